//! Sessions through a transaction pooler (pgbouncer's `pool_mode = transaction` and its like), where each transaction may run
//! on another server connection.
//!
//! What a session leaves on its connection is then lost to it, or met by a stranger. `detect` notices such an address. What it
//! takes away is made up for in three places: prepared statements by `unnamed`, below the driver; the lead of maintenance by
//! an open transaction (`maintenance/lead.rs`); and notifications by polling (`worker/listener.rs`). Settings of a session
//! are not made at all (`worker/link.rs`): they would reach strangers. Guarded by `tests/through_a_pooler.rs`.

mod detect;
mod tls;
mod unnamed;

pub(super) use detect::{swaps_connections, told_pid};
pub(super) use tls::{Plain, UnnamedOver};
pub(super) use unnamed::Unnamed;
