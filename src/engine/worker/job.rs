//! One attempt of a job, as a handler sees it.

use std::sync::Arc;

use chrono::{DateTime, Utc};

use super::json::RawJson;

/// A claimed job. All times are the database's.
#[derive(Debug, Clone)]
pub struct Job {
    pub id: i64,
    /// What chooses the handler. [`super::Registry::intern`] makes it without an allocation.
    pub kind: Arc<str>,
    pub queue: Arc<str>,
    pub args: RawJson,
    /// 1..=4, 1 first.
    pub priority: i16,
    /// This attempt, from 1.
    pub attempt: i16,
    pub max_attempts: i16,
    /// The fence: every write about this attempt names (`id`, `run_lease`).
    pub run_lease: i64,
    pub run_at: DateTime<Utc>,
    pub created_at: DateTime<Utc>,
    pub claimed_at: DateTime<Utc>,
    /// When the database gives this attempt up.
    pub deadline_at: Option<DateTime<Utc>>,
    /// `None` when every part of it is empty, which is the hot path.
    pub extras: Option<Box<JobExtras>>,
}

/// The parts most jobs do not have.
#[derive(Debug, Clone, Default)]
pub struct JobExtras {
    pub tags: Vec<String>,
    pub metadata: RawJson,
    /// What earlier attempts failed with, oldest first.
    pub errors: Vec<RawJson>,
    /// What an earlier attempt left with [`super::JobContext::set_progress`].
    pub progress: Option<RawJson>,
}

impl Job {
    /// Its tags, often none.
    pub fn tags(&self) -> &[String] {
        self.extras.as_ref().map_or(&[], |extras| &extras.tags)
    }

    /// Its metadata; `{}` when it has none.
    pub fn metadata(&self) -> &RawJson {
        const NONE: &RawJson = &RawJson::EMPTY_OBJECT;
        self.extras.as_ref().map_or(NONE, |extras| &extras.metadata)
    }

    /// What earlier attempts failed with, oldest first.
    pub fn errors(&self) -> &[RawJson] {
        self.extras.as_ref().map_or(&[], |extras| &extras.errors)
    }

    /// The progress an earlier attempt stored.
    pub fn progress(&self) -> Option<&RawJson> {
        self.extras.as_ref()?.progress.as_ref()
    }
}
