//! Heartbeats: only open attempts are kept alive, and a worker is told of those that are over.

mod common;

use common::{Attempt, Db, Session, attempts};

/// The losers: (place, reason). One progress for all.
async fn beat(s: &Session, a: &[Attempt], progress: Option<&str>) -> Vec<(i32, String)> {
    let (slots, receipts) =
        (a.iter().map(|a| a.slot).collect::<Vec<_>>(), a.iter().map(|a| a.receipt).collect::<Vec<_>>());
    let (jobs, leases) = (a.iter().map(|a| a.job).collect::<Vec<_>>(), a.iter().map(|a| a.lease).collect::<Vec<_>>());
    let progress = progress.map_or("NULL".to_owned(), |p| format!("'{p}'"));
    let sql = format!(
        "SELECT place, reason FROM @heartbeat($1, $2, $3, $4, array_fill({progress}::jsonb, ARRAY[{}]))",
        a.len()
    );
    let rows = s.rows(&sql, &[&slots, &receipts, &jobs, &leases]).await.unwrap();
    rows.iter().map(|r| (r.get(0), r.get(1))).collect()
}

async fn claimed(s: &Session, n: i32) -> Vec<Attempt> {
    s.enqueue("q", n).await;
    attempts(&s.claim("q", n).await)
}

/// The attempt again, after its job was retried.
async fn again(s: &Session, a: &Attempt) -> Attempt {
    assert_eq!(s.close(&[*a], "retryable", Some("no"), "0").await, []);
    s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(10)").await;
    attempts(&s.claim("q", 1).await)[0]
}

async fn states(s: &Session) -> Vec<String> {
    s.all("SELECT format('%s/%s %s', job_id, run_lease, progress) FROM @attempt_state ORDER BY job_id").await
}

#[tokio::test]
async fn a_stale_lease_is_refused_told_and_leaves_nothing_behind() {
    let db = Db::new().await;
    let s = db.session().await;
    let first = claimed(&s, 1).await[0];
    let second = again(&s, &first).await;
    let forged = Attempt { lease: first.lease, ..second };
    let told = beat(&s, &[first, forged, Attempt { job: second.job + 1, ..second }], Some("1")).await;
    assert_eq!(told.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 3], "{told:?}");
    assert!(told[1].1.contains("stale run_lease"), "{told:?}");
    assert_eq!(states(&s).await, [] as [String; 0]);
    assert_eq!(beat(&s, &[second], Some("2")).await, []);
    assert_eq!(states(&s).await, [format!("{}/2 2", second.job)]);
}

#[tokio::test]
async fn an_attempt_that_is_over_is_told_so_and_its_neighbours_are_kept_alive() {
    let db = Db::new().await;
    let s = db.session().await;
    let all = claimed(&s, 5).await;
    assert_eq!(s.complete(&all[..1]).await, []);
    assert_eq!(s.close(&all[1..2], "failed", Some("no"), "0").await, []);
    s.exec(&format!("SELECT @operate({}, 'cancel')", all[2].job)).await;
    let told = beat(&s, &all, None).await;
    let reasons: Vec<_> = told.iter().map(|(place, why)| format!("{place} {why}")).collect();
    assert_eq!(reasons, ["1 already closed: completed", "2 already closed: failed", "3 already closed: cancelled"]);
    assert_eq!(states(&s).await, [format!("{}/1 ", all[3].job), format!("{}/1 ", all[4].job)]);
}

#[tokio::test]
async fn progress_stays_until_there_is_more_and_belongs_to_one_attempt() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s, 1).await[0];
    for (progress, stored) in [(Some("1"), "1"), (None, "1"), (Some("2"), "2"), (None, "2")] {
        assert_eq!(beat(&s, &[a], progress).await, []);
        assert_eq!(states(&s).await, [format!("{}/1 {stored}", a.job)]);
    }
    // A state that the first attempt left is not the second's.
    let b = again(&s, &a).await;
    s.exec(&format!("INSERT INTO @attempt_state VALUES ({}, 1, clock_timestamp(), '9')", a.job)).await;
    assert_eq!(beat(&s, &[b], None).await, []);
    assert_eq!(states(&s).await, [format!("{}/2 ", b.job)]);
    // Twice in one call: the last word counts.
    let (slot, receipt, job, lease) = (b.slot, b.receipt, b.job, b.lease);
    let sql = format!(
        "SELECT count(*) FROM @heartbeat('{{{slot},{slot}}}', '{{{receipt},{receipt}}}', '{{{job},{job}}}', '{{{lease},{lease}}}',
         ARRAY['3', '4']::jsonb[])"
    );
    assert_eq!(s.one::<i64>(&sql).await, 0);
    assert_eq!(states(&s).await, [format!("{}/2 4", b.job)]);
}

#[tokio::test]
async fn a_heartbeat_that_waited_for_the_end_of_its_attempt_is_told_of_it() {
    let db = Db::new().await;
    let (ends, beats) = (db.session().await, db.session().await);
    let a = claimed(&ends, 1).await;
    ends.exec("BEGIN").await;
    assert_eq!(ends.complete(&a).await, []);
    let (pid, waiting) = (beats.pid().await, {
        let (beats, a) = (beats.clone(), a.clone());
        tokio::spawn(async move { beat(&beats, &a, Some("1")).await })
    });
    db.until_waiting(pid).await;
    ends.exec("COMMIT").await;
    assert_eq!(waiting.await.unwrap(), [(1, "already closed: completed".to_owned())]);
    assert_eq!(states(&ends).await, [] as [String; 0]);
}

#[tokio::test]
async fn an_attempt_with_a_lease_beats_like_any_other_and_is_fenced_like_any_other() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s, 2).await;
    for Attempt { slot, receipt, job, lease } in &a {
        assert!(s.one::<bool>(&format!("SELECT @materialise({slot}::smallint, {receipt}, {job}, {lease})")).await);
    }
    assert_eq!(beat(&s, &a, Some("1")).await, []);
    assert_eq!(states(&s).await.len(), 2);
    assert_eq!(s.complete(&a[..1]).await, []);
    let stale = Attempt { lease: a[1].lease + 1, ..a[1] };
    assert_eq!(beat(&s, &[a[0], stale], Some("2")).await.len(), 2);
    assert_eq!(states(&s).await, [format!("{}/1 1", a[1].job)], "the state of the completed one went with it");
}

#[tokio::test]
async fn heartbeats_that_name_the_same_batches_in_any_order_do_not_deadlock() {
    let db = Db::new().await;
    let s = db.session().await;
    let mut all = vec![];
    for _ in 0..6 {
        all.extend(claimed(&s, 1).await);
    }
    let mut tasks = vec![];
    for n in 0..4 {
        let (s, mut mine) = (db.session().await, all.clone());
        tasks.push(tokio::spawn(async move {
            for round in 0..20 {
                mine.rotate_left((n + round) % 6);
                if n % 2 == 0 {
                    mine.reverse();
                }
                assert_eq!(beat(&s, &mine, Some("1")).await, []);
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(states(&s).await.len(), 6);
}

#[tokio::test]
async fn what_attempts_leave_behind_is_swept_and_what_is_alive_stays() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s, 3).await;
    assert_eq!(beat(&s, &a, Some("1")).await, []);
    // Completed by receipt: its worker forgets the state, with a fence of its own.
    assert_eq!(s.complete(&a[..1]).await, []);
    s.exec(&format!("SELECT @drop_attempt_state('{{{}}}', '{{0}}')", a[0].job)).await;
    assert_eq!(states(&s).await.len(), 3, "an older lease drops nothing");
    s.exec(&format!("SELECT @drop_attempt_state('{{{}}}', '{{1}}')", a[0].job)).await;
    assert_eq!(states(&s).await.len(), 2);
    // Completed without that.
    assert_eq!(s.complete(&a[1..2]).await, []);
    s.exec(&format!(
        "UPDATE @attempt_state SET heartbeat_at = heartbeat_at - interval '2 days' WHERE job_id = {}",
        a[1].job
    ))
    .await;
    assert_eq!(s.one::<i64>("SELECT @trim_attempt_state()").await, 1);
    assert_eq!(states(&s).await, [format!("{}/1 1", a[2].job)]);
    // Failed: the state goes with the attempt.
    assert_eq!(s.close(&a[2..], "failed", Some("no"), "0").await, []);
    assert_eq!(states(&s).await, [] as [String; 0]);
}

#[tokio::test]
async fn an_attempt_that_waits_for_days_keeps_its_progress() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s, 1).await;
    assert_eq!(beat(&s, &a, Some("5")).await, []);
    let Attempt { slot, receipt, job, lease } = a[0];
    s.exec(&format!(
        "SELECT @wait_for_callback({receipt}, {job}, {lease},
             @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '30 days'));
         UPDATE @attempt_state SET heartbeat_at = heartbeat_at - interval '20 days'"
    ))
    .await;
    assert_eq!(s.one::<i64>("SELECT @trim_attempt_state()").await, 0);
    s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'; SELECT @rescue()").await;
    assert_eq!(s.one::<String>("SELECT state || ' ' || progress FROM @deferred_jobs").await, "retryable 5");
}

#[tokio::test]
async fn a_lease_that_gives_a_sign_of_life_between_the_look_and_the_lock_is_not_rescued() {
    let db = Db::new().await;
    let (s, worker, gate) = (db.session().await, db.session().await, db.session().await);
    let a = claimed(&s, 1).await[0];
    let Attempt { slot, receipt, job, lease } = a;
    s.exec(&format!("SELECT @materialise({slot}::smallint, {receipt}, {job}, {lease})")).await;
    assert_eq!(beat(&worker, &[a], None).await, []);
    s.exec("UPDATE @leases SET alive_at = '2020-01-01'; UPDATE @attempt_state SET heartbeat_at = '2020-01-01'").await;
    // A gate in the look at the heartbeats.
    s.exec(
        "ALTER TABLE @attempt_state RENAME TO ungated;
         CREATE FUNCTION @gate() RETURNS boolean LANGUAGE plpgsql AS
             'BEGIN PERFORM pg_advisory_xact_lock(42); RETURN true; END';
         CREATE VIEW @attempt_state AS SELECT * FROM @ungated WHERE @gate() OFFSET 0",
    )
    .await;
    gate.exec("SELECT pg_advisory_lock(42)").await;
    let pid = s.pid().await;
    let rescue = s.spawn("SELECT stale FROM @rescue()");
    db.until_waiting(pid).await;
    worker.exec("UPDATE @ungated SET heartbeat_at = clock_timestamp()").await;
    gate.exec("SELECT pg_advisory_unlock(42)").await;
    assert_eq!(rescue.await.unwrap().unwrap()[0].get::<_, i32>(0), 0);
    s.exec("DROP VIEW @attempt_state; ALTER TABLE @ungated RENAME TO attempt_state").await;
    assert_eq!(s.complete(&[a]).await, []);
}
