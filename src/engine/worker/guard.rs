//! Runs a handler so that whatever it does costs one permit, not the worker.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

use super::context::{CancelReason, JobContext};
use super::handler::Worker;
use super::job::Job;
use super::outcome::Outcome;

/// The error of an attempt that outlived its deadline.
pub const DEADLINE_EXCEEDED: &str = "deadline exceeded";

/// Asks the handler's fast path ([`Worker::perform_now`]); a panic becomes a retry.
pub fn run_now(worker: &dyn Worker, job: &Job) -> Option<Outcome> {
    match catch_unwind(AssertUnwindSafe(|| worker.perform_now(job))) {
        Ok(outcome) => outcome.map(Outcome::sanitized),
        Err(panic) => Some(from_panic(&*panic).sanitized()),
    }
}

/// Runs one attempt to its end; call it in a task of its own, so that a handler which blocks a
/// thread against the rules holds up that task only.
///
/// A context cancelled already starts nothing. A panic becomes a retry with its message. When `deadline` (from now) passes, the context is
/// cancelled with [`CancelReason::Deadline`] (unless it waited for a callback), the future gets [`Worker::stop_grace`] to wind up and
/// is dropped; the attempt retries with [`DEADLINE_EXCEEDED`] whatever it still answers. Other
/// cancellations are the handler's to obey: to force one, drop this future.
pub async fn run_guarded(worker: &dyn Worker, ctx: &JobContext, deadline: Option<Duration>) -> Outcome {
    if let Some(reason) = ctx.cancel_reason() {
        return Outcome::stopped(reason);
    }
    let mut run = match catch_unwind(AssertUnwindSafe(|| worker.perform(ctx))) {
        Ok(run) => run,
        Err(panic) => return from_panic(&*panic).sanitized(),
    };
    let outcome = match deadline {
        None => caught(&mut run).await,
        Some(deadline) => match tokio::time::timeout(deadline, caught(&mut run)).await {
            Ok(outcome) => outcome,
            // It waited for a callback, from when on it has no deadline.
            Err(_) if ctx.has_waited() => caught(&mut run).await,
            Err(_) => {
                ctx.cancel(CancelReason::Deadline);
                let grace = worker.stop_grace();
                if !grace.is_zero() {
                    let _ = tokio::time::timeout(grace, caught(&mut run)).await;
                }
                Outcome::retry(DEADLINE_EXCEEDED)
            }
        },
    };
    match catch_unwind(AssertUnwindSafe(|| drop(run))) {
        Ok(()) => outcome.sanitized(),
        Err(panic) => {
            // The work was done or given up before this; its answer still stands.
            let job = ctx.job();
            tracing::warn!(
                job_id = job.id,
                kind = &*job.kind,
                panic = panic_message(&*panic),
                "the handler panicked while it was dropped"
            );
            outcome.sanitized()
        }
    }
}

async fn caught(run: &mut BoxFuture<'_, Outcome>) -> Outcome {
    match AssertUnwindSafe(run).catch_unwind().await {
        Ok(outcome) => outcome,
        Err(panic) => from_panic(&*panic),
    }
}

fn from_panic(panic: &(dyn Any + Send)) -> Outcome {
    Outcome::retry(format!("the handler panicked: {}", panic_message(panic)))
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("(a value that is not text)")
}
