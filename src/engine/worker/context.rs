//! What a running handler holds: its job, a signal to stop, a slot for progress.

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::Notify;

use super::job::Job;
use super::json::RawJson;

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
    progress: Mutex<Option<RawJson>>,
}

impl JobContext {
    /// Wraps a claimed job.
    pub fn new(job: Job) -> Self {
        Self(Arc::new(Shared { job, cancelled: AtomicU8::new(0), wake: Notify::new(), progress: Mutex::new(None) }))
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

    /// Leaves progress for the runtime to store with its next flush; the newest wins.
    pub fn set_progress(&self, progress: RawJson) {
        *self.progress_slot() = Some(progress);
    }

    /// Takes what [`Self::set_progress`] left since the last take.
    pub fn take_progress(&self) -> Option<RawJson> {
        self.progress_slot().take()
    }

    fn progress_slot(&self) -> std::sync::MutexGuard<'_, Option<RawJson>> {
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
