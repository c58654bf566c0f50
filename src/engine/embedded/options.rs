//! What a caller may choose about an embedded server.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{EmbeddedError, Search};

pub type ProgressFn = Arc<dyn Fn(Progress) + Send + Sync>;

#[derive(Clone)]
pub struct Options {
    /// The folder of a server that is kept, by default `awactl/postgres` in the user's data directory. For an
    /// ephemeral server: the folder in which its own temporary one is made, by default the system's.
    pub dir: Option<PathBuf>,
    /// Lines for postgresql.conf, such as `("shared_buffers", "256MB")`. `ALTER SYSTEM` overrides them.
    pub settings: Vec<(String, String)>,
    /// A fresh cluster in a temporary folder, removed when the server stops.
    pub ephemeral: bool,
    pub progress: Option<ProgressFn>,
    pub search: Search,
    /// How long a start may take until it counts as failed, crash recovery included.
    pub start_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            dir: None,
            settings: Vec::new(),
            ephemeral: false,
            progress: None,
            search: Search::from_env(),
            start_timeout: Duration::from_secs(60),
        }
    }
}

impl Options {
    pub fn ephemeral() -> Self {
        Options { ephemeral: true, ..Options::default() }
    }

    pub fn in_dir(dir: impl Into<PathBuf>) -> Self {
        Options { dir: Some(dir.into()), ..Options::default() }
    }

    pub fn setting(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("dir", &self.dir)
            .field("settings", &self.settings)
            .field("ephemeral", &self.ephemeral)
            .field("search", &self.search)
            .field("start_timeout", &self.start_timeout)
            .finish_non_exhaustive()
    }
}

/// What a start is busy with. `Display` is a line for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    Fetching { what: String, bytes: u64, total: u64 },
    Unpacking { what: String },
    StoppingStale { pid: u32 },
    Initialising { data: PathBuf, version: String },
    Starting { version: String },
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Fetching { what, bytes, total } => {
                let mb = |bytes: &u64| *bytes as f64 / 1e6;
                write!(f, "fetching {what}: {:.1} of {:.1} MB", mb(bytes), mb(total))
            }
            Progress::Unpacking { what } => write!(f, "unpacking {what}"),
            Progress::StoppingStale { pid } => {
                write!(f, "stopping PostgreSQL {pid}, left by a killed awactl")
            }
            Progress::Initialising { data, version } => {
                write!(f, "making a PostgreSQL {version} cluster in {}", data.display())
            }
            Progress::Starting { version } => write!(f, "starting PostgreSQL {version}"),
        }
    }
}

/// Goes through all blocking work of one start: where to report, and whether the caller still waits.
#[derive(Clone, Default)]
pub struct Task {
    progress: Option<ProgressFn>,
    cancelled: Arc<AtomicBool>,
}

impl Task {
    pub fn new(progress: Option<ProgressFn>) -> Self {
        Task { progress, cancelled: Arc::default() }
    }

    pub(super) fn report(&self, progress: Progress) {
        if let Some(report) = &self.progress {
            report(progress);
        }
    }

    pub(super) fn check(&self) -> Result<(), EmbeddedError> {
        match self.cancelled.load(Ordering::Relaxed) {
            true => Err(EmbeddedError::Cancelled),
            false => Ok(()),
        }
    }

    /// Cancels the task when dropped, so that a dropped future does not leave a download running behind it.
    pub(super) fn cancel_on_drop(&self) -> impl Drop + Send + use<> {
        struct Guard(Arc<AtomicBool>);
        impl Drop for Guard {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        Guard(self.cancelled.clone())
    }
}
