//! Counts are exact whatever moves meanwhile, and neither they nor a look at the rings reads a backlog.
mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use awactl::engine::Schema;
use awactl::engine::counts::{QueueCount, queue_counts};
use awactl::engine::inspect_rings::rings;
use awactl::engine::ring::Ring;
use common::*;

async fn counts(s: &Session, queue: &str) -> QueueCount {
    let report = queue_counts(&s.client, &Schema::default()).await.unwrap();
    report.queues.into_iter().find(|q| q.queue == queue).expect("the queue had jobs")
}

fn total(q: &QueueCount) -> i64 {
    q.available + q.scheduled + q.retryable + q.running + q.waiting + q.completed + q.failed + q.cancelled + q.dlq
}

/// Claims so many jobs at most and completes them.
async fn drain_some(s: &Session, queue: &str, n: i32) {
    let attempts = attempts(&s.claim(queue, n).await);
    assert_eq!(s.complete(&attempts).await, []);
}

/// Rows of a partitioned table that this session has read, as far as it has not reported them; it reports between
/// transactions.
async fn rows_read(s: &Session, table: &str) -> i64 {
    s.one(&format!(
        "SELECT (sum(pg_stat_get_xact_tuples_returned(c.oid)) + sum(pg_stat_get_xact_tuples_fetched(c.oid)))::bigint
         FROM pg_class AS c WHERE c.relnamespace = 'awa'::regnamespace AND c.relkind = 'r' AND c.relname ~ '^{table}_[0-9]+$'"
    ))
    .await
}

#[tokio::test]
async fn two_settlers_with_a_moved_cursor_between_them_count_each_job_once() {
    let db = Db::new().await;
    let (a, b, c) = (db.session().await, db.session().await, db.session().await);
    c.enqueue("q", 3500).await;
    a.exec("BEGIN").await;
    assert_eq!(a.one::<i32>("SELECT @settle_backlog_segments(1000)").await, 3);
    drain_some(&c, "q", 500).await;
    c.exec("SELECT @advance_idle_cursors()").await;
    assert_eq!(b.one::<i32>("SELECT @settle_backlog_segments(1000)").await, 0, "the lane is being settled");
    a.exec("COMMIT").await;
    b.one::<i32>("SELECT @settle_backlog_segments(1000)").await;
    let q = counts(&c, "q").await;
    assert_eq!((q.available, q.available_exact, q.completed), (3000, true, 500));
}

#[tokio::test]
async fn a_settler_reads_what_the_one_before_it_has_committed() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    a.enqueue("q", 2500).await;
    b.exec("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1 FROM pg_class").await;
    a.exec("SELECT @settle_backlog_segments(1000)").await;
    drain_some(&a, "q", 500).await;
    a.exec("SELECT @advance_idle_cursors()").await;
    let error = b.try_exec("SELECT @settle_backlog_segments(1000)").await.unwrap_err();
    assert!(error.as_db_error().unwrap().message().contains("READ COMMITTED"), "{error:?}");
    b.exec("ROLLBACK").await;
    assert_eq!(counts(&a, "q").await.available, 2000);
}

#[tokio::test]
async fn jobs_committed_late_below_the_cursor_are_available() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    s.enqueue("q", 1).await;
    p.exec("BEGIN").await;
    p.enqueue("q", 3).await;
    s.enqueue("q", 200).await;
    for _ in 0..80 {
        drain_some(&s, "q", 1).await;
    }
    assert!(s.one::<bool>("SELECT EXISTS (SELECT FROM @ready_lane_holes)").await, "the hole was set aside");
    assert!(
        s.one::<bool>("SELECT pg_sequence_last_value(spent) > 4 FROM @queue_lanes").await,
        "and the cursor is above it"
    );
    assert_eq!(counts(&s, "q").await.available, 121);
    p.exec("COMMIT").await;
    let q = counts(&s, "q").await;
    assert_eq!((q.available, q.available_exact), (124, true));
    assert!(q.oldest_ready_age_s.is_some());
    // One of the late jobs is taken, and the hole stays open for the others.
    assert_eq!(s.probe("q", 1).await.len(), 1);
    let q = counts(&s, "q").await;
    assert_eq!((q.available, q.running), (123, 1));
    s.drain("q").await;
    assert_eq!(counts(&s, "q").await.available, 0);
}

#[tokio::test]
async fn a_count_that_a_prune_overtakes_is_exact() {
    let db = Db::new().await;
    let (s, c, x) = (db.session().await, db.session().await, db.session().await);
    s.enqueue("q", 1500).await;
    drain_some(&s, "q", 1000).await;
    s.exec("SELECT @advance_idle_cursors()").await;
    s.rotate("queue").await;
    s.enqueue("q", 2000).await;
    drain_some(&s, "q", 500).await;
    s.exec("SELECT @advance_idle_cursors(), @settle_backlog_segments(500)").await;
    s.exec("SELECT @rotate('claim', true)").await;
    // The slot is gone, but not for a snapshot that is taken before the commit.
    let pid = c.pid().await;
    x.exec("BEGIN").await;
    assert!(x.prune("queue", 0).await.0, "nothing keeps the slot");
    let client = c.client.clone();
    let count = tokio::spawn(async move { queue_counts(&client, &Schema::default()).await.unwrap() });
    db.until_waiting(pid).await;
    x.exec("COMMIT").await;
    let q = count.await.unwrap().queues.remove(0);
    assert_eq!((q.available, q.completed, total(&q)), (2000, 1500, 3500));
}

/// A count has read the cursors and not yet counted: no slot may go until it has.
#[tokio::test]
async fn no_slot_goes_between_the_cursors_and_the_count() {
    let db = Db::new().await;
    let (s, c, x) = (db.session().await, db.session().await, db.session().await);
    s.enqueue("q", 2000).await;
    drain_some(&s, "q", 100).await;
    s.exec("SELECT @advance_idle_cursors()").await;
    assert_eq!(s.one::<i32>("SELECT @settle_backlog_segments(500)").await, 3);
    x.exec("BEGIN; LOCK TABLE @queue_backlog_segments IN ACCESS EXCLUSIVE MODE").await;
    let pid = c.pid().await;
    let client = c.client.clone();
    let count = tokio::spawn(async move { queue_counts(&client, &Schema::default()).await.unwrap() });
    db.until_waiting(pid).await;
    s.drain("q").await;
    s.rotate("queue").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    let (_, reason, detail) = x.prune("queue", 0).await;
    assert!(reason == "reader" && detail.contains(&format!("pid {pid} ")), "{reason}: {detail}");
    x.exec("COMMIT").await;
    let q = count.await.unwrap().queues.remove(0);
    assert_eq!((q.available, q.completed, total(&q)), (0, 2000, 2000));
}

/// Every job is in one state at any time: the sum never moves while everything else does.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn the_sum_over_all_states_never_moves_while_jobs_do() {
    const JOBS: i64 = 3000;
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", JOBS as i32 / 2).await;
    s.exec(&format!(
        "SELECT @enqueue('k', 'q', run_at => clock_timestamp() + n * interval '3 milliseconds') FROM generate_series(1, {}) AS n",
        JOBS / 2
    ))
    .await;
    let over = AtomicBool::new(false);
    let going = || !over.load(Ordering::Relaxed);
    let worker = async |n: i64| {
        let s = db.session().await;
        let mut turn = n;
        while going() {
            turn += 1;
            let Some(batches) = s.try_claim("q", 3, turn % 40 == 0).await.unwrap() else { continue };
            let attempts = attempts(&batches);
            if attempts.is_empty() {
                tokio::time::sleep(Duration::from_millis(2)).await;
                continue;
            }
            let (first, rest) = attempts.split_at(1);
            match turn % 3 {
                0 => s.close(first, "failed", Some("e"), "0").await,
                1 => s.close(first, "retryable", Some("e"), "0").await,
                _ => s.complete(first).await,
            };
            s.complete(rest).await;
        }
    };
    // A promotion is a producer: one that stays open while others are claimed from leaves a hole, and then late jobs
    // below the cursor.
    let promoter = async |claims_meanwhile: i64| {
        let s = db.session().await;
        let claimed = "SELECT coalesce(pg_sequence_last_value('awa.lease_claim_batch_ids'), 0)";
        while going() {
            s.exec("BEGIN; SELECT @promote(40)").await;
            let enough = s.one::<i64>(claimed).await + claims_meanwhile;
            // Near the end nobody claims so much any more.
            for _ in 0..60 {
                if s.one::<i64>(claimed).await >= enough {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            s.exec("COMMIT; BEGIN; SELECT @enqueue('k', 'q'); ROLLBACK").await;
        }
    };
    let maintenance = async {
        let s = db.session().await;
        while going() {
            s.rotate("queue").await;
            s.rotate("claim").await;
            s.exec("SELECT @advance_idle_cursors()").await;
            s.prune_all("claim").await;
            s.prune_all("queue").await;
            s.exec("SELECT @settle_backlog_segments(100)").await;
            s.exec("SELECT @trim_backlog_segments()").await;
        }
    };
    let counter = async {
        let s = db.session().await;
        let mut looks = 0;
        loop {
            let q = counts(&s, "q").await;
            looks += 1;
            if !q.available_exact || total(&q) != JOBS {
                over.store(true, Ordering::Relaxed);
                panic!("{JOBS} jobs were enqueued; look {looks} saw {}: {q:?}", total(&q));
            }
            if q.completed + q.failed == JOBS {
                over.store(true, Ordering::Relaxed);
                return;
            }
        }
    };
    tokio::join!(worker(0), worker(1), worker(2), promoter(70), promoter(75), maintenance, counter);
    assert!(s.one::<i64>("SELECT count(*) FROM @queue_ring_prunes").await > 0, "slots were pruned under the counts");
    assert!(
        s.one::<bool>("SELECT pg_sequence_last_value('awa.ready_lane_hole_ids') IS NOT NULL").await,
        "holes were set aside and filled late"
    );
}

#[tokio::test]
async fn a_counted_backlog_is_not_read_again() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 20_000).await;
    drain_some(&s, "q", 1024).await;
    drain_some(&s, "q", 10).await;
    assert_eq!(s.one::<i32>("SELECT @settle_backlog_segments(500)").await, 37);
    s.exec("BEGIN").await;
    let before = rows_read(&s, "ready_entries").await;
    let q = counts(&s, "q").await;
    let read = rows_read(&s, "ready_entries").await - before;
    s.exec("COMMIT").await;
    assert_eq!((q.available, q.available_exact), (20_000 - 1034, true));
    assert!(read < 2500, "{read} rows were read");
}

#[tokio::test]
async fn a_backlog_too_deep_to_be_read_is_estimated_and_said_to_be() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 1000).await;
    s.exec("BEGIN").await;
    let before = rows_read(&s, "ready_entries").await;
    let rows = s.rows("SELECT job_count, is_exact FROM @queue_counts(999)", &[]).await.unwrap();
    assert_eq!((rows[0].get::<_, i64>(0), rows[0].get::<_, bool>(1)), (1000, false));
    assert!(rows_read(&s, "ready_entries").await - before < 10);
    s.exec("COMMIT").await;
    let rows = s.rows("SELECT job_count, is_exact FROM @queue_counts(1000)", &[]).await.unwrap();
    assert_eq!((rows[0].get::<_, i64>(0), rows[0].get::<_, bool>(1)), (1000, true));
}

#[tokio::test]
async fn a_look_at_the_rings_does_not_read_a_big_slot() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec(
        "SELECT count(@enqueue('k', 'q' || n % 3, jsonb_build_object('p', (SELECT string_agg(md5((n * m)::text), '') FROM generate_series(1, 30) AS m))))
         FROM generate_series(1, 12000) AS n",
    )
    .await;
    s.rotate("queue").await;
    let schema = Schema::default();
    for state in ["unclaimed", "in part", "running", "closed", "over"] {
        match state {
            "in part" => drain_some(&s, "q1", 100).await,
            "running" => {
                for queue in ["q0", "q1", "q2"] {
                    for _ in 0..4 {
                        s.claim(queue, 1024).await;
                    }
                }
            }
            "closed" => {
                let open = "SELECT b.claim_slot, b.batch_id, b.job_ids, b.run_lease FROM @lease_claim_batches AS b
                            WHERE NOT EXISTS (SELECT FROM @lease_claim_closure_batches AS c WHERE c.batch_id = b.batch_id)";
                s.exec(&format!(
                    "SELECT @complete(array_fill(b.claim_slot, ARRAY[n]), (SELECT array_agg(b.batch_id * 1024 + i) FROM generate_series(0, n - 1) AS i),
                                      b.job_ids, array_fill(b.run_lease, ARRAY[n]))
                     FROM ({open}) AS b, cardinality(b.job_ids) AS n"
                ))
                .await;
            }
            "over" => s.exec("SELECT @advance_idle_cursors()").await,
            _ => {}
        }
        s.exec("BEGIN").await;
        let before = rows_read(&s, "ready_entries").await;
        let report = rings(&s.client, &schema, &Ring::ALL).await.unwrap();
        let read = rows_read(&s, "ready_entries").await - before;
        s.exec("COMMIT").await;
        let slot = &report.rings[0].slots[0];
        assert!(slot.bytes > 9_000_000 && !slot.rows_exact, "{state}: {slot:?}");
        assert!((10_000..14_000).contains(&slot.rows), "{state}: {slot:?}");
        assert!(read < 1000, "{state}: {read} rows were read");
        let blockers: Vec<_> = slot.blockers.iter().map(|b| b.reason.as_str()).collect();
        let expected: &[&str] = match state {
            "unclaimed" | "in part" => &["ready_rows"],
            "running" => &["open_claims"],
            "closed" => &["lane_cursor"],
            _ => &[],
        };
        assert_eq!(blockers, expected, "{state}: {slot:?}");
        assert_eq!(slot.open > 0, blockers == ["ready_rows"], "{state}: {slot:?}");
    }
    assert!(s.prune("queue", 0).await.0);
}

#[tokio::test]
async fn a_job_committed_late_below_the_cursor_is_what_keeps_its_slot() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    s.enqueue("q", 1).await;
    p.exec("BEGIN").await;
    p.enqueue("q", 2).await;
    s.enqueue("q", 80).await;
    for _ in 0..81 {
        drain_some(&s, "q", 1).await;
    }
    for _ in 0..2 {
        s.rotate("queue").await;
        s.enqueue("q", 1).await;
        drain_some(&s, "q", 1).await;
    }
    s.exec("SELECT @advance_idle_cursors()").await;
    p.exec("COMMIT").await;
    // The hole is recorded in slot 0 too; as if it were over, but for the jobs.
    for hole_slot in ["0", "1"] {
        s.exec(&format!(
            "WITH gone AS (DELETE FROM @ready_lane_holes RETURNING *)
             INSERT INTO @ready_lane_holes SELECT hole_id, lane_hi, recorded_at, lane_id, {hole_slot}, holders, lane_ranges FROM gone"
        ))
        .await;
        let report = rings(&s.client, &Schema::default(), &[Ring::Queue]).await.unwrap();
        let blockers = &report.rings[0].slots[0].blockers;
        let expected = if hole_slot == "0" { "open_holes" } else { "ready_rows" };
        assert_eq!(blockers.iter().map(|b| b.reason.as_str()).collect::<Vec<_>>(), [expected], "{blockers:?}");
        let (_, reason, _) = s.prune("queue", 0).await;
        assert_eq!(reason, expected);
    }
    s.drain("q").await;
    assert!(s.prune("queue", 0).await.0);
}

#[tokio::test]
async fn a_ring_says_why_it_would_not_be_rotated() {
    let db = Db::new().await;
    let (s, other) = (db.session().await, db.session().await);
    let outlook = async || {
        let report = rings(&s.client, &Schema::default(), &[Ring::Queue]).await.unwrap();
        assert_eq!(report.rings.len(), 1);
        let rotation = report.rings[0].rotation.clone();
        (rotation.opens, rotation.skipped.unwrap_or_default())
    };
    assert_eq!(outlook().await, (None, "idle: the open slot is empty".into()));
    s.enqueue("q", 1).await;
    assert_eq!(outlook().await, (Some(1), String::new()));
    other.exec("BEGIN").await;
    other.rotate("queue").await;
    let (opens, skipped) = outlook().await;
    assert!(opens.is_none() && skipped.contains(&format!("pid {} ", other.pid().await)), "{skipped}");
    other.exec("ROLLBACK").await;
    assert_eq!(outlook().await, (Some(1), String::new()), "the promised one");
    for slot in 1..16 {
        assert_eq!(outlook().await, (Some(slot), String::new()));
        assert!(s.one::<bool>("SELECT rotated FROM @rotate('queue')").await);
        s.enqueue("q", 1).await;
    }
    assert_eq!(outlook().await, (None, "no pruned slot: the open one goes on".into()));
    assert!(!s.one::<bool>("SELECT rotated FROM @rotate('queue')").await);
}

#[tokio::test]
async fn finished_jobs_are_read_without_jit() {
    let s = Db::new().await.session().await;
    let off = "SELECT 'jit=off' = ANY (proconfig) FROM pg_proc WHERE proname = 'terminal_jobs_in' AND pronargs = 2";
    assert!(s.one::<bool>(off).await);
}

#[tokio::test]
async fn folding_the_deltas_of_pruned_slots_changes_no_count_and_waits_for_old_transactions() {
    let db = Db::new().await;
    let (s, old) = (db.session().await, db.session().await);
    for _ in 0..4 {
        s.enqueue("q", 3).await;
        s.drain("q").await;
        s.rotate("queue").await;
        s.rotate("claim").await;
        s.exec("SELECT @advance_idle_cursors()").await;
        s.prune_all("claim").await;
        s.prune_all("queue").await;
    }
    let count = "SELECT job_count FROM @queue_counts() WHERE state = 'completed'";
    assert_eq!(s.one::<i64>(count).await, 12);
    old.exec("BEGIN; SELECT pg_current_xact_id()").await;
    // As if it had been open for long.
    s.exec(
        "CREATE OR REPLACE FUNCTION @oldest_pin() RETURNS interval LANGUAGE sql AS $$ SELECT interval '6 seconds' $$",
    )
    .await;
    assert_eq!(s.one::<i64>("SELECT @fold_terminal_rollups(1)").await, 0);
    s.exec("CREATE OR REPLACE FUNCTION @oldest_pin() RETURNS interval LANGUAGE sql AS $$ SELECT interval '0' $$").await;
    assert_eq!(s.one::<i64>("SELECT @fold_terminal_rollups(5)").await, 0, "not worth it yet");
    assert_eq!(s.one::<i64>("SELECT @fold_terminal_rollups(1)").await, 4);
    assert_eq!(s.one::<i64>(count).await, 12);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @queue_terminal_rollup_deltas").await, 0);
    assert_eq!(s.one::<i64>("SELECT @fold_terminal_rollups(1)").await, 0);
}
