//! The handlers that come with awactl, one file per way of running a job:
//! `exec` starts a program, `builtin` holds those for trying and testing.
mod builtin;
mod exec;
mod process;

pub use builtin::{Builtin, BuiltinWorker, FlakyRule};
pub use exec::{Exec, ExecWorker, KILL_GRACE};
pub use process::kill_programs;
