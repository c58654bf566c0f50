//! Cron: jobs that come due by a schedule, in a time zone. `schedule` says when, `definition` is what is kept about one
//! and the changes to it, `fire` is the leader's pass.

mod definition;
mod fire;
mod schedule;

pub use definition::{CronJob, Definition, Put, list, pause, put, remove, trigger};
pub use fire::{Passed, pass};
pub use schedule::Schedule;
