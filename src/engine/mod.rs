//! The engine: the job queue itself, as a library. It knows nothing of terminals, flags or
//! formats. One file a concern, one file a transition; this one only re-exports.

pub mod bench;
pub mod claim;
pub mod close;
pub mod complete;
pub mod connect;
pub mod conninfo;
pub mod counts;
pub mod cron;
pub mod dead_tuples;
pub mod duration;
pub mod embedded;
pub mod enqueue;
pub mod enqueue_stream;
pub mod error;
pub mod fields;
pub mod heartbeat;
pub mod inspect_claims;
pub mod inspect_rings;
pub mod jobs;
pub mod leases;
pub mod maintenance;
pub mod migrate;
pub mod migrations;
pub mod operate;
mod pooled;
pub mod promote;
pub mod queues;
pub mod rescue;
pub mod ring;
pub mod schema;
pub mod target;
pub mod timeline;
pub mod tls;
pub mod unique;
pub mod worker;

pub use connect::{Session, connect};
pub use error::{EngineError, Refusal, Result};
pub use schema::Schema;
pub use target::Target;
