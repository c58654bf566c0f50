//! The trait of handlers, adapters for closures, and the registry that finds one by kind.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt};

use super::context::JobContext;
use super::job::Job;
use super::outcome::Outcome;

/// The kind under which a handler takes every job that has no handler of its own.
pub const ANY_KIND: &str = "*";

/// The longest name of a kind or queue, in characters.
pub const MAX_NAME_CHARS: usize = 200;

/// Runs the jobs of one kind.
///
/// A panic or a passed deadline ends the attempt, not the worker. What must not happen is blocking
/// a thread inside [`Worker::perform`]: the threads are shared with every other job, and a blocked
/// future cannot be dropped. Blocking code goes into [`blocking_fn`], or into
/// `tokio::task::spawn_blocking` inside `perform`.
pub trait Worker: Send + Sync + 'static {
    /// The kind it takes, or [`ANY_KIND`].
    fn kind(&self) -> &str;

    /// Runs one attempt. The future is dropped when the deadline passes or the worker is stopped,
    /// so what it holds must clean up in `Drop`.
    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome>;

    /// The fast path for handlers that never wait: answers at once, with no future and no context
    /// to allocate. `None` means that the job goes to [`Worker::perform`].
    fn perform_now(&self, _job: &Job) -> Option<Outcome> {
        None
    }

    /// How long the future may go on after it was told to stop, before it is dropped.
    fn stop_grace(&self) -> Duration {
        Duration::ZERO
    }
}

/// Makes a handler of an async closure: `worker_fn("resize", |ctx| async move { … })`.
pub fn worker_fn<F, Fut>(kind: impl Into<String>, run: F) -> WorkerFn<F>
where
    F: Fn(JobContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    WorkerFn { kind: kind.into(), run }
}

/// Makes a handler of a closure that blocks; it runs on tokio's threads for blocking work.
///
/// Such a thread cannot be interrupted: past its deadline the closure goes on, its answer unheard,
/// unless it looks at [`JobContext::is_cancelled`] now and then.
pub fn blocking_fn<F>(kind: impl Into<String>, run: F) -> BlockingFn<F>
where
    F: Fn(&JobContext) -> Outcome + Send + Sync + 'static,
{
    BlockingFn { kind: kind.into(), run: Arc::new(run) }
}

/// What [`worker_fn`] makes.
pub struct WorkerFn<F> {
    kind: String,
    run: F,
}

impl<F, Fut> Worker for WorkerFn<F>
where
    F: Fn(JobContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    fn kind(&self) -> &str {
        &self.kind
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        (self.run)(ctx.clone()).boxed()
    }
}

/// What [`blocking_fn`] makes.
pub struct BlockingFn<F> {
    kind: String,
    run: Arc<F>,
}

impl<F> Worker for BlockingFn<F>
where
    F: Fn(&JobContext) -> Outcome + Send + Sync + 'static,
{
    fn kind(&self) -> &str {
        &self.kind
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        // Dropping the future must tell the closure, which nothing else can stop; and work that
        // never got a thread must not start after its attempt was given up.
        struct Abandon(JobContext);
        impl Drop for Abandon {
            fn drop(&mut self) {
                self.0.cancel(super::CancelReason::LeaseLost);
            }
        }
        let (run, held) = (Arc::clone(&self.run), ctx.clone());
        async move {
            let guard = Abandon(ctx.clone());
            let task = tokio::task::spawn_blocking(move || match held.cancel_reason() {
                Some(reason) => Outcome::stopped(reason),
                None => run(&held),
            });
            let ended = task.await;
            std::mem::forget(guard);
            match ended {
                Ok(outcome) => outcome,
                Err(error) if error.is_panic() => resume_unwind(error.into_panic()),
                // Only a runtime that shuts down cancels a blocking task.
                Err(_) => Outcome::stopped(super::CancelReason::Shutdown),
            }
        }
        .boxed()
    }
}

/// Why a handler was not taken into a [`Registry`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RegistryError {
    #[error("there are two handlers for the kind `{0}`")]
    Duplicate(String),
    #[error("the kind `{kind}` {reason}")]
    BadKind { kind: String, reason: String },
}

/// The handlers of a worker process, by kind.
#[derive(Clone, Default)]
pub struct Registry {
    by_kind: HashMap<Arc<str>, Arc<dyn Worker>>,
    any: Option<Arc<dyn Worker>>,
}

impl Registry {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a handler under its own kind.
    pub fn insert(&mut self, worker: impl Worker) -> Result<(), RegistryError> {
        self.insert_shared(Arc::new(worker))
    }

    /// Adds a handler that somebody else holds too.
    pub fn insert_shared(&mut self, worker: Arc<dyn Worker>) -> Result<(), RegistryError> {
        let kind = worker.kind();
        check_name(kind).map_err(|reason| RegistryError::BadKind { kind: kind.escape_debug().to_string(), reason })?;
        if self.handles_by_name(kind) {
            return Err(RegistryError::Duplicate(kind.to_owned()));
        }
        if kind == ANY_KIND {
            self.any = Some(worker);
        } else {
            self.by_kind.insert(kind.into(), worker);
        }
        Ok(())
    }

    /// The handler for a kind: its own, else that of [`ANY_KIND`].
    pub fn get(&self, kind: &str) -> Option<&Arc<dyn Worker>> {
        self.by_kind.get(kind).or(self.any.as_ref())
    }

    /// `kind` as [`Job::kind`] wants it, allocating only when no handler has that kind.
    pub fn intern(&self, kind: &str) -> Arc<str> {
        match self.by_kind.get_key_value(kind) {
            Some((known, _)) => Arc::clone(known),
            None => kind.into(),
        }
    }

    /// The kinds with a handler of their own, sorted; [`Self::handles_any`] tells of the rest.
    pub fn kinds(&self) -> Vec<&str> {
        let mut kinds: Vec<&str> = self.by_kind.keys().map(AsRef::as_ref).collect();
        kinds.sort_unstable();
        kinds
    }

    /// Whether a handler for [`ANY_KIND`] is there.
    pub fn handles_any(&self) -> bool {
        self.any.is_some()
    }

    /// The longest [`Worker::stop_grace`] of all.
    pub(super) fn longest_grace(&self) -> Duration {
        let workers = self.by_kind.values().chain(&self.any);
        workers.map(|worker| worker.stop_grace()).max().unwrap_or_default()
    }

    /// Whether there is no handler at all.
    pub fn is_empty(&self) -> bool {
        self.by_kind.is_empty() && self.any.is_none()
    }

    fn handles_by_name(&self, kind: &str) -> bool {
        self.by_kind.contains_key(kind) || (kind == ANY_KIND && self.any.is_some())
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("kinds", &self.kinds()).field("any", &self.handles_any()).finish()
    }
}

/// Checks the name of a kind or queue; the error completes a sentence that names it.
pub(super) fn check_name(name: &str) -> Result<(), String> {
    let chars = name.chars().count();
    if !(1..=MAX_NAME_CHARS).contains(&chars) {
        return Err(format!("has {chars} characters; 1 to {MAX_NAME_CHARS} are allowed"));
    }
    if name.chars().any(char::is_control) {
        return Err("has a control character; none is allowed".into());
    }
    Ok(())
}
