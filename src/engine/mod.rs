//! The engine.
pub mod duration;
pub mod worker;
