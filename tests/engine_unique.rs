//! Unique keys through every transition: held exactly as the mask says, never by two jobs, never for ever; who comes back to
//! a key that another holds gives way and costs nobody else anything.
mod common;
use common::*;

const DEFAULT: &str = "11111000";

async fn enqueue(s: &Session, queue: &str, key: &str, mask: &str, more: &str) -> (i64, bool) {
    let sql = format!(
        "SELECT job_id, inserted FROM @enqueue('k', '{queue}', unique_key => '{key}', unique_states => B'{mask}'{more})"
    );
    let rows = s.rows(&sql, &[]).await.unwrap();
    (rows[0].get(0), rows[0].get(1))
}

/// A new job, which must not be a duplicate.
async fn new_job(s: &Session, queue: &str, key: &str, mask: &str) -> i64 {
    let (id, inserted) = enqueue(s, queue, key, mask, "").await;
    assert!(inserted, "a duplicate of {id}");
    id
}

async fn holder(s: &Session, key: &str) -> Option<i64> {
    s.one(&format!("SELECT (SELECT job_id FROM @job_unique_claims WHERE unique_key = '{key}')")).await
}

/// State and last error, wherever the job is now.
async fn state(s: &Session, job: i64) -> (String, String) {
    let sql =
        format!("SELECT state::text, coalesce(errors[cardinality(errors)]->>'error', '') FROM @jobs WHERE id = {job}");
    let rows = s.rows(&sql, &[]).await.unwrap();
    (rows[0].get(0), rows[0].get(1))
}

async fn run_one(s: &Session, queue: &str) -> Attempt {
    let all = attempts(&s.claim(queue, 1).await);
    assert_eq!(all.len(), 1);
    all[0]
}

async fn promote(s: &Session, job: i64) {
    s.exec(&format!("UPDATE @deferred_jobs SET run_at = '2020-01-01' WHERE job_id = {job}; SELECT @promote(100)"))
        .await;
}

async fn operate(s: &Session, job: i64, operation: &str) -> (bool, String) {
    let rows = s.rows(&format!("SELECT done, reason FROM @operate({job}, '{operation}')"), &[]).await.unwrap();
    (rows[0].get(0), rows[0].get::<_, Option<String>>(1).unwrap_or_default())
}

/// Lets the attempt wait for a callback; says where it stands, and the token.
async fn wait(s: &Session, a: Attempt, timeout: &str) -> (String, String) {
    let token: String = s
        .one(&format!(
            "SELECT @register_callback({}::smallint, {}, {}, {}, '{timeout}')::text",
            a.slot, a.receipt, a.job, a.lease
        ))
        .await;
    let sql = format!("SELECT @wait_for_callback({}, {}, {}, '{token}')", a.receipt, a.job, a.lease);
    (s.one(&sql).await, token)
}

async fn resolve(s: &Session, token: &str, action: &str) -> String {
    s.one(&format!("SELECT state::text FROM @resolve_callback('{token}', '{action}')")).await
}

async fn rescue(s: &Session) -> (i32, i32, i32) {
    let rows = s.rows("SELECT stale, deadline, callback_timeout FROM @rescue('0')", &[]).await.unwrap();
    (rows[0].get(0), rows[0].get(1), rows[0].get(2))
}

fn superseded_by(holder: i64) -> (String, String) {
    ("cancelled".into(), format!("superseded by job {holder}, which holds its unique key"))
}

#[tokio::test]
async fn through_every_transition_a_job_holds_its_key_exactly_while_its_mask_says_so() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mut kept = vec![];
    let singles = (0..8).map(|bit| format!("{:08b}", 0x80 >> bit));
    for mask in singles.chain([DEFAULT, "00000000", "11111111", "10101010", "01010101"].map(str::to_owned)) {
        let (queue, key) = (format!("q{mask}"), format!("\\x{:02x}", u8::from_str_radix(&mask, 2).unwrap()));
        let bit = |state: &str| {
            mask.as_bytes()[[
                "scheduled",
                "available",
                "running",
                "completed",
                "retryable",
                "failed",
                "cancelled",
                "waiting_external",
            ]
            .iter()
            .position(|s| *s == state)
            .unwrap()]
                == b'1'
        };
        let check = async |job: i64, expected: &str| {
            assert_eq!(state(&s, job).await.0, expected, "{mask}");
            // Kept when completed means kept while running, and that kept while available.
            let holds = match expected {
                "available" => bit("available") || bit("running") || bit("completed"),
                "running" => bit("running") || bit("completed"),
                other => bit(other),
            };
            assert_eq!(holder(&s, &key).await, holds.then_some(job), "{mask} {expected}");
        };

        let (job, _) = enqueue(&s, &queue, &key, &mask, ", run_at => '2999-01-01'").await;
        check(job, "scheduled").await;
        promote(&s, job).await;
        check(job, "available").await;
        let a = run_one(&s, &queue).await;
        check(job, "running").await;
        s.close(&[a], "retryable", Some("boom"), "1h").await;
        check(job, "retryable").await;
        promote(&s, job).await;
        check(job, "available").await;
        let a = run_one(&s, &queue).await;
        s.close(&[a], "scheduled", None, "1h").await;
        check(job, "scheduled").await;
        assert!(operate(&s, job, "retry").await.0);
        check(job, "available").await;
        let a = run_one(&s, &queue).await;
        let (_, token) = wait(&s, a, "1h").await;
        check(job, "waiting_external").await;
        assert_eq!(resolve(&s, &token, "resume").await, "running");
        check(job, "running").await;
        s.close(&[a], "failed", None, "0").await;
        check(job, "failed").await;
        assert!(operate(&s, job, "retry").await.0);
        check(job, "available").await;
        assert!(operate(&s, job, "cancel").await.0);
        check(job, "cancelled").await;
        assert!(operate(&s, job, "retry").await.0);
        run_one(&s, &queue).await;
        check(job, "running").await;
        assert_eq!(rescue(&s).await, (1, 0, 0));
        check(job, "retryable").await;
        promote(&s, job).await;
        assert_eq!(s.drain(&queue).await, [job]);
        check(job, "completed").await;
        if bit("completed") {
            kept.push(job);
        }
    }

    for ring in ["queue", "claim", "lease"] {
        s.rotate(ring).await;
    }
    s.exec("SELECT @advance_idle_cursors()").await;
    assert!(s.prune("queue", 0).await.0);
    let held =
        "SELECT job_id FROM @job_unique_claims WHERE held_until BETWEEN now() + '23h' AND now() + '24h' ORDER BY 1";
    assert_eq!(s.all::<i64>(held).await, kept, "a key outlives the history of its job, but not for ever");
    s.exec("UPDATE @job_unique_claims SET held_until = now()").await;
    s.exec("SELECT @purge_expired()").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @job_unique_claims").await, 0);
}

#[tokio::test]
async fn a_key_kept_after_its_job_was_pruned_is_free_when_its_time_is_over_though_nobody_purged() {
    let db = Db::odd().await;
    let s = db.session().await;
    let first = new_job(&s, "q", "\\x01", DEFAULT).await;
    s.drain("q").await;
    s.rotate("queue").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    assert!(s.prune("queue", 0).await.0);
    assert_eq!(enqueue(&s, "q", "\\x01", DEFAULT, "").await, (first, false));
    s.exec("UPDATE @job_unique_claims SET held_until = now()").await;
    let second = new_job(&s, "q", "\\x01", DEFAULT).await;
    assert_eq!(holder(&s, "\\x01").await, Some(second));
    s.exec("SELECT @purge_expired()").await;
    assert_eq!(enqueue(&s, "q", "\\x01", DEFAULT, "").await, (second, false), "its successor's is not purged");
}

#[tokio::test]
async fn a_claim_without_receipts_lets_go_what_the_mask_does_not_keep_while_running() {
    let db = Db::odd().await;
    let s = db.session().await;
    new_job(&s, "q", "\\x01", "01000000").await;
    let kept = new_job(&s, "q", "\\x02", DEFAULT).await;
    s.exec("SELECT @claim('q', 10, p_receipts => false)").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 2);
    assert_eq!((holder(&s, "\\x01").await, holder(&s, "\\x02").await), (None, Some(kept)));
}

#[tokio::test]
async fn whatever_removes_a_job_removes_its_key() {
    let db = Db::odd().await;
    let s = db.session().await;
    let mask = "11111110";
    let gone = async |job: i64| {
        assert_eq!(holder(&s, "\\x01").await, Some(job));
        assert_eq!(operate(&s, job, "delete").await, (true, String::new()));
        assert_eq!(holder(&s, "\\x01").await, None);
    };
    gone(new_job(&s, "q", "\\x01", mask).await).await;
    gone(enqueue(&s, "q", "\\x01", mask, ", run_at => '2999-01-01'").await.0).await;
    for outcome in ["retryable", "failed", "cancelled", "completed"] {
        let job = new_job(&s, "q", "\\x01", mask).await;
        let a = run_one(&s, "q").await;
        s.close(&[a], outcome, None, "1h").await;
        gone(job).await;
    }
    s.exec("INSERT INTO @queue_meta (queue, dlq) VALUES ('q', true)").await;
    for by_operator in [true, false] {
        let job = new_job(&s, "q", "\\x01", mask).await;
        let a = run_one(&s, "q").await;
        s.close(&[a], "failed", None, "0").await;
        if by_operator {
            gone(job).await;
        } else {
            assert_eq!(enqueue(&s, "q", "\\x01", mask, "").await, (job, false));
            s.exec("UPDATE @dlq_entries SET failed_at = '2020-01-01'; SELECT @purge_expired()").await;
        }
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @job_unique_claims").await, 0);
}

/// procrastinate#1446: a job whose outcome collides with a sibling's key must not stay running.
#[tokio::test]
async fn an_attempt_that_comes_back_to_a_taken_key_is_superseded_in_the_same_call() {
    let db = Db::odd().await;
    let s = db.session().await;
    for (n, (mask, outcome)) in [("01001000", "retryable"), ("11000000", "scheduled")].into_iter().enumerate() {
        let key = format!("\\x0{n}");
        let older = new_job(&s, "q", &key, mask).await;
        let a = run_one(&s, "q").await;
        let newer = new_job(&s, "q", &key, mask).await;
        assert_eq!(s.close(&[a], outcome, Some("boom"), "0").await, []);
        assert_eq!(state(&s, older).await, superseded_by(newer));
        let errors: i32 = s.one(&format!("SELECT cardinality(errors) FROM @jobs WHERE id = {older}")).await;
        assert_eq!(errors, 2, "what it failed with is kept too");
        assert_eq!(s.drain("q").await, [newer]);
    }
}

#[tokio::test]
async fn a_promoted_job_whose_key_is_taken_is_superseded_and_its_neighbours_are_promoted() {
    let db = Db::odd().await;
    let s = db.session().await;
    let older = new_job(&s, "q", "\\x01", "01000000").await;
    let mut all = vec![older];
    for n in 2..50 {
        all.push(new_job(&s, "q", &format!("\\x{n:02x}"), "01000000").await);
    }
    let a = attempts(&s.claim("q", 100).await);
    s.close(&a, "retryable", None, "0").await;
    let newer = new_job(&s, "q", "\\x01", "01000000").await;
    s.exec("SELECT @promote(1000)").await;
    assert_eq!(state(&s, older).await, superseded_by(newer));
    all[0] = newer;
    assert_eq!(sorted(s.drain("q").await), sorted(all));
}

/// hardbyte/awa#388: one unique conflict aborted every rescue sweep.
#[tokio::test]
async fn of_fifty_rescued_attempts_the_one_whose_key_is_taken_is_superseded_and_the_others_go_on() {
    for sweep in ["stale", "deadline", "callback"] {
        let db = Db::new().await;
        let s = db.session().await;
        let mut all = vec![];
        for n in 0..50 {
            all.push(new_job(&s, "q", &format!("\\x{n:02x}"), "01001000").await);
        }
        let deadline = if sweep == "deadline" { "'0'" } else { "NULL" };
        s.exec(&format!("SELECT @claim('q', 100, {deadline}, 'tester')")).await;
        if sweep == "callback" {
            let sql = "SELECT b.claim_slot, b.batch_id * 1024 + n - 1, b.job_ids[n], b.run_lease
                       FROM @lease_claim_batches AS b, generate_series(1, 50) AS n";
            for row in s.rows(sql, &[]).await.unwrap() {
                let a = Attempt { slot: row.get(0), receipt: row.get(1), job: row.get(2), lease: row.get(3) };
                assert_eq!(wait(&s, a, "1 microsecond").await.0, "waiting");
            }
        }
        let poisoned = all[20];
        let newer = new_job(&s, "other", "\\x14", "01001000").await;
        let (stale, late, timed_out) = match sweep {
            "stale" => rescue(&s).await,
            _ => {
                let rows = s.rows("SELECT stale, deadline, callback_timeout FROM @rescue('1h')", &[]).await.unwrap();
                (rows[0].get(0), rows[0].get(1), rows[0].get(2))
            }
        };
        let rescued = [("stale", stale), ("deadline", late), ("callback", timed_out)];
        for (name, n) in rescued {
            assert_eq!(n, if name == sweep { 50 } else { 0 }, "{sweep}: {rescued:?}");
        }
        assert_eq!(state(&s, poisoned).await, superseded_by(newer), "{sweep}");
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @jobs WHERE state = 'retryable'").await, 49, "{sweep}");
    }
}

#[tokio::test]
async fn an_attempt_that_waits_or_is_resumed_while_its_key_is_taken_is_superseded() {
    let db = Db::odd().await;
    let s = db.session().await;
    let older = new_job(&s, "q", "\\x01", "01000001").await;
    let a = run_one(&s, "q").await;
    let newer = new_job(&s, "other", "\\x01", "01000001").await;
    assert_eq!(wait(&s, a, "1h").await.0, "over");
    assert_eq!(state(&s, older).await, superseded_by(newer));

    // By default a job that waits keeps nobody out.
    let older = new_job(&s, "q", "\\x02", DEFAULT).await;
    let a = run_one(&s, "q").await;
    let (_, token) = wait(&s, a, "1h").await;
    let newer = new_job(&s, "other", "\\x02", DEFAULT).await;
    assert_eq!(resolve(&s, &token, "resume").await, "cancelled");
    assert_eq!(state(&s, older).await, superseded_by(newer));
    assert_eq!(s.complete(&[a]).await.len(), 1, "the handler is too late");

    let older = new_job(&s, "q", "\\x04", DEFAULT).await;
    let a = run_one(&s, "q").await;
    let (_, token) = wait(&s, a, "1h").await;
    let newer = new_job(&s, "other", "\\x04", DEFAULT).await;
    assert_eq!(resolve(&s, &token, "retry").await, "cancelled");
    assert_eq!(state(&s, older).await, superseded_by(newer));

    // What was done is done, with the key or without.
    let older = new_job(&s, "q", "\\x03", DEFAULT).await;
    let a = run_one(&s, "q").await;
    let (_, token) = wait(&s, a, "1h").await;
    let newer = new_job(&s, "other", "\\x03", DEFAULT).await;
    assert_eq!(resolve(&s, &token, "complete").await, "completed");
    assert_eq!(state(&s, older).await.0, "completed");
    assert_eq!(holder(&s, "\\x03").await, Some(newer));
}

#[tokio::test]
async fn an_operator_who_retries_a_job_whose_key_is_taken_is_told_by_whom_and_nothing_changes() {
    let db = Db::odd().await;
    let s = db.session().await;
    let older = new_job(&s, "q", "\\x01", DEFAULT).await;
    let a = run_one(&s, "q").await;
    s.close(&[a], "failed", Some("boom"), "0").await;
    let newer = new_job(&s, "q", "\\x01", DEFAULT).await;
    let (done, reason) = operate(&s, older, "retry").await;
    assert!(!done && reason.contains(&format!("job {newer} ")), "{reason}");
    assert_eq!(state(&s, older).await, ("failed".into(), "boom".into()));
    assert_eq!(operate(&s, newer, "cancel").await, (true, String::new()));
    assert!(operate(&s, older, "retry").await.0, "the key is free again");
    assert_eq!(holder(&s, "\\x01").await, Some(older));
}

#[tokio::test]
async fn a_mask_without_the_state_a_job_starts_in_keeps_nobody_out() {
    let db = Db::odd().await;
    let s = db.session().await;
    for mask in ["00000000", "10000000", "00001110"] {
        new_job(&s, "q", "\\x01", mask).await;
        new_job(&s, "q", "\\x01", mask).await;
    }
    let later = ", run_at => '2999-01-01'";
    let (first, _) = enqueue(&s, "q", "\\x02", "10000000", later).await;
    assert_eq!(enqueue(&s, "q", "\\x02", "10000000", later).await, (first, false));
    new_job(&s, "q", "\\x02", "10000000").await;
    let many = r#"[{"kind": "k", "unique_key": "\\x03", "unique_states": "00001000"}, {"kind": "k", "unique_key": "\\x03", "unique_states": "00001000"}]"#;
    assert_eq!(s.all::<bool>(&format!("SELECT inserted FROM @enqueue_many('{many}'::jsonb)")).await, [true, true]);
}

/// oban#1093: a duplicate of a row that then rolled back.
#[tokio::test]
async fn a_job_that_comes_back_waits_for_the_open_transaction_that_has_its_key() {
    for first_ends in ["COMMIT", "ROLLBACK", "killed"] {
        let db = Db::new().await;
        let (s, t) = (db.session().await, db.session().await);
        let older = new_job(&s, "q", "\\x01", "01000000").await;
        let a = run_one(&s, "q").await;
        s.close(&[a], "retryable", None, "0").await;
        let first_pid = t.pid().await;
        t.exec("BEGIN").await;
        let newer = new_job(&t, "other", "\\x01", "01000000").await;
        let pid = s.pid().await;
        let promoting = s.spawn("SELECT @promote(100)");
        db.until_waiting(pid).await;
        match first_ends {
            "killed" => db.exec(&format!("SELECT pg_terminate_backend({first_pid})")).await,
            end => t.exec(end).await,
        }
        promoting.await.unwrap().unwrap();
        if first_ends == "COMMIT" {
            assert_eq!(state(&s, older).await, superseded_by(newer));
        } else {
            assert_eq!(s.drain("q").await, [older], "{first_ends}");
        }
    }
}

#[tokio::test]
async fn of_two_enqueuers_of_which_the_first_is_killed_exactly_one_job_exists() {
    for level in ["READ COMMITTED", "REPEATABLE READ"] {
        let db = Db::new().await;
        let (a, b) = (db.session().await, db.session().await);
        let first_pid = a.pid().await;
        a.exec("BEGIN").await;
        new_job(&a, "q", "\\x01", DEFAULT).await;
        b.exec(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await;
        let pid = b.pid().await;
        let second = b.spawn("SELECT job_id, inserted FROM @enqueue('k', 'q', unique_key => '\\x01')");
        db.until_waiting(pid).await;
        db.exec(&format!("SELECT pg_terminate_backend({first_pid})")).await;
        let rows = second.await.unwrap().unwrap();
        assert!(rows[0].get::<_, bool>(1), "{level}");
        b.exec("COMMIT").await;
        assert_eq!(b.drain("q").await, [rows[0].get::<_, i64>(0)]);
    }
}
