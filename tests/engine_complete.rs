//! Complete and close: of any racers for one attempt exactly one wins, and the losers are told so.
mod common;
use common::*;

async fn claimed(db: &Db, n: i32) -> (Session, Vec<Attempt>) {
    let s = db.session().await;
    s.enqueue("q", n).await;
    let a = attempts(&s.claim("q", n).await);
    assert_eq!(a.len(), n as usize);
    (s, a)
}

async fn completed(s: &Session) -> Vec<i64> {
    s.all("SELECT id FROM @terminal_jobs WHERE state = 'completed' ORDER BY 1").await
}

fn places(lost: &[(i32, String)]) -> Vec<i32> {
    lost.iter().map(|l| l.0).collect()
}

#[tokio::test]
async fn a_writer_that_names_its_attempt_wrongly_loses_and_everybody_else_wins() {
    let db = Db::odd().await;
    let (s, good) = claimed(&db, 8).await;
    let mut a = good.clone();
    a[0].receipt += 7 * 1024;
    a[1].lease += 1;
    a[2].job = a[3].job;
    a[4].slot = 5;
    a[5].receipt = (a[5].receipt >> 10 << 10) + 500;
    let lost = s.complete(&a).await;
    assert_eq!(places(&lost), [1, 2, 3, 5, 6]);
    for ((place, reason), part) in lost.iter().zip([
        "no such receipt",
        "stale run_lease: the attempt has 1",
        "is of job",
        "no such receipt",
        "of job none",
    ]) {
        assert!(reason.contains(part), "place {place}: {reason}");
    }
    assert_eq!(completed(&s).await, [good[3].job, good[6].job, good[7].job]);
    assert_eq!(places(&s.complete(&good).await), [4, 7, 8]);
    assert_eq!(completed(&s).await.len(), 8);
}

#[tokio::test]
async fn an_attempt_named_twice_in_one_call_wins_once() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 3).await;
    let lost = s.complete(&[a[0], a[1], a[0], a[2], a[1]]).await;
    assert_eq!(lost, [(3, "named twice in one call".to_owned()), (5, "named twice in one call".to_owned())]);
    assert_eq!(completed(&s).await.len(), 3);
    let (t, b) = claimed(&db, 2).await;
    assert_eq!(places(&t.close(&[b[0], b[0], b[1]], "failed", None, "0").await), [2]);
    assert_eq!(t.one::<i64>("SELECT count(*) FROM @done_entries").await, 2);
}

#[tokio::test]
async fn an_attempt_closed_before_loses_with_the_outcome() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 3).await;
    assert_eq!(s.complete(&a[..1]).await, []);
    assert_eq!(s.close(&a[1..2], "failed", None, "0").await, []);
    let expected = vec![(1, "already closed: completed".to_owned()), (2, "already closed: failed".to_owned())];
    assert_eq!(s.complete(&a).await, expected);
    let lost = s.close(&a, "cancelled", None, "0").await;
    assert_eq!(places(&lost), [1, 2, 3]);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs").await, 3);
}

#[tokio::test]
async fn two_sessions_completing_one_batch_the_second_waits_and_loses() {
    let db = Db::odd().await;
    let (s, a) = claimed(&db, 5).await;
    let t = db.session().await;
    s.exec("BEGIN").await;
    assert_eq!(s.complete(&a[..3]).await, []);
    let (other, all, pid) = (t.clone(), a.clone(), t.pid().await);
    let second = tokio::spawn(async move { other.complete(&all).await });
    db.until_waiting(pid).await;
    s.exec("COMMIT").await;
    assert_eq!(places(&second.await.unwrap()), [1, 2, 3]);
    assert_eq!(completed(&s).await.len(), 5);
}

#[tokio::test]
async fn a_completion_rolled_back_leaves_the_attempt_to_the_one_that_waited() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 2).await;
    let t = db.session().await;
    s.exec("BEGIN").await;
    assert_eq!(s.complete(&a).await, []);
    let (other, all, pid) = (t.clone(), a.clone(), t.pid().await);
    let second = tokio::spawn(async move { other.close(&all, "failed", None, "0").await });
    db.until_waiting(pid).await;
    s.exec("ROLLBACK").await;
    assert_eq!(second.await.unwrap(), []);
    assert_eq!(places(&s.complete(&a).await), [1, 2]);
}

#[tokio::test]
async fn completion_and_close_of_one_attempt_have_one_winner_whoever_comes_first() {
    for complete_first in [true, false] {
        for outcome in ["failed", "cancelled", "retryable", "scheduled"] {
            let db = Db::new().await;
            let (s, a) = claimed(&db, 2).await;
            let t = db.session().await;
            s.exec("BEGIN").await;
            let first = if complete_first { s.complete(&a).await } else { s.close(&a, outcome, None, "0").await };
            assert_eq!(first, []);
            let (other, all, pid) = (t.clone(), a.clone(), t.pid().await);
            let second = tokio::spawn(async move {
                if complete_first { other.close(&all, outcome, None, "0").await } else { other.complete(&all).await }
            });
            db.until_waiting(pid).await;
            s.exec("COMMIT").await;
            assert_eq!(places(&second.await.unwrap()), [1, 2], "{outcome}, completed first: {complete_first}");
            let ends: i64 =
                s.one("SELECT (SELECT count(*) FROM @terminal_jobs) + (SELECT count(*) FROM @deferred_jobs)").await;
            assert_eq!(ends, 2);
        }
    }
}

#[tokio::test]
async fn calls_that_name_the_same_batches_in_opposite_order_do_not_deadlock() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 400).await;
    let mut all = vec![];
    for _ in 0..40 {
        all.extend(attempts(&s.claim("q", 10).await));
    }
    let tasks: Vec<_> = (0..6)
        .map(|n| {
            let (db, mut a) = (&db, all.clone());
            async move {
                let t = db.session().await;
                if n % 2 == 1 {
                    a.reverse();
                }
                let lost = if n < 3 { t.complete(&a).await } else { t.close(&a, "failed", None, "0").await };
                400 - lost.len()
            }
        })
        .collect();
    assert_eq!(futures_util::future::join_all(tasks).await.iter().sum::<usize>(), 400);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs").await, 400);
}

#[tokio::test]
async fn partial_completions_in_any_order_close_exactly_what_they_name() {
    let db = Db::odd().await;
    let (s, a) = claimed(&db, 40).await;
    let ids: Vec<i64> = a.iter().map(|x| x.job).collect();
    let mut done = vec![];
    for step in [7usize, 3, 11, 1] {
        let mut part: Vec<Attempt> = a.iter().step_by(step).copied().filter(|x| !done.contains(&x.job)).collect();
        part.reverse();
        assert_eq!(s.complete(&part).await, []);
        done.extend(part.iter().map(|x| x.job));
        assert_eq!(completed(&s).await, sorted(done.clone()));
        let open: i64 = s.one("SELECT coalesce(sum(open_count), 0)::bigint FROM @open_claims(0::smallint)").await;
        assert_eq!(open as usize, 40 - done.len());
    }
    assert_eq!(completed(&s).await, ids);
    let overlap = "SELECT count(*) FROM @lease_claim_closure_batches a JOIN @lease_claim_closure_batches b
                   ON a.ctid < b.ctid AND a.receipt_ranges && b.receipt_ranges";
    assert_eq!(s.one::<i64>(overlap).await, 0);
    let counted = "SELECT bool_and(job_count = (SELECT sum(upper(r) - lower(r)) FROM unnest(receipt_ranges) AS r)) FROM @lease_claim_closure_batches";
    assert!(s.one::<bool>(counted).await);
}

#[tokio::test]
async fn ranges_are_right_whichever_plan_the_completion_gets() {
    for setting in [
        "SET enable_hashagg = off",
        "SET work_mem = '64kB'",
        "SET enable_nestloop = off",
        "SET enable_nestloop = off; SET enable_hashjoin = off",
    ] {
        let db = Db::new().await;
        let s = db.session().await;
        s.exec(setting).await;
        s.enqueue("q", 2000).await;
        let mut all = vec![];
        while all.len() < 2000 {
            all.extend(attempts(&s.claim("q", 100).await));
        }
        let shuffled: Vec<Attempt> = (0..2000).map(|n| all[n * 1123 % 2000]).collect();
        assert_eq!(s.complete(&shuffled[..900]).await, [], "{setting}");
        assert_eq!(completed(&s).await, sorted(shuffled[..900].iter().map(|a| a.job).collect()), "{setting}");
        assert_eq!(s.complete(&shuffled[900..]).await, [], "{setting}");
        assert_eq!(completed(&s).await.len(), 2000, "{setting}");
    }
}

#[tokio::test]
async fn a_batch_of_1024_completes_in_one_call_and_a_second_call_loses_all() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 1024).await;
    assert_eq!(s.complete(&a).await, []);
    assert_eq!(s.complete(&a).await.len(), 1024);
    assert_eq!(completed(&s).await.len(), 1024);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @lease_claim_closure_batches").await, 1);
}

#[tokio::test]
async fn one_call_may_name_attempts_of_several_claim_slots() {
    let db = Db::odd().await;
    let (s, mut a) = claimed(&db, 3).await;
    s.rotate("claim").await;
    s.enqueue("q", 3).await;
    let b = attempts(&s.claim("q", 3).await);
    assert_eq!((a[0].slot, b[0].slot), (0, 1));
    let wrong = Attempt { lease: 9, ..b[1] };
    let call = [b[0], a[2], wrong, a[0]];
    assert_eq!(places(&s.complete(&call).await), [3]);
    a.extend(b);
    assert_eq!(places(&s.complete(&a).await), [1, 3, 4]);
    assert_eq!(completed(&s).await.len(), 6);
}

#[tokio::test]
async fn a_completion_after_its_claim_slot_was_pruned_and_reopened_loses() {
    let db = Db::odd().await;
    let (s, a) = claimed(&db, 3).await;
    assert_eq!(s.complete(&a).await, []);
    for turn in 1..=8 {
        s.rotate("claim").await;
        if turn == 1 {
            assert_eq!(s.prune_all("claim").await.0, [0]);
        }
        s.enqueue("q", 3).await;
        s.claim("q", 3).await;
    }
    assert_eq!(s.one::<i16>("SELECT slot FROM @ring_slots('claim') WHERE state = 'open'").await, 0);
    let lost = s.complete(&a).await;
    assert_eq!(places(&lost), [1, 2, 3]);
    assert!(lost[0].1.starts_with("no such receipt"), "{lost:?}");
    assert_eq!(places(&s.close(&a, "failed", None, "0").await), [1, 2, 3]);
    assert_eq!(completed(&s).await.len(), 3);
}

#[tokio::test]
async fn a_slot_that_does_not_exist_loses_and_its_neighbours_win() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 4).await;
    let call = [a[0], Attempt { slot: 99, ..a[1] }, Attempt { slot: -1, ..a[2] }];
    let lost = s.complete(&call).await;
    assert_eq!(places(&lost), [2, 3]);
    assert!(lost.iter().all(|l| l.1.starts_with("no such receipt")), "{lost:?}");
    assert_eq!(places(&s.close(&call, "failed", None, "0").await), [1, 2, 3]);
    let unknown: Vec<Attempt> = a[1..].iter().map(|a| Attempt { slot: 99, ..*a }).collect();
    assert_eq!(places(&s.complete_runs(&[&unknown]).await), [1, 2, 3]);
    assert_eq!(s.complete(&a[1..]).await, []);
}

#[tokio::test]
async fn each_outcome_puts_the_job_where_it_belongs() {
    let db = Db::odd().await;
    let s = db.session().await;
    s.exec("SELECT @enqueue('k', 'q', max_attempts => 2) FROM generate_series(1, 5)").await;
    let a = attempts(&s.claim("q", 5).await);
    for (n, outcome) in ["failed", "cancelled", "retryable", "scheduled"].iter().enumerate() {
        assert_eq!(s.close(&a[n..=n], outcome, Some("bad \"luck\""), "1 hour").await, []);
    }
    let ends: Vec<String> = s.all("SELECT state || ' ' || attempt || ' ' || run_lease || ' ' || (errors[1] ->> 'error') || ' ' || (errors[1] ->> 'attempt')
        FROM @terminal_jobs ORDER BY id").await;
    assert_eq!(ends, ["failed 1 1 bad \"luck\" 1", "cancelled 1 1 bad \"luck\" 1"]);
    let waits: Vec<String> = s.all("SELECT state || ' ' || attempt || ' ' || run_lease || ' ' || (run_at > now() + interval '59 minutes') || ' ' || cardinality(errors)
        FROM @deferred_jobs ORDER BY job_id").await;
    assert_eq!(waits, ["retryable 1 1 true 1", "scheduled 0 1 true 1"]);
    assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 0, "nothing is due");
    assert_eq!(s.one::<i64>("SELECT sum(open_count)::bigint FROM @open_claims(0::smallint)").await, 1);
}

#[tokio::test]
async fn a_deferred_job_comes_back_with_its_history_and_the_older_lease_loses() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec("SELECT @enqueue('k', 'q', '{\"x\": 1}', 1, 3, tags => ARRAY['t'], metadata => '{\"m\": 2}')").await;
    let mut old: Vec<Attempt> = vec![];
    for (n, (outcome, attempt)) in [("retryable", 1), ("scheduled", 2), ("retryable", 2)].iter().enumerate() {
        let batches = s.claim("q", 1).await;
        assert_eq!((batches[0].leases[0], batches[0].attempts[0]), (n as i64 + 1, *attempt));
        let now = attempts(&batches);
        for stale in &old {
            assert_eq!(places(&s.complete(&[*stale]).await), [1], "an older lease");
            assert_eq!(places(&s.close(&[Attempt { lease: now[0].lease, ..*stale }], "failed", None, "0").await), [1]);
            assert_eq!(places(&s.complete(&[Attempt { lease: stale.lease, ..now[0] }]).await), [1]);
        }
        assert_eq!(s.close(&now, outcome, Some(&format!("e{n}")), "0").await, []);
        old.extend(now);
        assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1);
        s.rotate("queue").await;
        s.rotate("claim").await;
    }
    let last = attempts(&s.claim("q", 1).await);
    let extras: serde_json::Value = s
        .one(
            "SELECT jsonb_build_object('tags', tags, 'metadata', metadata, 'errors', errors)
        FROM @ready_entries ORDER BY lane_seq DESC LIMIT 1",
        )
        .await;
    assert_eq!(extras["tags"][0], "t");
    assert_eq!(extras["metadata"]["m"], 2);
    assert_eq!(
        extras["errors"].as_array().unwrap().iter().map(|e| e["error"].as_str().unwrap()).collect::<Vec<_>>(),
        ["e0", "e1", "e2"]
    );
    assert_eq!(s.close(&last, "retryable", Some("last"), "0").await, []);
    let end: String = s
        .one("SELECT state || ' ' || attempt || ' ' || run_lease || ' ' || cardinality(errors) FROM @terminal_jobs")
        .await;
    assert_eq!(end, "failed 3 4 4", "no attempt left");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 0);
}

#[tokio::test]
async fn progress_given_with_the_outcome_replaces_the_old_one() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 2).await;
    s.exec(&format!(
        "SELECT @close_attempts(ARRAY[{0}, {0}]::smallint[], ARRAY[{1}, {2}]::bigint[], ARRAY[{3}, {4}]::bigint[], '{{1,1}}', '{{failed,scheduled}}',
         '{{NULL,NULL}}', '{{NULL,NULL}}', ARRAY['{{\"p\": 1}}', '{{\"p\": 2}}']::jsonb[])",
        a[0].slot, a[0].receipt, a[1].receipt, a[0].job, a[1].job)).await;
    assert_eq!(s.one::<String>("SELECT progress ->> 'p' FROM @terminal_jobs").await, "1");
    assert_eq!(s.one::<i32>("SELECT @promote(1)").await, 1);
    let extras: serde_json::Value = s.one("SELECT extras[1] FROM @claim('q', 1)").await;
    assert_eq!(extras["progress"]["p"], 2);
}

#[tokio::test]
async fn two_promotions_at_once_move_each_job_once_and_one_rolled_back_moves_none() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 10).await;
    let t = db.session().await;
    s.close(&a, "retryable", None, "0").await;
    s.exec("BEGIN").await;
    assert_eq!(s.one::<i32>("SELECT @promote(6)").await, 6);
    assert_eq!(t.one::<i32>("SELECT @promote(100)").await, 4);
    s.exec("ROLLBACK").await;
    assert_eq!(t.claim("q", 100).await.iter().map(|b| b.jobs.len()).sum::<usize>(), 4);
    assert_eq!(t.one::<i32>("SELECT @promote(100)").await, 6);
    assert_eq!(t.drain("q").await.len(), 6);
}

#[tokio::test]
async fn finished_jobs_are_shown_once_each_also_from_batches_with_gaps() {
    let db = Db::odd().await;
    let (s, t) = (db.session().await, db.session().await);
    let mut kept = vec![];
    for n in 0..12 {
        if n % 3 == 1 {
            t.exec("BEGIN").await;
            t.enqueue("q", 1 + n % 4).await;
            t.exec("ROLLBACK").await;
        }
        kept.push(s.one::<i64>(&format!("SELECT job_id FROM @enqueue('k{n}', 'q', '{{\"n\": {n}}}')")).await);
    }
    let a = attempts(&s.claim("q", 100).await);
    assert_eq!(a.iter().map(|x| x.job).collect::<Vec<_>>(), kept);
    assert!(s.one::<bool>("SELECT (SELECT count(*) FROM unnest(lane_ranges)) > 3 FROM @lease_claim_batches").await);
    assert_eq!(s.complete(&[a[1], a[4], a[5], a[11]]).await, []);
    assert_eq!(s.close(&[a[0], a[10]], "failed", Some("e"), "0").await, []);
    assert_eq!(s.complete(&[a[2], a[3], a[6], a[7], a[8], a[9]]).await, []);
    let shown: Vec<String> = s.all("SELECT id || kind || (args ->> 'n') || state || attempt || run_lease || queue FROM @terminal_jobs ORDER BY id").await;
    let expected: Vec<String> = kept
        .iter()
        .enumerate()
        .map(|(n, id)| format!("{id}k{n}{n}{}11q", if n == 0 || n == 10 { "failed" } else { "completed" }))
        .collect();
    assert_eq!(shown, expected);
}

#[tokio::test]
async fn a_run_partly_closed_by_another_session_loses_only_that_part() {
    for closed in [0..3, 4..6, 7..10] {
        let db = Db::odd().await;
        let (s, a) = claimed(&db, 10).await;
        let t = db.session().await;
        s.exec("BEGIN").await;
        assert_eq!(s.close(&a[closed.clone()], "failed", None, "0").await, []);
        let (other, all, pid) = (t.clone(), a.clone(), t.pid().await);
        let second = tokio::spawn(async move { other.complete_runs(&[&all]).await });
        db.until_waiting(pid).await;
        s.exec("COMMIT").await;
        let expected: Vec<_> = closed.clone().map(|n| (n as i32 + 1, "already closed: failed".to_owned())).collect();
        assert_eq!(second.await.unwrap(), expected);
        assert_eq!(completed(&s).await.len(), 10 - closed.len());
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs").await, 10);
    }
}

#[tokio::test]
async fn a_close_after_a_run_loses_every_attempt_of_it() {
    let db = Db::odd().await;
    let (s, a) = claimed(&db, 10).await;
    let t = db.session().await;
    s.exec("BEGIN").await;
    assert_eq!(s.complete_runs(&[&a[2..8]]).await, []);
    let (other, all, pid) = (t.clone(), a.clone(), t.pid().await);
    let second = tokio::spawn(async move { other.close(&all, "cancelled", None, "0").await });
    db.until_waiting(pid).await;
    s.exec("COMMIT").await;
    assert_eq!(places(&second.await.unwrap()), [3, 4, 5, 6, 7, 8]);
    assert_eq!(completed(&s).await, a[2..8].iter().map(|a| a.job).collect::<Vec<_>>());
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs").await, 10);
}

#[tokio::test]
async fn a_run_across_two_closures_loses_both_and_wins_between() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 12).await;
    assert_eq!(s.complete_runs(&[&a[1..3]]).await, []);
    assert_eq!(s.close(&a[6..8], "failed", None, "0").await, []);
    let lost = s.complete_runs(&[&a]).await;
    assert_eq!(places(&lost), [2, 3, 7, 8]);
    assert_eq!((&*lost[0].1, &*lost[3].1), ("already closed: completed", "already closed: failed"));
    assert_eq!(completed(&s).await.len(), 10);
}

#[tokio::test]
async fn a_run_with_a_wrong_job_lease_or_receipt_in_it_loses_only_there() {
    let db = Db::odd().await;
    let (s, good) = claimed(&db, 8).await;
    let mut a = good.clone();
    a[3].job = a[4].job;
    let lost = s.complete_runs(&[&a[..6]]).await;
    assert_eq!(places(&lost), [4]);
    assert!(lost[0].1.contains("is of job"), "{lost:?}");
    let stale: Vec<Attempt> = good[6..].iter().map(|a| Attempt { lease: a.lease + 1, ..*a }).collect();
    let lost = s.complete_runs(&[&stale]).await;
    assert_eq!(places(&lost), [1, 2]);
    assert!(lost.iter().all(|l| l.1.starts_with("stale run_lease")), "{lost:?}");
    let beyond: Vec<Attempt> = good[6..]
        .iter()
        .cycle()
        .take(4)
        .enumerate()
        .map(|(n, a)| Attempt { receipt: good[6].receipt + n as i64, ..*a })
        .collect();
    let lost = s.complete_runs(&[&good[3..4], &beyond]).await;
    assert_eq!(places(&lost), [4, 5], "{lost:?}");
    assert_eq!(completed(&s).await.len(), 8);
}

#[tokio::test]
async fn runs_of_a_batch_with_several_leases_win_where_the_lease_is_right() {
    let db = Db::new().await;
    let (s, a) = claimed(&db, 2).await;
    assert_eq!(s.close(&a, "retryable", None, "0").await, []);
    s.one::<i32>("SELECT @promote(10)").await;
    s.enqueue("q", 2).await;
    let b = attempts(&s.claim("q", 4).await);
    assert_eq!(b.iter().map(|b| b.lease).collect::<Vec<_>>(), [2, 2, 1, 1]);
    let wrong = Attempt { lease: 1, ..b[1] };
    assert_eq!(places(&s.complete_runs(&[&b[..1], &[wrong, b[2], b[3]]]).await), [2]);
    assert_eq!(s.complete_runs(&[&b[1..2]]).await, []);
    assert_eq!(completed(&s).await.len(), 4);
}

#[tokio::test]
async fn runs_of_one_call_share_a_closure_and_those_that_overlap_win_once() {
    let db = Db::odd().await;
    let (s, a) = claimed(&db, 12).await;
    assert_eq!(s.complete_runs(&[&a[..2], &a[3..5]]).await, []);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @lease_claim_closure_batches").await, 1);
    let lost = s.complete_runs(&[&a[5..9], &a[8..12]]).await;
    assert_eq!(lost, [(5, "named twice in one call".to_owned())]);
    assert_eq!(places(&s.complete_runs(&[&a[2..3], &a[2..3], &a[..1]]).await), [2, 3]);
    assert_eq!(completed(&s).await.len(), 12);
    for broken in [
        "'{0}', '{1024}', '{1}', '{2}', '{1}'",
        "'{0}', '{2047}', '{1}', '{2}', '{1,2}'",
        "'{0}', '{1024}', '{1}', '{0}', '{}'",
    ] {
        assert!(s.try_exec(&format!("SELECT @complete_runs({broken})")).await.is_err(), "{broken}");
    }
}

#[tokio::test]
async fn a_run_releases_the_unique_keys_of_its_jobs() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec("SELECT @enqueue('k', 'q', unique_key => decode(g::text, 'escape'), unique_states => B'11100000') FROM generate_series(1, 5) AS g").await;
    let a = attempts(&s.claim("q", 5).await);
    assert_eq!(s.complete_runs(&[&a[1..4]]).await, []);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @job_unique_claims").await, 2);
}
