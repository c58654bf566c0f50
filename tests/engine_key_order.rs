//! Whatever changes several unique keys locks every row first and then the keys in their order, so that no two of them
//! can wait for each other (engine.md, Transitions; docs/model.md, Lock order).

mod common;

use common::{Attempt, Db, Session, attempts};

/// In the mask only where a job is retryable, available, completed or cancelled: taken when that is entered.
const ON_RETRY: &str = "00001000";
const ON_CANCEL: &str = "00000010";
const WHEN_AVAILABLE: &str = "01000000";
const WHEN_COMPLETED: &str = "00010000";
/// Let go at the end.
const WHILE_RUNNING: &str = "01100000";

async fn enqueue(s: &Session, queue: &str, key: u8, mask: &str) -> i64 {
    s.one(&format!(
        "SELECT job_id FROM @enqueue('k', '{queue}', unique_key => '\\x{key:02x}', unique_states => B'{mask}')"
    ))
    .await
}

/// A job that is due, and was put off while another one held its key.
async fn deferred(s: &Session, queue: &str, key: u8, mask: &str) {
    let id: i64 = s
        .one(&format!(
            "SELECT job_id FROM @enqueue('k', '{queue}', run_at => now() + interval '1 hour',
             unique_key => '\\x{key:02x}', unique_states => B'{mask}')"
        ))
        .await;
    s.exec(&format!("UPDATE @deferred_jobs SET run_at = '2020-01-0{}' WHERE job_id = {id}", 9 - key)).await;
}

async fn running(s: &Session, key: u8, mask: &str) -> Attempt {
    enqueue(s, "q", key, mask).await;
    attempts(&s.claim("q", 1).await)[0]
}

/// The attempt as a lease that waits for a callback.
async fn waiting(s: &Session, key: u8, mask: &str) -> Attempt {
    let a = running(s, key, mask).await;
    let Attempt { slot, receipt, job, lease } = a;
    let token: String = s
        .one(&format!("SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 microsecond')::text"))
        .await;
    s.exec(&format!("SELECT @wait_for_callback({receipt}, {job}, {lease}, '{token}')")).await;
    a
}

fn call(function: &str, attempts: &[Attempt], more: &str) -> String {
    let list = |of: fn(&Attempt) -> i64| attempts.iter().map(|a| of(a).to_string()).collect::<Vec<_>>().join(",");
    format!(
        "SELECT place FROM @{function}('{{{}}}', '{{{}}}', '{{{}}}', '{{{}}}'{more})",
        list(|a| a.slot.into()),
        list(|a| a.receipt),
        list(|a| a.job),
        list(|a| a.lease)
    )
}

fn close(outcome: &str, attempts: &[Attempt]) -> String {
    let all = |what: &str| vec![what; attempts.len()].join(",");
    let more =
        format!(", '{{{}}}', '{{{}}}', '{{{}}}', '{{{}}}'", all(outcome), all("why"), all("1 hour"), all("NULL"));
    call("close_attempts", attempts, &more)
}

/// The statement waits for what the holder did; meanwhile nobody who asks for the key waits.
async fn waits_without_touching(db: &Db, holds: &str, statement: &str, key: u8) {
    let (holder, waiter, probe) = (db.session().await, db.session().await, db.session().await);
    holder.exec("BEGIN").await;
    holder.exec(holds).await;
    let pid = waiter.pid().await;
    let waiting = waiter.spawn(statement);
    db.until_waiting(pid).await;
    probe.exec("SET lock_timeout = '5 s'; BEGIN").await;
    enqueue(&probe, "probe", key, "11111111").await;
    probe.exec("ROLLBACK").await;
    holder.exec("ROLLBACK").await;
    waiting.await.unwrap().unwrap();
}

/// What has key 2 comes first by every other order, and still waits until key 1 is had.
async fn takes_key_1_before_key_2(db: &Db, statement: &str) {
    let holds = "SELECT @enqueue('k', 'holder', unique_key => '\\x01', unique_states => B'11111111')";
    waits_without_touching(db, holds, statement, 2).await;
}

#[tokio::test]
async fn a_close_of_several_attempts_takes_keys_in_their_order() {
    let db = Db::new().await;
    let s = db.session().await;
    let both = [running(&s, 2, ON_RETRY).await, running(&s, 1, ON_RETRY).await];
    takes_key_1_before_key_2(&db, &close("retryable", &both)).await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 2);
}

#[tokio::test]
async fn so_does_one_that_gives_one_up_and_takes_another() {
    let db = Db::new().await;
    let s = db.session().await;
    let both = [running(&s, 2, WHILE_RUNNING).await, running(&s, 1, ON_RETRY).await];
    takes_key_1_before_key_2(&db, &close("retryable", &both)).await;
}

#[tokio::test]
async fn a_close_that_goes_on_one_by_one_takes_keys_in_their_order_too() {
    let db = Db::new().await;
    let s = db.session().await;
    let both = [running(&s, 2, ON_RETRY).await, running(&s, 1, ON_RETRY).await];
    s.enqueue("q", 1).await;
    let third = attempts(&s.claim("q", 1).await)[0];
    s.exec("ALTER TABLE @deferred_jobs ADD CONSTRAINT no_poison CHECK (unique_key IS NOT NULL)").await;
    takes_key_1_before_key_2(&db, &close("retryable", &[third, both[0], both[1]])).await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 2);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs WHERE state = 'failed'").await, 1);
}

#[tokio::test]
async fn a_completion_of_several_leases_takes_keys_in_their_order() {
    let db = Db::new().await;
    let s = db.session().await;
    let both = [waiting(&s, 2, WHEN_COMPLETED).await, waiting(&s, 1, WHEN_COMPLETED).await];
    takes_key_1_before_key_2(&db, &call("complete", &both, "")).await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs WHERE state = 'completed'").await, 2);
}

#[tokio::test]
async fn a_rescue_takes_keys_in_their_order_over_all_its_sweeps() {
    let db = Db::new().await;
    let s = db.session().await;
    running(&s, 2, ON_RETRY).await;
    waiting(&s, 1, ON_RETRY).await;
    takes_key_1_before_key_2(&db, "SELECT @rescue('0 seconds')").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 2);
}

#[tokio::test]
async fn a_promotion_takes_keys_in_their_order_over_all_its_queues() {
    for (queues, promote) in [(["a", "b"], "SELECT @promote(10)"), (["a", "a"], "SELECT @promote_queue('a', 10)")] {
        let db = Db::new().await;
        let s = db.session().await;
        deferred(&s, queues[0], 2, WHEN_AVAILABLE).await;
        deferred(&s, queues[1], 1, WHEN_AVAILABLE).await;
        takes_key_1_before_key_2(&db, promote).await;
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 0);
    }
}

#[tokio::test]
async fn a_drain_takes_keys_in_their_order_over_all_its_lanes() {
    let db = Db::new().await;
    let s = db.session().await;
    enqueue(&s, "q", 2, ON_CANCEL).await;
    s.exec("SELECT @enqueue('k', 'q', priority => 4, unique_key => '\\x01', unique_states => B'00000010')").await;
    takes_key_1_before_key_2(&db, "SELECT @drain_queue('q')").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @terminal_jobs WHERE state = 'cancelled'").await, 2);
}

#[tokio::test]
async fn leases_are_locked_before_any_key_is_taken() {
    let db = Db::new().await;
    let s = db.session().await;
    let first = waiting(&s, 1, WHEN_COMPLETED).await;
    let second = waiting(&s, 2, WHEN_COMPLETED).await;
    let row = format!("SELECT FROM @leases WHERE job_id = {} FOR UPDATE", second.job);
    waits_without_touching(&db, &row, &call("complete", &[first, second], ""), 1).await;
}

#[tokio::test]
async fn leases_are_locked_before_any_key_is_given_up() {
    for statement in [|a: &[Attempt]| call("complete", a, ""), |a: &[Attempt]| close("failed", a)] {
        let db = Db::new().await;
        let s = db.session().await;
        let claim = running(&s, 1, WHILE_RUNNING).await;
        let lease = waiting(&s, 2, ON_RETRY).await;
        let row = format!("SELECT FROM @leases WHERE job_id = {} FOR UPDATE", lease.job);
        waits_without_touching(&db, &row, &statement(&[claim, lease]), 1).await;
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @job_unique_claims").await, 0);
    }
}

#[tokio::test]
async fn attempt_states_are_locked_before_any_key_is_taken() {
    let db = Db::new().await;
    let s = db.session().await;
    let both = [running(&s, 1, ON_RETRY).await, running(&s, 2, ON_RETRY).await];
    for Attempt { slot, receipt, job, lease } in both {
        s.exec(&format!("SELECT @heartbeat('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}', '{{NULL}}')"))
            .await;
    }
    let row = format!("SELECT FROM @attempt_state WHERE job_id = {} FOR UPDATE", both[1].job);
    waits_without_touching(&db, &row, &close("retryable", &both), 1).await;
}
