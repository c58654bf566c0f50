//! The life of an attempt: heartbeats, progress, cancellation, rescue, hand-back.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use awactl::engine::worker::{CancelReason, JobContext, Outcome, RawJson, Registry, worker_fn};

use crate::support::{Gate, Ground, fleet, one, until, within};

type Reasons = Arc<Mutex<Vec<CancelReason>>>;

/// A handler that goes on until it is told to stop, and keeps why.
fn until_cancelled() -> (Gate, Reasons, Registry) {
    let (gate, reasons) = (Gate::new(), Reasons::default());
    let (started, kept) = (gate.clone(), Arc::clone(&reasons));
    let registry = one(move |ctx: JobContext| {
        let (started, kept) = (started.clone(), Arc::clone(&kept));
        async move {
            started.open(1);
            started.pass().await;
            let reason = ctx.cancelled().await;
            kept.lock().unwrap().push(reason);
            Outcome::stopped(reason)
        }
    });
    (gate, reasons, registry)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_that_beats_outlives_the_rescue_and_leaves_no_state() {
    let ground = Ground::new().await;
    let ids = ground.session.enqueue("q", 3).await;
    let gate = Gate::new();
    // The third only waits for a permit, and must not be taken for lost either.
    let fleet = fleet(&ground.target, gate.registry(Outcome::Complete), 2, |o| {
        o.heartbeat_interval = Duration::from_millis(20);
    });
    ground.db.until("SELECT count(*) = 3 FROM @attempt_state").await;
    assert_eq!(gate.started(), 2);
    ground
        .db
        .until("SELECT bool_and(heartbeat_at > claimed_at + interval '1 s') FROM @attempt_state, @lease_claim_batches")
        .await;
    assert_eq!(ground.session.one::<i32>("SELECT stale FROM @rescue('1 s')").await, 0);
    gate.open(3);
    until("all complete", || fleet.stats().completed == 3).await;
    let stats = within(fleet.shut_down()).await;
    assert!(stats.heartbeats >= 3 && stats.lost == 0, "{stats:?}");
    assert_eq!(ground.session.one::<i64>("SELECT count(*) FROM @attempt_state").await, 0);
    assert_eq!(ground.finished("completed").await, ids.len() as i64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_is_stored_while_the_handler_runs_and_only_when_it_changed() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let gate = Gate::new();
    let steps = gate.clone();
    let handler = one(move |ctx: JobContext| {
        let gate = steps.clone();
        async move {
            for step in ["1", "1", "2"] {
                ctx.set_progress(RawJson::from_json(step).unwrap());
                gate.pass().await;
            }
            ctx.set_progress(RawJson::from_json("3").unwrap());
            Outcome::Snooze(Duration::from_secs(900))
        }
    });
    // Nothing but progress makes it beat.
    let fleet = fleet(&ground.target, handler, 2, |o| o.heartbeat_interval = Duration::from_secs(40));
    ground.db.until("SELECT EXISTS (SELECT FROM @attempt_state WHERE progress = '1')").await;
    gate.open(1);
    until("it says the same again", || gate.started() == 2).await;
    // The beat of another job shows that all were looked at since.
    ground.session.enqueue("q", 1).await;
    ground.db.until("SELECT count(*) = 2 FROM @attempt_state").await;
    assert_eq!(fleet.stats().heartbeats, 2);
    gate.open(1);
    ground.db.until("SELECT EXISTS (SELECT FROM @attempt_state WHERE progress = '2')").await;
    gate.open(4);
    until("both are snoozed", || fleet.stats().snoozed == 2).await;
    within(fleet.shut_down()).await;
    assert!(ground.session.one::<bool>("SELECT bool_and(progress = '3') FROM @deferred_jobs").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_that_cannot_be_stored_stops_nobodys_heart() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 2).await;
    ground
        .session
        .exec(
            "CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.progress = '\"poison\"' THEN RAISE EXCEPTION 'poisoned'; END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER poison BEFORE INSERT OR UPDATE ON @attempt_state FOR EACH ROW EXECUTE FUNCTION poison()",
        )
        .await;
    let gate = Gate::new();
    let passed = gate.clone();
    let handler = one(move |ctx: JobContext| {
        let gate = passed.clone();
        async move {
            ctx.set_progress(RawJson::from_json("\"poison\"").unwrap());
            gate.pass().await;
            Outcome::Complete
        }
    });
    let fleet = fleet(&ground.target, handler, 2, |o| o.heartbeat_interval = Duration::from_millis(20));
    ground.db.until("SELECT count(*) = 2 FROM @attempt_state WHERE progress IS NULL").await;
    gate.open(2);
    until("both complete", || fleet.stats().completed == 2).await;
    within(fleet.shut_down()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancelling_a_running_job_reaches_its_handler() {
    let ground = Ground::new().await;
    let ids = ground.session.enqueue("q", 1).await;
    let (gate, reasons, registry) = until_cancelled();
    let fleet = fleet(&ground.target, registry, 1, |_| {});
    until("it runs", || gate.started() == 1).await;
    ground.db.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_advisory_lock_shared%' AND pid <> pg_backend_pid())").await;
    assert!(ground.session.one::<bool>(&format!("SELECT done FROM @operate({}, 'cancel')", ids[0])).await);
    until("the handler hears it", || reasons.lock().unwrap().len() == 1).await;
    assert_eq!(reasons.lock().unwrap()[0], CancelReason::Requested);
    until("its result loses", || fleet.stats().lost == 1).await;
    within(fleet.shut_down()).await;
    assert_eq!(ground.finished("cancelled").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancellation_that_nobody_heard_is_learnt_from_the_next_heartbeat() {
    // river#1358
    let ground = Ground::new().await;
    let ids = ground.session.enqueue("q", 1).await;
    let (gate, reasons, registry) = until_cancelled();
    let fleet = fleet(&ground.target, registry, 1, |o| o.heartbeat_interval = Duration::from_millis(50));
    until("it runs", || gate.started() == 1).await;
    // The message is sent on another channel than anybody listens on: what a cut connection and a pooler come to.
    ground
        .session
        .exec(
            "CREATE OR REPLACE FUNCTION @signal_attempt(p_job_id bigint, p_run_lease bigint, p_what text) RETURNS void
             LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_notify('nobody', ''); END $$",
        )
        .await;
    assert!(ground.session.one::<bool>(&format!("SELECT done FROM @operate({}, 'cancel')", ids[0])).await);
    until("the handler learns it", || reasons.lock().unwrap().len() == 1).await;
    assert_eq!(reasons.lock().unwrap()[0], CancelReason::LeaseLost);
    within(fleet.shut_down()).await;
    assert_eq!(ground.finished("cancelled").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rescued_attempt_is_told_and_its_late_result_loses() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let (gate, reasons) = (Gate::new(), Reasons::default());
    let (late, kept) = (gate.clone(), Arc::clone(&reasons));
    let handler = one(move |ctx: JobContext| {
        let (late, kept) = (late.clone(), Arc::clone(&kept));
        async move {
            if ctx.job().attempt == 1 {
                let reason = ctx.cancelled().await;
                kept.lock().unwrap().push(reason);
                late.pass().await;
                return Outcome::fail("this is late");
            }
            Outcome::Complete
        }
    });
    let fleet = fleet(&ground.target, handler, 2, |o| o.heartbeat_interval = Duration::from_secs(40));
    until("it runs", || fleet.stats().claimed == 1).await;
    assert_eq!(ground.session.one::<i32>("SELECT stale FROM @rescue('0 s')").await, 1);
    until("the handler hears it", || reasons.lock().unwrap().len() == 1 && gate.waiting() == 1).await;
    assert_eq!(reasons.lock().unwrap()[0], CancelReason::LeaseLost);
    // The next attempt completes, then the first one ends.
    ground.session.exec("UPDATE @deferred_jobs SET run_at = clock_timestamp(); SELECT @promote(10)").await;
    until("the second attempt completes", || fleet.stats().completed == 1).await;
    gate.open(1);
    until("the late result loses", || fleet.stats().lost == 1).await;
    within(fleet.shut_down()).await;
    assert_eq!((ground.finished("completed").await, ground.finished("failed").await), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_shorter_than_the_job_hands_it_back_uncounted() {
    // pgqueuer#630
    let ground = Ground::new().await;
    ground.session.enqueue("q", 3).await;
    let gate = Gate::new();
    let first = fleet(&ground.target, gate.registry(Outcome::Complete), 1, |o| {
        o.shutdown_timeout = Duration::from_millis(50);
    });
    until("one runs and one waits", || gate.started() == 1 && first.stats().claimed >= 2).await;
    let stats = within(first.shut_down()).await;
    assert_eq!((stats.completed, stats.unwritten), (0, 0));
    let attempts = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&attempts);
    let handler = one(move |ctx: JobContext| {
        seen.lock().unwrap().push(ctx.job().attempt);
        async { Outcome::Complete }
    });
    ground.session.exec("SELECT @promote(10)").await;
    let second = fleet(&ground.target, handler, 1, |_| {});
    until("the next worker runs them", || second.stats().completed == 3).await;
    within(second.shut_down()).await;
    assert_eq!(*attempts.lock().unwrap(), [1, 1, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_costs_one_permit_for_as_long_as_it_takes() {
    let ground = Ground::new().await;
    ground
        .session
        .exec(
            "SELECT @enqueue('bad', 'q', max_attempts => 1) FROM generate_series(1, 5);
             SELECT @enqueue('k', 'q') FROM generate_series(1, 5)",
        )
        .await;
    let mut registry = one(|_| async { Outcome::Complete });
    registry.insert(worker_fn("bad", |_| async { panic!("bad") })).unwrap();
    let fleet = fleet(&ground.target, registry, 1, |_| {});
    until("all have ended", || fleet.stats().completed == 5 && fleet.stats().retried == 5).await;
    within(fleet.shut_down()).await;
    assert_eq!(ground.finished("failed").await, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_without_a_delay_backs_off_by_the_servers_rule() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let fleet = fleet(&ground.target, one(|_| async { Outcome::retry("not yet") }), 1, |_| {});
    until("it is written", || fleet.stats().retried == 1).await;
    within(fleet.shut_down()).await;
    // Two to two and a half seconds after the first attempt; the client's own rule was one at most.
    let waits = "SELECT run_at - (errors[1]->>'at')::timestamptz BETWEEN '2 s' AND '2.6 s' FROM @deferred_jobs";
    assert!(ground.session.one::<bool>(waits).await);
}
