//! Connections that go, and a server that does.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use awactl::engine::maintenance::MaintenanceOptions;
use awactl::engine::worker::{JobContext, Outcome, open};

use crate::support::{Gate, Ground, OwnServer, fleet, one, until, within};

/// A listening connection: the one that last ran this, or holds a sleeper's lock.
const LISTENERS: &str = "SELECT pid FROM pg_stat_activity WHERE datname = current_database()
    AND application_name = 'fleet' AND (query LIKE 'LISTEN %' OR query LIKE '%pg_advisory_%lock_shared%')";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_connections_lose_no_job() {
    let ground = Ground::new().await;
    let ran: Arc<Mutex<HashSet<i64>>> = Arc::default();
    let seen = Arc::clone(&ran);
    let handler = one(move |ctx: JobContext| {
        let seen = Arc::clone(&seen);
        async move {
            tokio::time::sleep(Duration::from_millis(15)).await;
            seen.lock().unwrap().insert(ctx.job().id);
            Outcome::Complete
        }
    });
    let fleet = fleet(&ground.target, handler, 8, |o| {
        o.heartbeat_interval = Duration::from_millis(10);
        o.maintenance =
            Some(MaintenanceOptions { lead_every: Duration::from_millis(20), ..MaintenanceOptions::default() });
    });
    let mut enqueued: HashSet<i64> = HashSet::new();
    // By what they do, as their last statement says; maintenance has names of its own.
    let kinds = [
        "query LIKE '%.claim($1%'",
        // An attempt that beat is forgotten in a statement of its own, right after.
        "query LIKE '%.complete($1%' OR query LIKE '%.complete_runs($1%' OR query LIKE '%.drop_attempt_state($1%'",
        "query LIKE '%.heartbeat($1%'",
        "query LIKE 'LISTEN %' OR query LIKE '%pg_advisory_%lock_shared%'",
        "application_name = 'awactl maintenance'",
        "application_name = 'awactl leader'",
    ];
    for kind in kinds.iter().cycle().take(18) {
        enqueued.extend(ground.session.enqueue("q", 20).await);
        let mine =
            "datname = current_database() AND application_name IN ('fleet', 'awactl maintenance', 'awactl leader')";
        ground.db.until(&format!(
            "SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE {mine} AND ({kind})"
        ))
        .await;
    }
    until("every job has run or is held by a claim whose answer was lost", || {
        let stats = fleet.stats();
        stats.completed + stats.lost >= stats.claimed
    })
    .await;
    // Claims whose answer died with their connection: for these is the rescue.
    for _ in 0..600 {
        ground.session.exec("SELECT @rescue('0.5 s')").await;
        ground.session.exec("UPDATE @deferred_jobs SET run_at = clock_timestamp()").await;
        if enqueued.iter().all(|id| ran.lock().unwrap().contains(id)) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let ran = ran.lock().unwrap().clone();
    assert_eq!(ran, enqueued);
    within(fleet.shut_down()).await;
    let open = "SELECT count(*) FROM @lease_claim_batches AS b, generate_series(1, cardinality(b.job_ids)) AS n
        WHERE NOT EXISTS (SELECT FROM @lease_claim_closure_batches AS c WHERE c.claim_slot = b.claim_slot
            AND c.batch_id = b.batch_id AND c.receipt_ranges @> (b.batch_id * 1024 + n - 1))";
    assert_eq!(ground.session.one::<i64>(open).await, 0, "open attempts");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_is_found_each_time_the_listening_connection_dies() {
    // oban#1499
    let ground = Ground::new().await;
    let fleet = fleet(&ground.target, one(|_| async { Outcome::Complete }), 2, |_| {});
    for n in 1..=20 {
        let kill = format!("SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM ({LISTENERS}) AS l");
        ground.db.until(&kill).await;
        ground.session.enqueue("q", 1).await;
        until("the job is done", || fleet.stats().completed == n).await;
    }
    within(fleet.shut_down()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_down_at_start_and_restarts_later_costs_no_result() {
    // solid_queue#683
    let own = OwnServer::start().await;
    own.server.halt().await.unwrap();
    let gate = Gate::new();
    let fleet = fleet(&own.target, gate.registry(Outcome::Complete), 2, |o| {
        o.maintenance = Some(MaintenanceOptions { lead_every: Duration::from_millis(50), ..Default::default() });
    });
    until("it fails to connect", || fleet.stats().reconnects >= 3).await;
    own.server.start_again().await.unwrap();
    own.enqueue().await;
    until("the job starts", || gate.started() == 1).await;
    // The result is computed while nobody can take it.
    own.server.stop_immediate().await.unwrap();
    gate.open(1);
    let before = fleet.stats().flushes;
    until("it fails to write", || fleet.stats().flushes >= before + 2).await;
    assert_eq!(fleet.stats().completed, 0);
    own.server.start_again().await.unwrap();
    until("the result is written", || fleet.stats().completed == 1).await;
    // And the rest of it works again too.
    own.enqueue().await;
    gate.open(1);
    until("the next job is done", || fleet.stats().completed == 2).await;
    let stats = within(fleet.shut_down()).await;
    assert_eq!((gate.started(), stats.lost, stats.unwritten), (2, 0, 0));
    let session = own.session().await;
    let done =
        session.query_one("SELECT count(*) FROM awa.terminal_jobs WHERE state = 'completed'", &[]).await.unwrap();
    assert_eq!(done.get::<_, i64>(0), 2);
    session.close().await;
    own.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_too_big_to_be_claimed_together_are_claimed_by_fewer() {
    let ground = Ground::new().await;
    // What PostgreSQL says when the bodies of a claim come to more than 1 GB, here for more than two jobs.
    ground.session.exec(
        "ALTER FUNCTION @claim(text, integer, interval, text, boolean, interval, boolean) RENAME TO claim_any;
         CREATE FUNCTION @claim(q text, n integer, d interval, c text, p boolean, a interval, r boolean) RETURNS SETOF @claimed_batch
         LANGUAGE plpgsql AS $$
         BEGIN
             IF n > 2 THEN RAISE program_limit_exceeded; END IF;
             RETURN QUERY SELECT b.* FROM @claim_any(q, n, d, c, p, a, r) AS b;
         END $$",
    ).await;
    ground.session.enqueue("q", 9).await;
    let fleet = fleet(&ground.target, one(|_| async { Outcome::Complete }), 16, |_| {});
    until("all jobs are done", || fleet.stats().completed == 9).await;
    within(fleet.shut_down()).await;
}

#[tokio::test]
async fn timeouts_meant_for_people_do_not_reach_the_engine_s_sessions() {
    let ground = Ground::new().await;
    let names = ["statement_timeout", "lock_timeout", "idle_session_timeout", "idle_in_transaction_session_timeout"];
    let config = ground.db.config();
    let database = config.get_dbname().unwrap();
    for name in names {
        ground.session.exec(&format!("ALTER DATABASE {database} SET {name} = '10min'")).await;
    }
    let session = open(&ground.target).await.unwrap();
    for name in names {
        let value: String = session.query_one(&format!("SHOW {name}"), &[]).await.unwrap().get(0);
        assert_eq!(value, "0", "{name}");
    }
}
