//! The engine.
pub mod embedded;
