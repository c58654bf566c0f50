//! Callbacks of handlers: resumed in the middle, answered after they returned, timed out.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use awactl::engine::worker::{CallbackError, CancelReason, Outcome, RawJson};
use tokio::sync::mpsc::unbounded_channel;

use crate::support::{Ground, PATIENCE, fleet, one, until, within};

async fn answer(ground: &Ground, token: &str, action: &str, payload: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM @resolve_callback('{token}', '{action}', '{payload}')");
    ground.session.one(&sql).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_handler_is_resumed_twice() {
    resumed_twice(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_handler_is_resumed_twice_on_a_lease_from_the_beginning() {
    resumed_twice(false).await;
}

async fn resumed_twice(receipts: bool) {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let (tokens, mut registered) = unbounded_channel();
    let heard: Arc<Mutex<Vec<Option<RawJson>>>> = Arc::default();
    let payloads = Arc::clone(&heard);
    let handler = one(move |ctx| {
        let (tokens, payloads) = (tokens.clone(), Arc::clone(&payloads));
        async move {
            for _ in 0..2 {
                let token = ctx.register_callback(PATIENCE).await.unwrap();
                tokens.send(token.clone()).unwrap();
                let payload = ctx.wait_for_callback(&token).await.unwrap();
                payloads.lock().unwrap().push(payload);
            }
            Outcome::Complete
        }
    });
    let fleet = fleet(&ground.target, handler, 2, |o| {
        o.queues[0].lease_claim_receipts = receipts;
        // Long enough for a slow machine to come to the wait.
        o.queues[0].deadline = Some(Duration::from_secs(3));
    });
    // The first answer comes while it waits, the second maybe before it does: both are right.
    let first = within(registered.recv()).await.unwrap();
    ground.db.until("SELECT EXISTS (SELECT FROM @leases WHERE state = 'waiting_external')").await;
    // A deadline does not run while somebody else does the work.
    ground.db.until("SELECT clock_timestamp() > claimed_at + interval '3.5 s' FROM @leases").await;
    // Losing the connection that it asks by is nothing to it.
    ground
        .db
        .until(
            "SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity
         WHERE datname = current_database() AND application_name = 'fleet' AND query LIKE '%.callback_result(%'",
        )
        .await;
    assert_eq!(answer(&ground, &first, "resume", "{\"n\": 1}").await, 1);
    let second = within(registered.recv()).await.unwrap();
    assert_eq!(answer(&ground, &second, "resume", "2").await, 1);
    assert_eq!(answer(&ground, &first, "resume", "3").await, 0, "a token is answered once");
    until("the job completes", || fleet.stats().completed == 1).await;
    within(fleet.shut_down()).await;
    let heard: Vec<String> = heard.lock().unwrap().iter().map(|p| p.as_ref().unwrap().to_string()).collect();
    assert_eq!(heard, ["{\"n\": 1}", "2"]);
    assert_eq!(ground.finished("completed").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_returned_leaves_its_attempt_to_the_callback() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let (tokens, mut registered) = unbounded_channel();
    let handler = one(move |ctx| {
        let tokens = tokens.clone();
        async move {
            ctx.set_progress(RawJson::from_json("\"asked\"").unwrap());
            let token = ctx.register_callback(PATIENCE).await.unwrap();
            tokens.send(token.clone()).unwrap();
            Outcome::WaitForCallback(token)
        }
    });
    // One worker: the wait must not keep the permit.
    let fleet = fleet(&ground.target, handler, 1, |_| {});
    let first = within(registered.recv()).await.unwrap();
    until("it is left waiting", || fleet.stats().waiting == 1).await;
    let progress = "SELECT progress = '\"asked\"' FROM @attempt_state";
    assert!(ground.session.one::<bool>(progress).await);
    ground.session.enqueue("q", 1).await;
    let second = within(registered.recv()).await.unwrap();
    until("both are left waiting", || fleet.stats().waiting == 2).await;
    let stats = within(fleet.shut_down()).await;
    assert_eq!((stats.completed, stats.lost, stats.unwritten), (0, 0, 0));
    assert_eq!(ground.session.one::<i64>("SELECT count(*) FROM @leases WHERE state = 'waiting_external'").await, 2);
    assert_eq!(answer(&ground, &first, "complete", "1").await, 1);
    assert_eq!(answer(&ground, &second, "fail", "1").await, 1);
    assert_eq!((ground.finished("completed").await, ground.finished("failed").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callback_that_completes_ends_the_handler_that_waits_for_it() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let (tokens, mut registered) = unbounded_channel();
    let handler = one(move |ctx| {
        let tokens = tokens.clone();
        async move {
            let token = ctx.register_callback(PATIENCE).await.unwrap();
            tokens.send(token.clone()).unwrap();
            match ctx.wait_for_callback(&token).await {
                Err(CallbackError::Stopped(CancelReason::LeaseLost)) => Outcome::fail("too late to say so"),
                other => panic!("{other:?}"),
            }
        }
    });
    let fleet = fleet(&ground.target, handler, 1, |_| {});
    let token = within(registered.recv()).await.unwrap();
    assert_eq!(answer(&ground, &token, "complete", "1").await, 1);
    until("the handler's own answer loses", || fleet.stats().lost == 1).await;
    within(fleet.shut_down()).await;
    assert_eq!((ground.finished("completed").await, ground.finished("failed").await), (1, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_callback_that_never_comes_is_a_retry_and_ends_the_handler() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 1).await;
    let handler = one(move |ctx| async move {
        let token = ctx.register_callback(Duration::from_millis(50)).await.unwrap();
        match ctx.wait_for_callback(&token).await {
            Err(error) => error.into(),
            Ok(_) => panic!("nobody answered"),
        }
    });
    let fleet = fleet(&ground.target, handler, 1, |o| {
        let maintenance = awactl::engine::maintenance::MaintenanceOptions {
            rescue_every: Duration::from_millis(20),
            ..Default::default()
        };
        o.maintenance = Some(maintenance);
    });
    until("the handler's own answer loses", || fleet.stats().lost == 1).await;
    within(fleet.shut_down()).await;
    let said = "SELECT errors[1]->>'error' LIKE '%callback timed out%' AND state = 'retryable' AND attempt = 1 FROM @deferred_jobs";
    assert!(ground.session.one::<bool>(said).await);
}
