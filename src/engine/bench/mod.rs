//! Benchmarks: scenarios as YAML, run with in-process workers against a real server, and judged by their checks.

mod ceiling;
mod ledger;
mod load;
mod run;
mod scenario;

pub use ceiling::{Ceiling, ceiling};
pub use run::{CheckOutcome, Summary, allow, run, wal_position};
pub use scenario::{Check, HeldProducers, Load, Phase, PhaseKind, Scenario, ScenarioError};
