//! Queues as a whole: pause, drain, shards, aging, and promotion that is fair between them.

mod common;

use std::time::Duration;

use awactl::engine::{Schema, queues};
use common::{Db, Session, attempts, jobs};

async fn counted(s: &Session) -> Vec<String> {
    s.all(
        "SELECT state || ' ' || sum(job_count) FROM @queue_counts() WHERE job_count <> 0 GROUP BY state ORDER BY state",
    )
    .await
}

/// n jobs of a queue that are due at the second `from` of the day they were all due, one a second.
async fn due(s: &Session, queue: &str, n: i32, from: i32) {
    s.exec(&format!(
        "INSERT INTO @deferred_jobs (job_id, run_lease, run_at, created_at, priority, attempt, max_attempts, state, queue, kind, args)
         SELECT nextval('@jobs_id_seq'), 0, timestamptz '2020-01-01' + ({from} + n) * interval '1 second', now(), 2, 0, 25, 'scheduled',
                '{queue}', 'k', '{{}}'
         FROM generate_series(1, {n}) AS n ORDER BY random()"
    ))
    .await;
}

#[tokio::test]
async fn a_paused_queue_gives_nothing_and_takes_everything_and_what_runs_goes_on() {
    let db = Db::new().await;
    let (s, operator) = (db.session().await, db.session().await);
    s.enqueue("q", 3).await;
    let running = attempts(&s.claim("q", 1).await);
    assert!(operator.one::<bool>("SELECT @pause_queue('q', 'me')").await);
    assert!(!operator.one::<bool>("SELECT @pause_queue('q', 'you')").await, "it was");
    assert_eq!(operator.one::<String>("SELECT paused_by FROM @queue_meta").await, "me");
    assert_eq!(s.claim("q", 10).await.len(), 0);
    assert_eq!(s.probe("q", 10).await.len(), 0);
    let more = s.enqueue("q", 1).await;
    due(&s, "q", 1, 0).await;
    assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1);
    assert_eq!(s.complete(&running).await, []);
    assert_eq!(counted(&s).await, ["available 4", "completed 1"]);
    assert!(operator.one::<bool>("SELECT @resume_queue('q')").await);
    assert!(!operator.one::<bool>("SELECT @resume_queue('q')").await);
    let all = jobs(&s.claim("q", 10).await);
    assert!(all.len() == 4 && all.contains(&more[0]));
    // A queue nobody has used can be paused, too.
    assert!(operator.one::<bool>("SELECT @pause_queue('new')").await);
    s.enqueue("new", 1).await;
    assert_eq!(s.claim("new", 1).await.len(), 0);
}

#[tokio::test]
async fn a_pause_is_seen_by_the_next_claim_of_a_session_with_warm_plans() {
    let db = Db::new().await;
    let (s, operator) = (db.session().await, db.session().await);
    for _ in 0..10 {
        s.enqueue("q", 1).await;
        assert_eq!(s.claim("q", 1).await.len(), 1);
        operator.exec("BEGIN; SELECT @pause_queue('q')").await;
        s.enqueue("q", 1).await;
        assert_eq!(s.claim("q", 1).await.len(), 1, "not committed yet");
        operator.exec("COMMIT").await;
        s.enqueue("q", 1).await;
        assert_eq!(s.claim("q", 1).await.len(), 0);
        operator.exec("SELECT @resume_queue('q')").await;
        assert_eq!(s.claim("q", 1).await.len(), 1);
    }
}

#[tokio::test]
async fn a_resumed_queue_wakes_those_who_sleep_on_it() {
    let db = Db::new().await;
    let (s, sleeper) = (db.session().await, db.session().await);
    let class: i32 = s.one("SELECT '@runtime_instances'::regclass::oid::integer").await;
    let (client, mut connection) = db.config().connect(tokio_postgres::NoTls).await.unwrap();
    let (sender, mut heard) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let tokio_postgres::AsyncMessage::Notification(n) = message {
                let _ = sender.send(n.payload().to_owned());
            }
        }
    });
    client.batch_execute(&format!("LISTEN awa_wake_{class}")).await.unwrap();
    s.exec("SELECT @pause_queue('q')").await;
    sleeper.exec(&format!("SELECT pg_advisory_lock_shared({class}, hashtext('q'))")).await;
    s.exec("SELECT @resume_queue('q')").await;
    assert_eq!(tokio::time::timeout(Duration::from_secs(60), heard.recv()).await.unwrap().unwrap(), "q");
}

#[tokio::test]
async fn a_drain_cancels_what_waits_in_bounded_calls_and_leaves_what_runs() {
    let db = Db::new().await;
    let s = db.session().await;
    let running = s.enqueue("q", 5).await;
    let claimed = attempts(&s.claim("q", 5).await);
    for _ in 0..5 {
        s.enqueue("q", 5000).await;
        s.rotate("queue").await;
    }
    due(&s, "q", 7, 0).await;
    s.exec(
        "SELECT @enqueue('k', 'q', priority => 4, run_at => clock_timestamp() + interval '1 day', unique_key => 'one')",
    )
    .await;
    s.enqueue("other", 3).await;
    due(&s, "other", 3, 0).await;
    let mut calls = vec![];
    loop {
        let n: i32 = s.one("SELECT @drain_queue('q', 'not wanted')").await;
        if n == 0 {
            break;
        }
        calls.push(n);
    }
    assert_eq!((calls.iter().sum::<i32>(), calls.iter().all(|n| *n <= 10_000)), (25_008, true), "{calls:?}");
    assert_eq!(counted(&s).await, ["available 3", "cancelled 25008", "running 5", "scheduled 3"]);
    let why: String = s.one("SELECT DISTINCT errors[1] ->> 'error' FROM @terminal_jobs").await;
    assert_eq!(why, "not wanted");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @job_unique_claims").await, 0, "a cancelled job gives up its key");
    assert_eq!(s.complete(&claimed).await, []);
    assert_eq!(common::sorted(claimed.iter().map(|a| a.job).collect()), running);
    // What comes later is not drained.
    let later = s.enqueue("q", 1).await;
    assert_eq!(s.drain("q").await, later);
}

#[tokio::test]
async fn a_drain_ends_although_a_producer_goes_on() {
    let db = Db::new().await;
    let s = db.session().await;
    // A job that comes while each call runs.
    s.exec(
        "ALTER FUNCTION @drain_queue RENAME TO drain_once;
         CREATE FUNCTION @drain_queue(q text, r text, n integer) RETURNS integer LANGUAGE plpgsql AS $$
         DECLARE
             v_drained integer := @drain_once(q, r, n);
         BEGIN
             PERFORM @enqueue('k', q);
             RETURN v_drained;
         END $$",
    )
    .await;
    s.enqueue("q", 3).await;
    let drained = queues::drain(&s.client, &Schema::default(), "q", None, |_| {}).await.unwrap();
    assert_eq!((drained, s.drain("q").await.len()), (3, 1));
}

#[tokio::test]
async fn a_drain_and_a_claim_at_once_share_the_jobs_between_them() {
    let db = Db::new().await;
    let (s, claimer) = (db.session().await, db.session().await);
    s.enqueue("q", 10).await;
    let pid = s.pid().await;
    claimer.exec("BEGIN").await;
    let taken = attempts(&claimer.claim("q", 4).await);
    let drain = s.spawn("SELECT @drain_queue('q')");
    db.until_waiting(pid).await;
    claimer.exec("COMMIT").await;
    assert_eq!(drain.await.unwrap().unwrap()[0].get::<_, i32>(0), 6);
    assert_eq!(claimer.complete(&taken).await, []);
    assert_eq!(counted(&s).await, ["cancelled 6", "completed 4"]);
}

#[tokio::test]
async fn shards_spread_producers_over_lanes_and_each_keeps_its_order() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec("SELECT @set_queue('q', p_enqueue_shards => 4)").await;
    let mut of_session = vec![];
    for _ in 0..8 {
        let producer = db.session().await;
        let mut mine = producer.enqueue("q", 5).await;
        mine.extend(producer.enqueue("q", 5).await);
        of_session.push(mine);
    }
    let lanes: i64 = s.one("SELECT count(DISTINCT enqueue_shard) FROM @queue_lanes WHERE queue = 'q'").await;
    assert!((2..=4).contains(&lanes), "{lanes} lanes of sessions that started one after the other");
    // As many claims at once as there are lanes.
    let mut got = vec![];
    for _ in 0..lanes {
        let claimer = db.session().await;
        claimer.exec("BEGIN").await;
        let batches = claimer.claim("q", 1).await;
        assert_eq!(batches.len(), 1);
        got.push((claimer, batches));
    }
    let mut order = vec![];
    for (claimer, batches) in &got {
        claimer.exec("COMMIT").await;
        order.extend(jobs(batches));
    }
    loop {
        let batches = s.claim("q", 7).await;
        if batches.is_empty() {
            break;
        }
        order.extend(jobs(&batches));
    }
    assert_eq!(order.len(), 80);
    for mine in of_session {
        let seen: Vec<i64> = order.iter().copied().filter(|id| mine.contains(id)).collect();
        assert_eq!(seen, mine);
    }
}

/// Benchmark harness, 2026-05-09: priority aging never fired in an hour at 9:1.
#[tokio::test]
async fn the_lowest_priority_waits_no_longer_than_three_agings_and_the_first_priority_itself() {
    let db = Db::new().await;
    let s = db.session().await;
    const ROUNDS: usize = 60; // ten seconds each, by moving what waits into the past
    const AGING: usize = 6; // a minute
    let (mut born, mut waits, mut first_waits) = (std::collections::HashMap::new(), vec![], 0);
    for round in 0..ROUNDS {
        for (priority, n) in [(1, 110), (4, 1)] {
            for id in s
                .all::<i64>(&format!(
                    "SELECT r.job_id FROM @enqueue_many((SELECT array_agg(ROW('k', 'q', NULL, {priority}, NULL, NULL, NULL, NULL, NULL, NULL)::@new_job)
                     FROM generate_series(1, {n}))) AS r"
                ))
                .await
            {
                born.insert(id, (round, priority));
            }
        }
        let rows = s.rows("SELECT job_ids FROM @claim('q', 100, NULL, 'w', p_aging => '1 minute')", &[]).await.unwrap();
        let mut n = 0;
        for id in rows.iter().flat_map(|r| r.get::<_, Vec<i64>>(0)) {
            let (since, priority) = born.remove(&id).unwrap();
            n += 1;
            match priority {
                1 => first_waits = first_waits.max(round - since),
                _ => waits.push(round - since),
            }
        }
        assert_eq!(n, 100, "the queue is never empty");
        s.exec("UPDATE @ready_entries SET run_at = run_at - interval '10 seconds'").await;
    }
    assert!(waits.len() >= ROUNDS - 3 * AGING - first_waits - 2, "{waits:?}");
    assert!(
        waits.iter().all(|w| *w <= 3 * AGING + first_waits + 1),
        "{waits:?}, the first priority waited {first_waits}"
    );
    assert!(waits[0] >= 2 * AGING, "and not before the others for nothing: {waits:?}");
}

#[tokio::test]
async fn a_flood_of_due_jobs_in_one_queue_delays_no_other() {
    let db = Db::new().await;
    let s = db.session().await;
    due(&s, "flood", 100_000, 0).await;
    due(&s, "zz", 1, 200_000).await; // due long after all of them
    assert!(s.one::<i32>("SELECT @promote(1000)").await <= 1001);
    assert_eq!(s.claim("zz", 10).await.len(), 1, "in the first call");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs WHERE queue = 'flood'").await, 99_500);
    assert_eq!(s.one::<i32>("SELECT @promote(1000)").await, 1000, "all of it where nobody else has some");
}

#[tokio::test]
async fn due_jobs_are_promoted_in_due_order_and_others_not_at_all() {
    let db = Db::new().await;
    let s = db.session().await;
    due(&s, "q", 300, 0).await;
    s.exec("SELECT @enqueue('k', 'q', run_at => clock_timestamp() + interval '1 day')").await;
    let expected: Vec<i64> = s.all("SELECT job_id FROM @deferred_jobs WHERE run_at < now() ORDER BY run_at").await;
    let mut order = vec![];
    while s.one::<i32>("SELECT @promote(70)").await > 0 {
        order.extend(jobs(&s.claim("q", 1000).await));
    }
    assert_eq!(order, expected);
    assert_eq!(counted(&s).await, ["running 300", "scheduled 1"]);
}

#[tokio::test]
async fn what_another_promotion_holds_is_passed_over_and_comes_later() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    b.exec("SET lock_timeout = '10s'").await;
    due(&a, "q", 20, 0).await;
    a.exec("BEGIN").await;
    assert_eq!(a.one::<i32>("SELECT @promote(15)").await, 15);
    assert_eq!(b.one::<i32>("SELECT @promote(15)").await, 5);
    a.exec("ROLLBACK").await;
    assert_eq!(b.one::<i32>("SELECT @promote(100)").await, 15);
    assert_eq!(b.drain("q").await.len(), 20);
}

#[tokio::test]
#[ignore = "a minute or more"]
async fn a_million_jobs_due_at_once_are_promoted_in_order_and_all_of_them() {
    let db = Db::new().await;
    let s = db.session().await;
    due(&s, "q", 1_000_000, 0).await;
    due(&s, "zz", 1, 2_000_000).await;
    s.exec("ANALYZE @deferred_jobs").await;
    let mut moved = 0;
    loop {
        let n: i32 = s.one("SELECT @promote(5000)").await;
        if moved == 0 {
            assert_eq!(s.claim("zz", 1).await.len(), 1);
        }
        if n == 0 {
            break;
        }
        moved += n;
    }
    assert_eq!(moved, 1_000_001);
    let unordered: i64 = s
        .one("SELECT count(*) FROM (SELECT run_at < lag(run_at) OVER (ORDER BY lane_id, lane_seq) AS back, lane_id = lag(lane_id) OVER (ORDER BY lane_id, lane_seq) AS same FROM @ready_entries) AS r WHERE back AND same")
        .await;
    assert_eq!(unordered, 0);
}

#[tokio::test]
async fn a_setting_that_cannot_be_is_refused_by_name_and_changes_nothing() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec("SELECT @set_queue('q', 2, true, '1 hour', '2 hours')").await;
    let settings =
        "SELECT format('%s %s %s %s', enqueue_shards, dlq, dlq_retention, failed_retention) FROM @queue_meta";
    for (arguments, field) in [
        ("'', 1", "queue"),
        ("NULL, 1", "queue"),
        ("'q', 0", "enqueue_shards"),
        ("'q', 65", "enqueue_shards"),
        ("'q', p_dlq_retention => '0'", "dlq_retention"),
        ("'q', p_failed_retention => '-1 second'", "failed_retention"),
    ] {
        let error = s.rows(&format!("SELECT @set_queue({arguments})"), &[]).await.expect_err(arguments);
        let error = error.as_db_error().unwrap();
        assert_eq!((error.column(), error.message().starts_with(field)), (Some(field), true), "{arguments}: {error:?}");
        assert_eq!(s.all::<String>(settings).await, ["2 t 01:00:00 02:00:00"], "{arguments}");
    }
    s.exec("SELECT @set_queue('q', p_dlq => false)").await;
    assert_eq!(s.all::<String>(settings).await, ["2 f 01:00:00 02:00:00"], "the others stay");
}
