//! awactl: the job queue engine, and the commands that operate it.

pub mod commands;
pub mod engine;
