//! The worker side of the engine: jobs, handlers and what runs them.
mod attempts;
mod callbacks;
mod completer;
mod config;
mod context;
mod dispatcher;
mod fleet;
mod guard;
mod handler;
pub mod handlers;
mod heart;
mod job;
mod json;
pub(crate) mod link;
mod listener;
mod outcome;
mod pool;
mod stats;

pub use callbacks::CallbackError;
pub use config::{Config, ConfigError, HandlerConfig, MAX_WEIGHT, MAX_WORKERS, QueueConfig};
pub use context::{CancelReason, JobContext};
pub use fleet::{Fleet, FleetOptions, QueueOptions, instance_name};
pub use guard::{DEADLINE_EXCEEDED, run_guarded, run_now};
pub use handler::{
    ANY_KIND, BlockingFn, MAX_NAME_CHARS, Registry, RegistryError, Worker, WorkerFn, blocking_fn, worker_fn,
};
pub use job::{Job, JobExtras};
pub use json::{JsonError, RawJson};
pub use link::open;
pub use outcome::{MAX_ERROR_BYTES, Outcome};
pub use stats::{Stats, StatsNow};
