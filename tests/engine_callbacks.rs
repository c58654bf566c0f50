//! Callbacks: a token is answered once, by whoever comes first, and the attempt goes where the answer says.

mod common;

use common::{Attempt, Db, Session, attempts};

async fn claimed(s: &Session) -> Attempt {
    s.enqueue("q", 1).await;
    attempts(&s.claim("q", 1).await)[0]
}

async fn register(s: &Session, a: &Attempt, timeout: &str) -> Option<String> {
    let Attempt { slot, receipt, job, lease } = a;
    s.one(&format!("SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '{timeout}')::text")).await
}

async fn wait(s: &Session, a: &Attempt, token: &str) -> String {
    s.one(&format!("SELECT @wait_for_callback({}, {}, {}, '{token}')", a.receipt, a.job, a.lease)).await
}

/// A waiting attempt and its token.
async fn waiting(s: &Session) -> (Attempt, String) {
    let a = claimed(s).await;
    let token = register(s, &a, "1 hour").await.unwrap();
    assert_eq!(wait(s, &a, &token).await, "waiting");
    (a, token)
}

fn answer_sql(token: &str, action: &str, payload: &str) -> String {
    format!("SELECT coalesce((SELECT state::text FROM @resolve_callback('{token}', '{action}', {payload})), 'nobody')")
}

async fn answer(s: &Session, token: &str, action: &str, payload: &str) -> String {
    s.one(&answer_sql(token, action, payload)).await
}

async fn result(s: &Session, a: &Attempt) -> (bool, bool, Option<String>) {
    let sql =
        format!("SELECT is_over, resumed, payload::text FROM @callback_result({}, {}, {})", a.receipt, a.job, a.lease);
    let row = &s.rows(&sql, &[]).await.unwrap()[0];
    (row.get(0), row.get(1), row.get(2))
}

async fn state(s: &Session, job: i64) -> String {
    s.one(&format!("SELECT coalesce((SELECT state::text FROM @find_job({job})), 'none')")).await
}

/// In how many places the job is.
async fn places(s: &Session, job: i64) -> i64 {
    s.one(&format!("SELECT count(*) FROM @list_jobs(p_job_id => {job})")).await
}

#[tokio::test]
async fn of_two_answers_at_once_the_first_counts_and_the_second_is_told() {
    for (first, second) in
        [("complete", "fail"), ("fail", "retry"), ("resume", "complete"), ("retry", "complete"), ("resume", "resume")]
    {
        for commits in [true, false] {
            let db = Db::new().await;
            let (a, b) = (db.session().await, db.session().await);
            let (attempt, token) = waiting(&a).await;
            a.exec("BEGIN").await;
            let one = answer(&a, &token, first, "'1'").await;
            let two = b.spawn(&answer_sql(&token, second, "'2'"));
            db.until_waiting(b.pid_while_busy(&db).await).await;
            a.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
            let two: String = two.await.unwrap().unwrap()[0].get(0);
            let case = format!("{first} then {second}, commits {commits}");
            assert_eq!(two == "nobody", commits, "{case}: {one}, {two}");
            assert_eq!(state(&a, attempt.job).await, if commits { one } else { two }, "{case}");
            assert_eq!(places(&a, attempt.job).await, 1, "{case}");
            assert_eq!(answer(&a, &token, "complete", "NULL").await, "nobody", "{case}");
        }
    }
}

trait Busy {
    async fn pid_while_busy(&self, db: &Db) -> i32;
}

impl Busy for Session {
    /// Of the one backend that waits for a lock: this session is busy and cannot be asked.
    async fn pid_while_busy(&self, db: &Db) -> i32 {
        let waiting = "FROM pg_locks WHERE NOT granted AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())";
        db.until(&format!("SELECT EXISTS (SELECT {waiting})")).await;
        db.one(&format!("SELECT pid {waiting} LIMIT 1")).await
    }
}

#[tokio::test]
async fn an_answer_and_its_timeout_end_the_attempt_once_whichever_comes_first() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    a.exec("SET lock_timeout = '10s'").await;
    let (attempt, token) = waiting(&a).await;
    a.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
    b.exec("BEGIN").await;
    assert_eq!(answer(&b, &token, "complete", "NULL").await, "completed");
    assert_eq!(a.one::<i32>("SELECT callback_timeout FROM @rescue()").await, 0, "an answer in progress is passed over");
    b.exec("COMMIT").await;
    assert_eq!(a.one::<i32>("SELECT callback_timeout FROM @rescue()").await, 0);
    assert_eq!(state(&a, attempt.job).await, "completed");

    let (attempt, token) = waiting(&a).await;
    a.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
    a.exec("BEGIN").await;
    assert_eq!(a.one::<i32>("SELECT callback_timeout FROM @rescue()").await, 1);
    let late = b.spawn(&answer_sql(&token, "complete", "NULL"));
    db.until_waiting(b.pid_while_busy(&db).await).await;
    a.exec("COMMIT").await;
    assert_eq!(late.await.unwrap().unwrap()[0].get::<_, String>(0), "nobody");
    assert_eq!((state(&a, attempt.job).await.as_str(), places(&a, attempt.job).await), ("retryable", 1));
    let why: String = a.one("SELECT errors[1] ->> 'error' FROM @deferred_jobs").await;
    assert_eq!(why, "the callback timed out");
    assert_eq!(a.one::<i16>("SELECT attempt FROM @deferred_jobs").await, 1, "it counts as an attempt");
}

#[tokio::test]
async fn a_resumed_handler_may_wait_again_and_an_old_token_is_worth_nothing() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s).await;
    let mut used: Vec<String> = vec![];
    for n in 1..=3 {
        let token = register(&s, &a, "1 hour").await.unwrap();
        assert_eq!(wait(&s, &a, &token).await, "waiting");
        assert_eq!(wait(&s, &a, &token).await, "waiting", "asked twice");
        assert_eq!(result(&s, &a).await, (false, false, None));
        for old in &used {
            assert_eq!(answer(&s, old, "complete", "NULL").await, "nobody");
        }
        assert_eq!(answer(&s, &token, "resume", &format!("'{n}'")).await, "running");
        assert_eq!(result(&s, &a).await, (false, true, Some(n.to_string())));
        used.push(token);
    }
    assert_eq!(s.complete(&[a]).await, []);
    assert_eq!(result(&s, &a).await, (true, false, None));
    assert_eq!(state(&s, a.job).await, "completed");
}

#[tokio::test]
async fn an_answer_that_comes_before_the_wait_is_not_lost() {
    let db = Db::new().await;
    let s = db.session().await;
    let a = claimed(&s).await;
    let token = register(&s, &a, "1 hour").await.unwrap();
    assert_eq!(answer(&s, &token, "resume", "'7'").await, "running");
    assert_eq!(wait(&s, &a, &token).await, "resumed");
    assert_eq!(result(&s, &a).await, (false, true, Some("7".into())));
    // A second registration replaces the first.
    let (one, two) = (register(&s, &a, "1 hour").await.unwrap(), register(&s, &a, "1 hour").await.unwrap());
    assert_eq!(answer(&s, &one, "complete", "NULL").await, "nobody");
    let refused =
        s.rows(&format!("SELECT @wait_for_callback({}, {}, {}, '{one}')", a.receipt, a.job, a.lease), &[]).await;
    assert!(refused.unwrap_err().as_db_error().unwrap().message().contains("another callback"));
    assert_eq!(answer(&s, &two, "complete", "NULL").await, "completed");
    assert_eq!(wait(&s, &a, &two).await, "over");
}

#[tokio::test]
async fn a_deadline_does_not_run_while_somebody_else_does_the_work() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 2).await;
    let rows = s
        .rows("SELECT claim_slot, batch_id, job_ids, run_leases FROM @claim('q', 2, '1 microsecond', 'w')", &[])
        .await
        .unwrap();
    let (batch, ids, leases) = (rows[0].get::<_, i64>(1), rows[0].get::<_, Vec<i64>>(2), rows[0].get::<_, Vec<i64>>(3));
    let of =
        |n: usize| Attempt { slot: rows[0].get(0), receipt: batch * 1024 + n as i64, job: ids[n], lease: leases[n] };
    let token = register(&s, &of(0), "1 hour").await.unwrap();
    assert_eq!(wait(&s, &of(0), &token).await, "waiting");
    register(&s, &of(1), "1 hour").await.unwrap(); // does not wait
    assert_eq!(s.one::<i32>("SELECT deadline FROM @rescue()").await, 1);
    assert_eq!((state(&s, ids[0]).await.as_str(), state(&s, ids[1]).await.as_str()), ("waiting_external", "retryable"));
    // Nor does silence matter.
    s.exec("UPDATE @leases SET alive_at = '2020-01-01'").await;
    assert_eq!(s.one::<i32>("SELECT stale + deadline FROM @rescue('0 seconds')").await, 0);
    // Once resumed, it does again, from that moment.
    assert_eq!(answer(&s, &token, "resume", "NULL").await, "running");
    assert_eq!(s.one::<i32>("SELECT stale + deadline FROM @rescue()").await, 0);
    assert_eq!(s.one::<i32>("SELECT stale FROM @rescue('0 seconds')").await, 1);
}

#[tokio::test]
async fn a_token_of_an_attempt_that_is_over_answers_nothing() {
    for end in ["complete", "fail", "cancel", "rescue"] {
        let db = Db::new().await;
        let s = db.session().await;
        let (a, token) = waiting(&s).await;
        let then = match end {
            "complete" => {
                assert_eq!(s.complete(&[a]).await, []);
                "completed"
            }
            "fail" => {
                assert_eq!(s.close(&[a], "failed", Some("no"), "0").await, []);
                "failed"
            }
            "cancel" => {
                assert!(s.one::<bool>(&format!("SELECT done FROM @operate({}, 'cancel')", a.job)).await);
                "cancelled"
            }
            _ => {
                s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'; SELECT @rescue()").await;
                "retryable"
            }
        };
        for action in ["complete", "resume", "retry", "fail"] {
            assert_eq!(answer(&s, &token, action, "NULL").await, "nobody", "{end}, {action}");
        }
        assert_eq!((state(&s, a.job).await.as_str(), places(&s, a.job).await), (then, 1), "{end}");
        assert_eq!(register(&s, &a, "1 hour").await, None, "{end}");
        assert!(!s.one::<bool>(&format!("SELECT @extend_callback('{token}', '1 hour')")).await, "{end}");
    }
}

#[tokio::test]
async fn a_timeout_is_put_off_by_whoever_still_works_on_the_answer() {
    let db = Db::new().await;
    let s = db.session().await;
    let (a, token) = waiting(&s).await;
    s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
    assert!(s.one::<bool>(&format!("SELECT @extend_callback('{token}', '1 hour')")).await);
    assert_eq!(s.one::<i32>("SELECT callback_timeout FROM @rescue()").await, 0);
    assert_eq!(state(&s, a.job).await, "waiting_external");
    for bad in ["NULL", "'0 seconds'", "'-1 hour'"] {
        for call in [
            format!("SELECT @extend_callback('{token}', {bad})"),
            format!("SELECT @register_callback({}::smallint, {}, {}, {}, {bad})", a.slot, a.receipt, a.job, a.lease),
        ] {
            let error = s.rows(&call, &[]).await.expect_err(&call);
            assert!(
                error.as_db_error().unwrap().message().contains("timeout must be longer than zero"),
                "{call}: {error:?}"
            );
        }
    }
    assert!(s.one::<bool>("SELECT callback_timeout_at > clock_timestamp() FROM @leases").await, "and nothing changed");
}

#[tokio::test]
async fn the_answer_stays_with_the_job() {
    for (action, kept_in) in [("complete", "completed"), ("fail", "failed"), ("retry", "available")] {
        let db = Db::new().await;
        let s = db.session().await;
        s.exec(r#"SELECT @enqueue('k', 'q', metadata => '{"a": 1}')"#).await;
        let a = attempts(&s.claim("q", 1).await)[0];
        let token = register(&s, &a, "1 hour").await.unwrap();
        assert_eq!(wait(&s, &a, &token).await, "waiting");
        assert_eq!(answer(&s, &token, action, r#"'{"b": 2}'"#).await, kept_in);
        let metadata: String = s.one(&format!("SELECT metadata::text FROM @list_jobs(p_job_id => {})", a.job)).await;
        assert_eq!(metadata, r#"{"a": 1, "_awa_callback_result": {"b": 2}}"#, "{action}");
    }
}

#[tokio::test]
async fn a_retry_by_callback_starts_the_job_anew_and_keeps_what_it_achieved() {
    let db = Db::new().await;
    let s = db.session().await;
    let (a, token) = waiting(&s).await;
    s.exec(&format!(
        r#"SELECT @heartbeat('{{{}}}', '{{{}}}', '{{{}}}', '{{{}}}', ARRAY['{{"at": 5}}'::jsonb])"#,
        a.slot, a.receipt, a.job, a.lease
    ))
    .await;
    let state: String =
        s.one(&format!("SELECT state::text FROM @resolve_callback('{token}', 'retry', NULL, 'not yet')")).await;
    assert_eq!(state, "available");
    let kept: Vec<String> =
        s.all("SELECT format('%s %s %s', attempt, progress ->> 'at', errors[1] ->> 'error') FROM @list_jobs('{available}')").await;
    assert_eq!(kept, ["0 5 not yet"]);
    let again = s.claim("q", 1).await;
    assert_eq!((again[0].attempts[0], again[0].leases[0]), (1, a.lease + 1));
    assert_eq!(s.complete(&[a]).await.len(), 1, "the old attempt is fenced off");
    assert_eq!(s.complete(&attempts(&again)).await, []);
}

#[tokio::test]
async fn an_attempt_materialises_once_and_not_after_its_end() {
    let db = Db::new().await;
    let (s, other) = (db.session().await, db.session().await);
    let a = claimed(&s).await;
    let call = format!("SELECT @materialise({}::smallint, {}, {}, {})", a.slot, a.receipt, a.job, a.lease);
    // While its completion is not committed yet.
    other.exec("BEGIN").await;
    assert_eq!(other.complete(&[a]).await, []);
    let waits = s.spawn(&call);
    db.until_waiting(s.pid_while_busy(&db).await).await;
    other.exec("COMMIT").await;
    assert!(!waits.await.unwrap().unwrap()[0].get::<_, bool>(0));
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 0);
    // Two at once: one lease.
    let a = claimed(&s).await;
    let call = format!("SELECT @materialise({}::smallint, {}, {}, {})", a.slot, a.receipt, a.job, a.lease);
    other.exec("BEGIN").await;
    assert!(other.one::<bool>(&call).await);
    let waits = s.spawn(&call);
    db.until_waiting(s.pid_while_busy(&db).await).await;
    other.exec("COMMIT").await;
    assert!(waits.await.unwrap().unwrap()[0].get::<_, bool>(0));
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 1);
    // Of another lease: neither.
    let stale = format!("SELECT @materialise({}::smallint, {}, {}, {})", a.slot, a.receipt, a.job, a.lease + 1);
    assert!(!s.one::<bool>(&stale).await);
    assert_eq!(register(&s, &Attempt { lease: a.lease + 1, ..a }, "1 hour").await, None);
}

#[tokio::test]
async fn a_lease_is_ended_only_by_the_claim_it_came_from() {
    let db = Db::new().await;
    let s = db.session().await;
    // A claim that was rolled back had the same job and run_lease, and another receipt.
    s.enqueue("q", 1).await;
    s.exec("BEGIN").await;
    let undone = attempts(&s.claim("q", 1).await)[0];
    s.exec("ROLLBACK").await;
    let a = attempts(&s.claim("q", 1).await)[0];
    assert_eq!((undone.job, undone.lease), (a.job, a.lease));
    assert!(register(&s, &a, "1 hour").await.is_some());
    let stale = Attempt { lease: a.lease - 1, ..a };
    assert_eq!(s.complete(&[undone, stale]).await.len(), 2);
    assert_eq!(s.close(&[undone, stale], "failed", Some("no"), "0").await.len(), 2);
    assert_eq!(register(&s, &undone, "1 hour").await, None);
    assert_eq!(state(&s, a.job).await, "running");
    assert_eq!(s.complete(&[a]).await, []);
}

#[tokio::test]
async fn an_answer_from_an_old_snapshot_is_refused_instead_of_called_unknown() {
    let db = Db::new().await;
    let (s, old) = (db.session().await, db.session().await);
    let (_, token) = waiting(&s).await;
    old.exec("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM @queue_meta").await;
    s.rotate("lease").await;
    assert_eq!(s.prune_all("lease").await.0.len(), 1);
    for call in [answer_sql(&token, "complete", "NULL"), format!("SELECT @extend_callback('{token}', '1 hour')")] {
        let error = old.rows(&call, &[]).await.expect_err(&call);
        assert!(error.as_db_error().unwrap().message().contains("READ COMMITTED"), "{error:?}");
        old.exec("ROLLBACK; BEGIN ISOLATION LEVEL REPEATABLE READ").await;
    }
    assert_eq!(answer(&s, &token, "complete", "NULL").await, "completed");
}
