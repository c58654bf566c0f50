//! The attempts that run in this process, so that heartbeats, and what the database says about one, find it.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Deserialize;

use super::context::{CancelReason, JobContext};
use super::json::RawJson;
use crate::engine::claim::Receipt;

/// Every spawned attempt comes by twice: few of them shall meet at one lock.
const SHARDS: usize = 32;

type Shard = HashMap<(i64, i64), Entry>;

struct Entry {
    ctx: JobContext,
    /// When the database last knew that it lives; `None` makes it due now.
    seen: Option<Instant>,
    /// Whether the database may hold state of it.
    beat: bool,
}

/// By job and run_lease.
#[derive(Default)]
pub(super) struct Attempts {
    shards: [Mutex<Shard>; SHARDS],
}

/// What `{schema}.signal_attempt` sends.
#[derive(Deserialize)]
struct Signal {
    job_id: i64,
    run_lease: i64,
    what: What,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum What {
    Cancelled,
    Over,
    Resumed,
}

impl Attempts {
    pub fn insert(&self, receipt: &Receipt, ctx: &JobContext) {
        let entry = Entry { ctx: ctx.clone(), seen: Some(Instant::now()), beat: false };
        self.shard(receipt.job_id).insert((receipt.job_id, receipt.run_lease), entry);
    }

    /// Says whether the database may hold state of it.
    pub fn remove(&self, receipt: &Receipt) -> bool {
        let removed = self.shard(receipt.job_id).remove(&(receipt.job_id, receipt.run_lease));
        removed.is_some_and(|entry| entry.beat)
    }

    /// Hands on a message of the database; one about another process's attempt is nobody's here.
    pub fn hear(&self, message: &str) {
        let Ok(signal) = serde_json::from_str::<Signal>(message) else { return };
        let shard = self.shard(signal.job_id);
        let Some(ctx) = shard.get(&(signal.job_id, signal.run_lease)).map(|entry| entry.ctx.clone()) else { return };
        drop(shard);
        match signal.what {
            What::Cancelled => ctx.cancel(CancelReason::Requested),
            What::Over => ctx.cancel(CancelReason::LeaseLost),
            What::Resumed => ctx.resumed(),
        }
    }

    /// Those that gave no sign of life for `interval`, and those with new progress, which is taken.
    pub fn due(&self, interval: Duration) -> Vec<(JobContext, Option<RawJson>)> {
        let now = Instant::now();
        let mut due = Vec::new();
        for shard in &self.shards {
            for entry in lock(shard).values_mut() {
                let progress = entry.ctx.changed_progress();
                if progress.is_some() || entry.seen.is_none_or(|seen| now.duration_since(seen) >= interval) {
                    entry.seen = Some(now);
                    entry.beat = true;
                    due.push((entry.ctx.clone(), progress));
                }
            }
        }
        due
    }

    /// Makes it due again: the database was not told.
    pub fn not_told(&self, receipt: &Receipt, ctx: &JobContext, progress: bool) {
        if progress {
            ctx.progress_not_stored();
        }
        if let Some(entry) = self.shard(receipt.job_id).get_mut(&(receipt.job_id, receipt.run_lease)) {
            entry.seen = None;
        }
    }

    fn shard(&self, job_id: i64) -> MutexGuard<'_, Shard> {
        lock(&self.shards[job_id.rem_euclid(SHARDS as i64) as usize])
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
}
