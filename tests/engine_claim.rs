//! Claim: who gets which job, whatever else happens.
mod common;
use common::*;

#[tokio::test]
async fn two_claimers_never_get_the_same_job_and_the_second_is_told_busy() {
    let db = Db::odd().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 10).await;
    a.exec("BEGIN").await;
    let first = jobs(&a.claim("q", 4).await);
    assert!(b.try_claim("q", 4, false).await.unwrap().is_none(), "busy while the first claim is open");
    a.exec("COMMIT").await;
    let second = jobs(&b.claim("q", 100).await);
    assert_eq!([first, second].concat(), ids);
    assert!(a.claim("q", 100).await.is_empty());
}

#[tokio::test]
async fn a_busy_lane_does_not_keep_a_claimer_from_the_other_priorities() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    for p in [1, 2] {
        a.exec(&format!("SELECT @enqueue('k', 'q', '{{}}', {p})")).await;
    }
    a.exec("BEGIN").await;
    assert_eq!(a.claim("q", 1).await[0].priority, 1);
    assert_eq!(b.claim("q", 10).await.iter().map(|x| x.priority).collect::<Vec<_>>(), [2]);
    a.exec("COMMIT").await;
}

#[tokio::test]
async fn claims_in_parallel_give_each_job_once() {
    let db = Db::new().await;
    let ids = db.session().await.enqueue("q", 3000).await;
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let s = db.session();
            async move {
                let s = s.await;
                let mut got = vec![];
                loop {
                    match s.try_claim("q", 7, false).await.unwrap() {
                        None => tokio::task::yield_now().await,
                        Some(batches) if batches.is_empty() => return got,
                        Some(batches) => got.extend(jobs(&batches)),
                    }
                }
            }
        })
        .collect();
    let got = futures_util::future::join_all(tasks).await.concat();
    assert_eq!(sorted(got), ids);
}

#[tokio::test]
async fn a_claim_rolled_back_loses_nothing_and_its_jobs_come_next() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 6).await;
    a.exec("BEGIN").await;
    assert_eq!(jobs(&a.claim("q", 3).await), ids[..3]);
    a.exec("ROLLBACK").await;
    assert_eq!(jobs(&b.claim("q", 3).await), ids[..3]);
    assert_eq!(jobs(&b.claim("q", 100).await), ids[3..]);
}

#[tokio::test]
async fn claiming_twice_in_one_transaction_that_rolls_back_loses_nothing() {
    let db = Db::odd().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 9).await;
    a.exec("BEGIN").await;
    assert_eq!(jobs(&a.claim("q", 3).await), ids[..3]);
    assert_eq!(jobs(&a.claim("q", 3).await), ids[3..6]);
    assert_eq!(jobs(&a.claim("q", 3).await), ids[6..]);
    assert!(a.probe("q", 3).await.is_empty());
    a.exec("ROLLBACK").await;
    assert_eq!(jobs(&b.claim("q", 100).await), ids);
}

#[tokio::test]
async fn a_claim_after_a_cursor_repair_in_one_transaction_that_rolls_back_loses_nothing() {
    let db = Db::new().await;
    let a = db.session().await;
    let ids = a.enqueue("q", 5).await;
    a.exec("BEGIN").await;
    a.claim("q", 3).await;
    a.exec("SELECT @advance_idle_cursors()").await;
    a.exec("ROLLBACK").await;
    assert_eq!(jobs(&a.claim("q", 100).await), ids);
}

#[tokio::test]
async fn a_claim_undone_by_a_savepoint_leaves_its_jobs_to_others() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 4).await;
    a.exec("BEGIN; SAVEPOINT s").await;
    a.claim("q", 2).await;
    a.exec("ROLLBACK TO s").await;
    assert_eq!(jobs(&b.claim("q", 3).await), ids[..3]);
    assert_eq!(jobs(&a.claim("q", 3).await), ids[3..]);
    a.exec("COMMIT").await;
}

#[tokio::test]
async fn a_claimer_killed_after_its_commit_leaves_its_jobs_claimed_and_nothing_else() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 5).await;
    let held = a.claim("q", 2).await;
    let pid = a.pid().await;
    b.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    db.until_gone(pid).await;
    assert_eq!(b.one::<i64>("SELECT open_count FROM @open_claims(0::smallint)").await, 2);
    assert_eq!(jobs(&b.claim("q", 100).await), ids[2..]);
    assert_eq!(b.complete(&attempts(&held)).await, [], "the attempts are still good");
    assert_eq!(
        b.one::<i64>(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        .await,
        0
    );
}

#[tokio::test]
async fn a_claimer_killed_before_its_commit_leaves_its_jobs_ready() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    let ids = a.enqueue("q", 5).await;
    a.exec("BEGIN").await;
    a.claim("q", 5).await;
    let pid = a.pid().await;
    b.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    db.until_gone(pid).await;
    assert_eq!(jobs(&b.claim("q", 100).await), ids);
}

#[tokio::test]
async fn whatever_reads_or_moves_cursors_refuses_old_snapshots() {
    let db = Db::odd().await;
    let s = db.session().await;
    s.enqueue("q", 1).await;
    for level in ["REPEATABLE READ", "SERIALIZABLE"] {
        for call in [
            "@claim('q', 1)",
            "@prune('queue', 0::smallint)",
            "@advance_idle_cursors()",
            "@complete('{}', '{}', '{}', '{}')",
            "@close_attempts('{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')",
        ] {
            s.exec(&format!("BEGIN ISOLATION LEVEL {level}")).await;
            let error = s.try_exec(&format!("SELECT {call}")).await.expect_err(&format!("{call} at {level}"));
            let error = error.as_db_error().unwrap();
            assert_eq!(error.code().code(), "0A000", "{call}: {error}");
            assert!(error.message().contains("READ COMMITTED"), "{error}");
            s.exec("ROLLBACK").await;
        }
    }
}

#[tokio::test]
async fn jobs_come_by_priority_then_first_in_first_out_and_never_more_than_asked() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mut by_priority: [Vec<i64>; 4] = Default::default();
    for n in 0..20 {
        let p = [3, 1, 4, 2][n % 4];
        let id = s.one(&format!("SELECT job_id FROM @enqueue('k', 'it''s \"q\"', '{{}}', {p})")).await;
        by_priority[p - 1].push(id);
    }
    let expected = by_priority.concat();
    let mut got = vec![];
    for limit in [1, 3, 6, 0, 10, 5] {
        let batches = s.claim("it's \"q\"", limit).await;
        let taken = jobs(&batches);
        assert_eq!(taken.len(), (limit as usize).min(20 - got.len()));
        assert!(batches.is_sorted_by_key(|b| b.priority));
        got.extend(taken);
    }
    assert_eq!(got, expected);
}

#[tokio::test]
async fn one_claim_is_capped_at_1024_jobs() {
    let db = Db::new().await;
    let s = db.session().await;
    let ids = s.enqueue("q", 1500).await;
    assert_eq!(jobs(&s.claim("q", 5000).await), ids[..1024]);
    assert_eq!(jobs(&s.claim("q", 5000).await), ids[1024..]);
}

#[tokio::test]
async fn one_claim_spans_ready_slots_in_order() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mut ids = s.enqueue("q", 3).await;
    for _ in 0..3 {
        assert!(s.rotate("queue").await.0);
        ids.extend(s.enqueue("q", 3).await);
    }
    let batches = s.claim("q", 10).await;
    assert_eq!(batches.len(), 4);
    assert_eq!(jobs(&batches), ids[..10]);
    assert_eq!(s.complete(&attempts(&batches)).await, []);
    let rest = s.claim("q", 10).await;
    assert_eq!(jobs(&rest), ids[10..]);
    assert_eq!(s.complete(&attempts(&rest)).await, []);
    assert_eq!(s.all::<i64>("SELECT id FROM @terminal_jobs ORDER BY 1").await, ids);
}

#[tokio::test]
async fn a_lost_cursor_advance_emits_nothing_twice() {
    let db = Db::odd().await;
    let s = db.session().await;
    s.enqueue("q", 3).await;
    let mut claimed = jobs(&s.claim("q", 3).await);
    for n in 0..6 {
        s.rotate("queue").await;
        s.enqueue("q", 5 + n).await;
        claimed.extend(jobs(&s.claim("q", 4).await));
    }
    let last: i64 = s.one("SELECT last_value FROM @lane_1_spent").await;
    assert!(last > 10);
    for back in 0..=last {
        s.exec(&format!("SELECT setval((SELECT spent FROM @queue_lanes), {back})")).await;
        claimed.extend(jobs(&s.claim("q", 1).await));
        assert_eq!(sorted(claimed.clone()).windows(2).find(|w| w[0] == w[1]), None, "cursor set back to {back}");
        s.exec(&format!("SELECT setval((SELECT spent FROM @queue_lanes), {back})")).await;
        s.exec("SELECT @advance_idle_cursors()").await;
        claimed.extend(jobs(&s.claim("q", 0).await));
    }
    claimed.extend(jobs(&s.claim("q", 1000).await));
    assert_eq!(sorted(claimed).len() as i64, s.one::<i64>("SELECT last_value FROM @jobs_id_seq").await);
}

#[tokio::test]
async fn a_cursor_set_back_over_pruned_slots_finds_its_way_forward() {
    let db = Db::new().await;
    let s = db.session().await;
    for _ in 0..4 {
        s.enqueue("q", 3).await;
        s.drain("q").await;
        s.rotate("queue").await;
        s.rotate("claim").await;
    }
    s.prune_all("claim").await;
    assert!(!s.prune_all("queue").await.0.is_empty());
    s.exec("SELECT setval((SELECT spent FROM @queue_lanes), 0)").await;
    let ids = s.enqueue("q", 2).await;
    assert_eq!(jobs(&s.claim("q", 100).await), ids);
    assert!(s.claim("q", 100).await.is_empty());
}

#[tokio::test]
async fn a_lane_hint_set_too_high_still_finds_everything() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mut ids = s.enqueue("q", 3).await;
    s.rotate("queue").await;
    ids.extend(s.enqueue("q", 3).await);
    s.rotate("queue").await;
    ids.extend(s.enqueue("q", 3).await);
    let mut got = vec![];
    for _ in 0..12 {
        s.exec("SELECT setval((SELECT generation FROM @queue_lanes), 1000)").await;
        got.extend(jobs(&s.claim("q", 1).await));
    }
    for _ in 0..12 {
        got.extend(jobs(&s.claim("q", 1).await));
    }
    assert_eq!(sorted(got), ids, "each once, though not in order");
}

#[tokio::test]
async fn deadline_and_claimer_are_kept_with_the_claim() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 2).await;
    s.exec("SELECT @claim('q', 2, '1 hour', 'me')").await;
    assert!(
        s.one::<bool>(
            "SELECT deadline_at = claimed_at + interval '1 hour' AND claimed_by = 'me' FROM @lease_claim_batches"
        )
        .await
    );
    assert_eq!(
        s.one::<i64>("SELECT count(*) FROM @open_claims(0::smallint) WHERE open_count = 2 AND claimed_by = 'me'").await,
        1
    );
}
