//! Everything through a transaction pooler (issue 3, point 14): fleets, enqueueing by COPY, the commands.

mod common;

use std::collections::HashSet;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use awactl::engine::connect;
use awactl::engine::enqueue::{BulkEnqueue, NewJob};
use awactl::engine::maintenance::MaintenanceOptions;
use awactl::engine::worker::{Fleet, FleetOptions, JobContext, Outcome, QueueOptions, RawJson, Registry, worker_fn};
use awactl::engine::{Schema, Session, Target};
use common::pooler::Pooler;
use common::{Db, server};

/// Long enough for any machine: only a hang takes it.
const PATIENCE: Duration = Duration::from_secs(60);

fn target(url: &str) -> Target {
    Target::parse(url, Schema::default(), "test", &|_| None).unwrap()
}

/// A database behind a pooler whose connections are used, by somebody else, with the names that the driver gives its statements.
async fn behind_a_pooler(size: usize) -> (Db, Pooler, Target) {
    let db = Db::new().await;
    let pooler = Pooler::start(db.config().get_dbname().unwrap(), size).await;
    let target = target(&pooler.url());
    let strangers: Vec<Session> = vec![connect(&target).await.unwrap(), connect(&target).await.unwrap()];
    assert!(strangers.iter().all(Session::is_pooled), "not noticed");
    for n in 0..2 * size {
        let prepare = (0..300).map(|s| format!("PREPARE s{s} AS SELECT 'a stranger''s';")).collect::<String>();
        // Some of them have it already.
        let _ = strangers[n % 2].batch_execute(&prepare).await;
    }
    (db, pooler, target)
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn job(kind: &str) -> NewJob {
    let mut job = NewJob::new(kind, RawJson::from_json("{}").unwrap());
    job.queue = "q".into();
    job
}

/// Every kind of end, by the job's kind.
fn registry(ran: &Arc<Mutex<HashSet<i64>>>) -> Registry {
    let mut registry = Registry::new();
    for kind in ["completes", "fails", "retries", "snoozes", "lasts"] {
        let ran = Arc::clone(ran);
        let handler = move |ctx: JobContext| {
            let ran = Arc::clone(&ran);
            async move {
                let first = ran.lock().unwrap().insert(ctx.job().id);
                match kind {
                    "fails" => Outcome::Fail { error: "for good".into() },
                    "retries" if first => Outcome::Retry { error: "once".into(), after: Some(Duration::ZERO) },
                    "snoozes" if first => Outcome::Snooze(Duration::ZERO),
                    "lasts" => {
                        ctx.set_progress(RawJson::from_json(r#"{"half": true}"#).unwrap());
                        tokio::time::sleep(Duration::from_millis(100)).await;
                        Outcome::Complete
                    }
                    _ => Outcome::Complete,
                }
            }
        };
        registry.insert(worker_fn(kind, handler)).unwrap();
    }
    registry
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleets_do_all_their_work_and_leave_nothing_on_connections_that_others_use() {
    let (db, _pooler, target) = behind_a_pooler(4).await;
    let ran = Arc::default();
    let fleets = [0, 1].map(|_| {
        let mut options = FleetOptions::new(vec![QueueOptions::new("q", 8)]);
        options.poll_interval = Duration::from_millis(50);
        options.heartbeat_interval = Duration::from_millis(20);
        options.maintenance = Some(MaintenanceOptions {
            lead_every: Duration::from_millis(50),
            rotate_every: Duration::from_millis(100),
            ..MaintenanceOptions::default()
        });
        Fleet::start(&target, registry(&ran), options)
    });
    let mut session = connect(&target).await.unwrap();
    let bulk = BulkEnqueue::prepare(&session, &Schema::default()).await.unwrap();
    let kinds = ["completes", "fails", "retries", "snoozes", "lasts"];
    for round in 0..20 {
        // Many go by COPY, few do not.
        let jobs: Vec<NewJob> =
            kinds.iter().cycle().take(if round % 2 == 0 { 5 } else { 100 }).map(|k| job(k)).collect();
        let transaction = session.transaction().await.unwrap();
        bulk.run(&transaction, &jobs).await.unwrap();
        transaction.commit().await.unwrap();
    }
    let sum =
        |count: fn(&awactl::engine::worker::StatsNow) -> u64| -> u64 { fleets.iter().map(|f| count(&f.stats())).sum() };
    until("all is done", || (sum(|s| s.completed), sum(|s| s.failed)) == (840, 210)).await;
    assert_eq!((sum(|s| s.retried), sum(|s| s.snoozed), sum(|s| s.lost), sum(|s| s.reconnects)), (210, 210, 0, 0));
    assert!(sum(|s| s.heartbeats) > 0);
    for fleet in fleets {
        assert_eq!(tokio::time::timeout(PATIENCE, fleet.shut_down()).await.unwrap().unwritten, 0);
    }
    db.until("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))").await;
    let fresh = db.session().await;
    for name in ["jit", "plan_cache_mode", "default_transaction_isolation", "idle_in_transaction_session_timeout"] {
        let usual: String = fresh.one(&format!("SELECT current_setting('{name}')")).await;
        // Once on each of the pool's connections.
        for _ in 0..8 {
            let row = session.simple_row(&format!("SELECT current_setting('{name}')")).await.unwrap();
            assert_eq!(row.get(0), Some(&*usual), "{name} was left on a connection");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_goes_on_after_errors_wherever_they_come() {
    let (_db, _pooler, target) = behind_a_pooler(3).await;
    let mut session = connect(&target).await.unwrap();
    let divide = session.prepare("SELECT 10 / $1::int").await.unwrap();
    let kind = session.prepare("SELECT 'failed'::awa.job_state, $1::text").await.unwrap();
    assert_eq!(kind.columns()[0].type_().name(), "job_state");
    for _ in 0..5 {
        assert_eq!(session.query_one(&divide, &[&5]).await.unwrap().get::<_, i32>(0), 2);
        assert!(session.query_one(&divide, &[&0]).await.is_err());
        assert!(session.prepare("SELECT nonsense").await.is_err());
        assert!(session.batch_execute("SELECT nonsense").await.is_err());
        assert_eq!(session.query_one(&kind, &[&"x"]).await.unwrap().get::<_, &str>(1), "x");
        // All at once, so that answers of one arrive while others are on their way out.
        let (a, b, c, d) = tokio::join!(
            session.query_one(&divide, &[&2]),
            session.query_one(&divide, &[&0]),
            session.query_one(&kind, &[&"y"]),
            session.query_one(&divide, &[&1]),
        );
        assert!(b.is_err());
        assert_eq!((a.unwrap().get::<_, i32>(0), d.unwrap().get::<_, i32>(0)), (5, 10));
        assert_eq!(c.unwrap().get::<_, &str>(1), "y");
        let transaction = session.transaction().await.unwrap();
        assert!(transaction.query_one(&divide, &[&0]).await.is_err());
        assert!(transaction.query_one(&divide, &[&1]).await.is_err(), "the transaction was aborted");
        transaction.rollback().await.unwrap();
    }
    // A text that takes many packets, there and back.
    let long = "x".repeat(3_000_000);
    assert_eq!(session.query_one(&kind, &[&long]).await.unwrap().get::<_, &str>(1), long);
}

#[tokio::test]
async fn a_server_is_not_taken_for_a_pooler() {
    let db = Db::new().await;
    let socket = server::server().url_of(db.config().get_dbname().unwrap());
    for url in [socket, server::server().tcp_url()] {
        assert!(!connect(&target(&url)).await.unwrap().is_pooled());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_commands_work() {
    let (_db, pooler, _target) = behind_a_pooler(3).await;
    let url = pooler.url();
    let awactl = |args: &str| {
        let (url, args) = (url.clone(), args.to_owned());
        async move {
            let run = move || {
                let mut command = Command::new(env!("CARGO_BIN_EXE_awactl"));
                command
                    .args(["--database-url", &url, "--schema", "other"])
                    .args(args.split(' ').map(|arg| arg.replace('_', " ")))
                    .output()
                    .unwrap()
            };
            tokio::task::spawn_blocking(run).await.unwrap()
        }
    };
    for args in [
        "migrate",
        "enqueue say {} --count 50 --queue q",
        "enqueue say {} --in 1h",
        "maintenance rotate --force",
        "maintenance prune",
        "maintenance rescue",
        "maintenance promote",
        "maintenance once",
        "maintenance status",
        "queue list",
        "queue pause q",
        "queue resume q",
        "job list --queue q",
        "job cancel --queue q --yes",
        "cron add c 0_2_*_*_* say",
        "cron list",
        "dlq list",
        "inspect rings",
        "inspect dead-tuples",
        "inspect queues",
        "inspect claims",
        "migrate status",
    ] {
        let out = awactl(args).await;
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(out.status.success(), "{args}: {said}");
    }
}
