//! The engine's protocol as two models that are checked in every interleaving (docs/model.md maps each action to the SQL
//! statement it stands for).
//!
//! `engine`: queue ring and claim ring with their sessions, statement by statement; invariants I1 to I3.
//! `locks`: every path as the locks it takes, in its order; no three of them deadlock.

pub mod engine;
pub mod guard;
pub mod locks;
pub mod report;
