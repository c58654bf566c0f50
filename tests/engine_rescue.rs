//! Rescue: attempts of lost workers and past deadlines are ended, in bounded passes that forget nobody.

mod common;
#[path = "engine_rescue/races.rs"]
mod races;

use common::{Attempt, Batch, Db, Session, attempts, jobs};

/// One pass of one sweep: how many attempts it ended.
async fn sweep(s: &Session, sweep: &str, limit: i32) -> i32 {
    s.one(&format!("SELECT {sweep} FROM @rescue('90 seconds', {limit})")).await
}

/// Makes claims an hour older than they are, and their slot with them.
async fn age(s: &Session, batches: &[&Batch]) {
    s.exec("UPDATE @claim_ring_state SET opened_at = clock_timestamp() - interval '1 day'").await;
    for b in batches {
        s.exec(&format!(
            "UPDATE @lease_claim_batches SET claimed_at = claimed_at - interval '1 hour' WHERE batch_id = {}",
            b.id
        ))
        .await;
    }
}

/// n batches of `width` jobs.
async fn claims(s: &Session, n: usize, width: i32) -> Vec<Batch> {
    let mut batches = vec![];
    for _ in 0..n {
        s.enqueue("q", width).await;
        batches.extend(s.claim("q", width).await);
    }
    assert_eq!(batches.len(), n);
    batches
}

async fn claims_due(s: &Session, deadlines: &[&str]) -> Vec<Batch> {
    let batches = claims(s, deadlines.len(), 2).await;
    for (b, at) in batches.iter().zip(deadlines) {
        s.exec(&format!("UPDATE @lease_claim_batches SET deadline_at = '{at}' WHERE batch_id = {}", b.id)).await;
    }
    batches
}

async fn state(s: &Session, job: i64) -> String {
    s.one(&format!("SELECT coalesce((SELECT state::text FROM @find_job({job})), 'none')")).await
}

async fn retried_once(s: &Session) -> i64 {
    s.one("SELECT count(*) FROM @deferred_jobs WHERE attempt = 1").await
}

async fn running(s: &Session, b: &Batch) -> bool {
    state(s, b.jobs[0]).await == "running"
}

async fn hold(s: &Session, b: &Batch) {
    s.exec(&format!("BEGIN; SELECT @lock_claim_batches(ARRAY[{}])", b.id * 1024)).await;
}

async fn heartbeat(s: &Session, a: &[Attempt], progress: Option<&str>) -> Vec<String> {
    let mut told = vec![];
    for Attempt { slot, receipt, job, lease } in a {
        let progress = progress.map_or("NULL::jsonb".to_owned(), |p| format!("'{p}'::jsonb"));
        told.extend(
            s.all::<String>(&format!(
                "SELECT reason FROM @heartbeat('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}', ARRAY[{progress}])"
            ))
            .await,
        );
    }
    told
}

#[tokio::test]
async fn a_pass_looks_at_no_more_batches_than_its_limit_and_the_next_goes_on_there() {
    let db = Db::new().await;
    let s = db.session().await;
    let batches = claims(&s, 10, 2).await;
    age(&s, &batches.iter().collect::<Vec<_>>()).await;
    let mut ended = vec![];
    for _ in 0..12 {
        ended.push(sweep(&s, "stale", 3).await);
    }
    assert!(ended.iter().all(|n| *n <= 6), "{ended:?}");
    assert_eq!(ended.iter().sum::<i32>(), 20, "{ended:?}");
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs WHERE state = 'retryable' AND attempt = 1").await, 20);
}

#[tokio::test]
async fn a_pass_over_many_slots_locks_no_more_than_twice_its_limit_and_forgets_no_slot() {
    let db = Db::new().await;
    let s = db.session().await;
    for _ in 0..6 {
        let batches = claims(&s, 5, 1).await;
        age(&s, &batches.iter().collect::<Vec<_>>()).await;
        s.rotate("claim").await;
    }
    s.exec("UPDATE @claim_ring_state SET opened_at = '2020-01-01'").await;
    let (mut ended, mut locked) = (vec![], vec![]);
    // At worst one slot after the other takes a pass to end, and one to see that.
    for _ in 0..200 {
        s.exec("BEGIN").await;
        ended.push(sweep(&s, "stale", 3).await);
        locked.push(
            s.one::<i64>(
                "SELECT count(*) FROM pg_locks
                 WHERE locktype = 'advisory' AND pid = pg_backend_pid() AND classid = '@lease_claim_batches'::regclass",
            )
            .await,
        );
        s.exec("COMMIT").await;
        if ended.iter().sum::<i32>() == 30 {
            break;
        }
    }
    assert_eq!(ended.iter().sum::<i32>(), 30, "{ended:?}");
    assert!(locked.iter().all(|n| *n < 6), "{locked:?}");
}

#[tokio::test]
async fn claims_that_are_too_young_are_neither_ended_nor_in_the_way() {
    let db = Db::new().await;
    let s = db.session().await;
    let batches = claims(&s, 6, 1).await;
    age(&s, &[&batches[1], &batches[5]]).await;
    // A limit of one: what is too young does not count against it.
    let mut ended = 0;
    for _ in 0..4 {
        ended += sweep(&s, "stale", 1).await;
    }
    assert_eq!(ended, 2);
    for n in [0, 2, 3, 4] {
        assert_eq!(s.complete(&batches[n].attempts()).await, [], "batch {n}");
    }
}

#[tokio::test]
async fn whoever_gives_signs_of_life_is_passed_over_and_met_again_after_the_wrap() {
    let db = Db::new().await;
    let s = db.session().await;
    let batches = claims(&s, 3, 1).await;
    age(&s, &batches.iter().collect::<Vec<_>>()).await;
    assert_eq!(heartbeat(&s, &batches[0].attempts(), None).await, [] as [String; 0]);
    let mut ended = vec![];
    for _ in 0..8 {
        ended.push(sweep(&s, "stale", 1).await);
    }
    assert_eq!(ended.iter().sum::<i32>(), 2, "{ended:?}");
    assert!(running(&s, &batches[0]).await);
    s.exec("UPDATE @attempt_state SET heartbeat_at = heartbeat_at - interval '1 hour'").await;
    let mut again = 0;
    for _ in 0..5 {
        again += sweep(&s, "stale", 1).await;
    }
    assert_eq!(again, 1);
    assert!(!running(&s, &batches[0]).await);
}

#[tokio::test]
async fn a_batch_that_another_session_holds_stops_the_cursor_and_is_ended_later() {
    let db = Db::new().await;
    let (s, holder) = (db.session().await, db.session().await);
    s.exec("SET lock_timeout = '10s'").await;
    let batches = claims(&s, 4, 1).await;
    age(&s, &batches.iter().collect::<Vec<_>>()).await;
    hold(&holder, &batches[1]).await;
    for _ in 0..8 {
        sweep(&s, "stale", 1).await;
    }
    let open: Vec<bool> =
        vec![running(&s, &batches[0]).await, running(&s, &batches[1]).await, running(&s, &batches[2]).await];
    assert_eq!(open, [false, true, true], "the cursor stands before what was not closed");
    // In one pass that is wide enough its neighbours do not wait for it.
    assert_eq!(sweep(&s, "stale", 500).await, 2);
    assert!(running(&s, &batches[1]).await);
    holder.exec("ROLLBACK").await;
    assert_eq!(sweep(&s, "stale", 1).await, 1, "it is the next that is looked at");
}

#[tokio::test]
async fn deadlines_are_swept_in_their_order_whatever_the_order_of_the_claims() {
    let db = Db::new().await;
    let s = db.session().await;
    let batches = claims_due(&s, &["2020-01-03", "2020-01-02", "2020-01-01", "2999-01-01"]).await;
    let mut order = vec![];
    for _ in 0..12 {
        if sweep(&s, "deadline", 1).await > 0 {
            for (n, b) in batches.iter().enumerate() {
                if !running(&s, b).await && !order.contains(&n) {
                    order.push(n);
                }
            }
        }
    }
    assert_eq!(order, [2, 1, 0]);
    assert_eq!(s.complete(&batches[3].attempts()).await, []);
}

#[tokio::test]
async fn of_many_batches_with_one_deadline_none_is_left_behind() {
    let db = Db::new().await;
    let s = db.session().await;
    let batches = claims_due(&s, &["2020-01-01"; 9]).await;
    // The first ones are closed already, and fill whole passes.
    for b in &batches[..6] {
        assert_eq!(s.complete(&b.attempts()).await, []);
    }
    let mut ended = vec![];
    for _ in 0..10 {
        ended.push(sweep(&s, "deadline", 2).await);
    }
    assert_eq!(ended.iter().sum::<i32>(), 6, "{ended:?}");
    assert!(ended.iter().all(|n| *n <= 4), "{ended:?}");
}

#[tokio::test]
async fn a_deadline_that_cannot_be_ended_now_stops_the_cursor() {
    let db = Db::new().await;
    let (s, holder) = (db.session().await, db.session().await);
    s.exec("SET lock_timeout = '10s'").await;
    let batches = claims_due(&s, &["2020-01-01", "2020-01-01", "2020-01-02"]).await;
    hold(&holder, &batches[1]).await;
    for _ in 0..8 {
        sweep(&s, "deadline", 1).await;
    }
    assert_eq!((running(&s, &batches[0]).await, running(&s, &batches[2]).await), (false, true));
    holder.exec("ROLLBACK").await;
    assert_eq!(sweep(&s, "deadline", 1).await, 2);
}

#[tokio::test]
async fn a_cursor_that_is_lost_or_wrong_costs_nothing_but_time() {
    for cursor in ["0", "9000000000000000"] {
        let db = Db::new().await;
        let s = db.session().await;
        let batches = claims_due(&s, &["2020-01-01"; 5]).await;
        age(&s, &batches.iter().collect::<Vec<_>>()).await;
        let mut ended = 0;
        for n in 0..16 {
            ended += sweep(&s, ["stale", "deadline"][n % 2], 1).await;
            if n < 4 {
                for which in ["stale", "deadline"] {
                    s.exec(&format!(
                        "SELECT setval(@rescue_cursor({}::smallint, '{which}'), {cursor})",
                        batches[0].claim_slot
                    ))
                    .await;
                }
            }
        }
        // A pass of rescue sweeps both ways; what one of them ended counts once.
        let closed: i64 = s.one("SELECT sum(job_count) FROM @lease_claim_closure_batches").await;
        assert_eq!(closed, 10, "cursor {cursor}, seen {ended}");
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 10);
    }
}

#[tokio::test]
async fn claims_of_a_slot_that_opens_again_are_swept_like_the_first() {
    let db = Db::new().await;
    let s = db.session().await;
    let old = claims_due(&s, &["2999-01-01"]).await;
    s.exec(&format!("UPDATE @lease_claim_batches SET deadline_at = '2020-01-01' WHERE batch_id = {}", old[0].id)).await;
    assert_eq!(sweep(&s, "deadline", 1).await, 2);
    assert_eq!(sweep(&s, "deadline", 1).await, 0); // stands at its end now
    s.rotate("claim").await;
    assert!(s.prune("claim", old[0].claim_slot.into()).await.0);
    for _ in 0..8 {
        if s.rotate("claim").await.1 == old[0].claim_slot {
            break;
        }
        s.prune_all("claim").await;
    }
    let new = claims_due(&s, &["2019-01-01"]).await;
    assert_eq!(new[0].claim_slot, old[0].claim_slot);
    assert_eq!(sweep(&s, "deadline", 1).await, 2);
}

/// hardbyte/awa#388: one unique conflict aborted every rescue sweep.
#[tokio::test]
async fn one_superseded_attempt_among_fifty_costs_its_neighbours_nothing() {
    for which in ["stale", "deadline", "callback_timeout"] {
        let db = Db::new().await;
        let s = db.session().await;
        s.enqueue("q", 24).await;
        let poisoned: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', unique_key => 'one')").await;
        s.enqueue("q", 25).await;
        let all = attempts(&s.claim("q", 50).await);
        match which {
            "stale" => {
                s.exec(
                    "UPDATE @lease_claim_batches SET claimed_at = '2020-01-01'; UPDATE @claim_ring_state SET opened_at = '2020-01-01'",
                )
                .await
            }
            "deadline" => s.exec("UPDATE @lease_claim_batches SET deadline_at = '2020-01-01'").await,
            _ => {
                for Attempt { slot, receipt, job, lease } in &all {
                    s.exec(&format!(
                        "SELECT @wait_for_callback({receipt}, {job}, {lease},
                             @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 hour'))"
                    ))
                    .await;
                }
                s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
            }
        }
        // Its key got lost, and a newer job took it.
        s.exec(&format!("DELETE FROM @job_unique_claims WHERE job_id = {poisoned}")).await;
        let holder: i64 = s.one("SELECT job_id FROM @enqueue('k', 'other', unique_key => 'one')").await;
        assert_eq!(sweep(&s, which, 500).await, 50, "{which}");
        assert_eq!(state(&s, poisoned).await, "cancelled", "{which}");
        let why: String = s
            .one(&format!("SELECT errors[cardinality(errors)] ->> 'error' FROM @terminal_jobs WHERE id = {poisoned}"))
            .await;
        assert!(why.contains(&format!("superseded by job {holder}")), "{why}");
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs WHERE state = 'retryable'").await, 49, "{which}");
        assert_eq!(state(&s, holder).await, "available");
    }
}

#[tokio::test]
async fn one_attempt_that_cannot_be_stored_fails_and_its_neighbours_are_retried() {
    for which in ["stale", "callback_timeout"] {
        let db = Db::new().await;
        let s = db.session().await;
        let ids = s.enqueue("q", 20).await;
        let all = attempts(&s.claim("q", 20).await);
        if which == "stale" {
            s.exec("UPDATE @lease_claim_batches SET claimed_at = '2020-01-01'; UPDATE @claim_ring_state SET opened_at = '2020-01-01'")
                .await;
        } else {
            for Attempt { slot, receipt, job, lease } in &all {
                s.exec(&format!(
                    "SELECT @wait_for_callback({receipt}, {job}, {lease},
                         @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 hour'))"
                ))
                .await;
            }
            s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
        }
        s.exec(&format!("ALTER TABLE @deferred_jobs ADD CONSTRAINT poison CHECK (job_id <> {})", ids[7])).await;
        assert_eq!(sweep(&s, which, 500).await, 20, "{which}");
        assert_eq!(state(&s, ids[7]).await, "failed", "{which}");
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 19, "{which}");
    }
}

#[tokio::test]
async fn a_job_whose_worker_is_lost_each_time_backs_off_and_fails_at_its_last_attempt() {
    let db = Db::new().await;
    let s = db.session().await;
    let job: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', max_attempts => 3)").await;
    for attempt in 1..=3i16 {
        assert_eq!(s.claim("q", 1).await[0].attempts, [attempt]);
        s.exec("UPDATE @lease_claim_batches SET claimed_at = '2020-01-01'; UPDATE @claim_ring_state SET opened_at = '2020-01-01'")
            .await;
        assert_eq!(sweep(&s, "stale", 500).await, 1);
        if attempt < 3 {
            let seconds = f64::from(1 << attempt);
            let waits: f64 = s
                .one("SELECT extract(epoch FROM run_at - (errors[cardinality(errors)] ->> 'at')::timestamptz)::float8 FROM @deferred_jobs")
                .await;
            assert!(waits >= seconds && waits <= seconds * 1.25 + 0.001, "attempt {attempt} waits {waits}");
            s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'").await;
            assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1);
        }
    }
    assert_eq!(state(&s, job).await, "failed");
    let told: Vec<String> = s
        .all("SELECT (e ->> 'attempt') || ' ' || (e ->> 'error') || ' ' || ((e ->> 'at')::timestamptz <= clock_timestamp())
              FROM @terminal_jobs, unnest(errors) WITH ORDINALITY AS x (e, n) ORDER BY n")
        .await;
    let lost = "the worker was lost: no sign of life for 00:01:30 true";
    assert_eq!(told, [format!("1 {lost}"), format!("2 {lost}"), format!("3 {lost}")]);
}

/// hardbyte/awa PR 435: one way to fail ignored max_attempts (attempt 653 of 2).
#[tokio::test]
async fn whatever_ends_them_a_job_gets_exactly_as_many_attempts_as_it_may_have() {
    for which in ["stale", "deadline", "callback_timeout", "retry_after", "in turn"] {
        let db = Db::new().await;
        let s = db.session().await;
        let job: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', max_attempts => 4)").await;
        let mut runs = 0;
        while runs < 10 {
            let claimed = attempts(&s.claim("q", 1).await);
            let Some(&a) = claimed.first() else { break };
            let way = match which {
                "in turn" => ["retry_after", "callback_timeout", "deadline", "stale"][runs % 4],
                other => other,
            };
            runs += 1;
            let Attempt { slot, receipt, lease, .. } = a;
            match way {
                "retry_after" => assert_eq!(s.close(&[a], "retryable", Some("later"), "1 second").await, []),
                "stale" => age(&s, &[&Batch { id: receipt / 1024, ..batch() }]).await,
                "deadline" => s.exec("UPDATE @lease_claim_batches SET deadline_at = '2020-01-01'").await,
                _ => {
                    s.exec(&format!(
                        "SELECT @wait_for_callback({receipt}, {job}, {lease},
                             @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 microsecond'))"
                    ))
                    .await
                }
            }
            s.exec("SELECT @rescue(); UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(10)").await;
        }
        assert_eq!((runs, state(&s, job).await.as_str()), (4, "failed"), "{which}");
        assert_eq!(s.one::<i64>("SELECT cardinality(errors)::bigint FROM @terminal_jobs").await, 4, "{which}");
    }
}

fn batch() -> Batch {
    Batch { id: 0, claim_slot: 0, priority: 0, jobs: vec![], leases: vec![], attempts: vec![] }
}

#[tokio::test]
async fn progress_outlives_rescue_and_retry_and_ends_with_completion() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 1).await;
    let first = attempts(&s.claim("q", 1).await);
    assert_eq!(heartbeat(&s, &first, Some(r#"{"at": 1}"#)).await, [] as [String; 0]);
    s.exec("UPDATE @lease_claim_batches SET claimed_at = '2020-01-01'; UPDATE @claim_ring_state SET opened_at = '2020-01-01';
            UPDATE @attempt_state SET heartbeat_at = '2020-01-01'")
        .await;
    assert_eq!(sweep(&s, "stale", 500).await, 1);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @attempt_state").await, 0);
    for round in 0..2 {
        assert_eq!(s.one::<String>("SELECT progress ->> 'at' FROM @deferred_jobs").await, "1", "round {round}");
        s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(1)").await;
        let again = attempts(&s.claim("q", 1).await);
        // The second is failed by its own worker, which said nothing new.
        assert_eq!(s.close(&again, "retryable", Some("no"), "0").await, []);
    }
    s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'; SELECT @promote(1)").await;
    let last = attempts(&s.claim("q", 1).await);
    assert_eq!(s.complete(&last).await, []);
    assert_eq!(s.one::<Option<String>>("SELECT progress::text FROM @terminal_jobs").await, None);
}

#[tokio::test]
async fn a_lease_whose_worker_is_lost_or_late_is_ended_like_any_other() {
    for which in ["stale", "deadline"] {
        let db = Db::new().await;
        let (s, holder) = (db.session().await, db.session().await);
        s.exec("SET lock_timeout = '10s'").await;
        let ids = s.enqueue("q", 3).await;
        s.exec("SELECT @claim('q', 3, '1 hour', 'w', p_receipts => false)").await;
        let column = if which == "stale" { "alive_at" } else { "deadline_at" };
        s.exec(&format!("UPDATE @leases SET {column} = '2020-01-01'")).await;
        // One of them is being worked on.
        holder.exec(&format!("BEGIN; SELECT FROM @leases WHERE job_id = {} FOR UPDATE", ids[0])).await;
        assert_eq!(sweep(&s, which, 500).await, 2, "{which}");
        holder.exec("COMMIT").await;
        assert_eq!(sweep(&s, which, 500).await, 1, "{which}");
        assert_eq!(retried_once(&s).await, 3);
        assert_eq!(jobs(&s.claim("q", 3).await), [] as [i64; 0]);
    }
}
