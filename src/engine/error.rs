//! What can go wrong in the engine, as types. The commands map each variant to an exit code
//! (`commands/exit.rs`) and to three lines of text (`commands/report.rs`).

use std::error::Error as StdError;

use tokio_postgres::error::SqlState;

pub type Result<T, E = EngineError> = std::result::Result<T, E>;

/// Why something is not done now, and what would make it possible.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Refusal {
    pub what: String,
    pub why: String,
    pub todo: String,
}

impl Refusal {
    pub fn new(what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { what: what.into(), why: why.into(), todo: todo.into() }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// `message` says what is allowed; it never repeats a value that may hold a secret.
    #[error("{field} is not valid: {message}")]
    InvalidInput { field: String, message: String },

    /// No usable connection: refused, timed out, not authenticated, or lost on the way.
    #[error("cannot reach {target}: {why}")]
    Unreachable {
        target: String,
        why: String,
        #[source]
        source: Option<Box<dyn StdError + Send + Sync>>,
    },

    /// It would be unsafe now.
    #[error("{}: {}", .0.what, .0.why)]
    Refused(Refusal),

    #[error("schema {schema} holds no awactl installation")]
    NotInstalled { schema: String },

    #[error("schema {schema} has version {found}, this awactl needs {wanted}")]
    WrongVersion { schema: String, found: i32, wanted: i32 },

    #[error("migration {file} failed at line {line}: {message}")]
    Migration {
        file: String,
        line: usize,
        message: String,
        #[source]
        source: tokio_postgres::Error,
    },

    #[error("the database refused a statement: {}", chain(.0))]
    Database(#[source] tokio_postgres::Error),
}

impl EngineError {
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidInput { field: field.into(), message: message.into() }
    }

    /// Worth trying again with nothing changed (the connection may have to be a new one).
    pub fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Database(source) | Self::Migration { source, .. } => is_transient(source),
            Self::InvalidInput { .. } | Self::Refused(_) | Self::NotInstalled { .. } | Self::WrongVersion { .. } => {
                false
            }
        }
    }
}

impl From<Refusal> for EngineError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<tokio_postgres::Error> for EngineError {
    fn from(error: tokio_postgres::Error) -> Self {
        if is_connection_loss(&error) {
            Self::Unreachable { target: "the server".into(), why: chain(&error), source: Some(Box::new(error)) }
        } else {
            Self::Database(error)
        }
    }
}

/// The connection is gone, whatever the statement was.
pub fn is_connection_loss(error: &tokio_postgres::Error) -> bool {
    if let Some(code) = error.code() {
        return code.code().starts_with("08")
            || [SqlState::ADMIN_SHUTDOWN, SqlState::CRASH_SHUTDOWN, SqlState::CANNOT_CONNECT_NOW].contains(code);
    }
    error.is_closed() || error.source().is_some_and(|e| e.is::<std::io::Error>())
}

/// The same statement may succeed if tried again: lost connections, serialization failures,
/// deadlocks, lock timeouts, and a server that is read-only until its failover is over.
pub fn is_transient(error: &tokio_postgres::Error) -> bool {
    is_connection_loss(error)
        || error.code().is_some_and(|code| {
            [
                SqlState::T_R_SERIALIZATION_FAILURE,
                SqlState::T_R_DEADLOCK_DETECTED,
                SqlState::LOCK_NOT_AVAILABLE,
                SqlState::READ_ONLY_SQL_TRANSACTION,
            ]
            .contains(code)
        })
}

/// The server takes no writes, or not yet, as a standby before its promotion.
pub fn is_read_only(error: &EngineError) -> bool {
    matches!(error, EngineError::Database(source) if source.code() == Some(&SqlState::READ_ONLY_SQL_TRANSACTION))
}

pub fn is_forbidden(error: &EngineError) -> bool {
    matches!(error, EngineError::Database(source) if source.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE))
}

/// An error and its causes on one line, without saying the same thing twice.
pub fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}
