//! The engine: the job queue itself, as a library. It knows nothing of terminals, flags or
//! formats. One file a concern; this one only re-exports.

pub mod connect;
pub mod conninfo;
pub mod error;
pub mod migrate;
pub mod migrations;
pub mod schema;
pub mod target;
pub mod tls;

pub use connect::{Session, connect};
pub use error::{EngineError, Refusal, Result};
pub use schema::Schema;
pub use target::Target;
