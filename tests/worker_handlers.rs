//! Handlers: what the guard catches, how one is found, and what the builtins do.

mod worker_support;

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use awactl::engine::worker::handlers::{Builtin, BuiltinWorker, FlakyRule};
use awactl::engine::worker::{
    CancelReason, DEADLINE_EXCEEDED, Job, JobContext, Outcome, RawJson, Registry, RegistryError, Worker, blocking_fn,
    run_guarded, run_now, worker_fn,
};
use worker_support::{PATIENCE, context, error_of, job, run, until, within};

// --- guard, adapters, registry ---

#[tokio::test]
async fn a_panic_becomes_a_retry_with_its_message() {
    fn at_once(ctx: &JobContext) -> Outcome {
        panic!("job {} is too heavy\0", ctx.job().id)
    }
    let early = worker_fn("k", |ctx| {
        let outcome = at_once(&ctx);
        async { outcome }
    });
    let late = worker_fn("k", |ctx: JobContext| async move {
        tokio::task::yield_now().await;
        at_once(&ctx)
    });
    let blocking = blocking_fn("k", at_once);
    for worker in [&early as &dyn Worker, &late, &blocking] {
        assert_eq!(run(worker, &context("{}")).await, Outcome::retry("the handler panicked: job 42 is too heavy"));
    }
}

#[tokio::test]
async fn a_panic_in_the_fast_path_or_in_drop_is_caught_too() {
    struct Now;
    impl Worker for Now {
        fn kind(&self) -> &str {
            "now"
        }
        fn perform<'a>(&'a self, _: &'a JobContext) -> futures_util::future::BoxFuture<'a, Outcome> {
            unreachable!("the fast path answers")
        }
        fn perform_now(&self, _: &Job) -> Option<Outcome> {
            panic!("at once")
        }
    }
    assert_eq!(run_now(&Now, &job("{}")), Some(Outcome::retry("the handler panicked: at once")));

    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped")
        }
    }
    let worker = worker_fn("k", |_| async {
        let _bomb = Bomb;
        pending().await
    });
    let ctx = context("{}");
    let outcome = within(run_guarded(&worker, &ctx, Some(Duration::from_millis(1)))).await;
    assert_eq!(outcome, Outcome::retry(DEADLINE_EXCEEDED));
}

#[tokio::test]
async fn a_handler_that_outlives_its_deadline_is_dropped() {
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&dropped);
    let worker = worker_fn("k", move |_| {
        let flag = Flag(Arc::clone(&seen));
        async move {
            let _flag = flag;
            pending().await
        }
    });
    let ctx = context("{}");
    let outcome = within(run_guarded(&worker, &ctx, Some(Duration::from_millis(5)))).await;
    assert_eq!(outcome, Outcome::retry(DEADLINE_EXCEEDED));
    assert_eq!(ctx.cancel_reason(), Some(CancelReason::Deadline));
    assert!(dropped.load(Ordering::SeqCst));
}

#[tokio::test]
async fn a_handler_in_time_answers_for_itself() {
    let worker = worker_fn("k", |ctx: JobContext| async move {
        ctx.set_progress(RawJson::from_json("1").unwrap());
        ctx.set_progress(RawJson::from_json("2").unwrap());
        Outcome::fail("no\0 good")
    });
    let ctx = context("{}");
    let outcome = within(run_guarded(&worker, &ctx, Some(PATIENCE))).await;
    assert_eq!(outcome, Outcome::fail("no good"));
    assert_eq!(ctx.take_progress().unwrap().as_str(), "2");
    assert!(ctx.take_progress().is_none());
}

#[tokio::test]
async fn a_job_cancelled_before_it_starts_does_not_start() {
    let worker = worker_fn("k", |_| async { panic!("it started") });
    let ctx = context("{}");
    ctx.cancel(CancelReason::Requested);
    assert_eq!(run(&worker, &ctx).await, Outcome::stopped(CancelReason::Requested));
}

#[tokio::test]
async fn cancellation_wakes_every_waiter_and_the_first_reason_stays() {
    let ctx = context("{}");
    let waiters: Vec<_> = (0..4)
        .map(|_| {
            let ctx = ctx.clone();
            tokio::spawn(async move { ctx.cancelled().await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert!(!ctx.is_cancelled());
    ctx.cancel(CancelReason::Shutdown);
    ctx.cancel(CancelReason::Requested);
    for waiter in waiters {
        assert_eq!(within(waiter).await.unwrap(), CancelReason::Shutdown);
    }
    assert_eq!(within(ctx.cancelled()).await, CancelReason::Shutdown);
}

#[tokio::test]
async fn a_blocking_handler_leaves_the_other_jobs_their_thread() {
    // This runtime has a single thread, so blocking it would hang the deadline too.
    let stopped = Arc::new(AtomicBool::new(false));
    let started = Arc::new(AtomicBool::new(false));
    let (seen, began) = (Arc::clone(&stopped), Arc::clone(&started));
    let worker = blocking_fn("k", move |ctx| {
        began.store(true, Ordering::SeqCst);
        while !ctx.is_cancelled() {
            std::thread::sleep(Duration::from_millis(1));
        }
        seen.store(true, Ordering::SeqCst);
        Outcome::Complete
    });
    let ctx = context("{}");
    let outcome = within(run_guarded(&worker, &ctx, Some(Duration::from_millis(5)))).await;
    assert_eq!(outcome, Outcome::retry(DEADLINE_EXCEEDED));
    // On a slow machine the deadline may pass before the closure has a thread; then it never starts.
    until("the closure sees that it was given up", || {
        stopped.load(Ordering::SeqCst) || !started.load(Ordering::SeqCst)
    })
    .await;
}

#[test]
fn the_registry_finds_by_kind_then_the_one_for_any() {
    let done = |kind: &str| worker_fn(kind, |_| async { Outcome::Complete });
    let mut registry = Registry::new();
    assert!(registry.get("a").is_none() && registry.is_empty());
    registry.insert(done("a")).unwrap();
    assert!(registry.get("b").is_none());
    registry.insert(done("*")).unwrap();
    assert_eq!(registry.get("a").unwrap().kind(), "a");
    assert_eq!(registry.get("b").unwrap().kind(), "*");
    assert!(Arc::ptr_eq(&registry.intern("a"), &registry.intern("a")));
    assert_eq!(&*registry.intern("b"), "b");
    for kind in ["a", "*"] {
        assert_eq!(registry.insert(done(kind)), Err(RegistryError::Duplicate(kind.into())));
    }
    for kind in ["", "a\0b", &"x".repeat(201)] {
        let error = registry.insert(done(kind)).unwrap_err();
        assert!(matches!(error, RegistryError::BadKind { .. }), "{error}");
    }
}

// --- builtins ---

fn builtin(builtin: Builtin, args: &str, attempt: i16) -> Outcome {
    let job = Job { attempt, ..job(args) };
    run_now(&BuiltinWorker::new("kind", builtin), &job).expect("an answer at once")
}

#[tokio::test]
async fn builtins_do_as_they_are_told() {
    assert_eq!(builtin(Builtin::Noop, "[]", 1), Outcome::Complete);
    assert_eq!(builtin(Builtin::Echo, r#"{"a":1}"#, 1), Outcome::Complete);

    assert_eq!(builtin(Builtin::Fail, "{}", 1), Outcome::retry("failed as asked"));
    assert_eq!(builtin(Builtin::Fail, r#"{"error":"why","terminal":true}"#, 1), Outcome::fail("why"));

    let twice = || Builtin::Flaky(FlakyRule::FailTimes(2));
    assert!(error_of(builtin(twice(), "{}", 2)).contains("attempt 2"));
    assert_eq!(builtin(twice(), "{}", 3), Outcome::Complete);
    assert_eq!(builtin(twice(), r#"{"fail_times":0}"#, 1), Outcome::Complete);
    assert!(error_of(builtin(twice(), r#"{"probability":1}"#, 9)).contains("flaky"));
    assert_eq!(builtin(twice(), r#"{"probability":0.0}"#, 1), Outcome::Complete);

    let sleep = |duration| BuiltinWorker::new("kind", Builtin::Sleep { duration });
    let started = Instant::now();
    let outcome = run(&sleep(Some(PATIENCE * 2)), &context(r#"{"ms":30}"#)).await;
    assert_eq!(outcome, Outcome::Complete);
    assert!(started.elapsed() >= Duration::from_millis(30));
    let outcome = run(&sleep(Some(Duration::from_millis(1))), &context("null")).await;
    assert_eq!(outcome, Outcome::Complete);

    let ctx = context("{}");
    let worker = sleep(Some(PATIENCE * 2));
    let stop = async { ctx.cancel(CancelReason::Shutdown) };
    let (outcome, ()) = tokio::join!(run(&worker, &ctx), stop);
    assert_eq!(outcome, Outcome::Snooze(Duration::ZERO));
}

#[tokio::test]
async fn builtins_fail_for_good_on_arguments_without_sense() {
    for (kind, args, part) in [
        (Builtin::Fail, r#"{"terminal":3}"#, "expected a boolean"),
        (Builtin::Flaky(FlakyRule::default()), r#"{"probability":2}"#, "0.0 to 1.0"),
        (Builtin::Flaky(FlakyRule::default()), r#"{"probability":1,"fail_times":1}"#, "exclude each other"),
        (Builtin::Sleep { duration: None }, "{}", "`duration`"),
        (Builtin::Sleep { duration: None }, r#"{"ms":-1}"#, "args: "),
    ] {
        let name = kind.name();
        match run(&BuiltinWorker::new("kind", kind), &context(args)).await {
            Outcome::Fail { error } => {
                assert!(error.contains(part) && error.contains(&format!("builtin `{name}`")), "{error}")
            }
            other => panic!("{name} {args}: {other:?}"),
        }
    }
}
