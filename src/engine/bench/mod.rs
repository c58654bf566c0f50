//! Benchmarks: scenarios as YAML, run with in-process workers against a real server, and judged by their checks.

mod ceiling;
mod dead_watch;
mod ledger;
mod load;
mod progress;
mod run;
mod scenario;
mod shipped;
mod target;

pub use ceiling::{Ceiling, ceiling};
pub use progress::{Progress, Watcher};
pub use run::{CheckOutcome, Summary, run, wal_position};
pub use scenario::{Check, HeldProducers, Load, Phase, PhaseKind, Scenario, ScenarioError};
pub use shipped::{SHIPPED, Shipped};
pub use target::{Allowed, allow};
