//! What the tests of handlers share.

use std::time::{Duration, Instant};

use awactl::engine::worker::{Job, JobContext, Outcome, RawJson, Worker, run_guarded};
use chrono::{DateTime, Utc};

/// Long enough for any machine: only a hang takes it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn job(args: &str) -> Job {
    let at = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
    Job {
        id: 42,
        kind: "kind".into(),
        queue: "default".into(),
        args: RawJson::from_json(args).unwrap(),
        priority: 2,
        attempt: 1,
        max_attempts: 25,
        run_lease: 7,
        run_at: at("2026-01-02T03:04:05.678901Z"),
        created_at: at("2026-01-02T03:04:05Z"),
        claimed_at: at("2026-01-02T03:04:06Z"),
        deadline_at: None,
        extras: None,
    }
}

pub fn context(args: &str) -> JobContext {
    JobContext::new(job(args))
}

/// Runs a handler, which must not hang.
pub async fn run(worker: &dyn Worker, ctx: &JobContext) -> Outcome {
    within(run_guarded(worker, ctx, None)).await
}

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it hangs")
}

pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub fn error_of(outcome: Outcome) -> String {
    match outcome {
        Outcome::Retry { error, .. } => error,
        other => panic!("not a retry: {other:?}"),
    }
}
