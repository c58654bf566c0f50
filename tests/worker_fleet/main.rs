//! Fleets on a real server: what they do when the database, a connection or a handler does not do its part, and how they end.

#[path = "../common/mod.rs"]
mod common;

mod callbacks;
mod connections;
mod failover;
mod lives;
mod results;
mod shares;
mod support;
