//! Operators: every operation in every state, wherever the job lies, and against whoever wants it at the same moment.

mod common;
#[path = "engine_operate/races.rs"]
mod races;

use common::{Attempt, Db, Session, attempts, jobs};

const STATES: [&str; 10] = [
    "without_receipt",
    "scheduled",
    "available",
    "running",
    "leased",
    "waiting_external",
    "retryable",
    "completed",
    "failed",
    "cancelled",
];

/// Those with an attempt that is not over.
const OPEN: [&str; 4] = ["running", "leased", "without_receipt", "waiting_external"];

/// A job in that state, and its last attempt where it had one.
async fn make(s: &Session, state: &str) -> (i64, Option<Attempt>) {
    if state == "scheduled" {
        return (
            s.one("SELECT job_id FROM @enqueue('k', 'q', run_at => clock_timestamp() + interval '1 day')").await,
            None,
        );
    }
    let job = s.enqueue("q", 1).await[0];
    if state == "available" {
        return (job, None);
    }
    if state == "without_receipt" {
        let sql = "SELECT claim_slot, batch_id * 1024, run_leases[1] FROM @claim('q', 1, p_receipts => false)";
        let row = &s.rows(sql, &[]).await.unwrap()[0];
        return (job, Some(Attempt { slot: row.get(0), receipt: row.get(1), job, lease: row.get(2) }));
    }
    let a = attempts(&s.claim("q", 1).await)[0];
    assert_eq!(a.job, job);
    let Attempt { slot, receipt, lease, .. } = a;
    match state {
        "running" => {}
        "leased" => {
            assert!(s.one::<bool>(&format!("SELECT @materialise({slot}::smallint, {receipt}, {job}, {lease})")).await)
        }
        "waiting_external" => {
            s.exec(&format!(
                "SELECT @wait_for_callback({receipt}, {job}, {lease},
                     @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 hour'))"
            ))
            .await
        }
        "completed" => assert_eq!(s.complete(&[a]).await, []),
        other => assert_eq!(s.close(&[a], other, Some("no"), "1 day").await, []),
    }
    (job, Some(a))
}

/// Leaves the queue slot with nothing in its way to be pruned.
async fn seal(s: &Session) {
    s.rotate("queue").await;
    s.rotate("claim").await;
    s.exec("SELECT @advance_idle_cursors()").await;
    assert_eq!(s.prune_all("claim").await.1, []);
}

#[derive(Debug, PartialEq)]
struct Said {
    done: bool,
    state: Option<String>,
    reason: Option<String>,
}

fn read(row: &tokio_postgres::Row) -> Said {
    Said { done: row.get(0), state: row.get(1), reason: row.get(2) }
}

fn call(job: i64, operation: &str) -> String {
    let to = if operation == "move" { ", p_priority => 4" } else { "" };
    format!("SELECT done, state::text, reason FROM @operate({job}, '{operation}'{to})")
}

async fn operate(s: &Session, job: i64, operation: &str) -> Said {
    read(&s.rows(&call(job, operation), &[]).await.unwrap_or_else(|e| panic!("{operation}: {e:?}"))[0])
}

async fn state(s: &Session, job: i64) -> String {
    let states: Vec<String> = s.all(&format!("SELECT state::text FROM @list_jobs(p_job_id => {job})")).await;
    assert!(states.len() < 2, "{states:?}");
    let found: String = s
        .one(&format!(
            "SELECT coalesce((SELECT CASE WHEN hidden THEN 'none' ELSE state::text END FROM @find_job({job})), 'none')"
        ))
        .await;
    assert_eq!(states.first().map_or("none", String::as_str), found, "the list and the look-up agree");
    found
}

/// Jobs by state as they are counted, without zeros.
async fn counted(s: &Session) -> Vec<String> {
    s.all(
        "SELECT state || ' ' || sum(job_count) FROM @queue_counts() WHERE job_count <> 0 GROUP BY state ORDER BY state",
    )
    .await
}

#[tokio::test]
async fn every_operation_does_in_every_state_what_it_says_or_says_why_not() {
    let suits = |operation: &str, state: &str| match operation {
        "cancel" => !["completed", "failed", "cancelled"].contains(&state),
        "retry" => ["scheduled", "retryable", "failed", "cancelled"].contains(&state),
        "delete" => !OPEN.contains(&state),
        _ => ["scheduled", "available", "retryable"].contains(&state),
    };
    for operation in ["cancel", "retry", "delete", "move"] {
        let db = Db::new().await;
        let s = db.session().await;
        for made in STATES {
            let shown = if ["leased", "without_receipt"].contains(&made) { "running" } else { made };
            let case = format!("{operation} of {made}");
            let (job, attempt) = make(&s, made).await;
            assert_eq!(state(&s, job).await, shown, "{case}");
            let said = operate(&s, job, operation).await;
            assert_eq!(said.done, suits(operation, made), "{case}: {said:?}");
            assert_eq!(said.state.as_deref(), Some(shown), "{case}");
            assert_eq!(said.reason.is_none(), said.done, "{case}: {said:?}");
            let after = match (operation, said.done) {
                (_, false) => shown,
                ("cancel", _) => "cancelled",
                ("retry", _) => "available",
                ("delete", _) => "none",
                _ => shown,
            };
            assert_eq!(state(&s, job).await, after, "{case}");
            let total: i64 = s.one("SELECT coalesce(sum(job_count), 0)::bigint FROM @queue_counts()").await;
            assert_eq!(total, i64::from(after != "none"), "{case}: {:?}", counted(&s).await);
            if operation == "move" && said.done {
                assert_eq!(
                    s.one::<i16>(&format!("SELECT priority FROM @list_jobs(p_job_id => {job})")).await,
                    4,
                    "{case}"
                );
            }
            if let Some(a) = attempt {
                let still = OPEN.contains(&made) && !said.done;
                assert_eq!(s.complete(&[a]).await.is_empty(), still, "{case}: its worker");
            }
            // Out of the way of the next.
            operate(&s, job, "cancel").await;
            operate(&s, job, "delete").await;
            assert_eq!(counted(&s).await, [] as [String; 0], "{case}");
        }
    }
}

#[tokio::test]
async fn a_job_that_never_was_or_is_gone_is_said_not_to_be() {
    let db = Db::new().await;
    let s = db.session().await;
    let none = Said { done: false, state: None, reason: Some("no such job".into()) };
    for operation in ["cancel", "retry", "delete", "move"] {
        assert_eq!(operate(&s, 999, operation).await, none);
    }
    for made in ["scheduled", "available", "retryable", "completed", "failed", "cancelled"] {
        let (job, _) = make(&s, made).await;
        assert!(operate(&s, job, "delete").await.done);
        for operation in ["delete", "retry", "cancel", "move"] {
            let said = operate(&s, job, operation).await;
            assert_eq!(
                (said.done, said.reason.as_deref()),
                (false, Some("no such job")),
                "{operation} of a deleted {made}"
            );
        }
    }
    let error = s.rows("SELECT @operate(1, 'frobnicate')", &[]).await;
    assert!(error.is_ok(), "nothing is done to a job that is not there");
    let (job, _) = make(&s, "available").await;
    let error = s.rows(&format!("SELECT @operate({job}, 'frobnicate')"), &[]).await.unwrap_err();
    assert!(error.as_db_error().unwrap().message().contains("operation must be"), "{error:?}");
}

#[tokio::test]
async fn a_job_that_was_retried_is_shown_and_counted_once_through_all_its_lives() {
    let db = Db::new().await;
    let s = db.session().await;
    let (job, _) = make(&s, "failed").await;
    for life in 0..3 {
        assert!(operate(&s, job, "retry").await.done);
        assert_eq!(
            (state(&s, job).await.as_str(), counted(&s).await),
            ("available", vec!["available 1".into()]),
            "{life}"
        );
        let a = attempts(&s.claim("q", 1).await);
        assert_eq!((a[0].job, s.close(&a, "failed", Some("again"), "0").await), (job, vec![]));
        assert_eq!((state(&s, job).await.as_str(), counted(&s).await), ("failed", vec!["failed 1".into()]), "{life}");
    }
    assert_eq!(s.one::<i64>("SELECT cardinality(errors)::bigint FROM @terminal_jobs").await, 4);
    assert!(operate(&s, job, "retry").await.done);
    assert_eq!(s.complete(&attempts(&s.claim("q", 1).await)).await, []);
    assert_eq!(counted(&s).await, ["completed 1"]);
    assert!(operate(&s, job, "delete").await.done);
    assert_eq!(counted(&s).await, [] as [String; 0]);
    // And when all of that is reclaimed.
    seal(&s).await;
    assert_eq!(s.prune_all("queue").await.1, []);
    assert_eq!(counted(&s).await, [] as [String; 0]);
    assert_eq!(state(&s, job).await, "none");
}

#[tokio::test]
async fn a_job_cancelled_before_its_first_attempt_can_be_retried_and_cancelled_again_and_again() {
    let db = Db::new().await;
    let s = db.session().await;
    let (job, _) = make(&s, "available").await;
    for round in 0..3 {
        assert!(operate(&s, job, "cancel").await.done, "{round}");
        assert_eq!(
            (state(&s, job).await.as_str(), counted(&s).await),
            ("cancelled", vec!["cancelled 1".into()]),
            "{round}"
        );
        assert!(operate(&s, job, "retry").await.done, "{round}");
        assert_eq!(
            (state(&s, job).await.as_str(), counted(&s).await),
            ("available", vec!["available 1".into()]),
            "{round}"
        );
    }
    assert_eq!(s.drain("q").await, [job]);
}

#[tokio::test]
async fn a_retry_fences_off_whoever_held_the_job_before() {
    let db = Db::new().await;
    let s = db.session().await;
    let (job, old) = make(&s, "failed").await;
    let old = old.unwrap();
    assert!(operate(&s, job, "retry").await.done);
    let new = s.claim("q", 1).await;
    assert_eq!(new[0].attempts, [1], "with all its attempts anew");
    let new = attempts(&new)[0];
    assert!(new.lease > old.lease + 1, "{new:?}");
    assert_eq!(
        s.complete(&[old, Attempt { lease: old.lease, ..new }, Attempt { lease: old.lease + 1, ..new }]).await.len(),
        3
    );
    assert_eq!(s.complete(&[new]).await, []);
    assert_eq!(state(&s, job).await, "completed");
}

#[tokio::test]
async fn a_failed_job_can_be_retried_after_its_slot_is_gone_for_as_long_as_its_queue_keeps_it() {
    let db = Db::new().await;
    let s = db.session().await;
    let (kept, _) = make(&s, "failed").await;
    let (purged, _) = make(&s, "failed").await;
    seal(&s).await;
    assert_eq!(s.prune_all("queue").await.1, []);
    assert_eq!((state(&s, kept).await.as_str(), counted(&s).await), ("failed", vec!["failed 2".into()]));
    let why: String = s.one(&format!("SELECT errors[1] ->> 'error' FROM @list_jobs(p_job_id => {kept})")).await;
    assert_eq!(why, "no");
    // Retention by the queue's setting.
    assert_eq!(s.one::<i32>("SELECT @purge_expired()").await, 0);
    s.exec(&format!(
        "UPDATE @dlq_entries SET failed_at = failed_at - interval '71 hours' WHERE job_id = {kept};
                     UPDATE @dlq_entries SET failed_at = failed_at - interval '73 hours' WHERE job_id = {purged}"
    ))
    .await;
    assert_eq!(s.one::<i32>("SELECT @purge_expired()").await, 1);
    assert_eq!(operate(&s, purged, "retry").await.reason.as_deref(), Some("no such job"));
    assert_eq!(counted(&s).await, ["failed 2"], "what is purged still counts");
    assert!(operate(&s, kept, "retry").await.done);
    assert_eq!(counted(&s).await, ["available 1", "failed 1"]);
    assert_eq!(s.drain("q").await, [kept]);
    // A queue that keeps nothing.
    s.exec("SELECT @set_queue('q', p_failed_retention => '0')").await;
    make(&s, "failed").await;
    seal(&s).await;
    assert_eq!(s.prune_all("queue").await.1, []);
    assert_eq!(s.one::<i32>("SELECT @purge_expired()").await, 1);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @dlq_entries").await, 0);
}

#[tokio::test]
async fn purging_is_bounded_and_passes_over_what_an_operator_holds() {
    let db = Db::new().await;
    let (s, operator) = (db.session().await, db.session().await);
    s.exec("SET lock_timeout = '10s'; SELECT @set_queue('q', p_dlq => true, p_dlq_retention => '1 hour')").await;
    let mut ids = vec![];
    for _ in 0..5 {
        ids.push(make(&s, "failed").await.0);
    }
    s.exec("UPDATE @dlq_entries SET failed_at = failed_at - interval '2 hours'").await;
    operator.exec("BEGIN").await;
    assert!(operate(&operator, ids[0], "retry").await.done);
    assert_eq!(s.one::<i32>("SELECT @purge_expired(3)").await, 3);
    assert_eq!(s.one::<i32>("SELECT @purge_expired(3)").await, 1);
    operator.exec("COMMIT").await;
    assert_eq!(s.one::<i32>("SELECT @purge_expired(3)").await, 0);
    assert_eq!(state(&s, ids[0]).await, "available");
    assert_eq!(counted(&s).await, ["available 1", "failed 4"]);
}

#[tokio::test]
async fn a_queue_with_a_dlq_holds_what_fails_until_an_operator_decides() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec("SELECT @set_queue('q', p_dlq => true)").await;
    let (held, _) = make(&s, "failed").await;
    let last: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', max_attempts => 1)").await;
    assert_eq!(s.close(&attempts(&s.claim("q", 1).await), "retryable", Some("no"), "0").await, []);
    assert_eq!(s.all::<i64>("SELECT job_id FROM @dlq_entries WHERE held = 'dlq' ORDER BY job_id").await, [held, last]);
    assert_eq!((state(&s, held).await.as_str(), counted(&s).await), ("failed", vec!["dlq 2".into()]));
    // It waits for no prune and no retention of the other kind.
    s.exec("UPDATE @dlq_entries SET failed_at = failed_at - interval '29 days'; SELECT @purge_expired()").await;
    assert!(operate(&s, held, "retry").await.done);
    assert_eq!(s.drain("q").await, [held]);
    s.exec("UPDATE @dlq_entries SET failed_at = failed_at - interval '2 days'; SELECT @purge_expired()").await;
    assert_eq!(state(&s, last).await, "none");
    // Without one it is history.
    s.exec("SELECT @set_queue('q', p_dlq => false)").await;
    make(&s, "failed").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @dlq_entries").await, 0);
}

#[tokio::test]
async fn a_retry_may_go_to_another_queue_and_priority_and_a_wrong_one_changes_nothing() {
    let db = Db::new().await;
    let s = db.session().await;
    for made in ["failed", "cancelled", "retryable", "scheduled", "available"] {
        let (job, _) = make(&s, made).await;
        let operation = if made == "available" { "move" } else { "retry" };
        for (arguments, field) in
            [("p_priority => 9", "priority"), ("p_queue => ''", "queue"), ("p_queue => repeat('x', 201)", "queue")]
        {
            let sql = format!("SELECT done, state::text, reason FROM @operate({job}, '{operation}', {arguments})");
            let said = read(&s.rows(&sql, &[]).await.unwrap()[0]);
            assert!(!said.done && said.reason.as_deref().unwrap().starts_with(field), "{made}, {arguments}: {said:?}");
            assert_eq!(state(&s, job).await, made, "{arguments}");
        }
        let to = format!(
            "SELECT done, state::text, reason FROM @operate({job}, '{operation}', p_queue => 'r', p_priority => 1)"
        );
        assert!(read(&s.rows(&to, &[]).await.unwrap()[0]).done, "{made}");
        let batches = s.claim("r", 10).await;
        assert_eq!((jobs(&batches), batches[0].priority), (vec![job], 1), "{made}");
        assert_eq!(s.complete(&attempts(&batches)).await, []);
    }
}

#[tokio::test]
async fn an_operator_cannot_take_a_unique_key_from_another_job() {
    let db = Db::new().await;
    let s = db.session().await;
    let old: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', unique_key => 'one')").await;
    assert!(operate(&s, old, "cancel").await.done);
    let new: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', unique_key => 'one')").await;
    assert_ne!(old, new, "the cancelled one gave it up");
    let said = operate(&s, old, "retry").await;
    assert!(
        !said.done && said.reason.as_deref().unwrap().contains(&format!("job {new} holds its unique key")),
        "{said:?}"
    );
    assert_eq!((state(&s, old).await.as_str(), state(&s, new).await.as_str()), ("cancelled", "available"));
    assert!(operate(&s, new, "delete").await.done);
    assert!(operate(&s, old, "retry").await.done, "a deleted job holds none");
    assert_eq!(s.one::<i64>("SELECT job_id FROM @job_unique_claims").await, old);
}

#[tokio::test]
async fn a_withdrawn_job_is_spent_for_every_later_claim_and_for_prune() {
    let db = Db::new().await;
    let s = db.session().await;
    let ids = s.enqueue("q", 6).await;
    for job in [ids[0], ids[2], ids[5]] {
        assert!(operate(&s, job, "cancel").await.done);
    }
    assert!(operate(&s, ids[3], "move").await.done);
    s.exec("SELECT setval(spent, 0) FROM @queue_lanes").await; // a lost cursor finds them spent again
    assert_eq!(common::sorted(s.drain("q").await), [ids[1], ids[3], ids[4]]);
    seal(&s).await;
    assert_eq!(s.prune_all("queue").await.1, []);
    assert_eq!(counted(&s).await, ["cancelled 3", "completed 3"]);
}

#[tokio::test]
async fn a_cancelled_attempt_loses_and_what_it_left_is_kept_with_the_reason() {
    let db = Db::new().await;
    let s = db.session().await;
    let (job, a) = make(&s, "running").await;
    let a = a.unwrap();
    s.exec(&format!(
        "SELECT @heartbeat('{{{}}}', '{{{}}}', '{{{job}}}', '{{{}}}', ARRAY['7'::jsonb])",
        a.slot, a.receipt, a.lease
    ))
    .await;
    s.exec(&format!("SELECT @operate({job}, 'cancel', 'not wanted any more')")).await;
    assert_eq!(s.complete(&[a]).await, [(1, "already closed: cancelled".into())]);
    let told: Vec<String> =
        s.all("SELECT format('%s %s %s %s', attempt, progress, errors[1] ->> 'error', errors[1] ->> 'attempt') FROM @terminal_jobs").await;
    assert_eq!(told, ["1 7 not wanted any more 1"]);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @attempt_state").await, 0);
}

/// With an old snapshot two operators would each retry the same history.
#[tokio::test]
async fn an_operator_with_an_old_snapshot_is_refused() {
    for made in ["failed", "cancelled", "completed", "available", "running", "scheduled"] {
        let db = Db::new().await;
        let (s, old) = (db.session().await, db.session().await);
        let (job, _) = make(&s, made).await;
        old.exec("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM @queue_meta").await;
        let operation = match made {
            "completed" => "delete",
            "available" | "running" => "cancel",
            _ => "retry",
        };
        assert!(operate(&s, job, operation).await.done, "{made}");
        let error = old.rows(&call(job, operation), &[]).await.expect_err(made);
        assert!(error.as_db_error().unwrap().message().contains("READ COMMITTED"), "{made}: {error:?}");
    }
}
