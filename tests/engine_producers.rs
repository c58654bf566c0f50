//! Producers that stay open, abort, or come late: nobody waits for them, and nothing of theirs is lost (I1, I6).
mod common;
use common::*;

/// n claims of one job each, of jobs enqueued for it.
async fn claims(s: &Session, n: i32) -> Vec<Attempt> {
    let mut all = vec![];
    for _ in 0..n {
        let id = s.enqueue("q", 1).await;
        let a = attempts(&s.claim("q", 10).await);
        assert_eq!(a.iter().map(|x| x.job).collect::<Vec<_>>(), id, "claimed at once");
        all.extend(a);
    }
    all
}

async fn open_holes(s: &Session) -> i64 {
    s.one(
        "SELECT count(*) FROM @ready_lane_holes h WHERE holders IS NOT NULL
           AND NOT EXISTS (SELECT FROM @ready_lane_holes o WHERE o.hole_id = h.hole_id AND o.holders IS NULL)",
    )
    .await
}

async fn spent(s: &Session) -> i64 {
    s.one("SELECT pg_sequence_last_value(spent) FROM @queue_lanes ORDER BY lane_id LIMIT 1").await
}

#[tokio::test]
async fn an_open_producer_delays_neither_producers_nor_claims_and_its_jobs_come_when_it_commits() {
    let db = Db::odd().await;
    let (s, slow) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    slow.exec("BEGIN").await;
    let late = slow.enqueue("q", 3).await;
    let done = claims(&s, 70).await;
    assert_eq!(open_holes(&s).await, 1, "set aside");
    claims(&s, 2).await;
    assert!(spent(&s).await > 60, "the cursor moved on");
    assert_eq!(open_holes(&s).await, 1, "one row a hole, not a claim");
    assert_eq!(s.complete(&done).await, []);
    assert!(s.probe("q", 10).await.is_empty());
    slow.exec("COMMIT").await;
    assert_eq!(jobs(&s.probe("q", 2).await), late[..2]);
    assert_eq!(open_holes(&s).await, 1, "one job is still in it");
    assert_eq!(jobs(&s.probe("q", 10).await), late[2..]);
    assert_eq!(open_holes(&s).await, 0);
    assert!(s.probe("q", 10).await.is_empty());
}

#[tokio::test]
async fn a_probe_rolled_back_leaves_the_late_jobs_to_the_next() {
    let db = Db::new().await;
    let (s, slow) = (db.session().await, db.session().await);
    slow.exec("BEGIN").await;
    let late = slow.enqueue("q", 3).await;
    s.exec("SELECT @create_lane('q', 2::smallint, 0::smallint)").await;
    slow.exec("COMMIT; BEGIN").await;
    assert_eq!(jobs(&s.claim("q", 9).await), late);
    let late = slow.enqueue("q", 2).await;
    claims(&s, 70).await;
    slow.exec("COMMIT").await;
    s.exec("BEGIN").await;
    assert_eq!(jobs(&s.probe("q", 9).await), late);
    assert_eq!(jobs(&s.probe("q", 9).await), [0i64; 0]);
    s.exec("ROLLBACK").await;
    assert_eq!(jobs(&s.probe("q", 9).await), late);
    assert!(s.probe("q", 9).await.is_empty());
}

#[tokio::test]
async fn an_open_producer_costs_the_ring_its_own_slots_and_not_its_turning() {
    let db = Db::new().await;
    let (s, slow) = (db.session().await, db.session().await);
    let mut all = claims(&s, 1).await;
    slow.exec("BEGIN").await;
    let late = slow.enqueue("q", 1).await;
    all.extend(claims(&s, 70).await);
    s.rotate("queue").await;
    let kept: Vec<i16> = s.all("SELECT DISTINCT ready_slot FROM @ready_lane_holes").await;
    let mut opened = vec![];
    for _ in 0..40 {
        all.extend(claims(&s, 1).await);
        s.probe("q", 1).await;
        s.complete(&all.split_off(0)).await;
        let (rotated, slot, _) = s.rotate("queue").await;
        assert!(rotated);
        opened.push(slot);
        s.rotate("claim").await;
        s.prune_all("claim").await;
        s.prune_all("queue").await;
    }
    assert!(opened.iter().filter(|x| **x == 7).count() >= 2, "the ring turned: {opened:?}");
    assert!(!opened[16..].iter().any(|x| *x == 0 || kept.contains(x)), "{opened:?}, hole in {kept:?}");
    let (pruned, reason, detail) = s.prune("queue", 0).await;
    assert!(!pruned && !reason.is_empty(), "{reason} {detail}");
    slow.exec("COMMIT").await;
    let last = s.probe("q", 10).await;
    assert_eq!(jobs(&last), late);
    s.complete(&attempts(&last)).await;
    s.drain("q").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    s.prune_all("claim").await;
    assert!(s.prune_all("queue").await.0.contains(&0));
}

#[tokio::test]
async fn an_open_producer_of_a_queue_gone_quiet_does_not_hold_the_slots_claimed_above_it() {
    let db = Db::new().await;
    let (s, slow) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    slow.exec("BEGIN").await;
    let late = slow.enqueue("q", 1).await;
    let mut above = vec![];
    for _ in 0..5 {
        s.rotate("queue").await;
        above.extend(claims(&s, 1).await);
    }
    s.complete(&above).await;
    s.rotate("queue").await;
    s.rotate("claim").await;
    db.until("SELECT max(claimed_at) < clock_timestamp() - interval '1 second' FROM @ready_claim_attempt_batches")
        .await;
    s.exec("SELECT @advance_idle_cursors()").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    s.prune_all("claim").await;
    let (done, kept) = s.prune_all("queue").await;
    assert!(done.len() >= 4, "pruned {done:?}, kept {kept:?}");
    slow.exec("COMMIT").await;
    assert_eq!(jobs(&s.probe("q", 10).await), late);
}

#[tokio::test]
async fn nothing_is_stuck_when_an_open_producer_aborts() {
    let db = Db::odd().await;
    let (s, slow) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    slow.exec("BEGIN").await;
    slow.enqueue("q", 3).await;
    claims(&s, 70).await;
    assert_eq!(open_holes(&s).await, 1);
    let pid = slow.pid().await;
    s.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    db.until_gone(pid).await;
    assert!(s.probe("q", 10).await.is_empty());
    assert_eq!(open_holes(&s).await, 0);
    claims(&s, 1).await;
    s.claim("q", 1).await;
    assert_eq!(spent(&s).await, s.one::<i64>("SELECT pg_sequence_last_value(seq) FROM @queue_lanes").await);
}

#[tokio::test]
async fn jobs_of_an_older_slot_committed_late_come_with_the_next_probe_though_another_producer_stays_open() {
    let db = Db::new().await;
    let (s, late, stays) = (db.session().await, db.session().await, db.session().await);
    claims(&s, 1).await;
    late.exec("BEGIN").await;
    let ids = late.enqueue("q", 2).await;
    s.rotate("queue").await;
    claims(&s, 1).await;
    stays.exec("BEGIN").await;
    let last = stays.enqueue("q", 1).await;
    late.exec("COMMIT").await;
    assert_eq!(jobs(&s.probe("q", 10).await), ids);
    stays.exec("COMMIT").await;
    assert_eq!(jobs(&s.claim("q", 10).await), last);
}

#[tokio::test]
async fn two_hundred_open_producers_are_all_found_when_they_end() {
    let db = Db::new().await;
    let s = db.session().await;
    claims(&s, 1).await;
    let mut open = vec![];
    for _ in 0..200 {
        let p = db.session().await;
        p.exec("BEGIN").await;
        let ids = p.enqueue("q", 2).await;
        open.push((p, ids));
        s.enqueue("q", 1).await;
    }
    let mut got = s.drain("q").await.len();
    assert_eq!(got, 200);
    claims(&s, 70).await;
    assert!(open_holes(&s).await >= 1);
    let mut expected = vec![];
    let mut late = vec![];
    for (n, (p, ids)) in open.iter().enumerate() {
        if n % 10 == 3 {
            p.exec("ROLLBACK").await;
        } else {
            p.exec("COMMIT").await;
            expected.extend(ids.clone());
        }
        if n % 7 == 0 {
            let batches = s.probe("q", 5).await;
            late.extend(jobs(&batches));
            s.complete(&attempts(&batches)).await;
        }
    }
    late.extend(s.drain("q").await);
    got = late.len();
    assert_eq!((sorted(late), got), (sorted(expected), 360));
    s.probe("q", 1).await;
    assert_eq!(open_holes(&s).await, 0);
}

#[tokio::test]
async fn a_producer_whose_snapshot_is_older_than_a_turn_of_the_ring_writes_into_the_open_slot() {
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        let db = Db::new().await;
        let (s, old) = (db.session().await, db.session().await);
        claims(&s, 1).await;
        old.exec(&format!("BEGIN ISOLATION LEVEL {level}; SELECT count(*) FROM @queue_lanes")).await;
        for _ in 0..20 {
            s.enqueue("q", 1).await;
            s.drain("q").await;
            assert!(s.rotate("queue").await.0);
            s.rotate("claim").await;
            s.prune_all("claim").await;
            s.prune_all("queue").await;
        }
        let ids = old.enqueue("q", 2).await;
        let first_use = old.enqueue("new", 2).await;
        old.exec("COMMIT").await;
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @ready_entries r JOIN @ring_slots('queue') o ON o.slot = r.ready_slot AND o.state = 'open'").await, 4);
        assert_eq!(jobs(&s.claim("q", 10).await), ids, "{level}");
        assert_eq!(jobs(&s.claim("new", 10).await), first_use, "{level}");
    }
}

#[tokio::test]
async fn jobs_of_a_savepoint_rolled_back_are_gone_and_the_others_stay() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    p.exec("BEGIN; SAVEPOINT a").await;
    p.enqueue("q", 2).await;
    p.exec("ROLLBACK TO a").await;
    let kept = p.enqueue("q", 2).await;
    p.exec("SAVEPOINT b").await;
    p.enqueue("q", 2).await;
    p.exec("ROLLBACK TO b").await;
    claims(&s, 70).await;
    claims(&s, 1).await;
    assert_eq!(open_holes(&s).await, 1);
    p.exec("COMMIT").await;
    assert_eq!(jobs(&s.probe("q", 10).await), kept);
    assert_eq!(open_holes(&s).await, 0);
}

#[tokio::test]
async fn a_producer_prepared_after_its_hole_was_set_aside_is_waited_for() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    p.exec("BEGIN").await;
    let ids = p.enqueue("q", 2).await;
    claims(&s, 70).await;
    assert_eq!(open_holes(&s).await, 1);
    p.exec("PREPARE TRANSACTION 'late'").await;
    assert!(s.probe("q", 10).await.is_empty());
    assert_eq!(open_holes(&s).await, 1, "a prepared transaction may still commit");
    s.rotate("queue").await;
    let (pruned, reason, detail) = s.prune("queue", 0).await;
    assert!(!pruned && reason == "open_holes", "{reason}: {detail}");
    assert!(detail.contains("prepared transaction 'late' (of postgres"), "{detail}");
    p.exec("COMMIT PREPARED 'late'").await;
    assert_eq!(jobs(&s.probe("q", 10).await), ids);
    assert!(s.probe("q", 10).await.is_empty());
    assert_eq!(open_holes(&s).await, 0);
}

#[tokio::test]
async fn a_transaction_can_be_prepared_although_a_worker_sleeps() {
    let db = Db::new().await;
    let (s, p, sleeper) = (db.session().await, db.session().await, db.session().await);
    sleeper.exec("SELECT pg_advisory_lock_shared('@runtime_instances'::regclass::oid::integer, hashtext('q'))").await;
    p.exec("BEGIN").await;
    p.enqueue("q", 1).await;
    let refused = p.try_exec("PREPARE TRANSACTION 'awake'").await.unwrap_err();
    assert!(format!("{refused:?}").contains("NOTIFY"), "{refused:?}");
    p.exec("BEGIN; SET LOCAL awa.wake = off").await;
    let ids = p.enqueue("q", 1).await;
    p.exec("PREPARE TRANSACTION 'asleep'").await;
    p.exec("COMMIT PREPARED 'asleep'").await;
    assert_eq!(jobs(&s.probe("q", 10).await), ids);
}

#[tokio::test]
async fn a_prepared_producer_is_no_dead_hole() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    claims(&s, 1).await;
    p.exec("BEGIN").await;
    let ids = p.enqueue("q", 2).await;
    p.exec("PREPARE TRANSACTION 'late'").await;
    claims(&s, 80).await;
    p.exec("COMMIT PREPARED 'late'").await;
    assert_eq!(jobs(&s.probe("q", 10).await), ids);
}

#[tokio::test]
async fn numbers_without_an_owner_are_stepped_over_at_once() {
    let db = Db::odd().await;
    let s = db.session().await;
    claims(&s, 1).await;
    s.exec("SELECT setval(seq, pg_sequence_last_value(seq) + 32) FROM @queue_lanes").await;
    assert!(s.claim("q", 10).await.is_empty());
    assert_eq!(spent(&s).await, 33);
    s.exec("SELECT setval(seq, pg_sequence_last_value(seq) + 32) FROM @queue_lanes").await;
    claims(&s, 1).await;
    s.claim("q", 1).await;
    assert_eq!(spent(&s).await, 66);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @ready_lane_holes").await, 0);
}

#[tokio::test]
async fn two_open_transactions_that_first_use_a_queue_do_not_wait_and_all_jobs_are_found() {
    let db = Db::new().await;
    let (s, a, b) = (db.session().await, db.session().await, db.session().await);
    a.exec("BEGIN").await;
    b.exec("BEGIN").await;
    let mut ids = a.enqueue("q", 2).await;
    ids.extend(b.enqueue("q", 2).await);
    b.exec("COMMIT").await;
    assert_eq!(jobs(&s.claim("q", 10).await), ids[2..]);
    a.exec("COMMIT").await;
    assert_eq!(jobs(&s.claim("q", 10).await), ids[..2]);
    claims(&s, 1).await;
}

#[tokio::test]
async fn holes_of_aborted_producers_do_not_pile_up_behind_producers_always_active_and_an_idle_writer() {
    let db = Db::new().await;
    let (s, stranger) = (db.session().await, db.session().await);
    s.exec("CREATE TABLE other (x int)").await;
    claims(&s, 1).await;
    stranger.exec("BEGIN; INSERT INTO other VALUES (1)").await;
    let (mut a, mut b) = (db.session().await, db.session().await);
    a.exec("BEGIN").await;
    let mut expected = a.enqueue("q", 1).await;
    let mut got = vec![];
    for n in 0..300 {
        b.exec("BEGIN").await;
        let ids = b.enqueue("q", 1).await;
        let dies = n % 10 == 5;
        a.exec("COMMIT").await;
        std::mem::swap(&mut a, &mut b);
        if dies {
            b.exec("BEGIN").await;
            expected.extend(b.enqueue("q", 1).await);
            a.exec("ROLLBACK").await;
            std::mem::swap(&mut a, &mut b);
        } else {
            expected.extend(ids);
        }
        let batches = if n % 20 == 0 { s.probe("q", 10).await } else { s.claim("q", 10).await };
        got.extend(jobs(&batches));
        s.complete(&attempts(&batches)).await;
    }
    s.probe("q", 0).await;
    assert!(open_holes(&s).await <= 1, "{} holes", open_holes(&s).await);
    assert!(s.one::<i64>("SELECT count(*) FROM @ready_lane_holes").await < 30);
    let behind: i64 =
        s.one("SELECT pg_sequence_last_value(seq) - pg_sequence_last_value(spent) FROM @queue_lanes").await;
    assert!(behind < 100, "{behind} behind");
    a.exec("COMMIT").await;
    got.extend(s.drain("q").await);
    assert_eq!(sorted(got), sorted(expected));
}

#[tokio::test]
async fn late_jobs_in_a_slot_whose_opening_never_committed_are_found() {
    let db = Db::new().await;
    let (s, slow, rotator) = (db.session().await, db.session().await, db.session().await);
    claims(&s, 1).await;
    slow.exec("BEGIN").await;
    rotator.exec("BEGIN").await;
    assert!(rotator.rotate("queue").await.0);
    let ids = slow.enqueue("q", 1).await;
    rotator.exec("ROLLBACK").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @queue_ring_state").await, 1);
    claims(&s, 70).await;
    assert_eq!(open_holes(&s).await, 1);
    slow.exec("COMMIT").await;
    assert_eq!(jobs(&s.probe("q", 10).await), ids);
    assert_eq!(s.rotate("queue").await.1, 1, "the promise is kept");
    assert!(s.probe("q", 10).await.is_empty());
}

#[tokio::test]
async fn a_claim_that_finds_nothing_does_not_read_its_lane() {
    let db = Db::new().await;
    let (s, p) = (db.session().await, db.session().await);
    // As workers have it, planned while the partitions were empty.
    s.exec("SET jit = off; SET plan_cache_mode = force_generic_plan").await;
    s.enqueue("q", 1).await;
    s.drain("q").await;
    p.exec("BEGIN").await;
    p.enqueue("q", 1).await;
    p.exec("ROLLBACK").await;
    assert!(jobs(&s.claim("q", 10).await).is_empty(), "a number that nobody has");
    p.exec("BEGIN").await;
    p.enqueue("q", 1).await;
    db.session().await.enqueue("q", 5000).await;
    s.drain("q").await;
    p.exec("ROLLBACK").await;
    let read = "SELECT sum(seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_xact_user_tables WHERE relname LIKE 'ready_entries%'";
    s.exec("BEGIN").await;
    let before: i64 = s.one(read).await;
    s.claim("q", 10).await;
    let rows = s.one::<i64>(read).await - before;
    s.exec("ROLLBACK").await;
    assert!(rows < 100, "{rows} rows");
}
