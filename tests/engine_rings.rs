//! Rotate and prune: a slot goes only when everything in it is proven over; whatever stands in the way is a reason (I3, I4).
mod common;
use common::*;

/// n finished jobs in the open slots.
async fn finish(s: &Session, n: i32) -> Vec<i64> {
    s.enqueue("q", n).await;
    s.drain("q").await
}

#[tokio::test]
async fn a_slot_is_pruned_when_all_is_over_and_its_counts_remain() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mut total = 0;
    for n in 1..=40 {
        s.enqueue("q", n % 5 + 1).await;
        s.enqueue("other", 1).await;
        let a = attempts(&s.claim("q", 10).await);
        s.complete(&a[..a.len() - 1]).await;
        s.close(&a[a.len() - 1..], ["failed", "cancelled"][n as usize % 2], Some("e"), "0").await;
        s.drain("other").await;
        s.drain("q").await;
        total += a.len() as i64 + 1;
        assert!(s.rotate("queue").await.0);
        s.rotate("claim").await;
        // Either ring may go first.
        for ring in if n % 2 == 0 { ["queue", "claim"] } else { ["claim", "queue"] } {
            s.prune_all(ring).await;
        }
        let count: i64 = s.one("SELECT (SELECT count(*) FROM @terminal_jobs) + (SELECT count(*) FROM @dlq_entries) + (SELECT coalesce(sum(job_count), 0)::bigint FROM @queue_terminal_rollup_deltas)").await;
        assert_eq!(count, total);
    }
    assert!(s.one::<bool>("SELECT sum(job_count) > 60 FROM @queue_terminal_rollup_deltas").await);
    assert_eq!(s.one::<i64>("SELECT count(DISTINCT (queue, state)) FROM @queue_terminal_rollup_deltas").await, 3);
}

#[tokio::test]
async fn an_uncommitted_producer_keeps_its_slot_and_is_named() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    finish(&s, 3).await;
    p.exec("BEGIN").await;
    let ids = p.enqueue("q", 1).await;
    s.rotate("queue").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    let (pruned, reason, detail) = s.prune("queue", 0).await;
    assert!(!pruned && reason == "pinned" && detail.contains(&format!("pid {} ", p.pid().await)), "{reason}: {detail}");
    p.exec("COMMIT").await;
    assert_eq!(s.prune("queue", 0).await.1, "ready_rows");
    assert_eq!(s.drain("q").await, ids);
    assert!(s.prune("queue", 0).await.0);
}

#[tokio::test]
async fn claims_in_flight_and_open_keep_both_slots() {
    let db = Db::odd().await;
    let (s, c) = (db.session().await, db.session().await);
    let first = finish(&s, 3).await;
    s.enqueue("q", 2).await;
    c.exec("BEGIN").await;
    let a = attempts(&c.claim("q", 2).await);
    s.rotate("queue").await;
    s.rotate("claim").await;
    assert_eq!(s.prune("queue", 0).await.1, "ready_rows");
    let (_, reason, detail) = s.prune("claim", 0).await;
    assert!(reason == "pinned" && detail.contains(&format!("pid {} ", c.pid().await)), "{reason}: {detail}");
    c.exec("COMMIT").await;
    assert_eq!(s.prune("queue", 0).await.1, "open_claims");
    let (_, reason, detail) = s.prune("claim", 0).await;
    assert!(
        reason == "open_claims" && detail.contains(&format!("job {}", a[0].job)) && detail.contains("tester"),
        "{reason}: {detail}"
    );
    assert_eq!(s.complete(&a[1..]).await, []);
    assert_eq!(s.prune("claim", 0).await.1, "open_claims");
    assert_eq!(s.complete(&a[..1]).await, []);
    assert!(s.prune("claim", 0).await.0);
    assert_eq!(s.prune("queue", 0).await.1, "lane_cursor", "nobody claimed since");
    assert_eq!(s.one::<i32>("SELECT @advance_idle_cursors()").await, 1);
    assert!(s.prune("queue", 0).await.0);
    assert_eq!(
        s.one::<i64>("SELECT sum(job_count)::bigint FROM @queue_terminal_rollup_deltas").await,
        first.len() as i64 + 2
    );
    assert_eq!(s.prune("queue", 0).await.1, "pruned");
    assert_eq!(s.prune("queue", 1).await.1, "open");
    assert_eq!(s.prune("queue", 99).await.1, "no_such_slot");
}

#[tokio::test]
async fn a_completion_in_flight_keeps_its_claim_slot() {
    let db = Db::new().await;
    let (s, c) = (db.session().await, db.session().await);
    s.enqueue("q", 2).await;
    let a = attempts(&s.claim("q", 2).await);
    s.rotate("claim").await;
    c.exec("BEGIN").await;
    c.complete(&a).await;
    assert_eq!(s.prune("claim", 0).await.1, "open_claims");
    c.exec("ROLLBACK").await;
    assert_eq!(s.prune("claim", 0).await.1, "open_claims");
    assert_eq!(s.complete(&a).await, []);
    assert!(s.prune("claim", 0).await.0);
}

#[tokio::test]
async fn a_long_reader_costs_a_skip_that_names_it() {
    let db = Db::odd().await;
    let (s, r) = (db.session().await, db.session().await);
    finish(&s, 3).await;
    s.rotate("queue").await;
    s.rotate("claim").await;
    r.exec("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM @ready_entries_0; SELECT count(*) FROM @lease_claim_batches_0").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    for ring in ["queue", "claim"] {
        let (pruned, reason, detail) = s.prune(ring, 0).await;
        assert!(
            !pruned && reason == "reader" && detail.contains(&format!("pid {} ", r.pid().await)),
            "{reason}: {detail}"
        );
    }
    assert_eq!(s.one::<String>("SHOW lock_timeout").await, "0");
    r.exec("COMMIT").await;
    assert!(s.prune("queue", 0).await.0 && s.prune("claim", 0).await.0);
}

#[tokio::test]
async fn what_is_committed_while_prune_waits_for_its_locks_is_seen() {
    for (ring, read, write, reason) in [
        (
            "queue",
            "ready_entries_0",
            "INSERT INTO @ready_entries_0 SELECT 999, 999, 0, now(), now(), 1, 0, 0, 5, 'k', '{}'",
            "ready_rows",
        ),
        (
            "claim",
            "lease_claim_batches_0",
            "INSERT INTO @lease_claim_batches_0 SELECT 999, 0, 0, 1, now(), NULL, 1, 0, 0, false, 'me', '{[999,1000)}', '{999}'",
            "open_claims",
        ),
    ] {
        let db = Db::new().await;
        let (s, r) = (db.session().await, db.session().await);
        finish(&s, 3).await;
        s.rotate(ring).await;
        s.exec("SELECT @advance_idle_cursors()").await;
        r.exec(&format!("BEGIN; SELECT count(*) FROM @{read}")).await;
        let pid = s.pid().await;
        let prune = s.spawn(&format!("SELECT pruned, reason FROM @prune('{ring}', 0::smallint, '10 minutes')"));
        db.until_waiting(pid).await;
        r.exec(write).await;
        r.exec("COMMIT").await;
        let rows = prune.await.unwrap().unwrap();
        assert_eq!((rows[0].get::<_, bool>(0), rows[0].get::<_, &str>(1)), (false, reason));
        assert_eq!(s.one::<i64>(&format!("SELECT count(*) FROM @{read}")).await, if ring == "queue" { 4 } else { 2 });
    }
}

#[tokio::test]
async fn a_producer_paused_before_its_pin_writes_into_the_slot_that_is_open_then() {
    let db = Db::odd().await;
    let (s, x, p) = (db.session().await, db.session().await, db.session().await);
    finish(&s, 3).await;
    // x holds slot 0 as a pruner does; p has read the cursor and waits for its pin.
    x.exec(&format!(
        "SELECT pg_advisory_lock(c.oid::integer, 0) FROM pg_class c WHERE c.oid = {}",
        oid("queue_ring_slots")
    ))
    .await;
    let pid = p.pid().await;
    let enqueue = p.spawn("SELECT job_id FROM @enqueue('k', 'q')");
    db.until_waiting(pid).await;
    s.rotate("queue").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    assert!(x.prune("queue", 0).await.0, "its own lock is no hindrance");
    s.rotate("queue").await;
    x.exec("SELECT pg_advisory_unlock_all()").await;
    let id: i64 = enqueue.await.unwrap().unwrap()[0].get(0);
    assert_eq!(s.one::<i16>("SELECT ready_slot FROM @ready_entries").await, 2, "the open slot");
    assert_eq!(jobs(&s.claim("q", 5).await), [id]);
}

fn oid(table: &str) -> String {
    format!(
        "(SELECT t.oid FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace WHERE t.relname = '{table}' AND n.nspname <> 'pg_catalog')"
    )
}

#[tokio::test]
async fn numbers_reserved_for_a_copy_keep_their_slot_through_a_turn_of_the_ring() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    finish(&s, 3).await;
    p.exec("BEGIN").await;
    let rows = p
        .rows("SELECT lane_id, ready_slot, job_ids, lane_seqs FROM @enqueue_reserve('{q}', '{2}', '{2}')", &[])
        .await
        .unwrap();
    let (lane, slot, ids, seqs) = (
        rows[0].get::<_, i32>(0),
        rows[0].get::<_, i16>(1),
        rows[0].get::<_, Vec<i64>>(2),
        rows[0].get::<_, Vec<i64>>(3),
    );
    for n in 0..40 {
        if n % 10 == 9 {
            db.until(
                "SELECT max(claimed_at) < clock_timestamp() - interval '1 second' FROM @ready_claim_attempt_batches",
            )
            .await;
        }
        s.exec("SELECT @advance_idle_cursors()").await;
        s.exec("SELECT @advance_idle_cursors()").await;
        s.prune_all("queue").await;
        assert!(s.rotate("queue").await.0);
        s.probe("q", 1).await;
        finish(&s, 1).await;
        s.rotate("claim").await;
        s.prune_all("claim").await;
        s.prune_all("queue").await;
        assert_eq!(
            s.one::<i64>("SELECT max(generation) FROM @queue_ring_state WHERE slot = 0").await,
            0,
            "never reopened"
        );
    }
    for (id, seq) in ids.iter().zip(&seqs) {
        p.exec(&format!(
            "INSERT INTO @ready_entries SELECT {id}, {seq}, 0, now(), now(), {lane}, {slot}, 0, 5, 'k', '{{}}'"
        ))
        .await;
    }
    p.exec("COMMIT").await;
    assert_eq!(sorted(s.drain("q").await), ids);
    s.exec("SELECT @advance_idle_cursors()").await;
    s.probe("q", 1).await;
    assert!(s.prune("queue", 0).await.0);
}

#[tokio::test]
async fn rotation_passes_over_what_cannot_be_pruned_and_goes_on_when_nothing_can() {
    let db = Db::odd().await;
    let s = db.session().await;
    finish(&s, 1).await;
    s.rotate("queue").await;
    let stuck = s.enqueue("stuck", 1).await;
    s.rotate("queue").await;
    let mut opened = vec![];
    for _ in 0..30 {
        finish(&s, 1).await;
        opened.push(s.rotate("queue").await.1);
        s.exec("SELECT @advance_idle_cursors()").await;
        s.prune_all("queue").await;
    }
    assert!(!opened.contains(&1) && opened.contains(&0) && opened.contains(&15), "{opened:?}");
    for n in 0..40 {
        s.enqueue("q", 1).await;
        let (rotated, _, reason) = s.rotate("queue").await;
        s.prune_all("queue").await;
        if n > 20 {
            assert!(!rotated && reason.contains("no pruned slot"), "{reason}");
        }
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @ring_slots('queue') WHERE state = 'open'").await, 1);
    assert_eq!(s.drain("q").await.len(), 40);
    assert_eq!(s.drain("stuck").await, stuck);
    s.prune_all("queue").await;
    assert!(s.rotate("queue").await.0, "turning again");
}

#[tokio::test]
async fn an_idle_ring_is_not_rotated() {
    let db = Db::new().await;
    let s = db.session().await;
    for ring in ["queue", "claim"] {
        assert_eq!(
            s.one::<String>(&format!("SELECT reason FROM @rotate('{ring}')")).await,
            "idle: the open slot is empty"
        );
    }
    s.enqueue("q", 1).await;
    assert!(s.one::<bool>("SELECT rotated FROM @rotate('queue')").await);
    assert!(!s.one::<bool>("SELECT rotated FROM @rotate('claim')").await);
}

#[tokio::test]
async fn of_two_rotators_one_opens_a_slot() {
    let db = Db::new().await;
    let (s, t) = (db.session().await, db.session().await);
    s.exec("BEGIN").await;
    assert!(s.rotate("queue").await.0);
    let (rotated, _, reason) = t.rotate("queue").await;
    assert!(!rotated && reason.contains("another session"), "{reason}");
    assert!(t.rotate("claim").await.0, "the other ring is free");
    s.exec("COMMIT").await;
    assert_eq!(t.one::<i64>("SELECT max(generation) FROM @queue_ring_state").await, 1);
    let tasks: Vec<_> = (0..6)
        .map(|_| async {
            let t = db.session().await;
            let mut n = 0;
            for _ in 0..10 {
                n += t.rotate("claim").await.0 as i64;
                t.prune_all("claim").await;
            }
            n
        })
        .collect();
    let opened: i64 = futures_util::future::join_all(tasks).await.iter().sum();
    assert_eq!(t.one::<i64>("SELECT max(generation) FROM @claim_ring_state").await, opened + 1);
    assert_eq!(
        t.one::<i64>(
            "SELECT pg_sequence_last_value(s.oid) >> 8 FROM (SELECT 'awa.claim_ring_cursor'::regclass AS oid) s"
        )
        .await,
        opened + 1
    );
}

#[tokio::test]
async fn a_rotator_that_dies_before_its_commit_loses_nothing_and_its_slot_is_opened_next() {
    let db = Db::odd().await;
    let (s, r) = (db.session().await, db.session().await);
    let mut ids = s.enqueue("q", 2).await;
    r.exec("BEGIN").await;
    assert_eq!(r.rotate("queue").await.1, 1);
    assert_eq!(r.rotate("claim").await.1, 1);
    ids.extend(s.enqueue("q", 2).await);
    let a = s.claim("q", 3).await;
    assert_eq!(jobs(&a), ids[..3], "claimed though the opening is not committed");
    r.exec("ROLLBACK").await;
    ids.extend(s.enqueue("q", 2).await);
    s.complete(&attempts(&a)).await;
    for ring in ["queue", "claim"] {
        for slot in [0, 1] {
            assert!(!s.prune(ring, slot).await.0);
        }
        let (rotated, slot, _) = s.rotate(ring).await;
        assert!(rotated && slot == 1, "the promised slot");
    }
    assert_eq!(sorted([jobs(&a), s.drain("q").await].concat()), ids);
    s.rotate("queue").await;
    s.rotate("claim").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    assert_eq!(s.prune_all("claim").await.0, [0, 1]);
    assert_eq!(s.prune_all("queue").await.0, [0, 1]);
    assert_eq!(s.one::<i64>("SELECT sum(job_count)::bigint FROM @queue_terminal_rollup_deltas").await, 6);
}

#[tokio::test]
async fn a_promised_slot_is_opened_though_a_nearer_one_has_become_free() {
    let db = Db::new().await;
    let (s, r) = (db.session().await, db.session().await);
    s.rotate("queue").await;
    let stuck = s.enqueue("stuck", 1).await;
    while s.rotate("queue").await.1 != 0 {
        s.prune_all("queue").await;
    }
    r.exec("BEGIN").await;
    assert_eq!(r.rotate("queue").await.1, 2, "past slot 1");
    let ids = s.enqueue("q", 1).await;
    r.exec("ROLLBACK").await;
    assert_eq!(s.drain("stuck").await, stuck);
    s.exec("SELECT @advance_idle_cursors()").await;
    assert!(s.prune("queue", 1).await.0);
    assert_eq!(s.rotate("queue").await.1, 2, "where somebody has written already");
    s.rotate("queue").await;
    assert_eq!(s.drain("q").await, ids);
}

#[tokio::test]
async fn of_two_pruners_one_prunes_and_both_return() {
    let db = Db::new().await;
    let (s, t) = (db.session().await, db.session().await);
    s.exec("SELECT @enqueue('k', 'q', unique_key => '\\x01')").await;
    s.drain("q").await;
    s.rotate("queue").await;
    s.exec("SELECT @enqueue('k', 'q', unique_key => '\\x02')").await;
    s.drain("q").await;
    s.rotate("queue").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    s.exec("BEGIN").await;
    assert!(s.prune("queue", 0).await.0);
    let (pruned, reason, _) = t.prune("queue", 0).await;
    assert!(!pruned && !reason.is_empty());
    assert!(t.prune("queue", 1).await.0, "another slot is free");
    s.exec("COMMIT").await;
    assert_eq!(
        s.one::<i64>("SELECT count(held_until) FROM @job_unique_claims").await,
        2,
        "keys without a job have an end"
    );
}

#[tokio::test]
async fn thousands_of_jobs_leave_no_dead_row_while_a_writer_stays_idle_in_its_transaction() {
    let db = Db::new().await;
    let (s, stranger) = (db.session().await, db.session().await);
    s.exec("CREATE EXTENSION pgstattuple; CREATE TABLE other (x int)").await;
    finish(&s, 1).await;
    stranger.exec("BEGIN; INSERT INTO other VALUES (1)").await;
    let dead = "SELECT coalesce(string_agg(t.relname || ' ' || d.dead_tuple_count, ', '), '') FROM pg_class t,
        LATERAL pgstattuple(t.oid) AS d WHERE t.relkind = 'r' AND t.relnamespace = 'awa'::regnamespace AND d.dead_tuple_count > 0";
    let mut turns = 0;
    for n in 0..60 {
        for _ in 0..3 {
            finish(&s, 40).await;
        }
        turns += s.rotate("queue").await.0 as i32;
        s.rotate("claim").await;
        s.exec("SELECT @advance_idle_cursors()").await;
        s.prune_all("claim").await;
        s.prune_all("queue").await;
        s.exec(
            "SELECT @trim_ring_state('queue', 4, 8), @trim_ring_state('claim', 4, 8) WHERE @oldest_pin() > '5 seconds'",
        )
        .await;
        if n % 20 == 19 {
            assert_eq!(s.one::<String>(dead).await, "");
        }
    }
    assert_eq!(turns, 60);
    stranger.exec("ROLLBACK").await;
}

#[tokio::test]
async fn trimming_the_ring_state_keeps_what_is_needed() {
    let db = Db::odd().await;
    let s = db.session().await;
    s.enqueue("old", 1).await;
    let held = attempts(&s.claim("old", 1).await);
    for n in 0..80 {
        finish(&s, 1).await;
        s.rotate("queue").await;
        s.rotate("claim").await;
        s.exec("SELECT @advance_idle_cursors()").await;
        s.prune_all("queue").await;
        s.prune_all("claim").await;
        s.exec("SELECT @trim_ring_state('queue', 4, 8), @trim_ring_state('claim', 4, 8)").await;
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @ring_slots('queue') WHERE state = 'open'").await, 1, "{n}");
    }
    assert!(s.one::<i64>("SELECT count(*) FROM @queue_ring_state").await < 40);
    assert_eq!(s.complete(&held).await, []);
    s.rotate("claim").await;
    assert!(s.prune_all("claim").await.0.contains(&0));
    assert!(s.prune_all("queue").await.0.contains(&0));
}
