//! Results: written once, kept over an outage, and counted when they cannot be written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use awactl::engine::worker::{JobContext, Outcome};

use crate::support::{Gate, Ground, OwnServer, fleet, one, until, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_while_the_database_is_down_ends_and_says_what_is_unwritten() {
    let own = OwnServer::start().await;
    own.enqueue().await;
    let gate = Gate::new();
    let fleet =
        fleet(&own.target, gate.registry(Outcome::Complete), 4, |o| o.shutdown_timeout = Duration::from_millis(200));
    until("the job starts", || gate.started() == 1).await;
    own.server.stop_immediate().await.unwrap();
    gate.open(1);
    until("the job ends", || gate.waiting() == 0).await;
    let stats = within(fleet.shut_down()).await;
    assert_eq!((stats.completed, stats.unwritten), (0, 1));
    own.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_lane_is_asked_less_and_less_often() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let holder = ground.db.session().await;
    holder
        .exec("BEGIN; SELECT pg_advisory_xact_lock('@queue_lanes'::regclass::oid::integer, lane_id) FROM @queue_lanes")
        .await;
    let start = Instant::now();
    let fleet = fleet(&ground.target, one(|_| async { Outcome::Complete }), 4, |_| {});
    until("30 busy claims", || fleet.stats().busy_claims >= 30).await;
    // Doubling from 1 to 50 ms, each at least half of it: never sooner, however fast the machine is.
    assert!(start.elapsed() >= Duration::from_millis(500), "{:?}", start.elapsed());
    holder.exec("COMMIT").await;
    until("the job is done", || fleet.stats().completed == 1).await;
    within(fleet.shut_down()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_that_cannot_be_stored_costs_its_neighbours_nothing() {
    let ground = Ground::new().await;
    // An internal error is none that close_attempts could store in another way.
    ground
        .session
        .exec(
            "CREATE FUNCTION poison() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.args->>'poison' IS NOT NULL THEN RAISE EXCEPTION 'poisoned' USING ERRCODE = 'XX000'; END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER poison BEFORE INSERT ON @deferred_jobs FOR EACH ROW EXECUTE FUNCTION poison();
             SELECT @enqueue('k', 'q', CASE WHEN n = 4 THEN '{\"poison\": 1}' ELSE '{}' END::jsonb) FROM generate_series(1, 9) AS n",
        )
        .await;
    let gate = Gate::new();
    let fleet = fleet(&ground.target, gate.registry(Outcome::Snooze(Duration::from_secs(900))), 9, |_| {});
    until("all have started", || gate.started() == 9).await;
    gate.open(9);
    until("the others are written", || fleet.stats().snoozed == 8).await;
    let stats = within(fleet.shut_down()).await;
    assert_eq!(stats.unwritten, 1);
    assert_eq!(ground.session.one::<i64>("SELECT count(*) FROM @deferred_jobs WHERE state = 'scheduled'").await, 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_blocks_its_thread_does_not_hold_up_the_end() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let (started, stop) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let (told, seen) = (Arc::clone(&started), Arc::clone(&stop));
    let handler = one(move |_| {
        let (told, seen) = (Arc::clone(&told), Arc::clone(&seen));
        async move {
            told.store(true, Ordering::SeqCst);
            while !seen.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            Outcome::Complete
        }
    });
    let fleet = fleet(&ground.target, handler, 1, |o| o.shutdown_timeout = Duration::from_millis(50));
    until("it blocks", || started.load(Ordering::SeqCst)).await;
    let stats = within(fleet.shut_down()).await;
    stop.store(true, Ordering::SeqCst);
    assert_eq!((stats.claimed, stats.completed), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_delay_beyond_all_time_is_a_very_long_one() {
    let ground = Ground::new().await;
    let ids = ground.session.enqueue("q", 2).await;
    let first = ids[0];
    let handler = one(move |ctx: JobContext| async move {
        match ctx.job().id == first {
            true => Outcome::Snooze(Duration::MAX),
            false => Outcome::Retry { error: "later".into(), after: Some(Duration::MAX) },
        }
    });
    let fleet = fleet(&ground.target, handler, 2, |_| {});
    until("both are put off", || fleet.stats().snoozed + fleet.stats().retried == 2).await;
    within(fleet.shut_down()).await;
    let late = "SELECT count(*) FROM @deferred_jobs WHERE run_at > clock_timestamp() + interval '900 years'";
    assert_eq!(ground.session.one::<i64>(late).await, 2);
}
