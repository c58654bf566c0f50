//! Against whoever is at the same attempts or partitions: another rescue, a completion, a heartbeat, a prune.

use super::*;

#[tokio::test]
async fn of_two_rescues_at_once_one_ends_an_attempt_and_the_other_waits_for_nobody() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    b.exec("SET lock_timeout = '10s'").await;
    let batches = claims_due(&a, &["2020-01-01", "2020-01-01"]).await;
    a.exec("BEGIN").await;
    assert_eq!(sweep(&a, "deadline", 500).await, 4);
    assert_eq!(sweep(&b, "deadline", 500).await, 0);
    a.exec("ROLLBACK").await;
    assert_eq!(sweep(&b, "deadline", 500).await, 4, "the rollback of one costs the other nothing");
    assert_eq!(sweep(&a, "deadline", 500).await, 0);
    assert_eq!(retried_once(&a).await, 4);
    assert_eq!(a.complete(&attempts(&batches)).await.len(), 4, "their workers are told");
}

#[tokio::test]
async fn an_attempt_that_completes_while_a_rescue_looks_at_it_is_not_retried() {
    let db = Db::new().await;
    let (worker, s) = (db.session().await, db.session().await);
    s.exec("SET lock_timeout = '10s'").await;
    let batches = claims_due(&s, &["2020-01-01"]).await;
    worker.exec("BEGIN").await;
    assert_eq!(worker.complete(&batches[0].attempts()).await, []);
    assert_eq!(sweep(&s, "deadline", 500).await, 0, "it is late and not lost");
    worker.exec("COMMIT").await;
    assert_eq!(sweep(&s, "deadline", 500).await, 0);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 0);
}

#[tokio::test]
async fn a_sign_of_life_between_the_look_and_the_lock_is_heeded() {
    let db = Db::new().await;
    let (s, worker, gate) = (db.session().await, db.session().await, db.session().await);
    let batches = claims(&s, 1, 2).await;
    age(&s, &[&batches[0]]).await;
    // A gate behind the look.
    let look = format!("stale_scan_in_{}", batches[0].claim_slot);
    s.exec(&format!(
        "ALTER FUNCTION @{look} RENAME TO ungated_look;
         CREATE FUNCTION @{look}(bigint, timestamptz, integer) RETURNS @rescue_scan LANGUAGE plpgsql AS $$
         DECLARE v @rescue_scan := @ungated_look($1, $2, $3);
         BEGIN PERFORM pg_advisory_xact_lock(42); RETURN v; END $$"
    ))
    .await;
    gate.exec("SELECT pg_advisory_lock(42)").await;
    let pid = s.pid().await;
    let rescue = s.spawn("SELECT stale FROM @rescue()");
    db.until_waiting(pid).await;
    assert_eq!(heartbeat(&worker, &batches[0].attempts()[..1], None).await, [] as [String; 0]);
    gate.exec("SELECT pg_advisory_unlock(42)").await;
    assert_eq!(rescue.await.unwrap().unwrap()[0].get::<_, i32>(0), 1);
    assert_eq!(state(&s, batches[0].jobs[0]).await, "running");
    assert_eq!(state(&s, batches[0].jobs[1]).await, "retryable");
}

#[tokio::test]
async fn a_claim_slot_is_pruned_only_after_its_last_attempt_was_rescued() {
    let db = Db::new().await;
    let (s, rescuer) = (db.session().await, db.session().await);
    let batches = claims_due(&s, &["2020-01-01"]).await;
    let slot = i32::from(batches[0].claim_slot);
    s.rotate("claim").await;
    assert_eq!(s.prune("claim", slot).await.1, "open_claims");
    rescuer.exec("BEGIN").await;
    assert_eq!(sweep(&rescuer, "deadline", 500).await, 2);
    assert_eq!(s.prune("claim", slot).await.1, "open_claims", "not yet committed");
    rescuer.exec("ROLLBACK").await;
    assert_eq!(s.prune("claim", slot).await.1, "open_claims");
    assert_eq!(sweep(&rescuer, "deadline", 500).await, 2);
    assert!(s.prune("claim", slot).await.0);
    assert_eq!(retried_once(&s).await, 2);
}

#[tokio::test]
async fn a_rescue_that_waited_for_a_prune_finds_nothing_and_says_so() {
    let db = Db::new().await;
    let (pruner, rescuer) = (db.session().await, db.session().await);
    let batches = claims_due(&pruner, &["2020-01-01"]).await;
    assert_eq!(sweep(&rescuer, "deadline", 500).await, 2);
    pruner.rotate("claim").await;
    pruner.exec("BEGIN").await;
    assert!(pruner.prune("claim", batches[0].claim_slot.into()).await.0);
    let waiting = rescuer.spawn("SELECT stale + deadline FROM @rescue('0 seconds')");
    db.until_waiting(rescuer_pid(&db, &waiting).await).await;
    pruner.exec("COMMIT").await;
    assert_eq!(waiting.await.unwrap().unwrap()[0].get::<_, i32>(0), 0);
}

/// The backend that waits; there is only one.
async fn rescuer_pid<T>(db: &Db, _: &T) -> i32 {
    db.until("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))")
        .await;
    db.one("SELECT pid FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) LIMIT 1").await
}

#[tokio::test]
async fn what_is_rescued_while_a_prune_waits_for_the_partition_is_neither_lost_nor_doubled() {
    let db = Db::new().await;
    let (s, reader, pruner) = (db.session().await, db.session().await, db.session().await);
    let batches = claims_due(&s, &["2020-01-01"]).await;
    let slot = batches[0].claim_slot;
    s.rotate("claim").await;
    assert_eq!(sweep(&s, "deadline", 500).await, 2);
    // Between its proofs the pruner waits for a reader, and a rescue waits behind the pruner.
    reader.exec(&format!("BEGIN; SELECT count(*) FROM @lease_claim_batches_{slot}")).await;
    let prune = pruner.spawn(&format!("SELECT pruned FROM @prune('claim', {slot}::smallint, '1 minute')"));
    rescuer_pid(&db, &()).await;
    let rescue = s.spawn("SELECT stale + deadline FROM @rescue('0 seconds')");
    db.until(
        "SELECT count(*) = 2 FROM pg_locks WHERE NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
    )
    .await;
    reader.exec("COMMIT").await;
    assert!(prune.await.unwrap().unwrap()[0].get::<_, bool>(0));
    assert_eq!(rescue.await.unwrap().unwrap()[0].get::<_, i32>(0), 0);
    assert_eq!(retried_once(&s).await, 2);
}

#[tokio::test]
async fn rescue_and_prune_at_the_same_partitions_lose_no_job() {
    rescue_against_prune(60, 100).await;
}

#[tokio::test]
#[ignore = "minutes; the long twin of the test before"]
async fn rescue_and_prune_at_the_same_partitions_lose_no_job_for_long() {
    rescue_against_prune(4000, 6000).await;
}

/// Workers that abandon or complete what they claim, rescuers that take it from them at once, rotators and pruners, all as
/// fast as they can. A partition truncated with an open claim in it would lose that job, and the sum at the end with it.
async fn rescue_against_prune(rounds: usize, jobs_in_all: i32) {
    let db = Db::new().await;
    let s = db.session().await;
    let all = s.enqueue("q", jobs_in_all).await;
    // Never out of attempts.
    s.exec("UPDATE @ready_entries SET max_attempts = 1000").await;
    let mut tasks = vec![];
    for n in 0..2usize {
        let w = db.session().await;
        tasks.push(tokio::spawn(async move {
            let mut won = vec![];
            for round in 0..rounds {
                let Some(batches) = w.try_claim("q", 3, false).await.unwrap() else { continue };
                if (round + n) % 3 != 0 {
                    let mine = attempts(&batches);
                    let lost: Vec<i32> = w.complete(&mine).await.iter().map(|l| l.0).collect();
                    won.extend((1..).zip(&mine).filter(|(place, _)| !lost.contains(place)).map(|(_, a)| a.job));
                }
            }
            won
        }));
    }
    for _ in 0..2 {
        let r = db.session().await;
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds {
                r.exec("SELECT @rescue('0 seconds', 2)").await;
                r.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(100)").await;
            }
            vec![]
        }));
        let p = db.session().await;
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds {
                for ring in ["claim", "queue"] {
                    p.rotate(ring).await;
                    p.prune_all(ring).await;
                }
            }
            vec![]
        }));
    }
    let mut won = vec![];
    for task in tasks {
        won.extend(task.await.unwrap());
    }
    // Now without any hurry.
    for _ in 0..200 {
        s.exec("SELECT @rescue('0 seconds')").await;
        s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(10000)").await;
        won.extend(s.drain("q").await);
        if won.len() >= all.len() {
            break;
        }
    }
    assert_eq!(common::sorted(won), all, "every job completes exactly once");
    let left: i64 =
        s.one("SELECT coalesce(sum(job_count), 0)::bigint FROM @queue_counts() WHERE state <> 'completed'").await;
    assert_eq!(left, 0);
}
