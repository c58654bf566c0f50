//! Exit codes, and which error ends in which. Documented in the README; scripts rely on them.

use crate::engine::EngineError;
use crate::engine::embedded::EmbeddedError;
use crate::engine::error::is_connection_loss;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ExitCode {
    /// Done, or nothing to do.
    Done = 0,
    /// It failed, or a check did not pass.
    Failed = 1,
    /// Wrong usage: arguments, configuration, input.
    Usage = 2,
    /// The database cannot be reached.
    Unreachable = 3,
    /// Refused because it would be unsafe now.
    Refused = 4,
}

impl From<ExitCode> for std::process::ExitCode {
    fn from(code: ExitCode) -> Self {
        Self::from(code as u8)
    }
}

/// What goes wrong at the edge, before or after the engine.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("{what}: {why}")]
    Usage { what: String, why: String, todo: String },

    #[error("{what}: {why}")]
    Refused { what: String, why: String, todo: String },

    /// It was asked for rightly and could not be done.
    #[error("{what}: {why}")]
    Failed { what: String, why: String, todo: String },
}

impl CommandError {
    pub fn usage(what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::Usage { what: what.into(), why: why.into(), todo: todo.into() }
    }

    pub fn refused(what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::Refused { what: what.into(), why: why.into(), todo: todo.into() }
    }

    pub fn failed(what: impl Into<String>, why: impl Into<String>, todo: impl Into<String>) -> Self {
        Self::Failed { what: what.into(), why: why.into(), todo: todo.into() }
    }

    /// Nothing is known of a job.
    pub fn no_such_job(id: i64) -> Self {
        Self::failed(
            format!("there is no job {id}"),
            "it never was, was deleted, or finished long enough ago for its slot of the ring to be reclaimed",
            "see `awactl job list` for jobs that are there, `awactl queue list` for how many finished",
        )
    }
}

impl ExitCode {
    pub fn of(error: &anyhow::Error) -> Self {
        // anyhow keeps the type below any context that was added on the way.
        if let Some(error) = error.downcast_ref::<CommandError>() {
            return Self::of_command(error);
        }
        for cause in error.chain() {
            if let Some(error) = cause.downcast_ref::<EngineError>() {
                return Self::of_engine(error);
            }
            if let Some(
                EmbeddedError::InUse { .. } | EmbeddedError::ForeignCluster { .. } | EmbeddedError::NotACluster { .. },
            ) = cause.downcast_ref()
            {
                return Self::Refused;
            }
            if let Some(error) = cause.downcast_ref::<tokio_postgres::Error>()
                && is_connection_loss(error)
            {
                return Self::Unreachable;
            }
        }
        Self::Failed
    }

    fn of_command(error: &CommandError) -> Self {
        match error {
            CommandError::Usage { .. } => Self::Usage,
            CommandError::Refused { .. } => Self::Refused,
            CommandError::Failed { .. } => Self::Failed,
        }
    }

    fn of_engine(error: &EngineError) -> Self {
        match error {
            EngineError::InvalidInput { .. } => Self::Usage,
            EngineError::Unreachable { .. } => Self::Unreachable,
            EngineError::Refused(_) | EngineError::NotInstalled { .. } | EngineError::WrongVersion { .. } => {
                Self::Refused
            }
            EngineError::Migration { .. } | EngineError::Database(_) => Self::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;
    use crate::engine::Refusal;

    #[test]
    fn each_kind_of_error_ends_in_its_documented_code() {
        let unreachable = EngineError::Unreachable { target: "t".into(), why: "w".into(), source: None };
        let wrong_version = EngineError::WrongVersion { schema: "awa".into(), found: 1, wanted: 2 };
        let in_use = EmbeddedError::InUse { dir: "d".into(), pid: None };
        let cases: [(anyhow::Error, u8); 9] = [
            (anyhow::anyhow!("anything else"), 1),
            (EngineError::invalid("f", "m").into(), 2),
            (CommandError::usage("w", "y", "t").into(), 2),
            (unreachable.into(), 3),
            (EngineError::from(Refusal::new("w", "y", "t")).into(), 4),
            (wrong_version.into(), 4),
            (EngineError::NotInstalled { schema: "awa".into() }.into(), 4),
            (CommandError::refused("w", "y", "t").into(), 4),
            (in_use.into(), 4),
        ];
        for (error, code) in cases {
            assert_eq!(ExitCode::of(&error) as u8, code, "{error}");
        }
        let wrapped = Err::<(), _>(EngineError::invalid("f", "m")).context("while reading the file").unwrap_err();
        assert_eq!(ExitCode::of(&wrapped), ExitCode::Usage);
    }
}
