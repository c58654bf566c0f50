//! A private PostgreSQL that this process starts, owns and stops again.
//!
//! A server is found (`find`) or fetched (`fetch`), given a folder (`home`) with a cluster in it (`cluster`), run as a
//! child (`server`, `keeper`), and handed out as an [`Embedded`] (`handle`). `recover` cleans up after a killed owner.
//!
//! Who may connect: the unix socket is trusted, but lies in a folder of mode 0700, so only the server's own account and
//! root get to it. The loopback port is open to every local user and so asks for a generated password (SCRAM).

mod child;
mod cluster;
mod error;
mod exit;
mod fetch;
mod find;
mod handle;
mod home;
mod keeper;
mod options;
mod recover;
mod server;
mod unprivileged;

pub use error::{EmbeddedError, Looked};
pub use fetch::{Build, Client, PINNED, fetch};
pub use find::{Installation, OLDEST_MAJOR, Search, Version};
pub use handle::Embedded;
pub use options::{Options, Progress, ProgressFn, Task};
