//! What a running handler holds: its job, a signal to stop, a slot for progress.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::callbacks::Callbacks;
use super::job::Job;
use super::json::RawJson;
use crate::engine::claim::Receipt;

/// Why a handler is asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CancelReason {
    /// Somebody cancelled the job.
    Requested,
    /// Its deadline passed.
    Deadline,
    /// This worker is going away and will not wait any longer.
    Shutdown,
    /// The attempt is over in the database; whatever the handler answers will lose.
    LeaseLost,
}

impl CancelReason {
    fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Requested),
            2 => Some(Self::Deadline),
            3 => Some(Self::Shutdown),
            4 => Some(Self::LeaseLost),
            _ => None,
        }
    }

    fn code(self) -> u8 {
        match self {
            Self::Requested => 1,
            Self::Deadline => 2,
            Self::Shutdown => 3,
            Self::LeaseLost => 4,
        }
    }
}

/// A handle on one running attempt. Cloning it is cheap; handler and runtime share it.
#[derive(Clone)]
pub struct JobContext(Arc<Shared>);

// One allocation holds it all, because there is one of these per job.
struct Shared {
    job: Job,
    /// 0, or the code of the first reason given.
    cancelled: AtomicU8,
    wake: Notify,
    progress: Mutex<Progress>,
    attempt: Option<Attempt>,
}

/// What ties a context to a fleet.
pub(super) struct Attempt {
    pub receipt: Receipt,
    pub callbacks: Arc<Callbacks>,
    /// Its callback came.
    pub resumed: Notify,
    /// The database let it wait for a callback, and so took its deadline off.
    pub waited: AtomicBool,
}

#[derive(Default)]
struct Progress {
    latest: Option<RawJson>,
    /// Since it was last given to the database.
    changed: bool,
}

impl JobContext {
    /// Wraps a job that no fleet runs, for tests of handlers: it has no callbacks.
    pub fn new(job: Job) -> Self {
        Self::with(job, None)
    }

    /// Wraps a claimed job.
    pub(super) fn claimed(job: Job, receipt: Receipt, callbacks: Arc<Callbacks>) -> Self {
        Self::with(job, Some(Attempt { receipt, callbacks, resumed: Notify::new(), waited: AtomicBool::new(false) }))
    }

    fn with(job: Job, attempt: Option<Attempt>) -> Self {
        Self(Arc::new(Shared {
            job,
            cancelled: AtomicU8::new(0),
            wake: Notify::new(),
            progress: Mutex::default(),
            attempt,
        }))
    }

    pub(super) fn attempt(&self) -> Option<&Attempt> {
        self.0.attempt.as_ref()
    }

    pub(super) fn receipt(&self) -> Option<&Receipt> {
        self.attempt().map(|attempt| &attempt.receipt)
    }

    pub(super) fn has_waited(&self) -> bool {
        self.attempt().is_some_and(|attempt| attempt.waited.load(Ordering::Acquire))
    }

    /// Wakes a handler that waits for its callback.
    pub(super) fn resumed(&self) {
        if let Some(attempt) = self.attempt() {
            attempt.resumed.notify_one();
        }
    }

    /// The job.
    pub fn job(&self) -> &Job {
        &self.0.job
    }

    /// Asks the handler to stop. Only the first reason counts.
    pub fn cancel(&self, reason: CancelReason) {
        let first = self.0.cancelled.compare_exchange(0, reason.code(), Ordering::AcqRel, Ordering::Acquire);
        if first.is_ok() {
            self.0.wake.notify_waiters();
        }
    }

    /// Why the handler was asked to stop, if it was.
    pub fn cancel_reason(&self) -> Option<CancelReason> {
        CancelReason::from_code(self.0.cancelled.load(Ordering::Acquire))
    }

    /// Whether the handler was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.cancel_reason().is_some()
    }

    /// Waits until the handler is asked to stop; at once if it already was.
    pub async fn cancelled(&self) -> CancelReason {
        loop {
            // Registered before the look, so a cancel in between is not missed.
            let mut woken = std::pin::pin!(self.0.wake.notified());
            woken.as_mut().enable();
            if let Some(reason) = self.cancel_reason() {
                return reason;
            }
            woken.await;
        }
    }

    /// Leaves progress for the runtime to store: within about a second, and with whatever ends the attempt but success.
    /// The newest wins.
    pub fn set_progress(&self, progress: RawJson) {
        let mut slot = self.progress();
        if slot.latest.as_ref() != Some(&progress) {
            *slot = Progress { latest: Some(progress), changed: true };
        }
    }

    /// Takes the newest progress that [`Self::set_progress`] left, stored meanwhile or not.
    pub fn take_progress(&self) -> Option<RawJson> {
        std::mem::take(&mut *self.progress()).latest
    }

    /// The progress, if it is newer than what was last asked for here.
    pub(super) fn changed_progress(&self) -> Option<RawJson> {
        let mut slot = self.progress();
        if std::mem::take(&mut slot.changed) { slot.latest.clone() } else { None }
    }

    pub(super) fn progress_not_stored(&self) {
        let mut slot = self.progress();
        slot.changed = slot.latest.is_some();
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for JobContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JobContext")
            .field("job", &self.0.job)
            .field("cancel_reason", &self.cancel_reason())
            .finish_non_exhaustive()
    }
}
