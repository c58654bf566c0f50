//! Kill -9 of workers and of the server at random points, with a ledger kept outside the engine: nothing is lost (I1),
//! nothing runs twice, and every count adds up.

use std::collections::HashSet;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use awactl::engine::embedded::{Embedded, Options};
use awactl::engine::enqueue::{BulkEnqueue, NewJob};
use awactl::engine::migrate;
use awactl::engine::migrations::MIGRATIONS;
use awactl::engine::worker::{
    Fleet, FleetOptions, Job, JobContext, Outcome, QueueOptions, RawJson, Registry, Worker, open,
};
use awactl::engine::{Schema, Session, Target};
use futures_util::future::BoxFuture;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Writes the job's id to the ledger before it answers: one write of 8 bytes, which a SIGKILL cannot tear.
struct Recorder(File);

impl Worker for Recorder {
    fn kind(&self) -> &str {
        "recorded"
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        let outcome = self.perform_now(ctx.job()).unwrap();
        Box::pin(async { outcome })
    }

    fn perform_now(&self, job: &Job) -> Option<Outcome> {
        (&self.0).write_all(&job.id.to_le_bytes()).unwrap();
        Some(Outcome::Complete)
    }
}

fn target(url: &str) -> Target {
    Target::parse(url, Schema::default(), "test", &|_| None).unwrap()
}

fn fleet(url: &str, ledger: &Path) -> Fleet {
    let mut registry = Registry::new();
    registry.insert(Recorder(File::options().append(true).create(true).open(ledger).unwrap())).unwrap();
    let queue = QueueOptions::new("crash", 16);
    let mut options = FleetOptions::new(vec![queue]);
    options.poll_interval = Duration::from_millis(50);
    if let Some(maintenance) = &mut options.maintenance {
        maintenance.rotate_every = Duration::from_millis(40);
        maintenance.prune_every = Duration::from_millis(20);
        maintenance.lead_every = Duration::from_millis(20);
    }
    Fleet::start(&target(url), registry, options)
}

/// Not a test: the worker process that the others start and kill.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the child process of the crash tests"]
async fn worker_process() {
    let (Ok(url), Ok(ledger)) = (std::env::var("CRASH_URL"), std::env::var("CRASH_LEDGER")) else { return };
    let _fleet = fleet(&url, Path::new(&ledger));
    std::future::pending::<()>().await
}

struct WorkerProcess(Child);

impl WorkerProcess {
    fn start(url: &str, ledger: &Path) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker_process", "--ignored", "--nocapture"])
            .env("CRASH_URL", url)
            .env("CRASH_LEDGER", ledger)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Drop for WorkerProcess {
    /// SIGKILL.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What was enqueued, and whether the server acknowledged it.
#[derive(Default)]
struct Enqueued {
    committed: HashSet<i64>,
    maybe: HashSet<i64>,
}

/// Enqueues until told to stop, some batches aborting, over as many connections as it takes.
async fn produce(url: String, seed: u64, mut stop: tokio::sync::watch::Receiver<bool>) -> Enqueued {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut enqueued = Enqueued::default();
    let target = target(&url);
    while !*stop.borrow_and_update() {
        let Ok(mut session) = open(&target).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        let Ok(bulk) = BulkEnqueue::prepare(&session, &target.schema).await else { continue };
        while !*stop.borrow_and_update() {
            let jobs: Vec<NewJob> = (0..rng.random_range(1..40)).map(|_| job(&mut rng)).collect();
            let Ok(transaction) = session.transaction().await else { break };
            let Ok(new) = bulk.run(&transaction, &jobs).await else { break };
            let ids = new.iter().map(|job| job.job_id);
            if rng.random_bool(0.1) {
                if transaction.rollback().await.is_err() {
                    break;
                }
                continue;
            }
            match transaction.commit().await {
                Ok(()) => enqueued.committed.extend(ids),
                // Killed between COMMIT and its acknowledgement: nobody knows.
                Err(_) => {
                    enqueued.maybe.extend(ids);
                    break;
                }
            }
            // Slow enough that a round ends with a mix of states.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
    enqueued
}

fn job(rng: &mut StdRng) -> NewJob {
    let mut job = NewJob::new("recorded", RawJson::from_json(r#"{"some": "payload"}"#).unwrap());
    job.queue = "crash".into();
    job.priority = rng.random_range(1..=4);
    job
}

fn executed(ledger: &Path) -> Vec<i64> {
    let bytes = std::fs::read(ledger).unwrap();
    bytes.chunks_exact(8).map(|id| i64::from_le_bytes(id.try_into().unwrap())).collect()
}

async fn ids(session: &Session, sql: &str) -> HashSet<i64> {
    session.query(sql, &[]).await.unwrap().iter().map(|row| row.get(0)).collect()
}

async fn number(session: &Session, sql: &str) -> i64 {
    session.query_one(sql, &[]).await.unwrap().get(0)
}

async fn crash_rounds(rounds: u32, seed: u64) {
    let mut rng = StdRng::seed_from_u64(seed);
    let server = Embedded::start(Options::ephemeral().setting("shared_buffers", "32MB")).await.unwrap();
    let url = server.url();
    let mut session = open(&target(&url)).await.unwrap();
    migrate::run(&mut session, &Schema::default(), MIGRATIONS, &|_| {}).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let ledger: PathBuf = dir.path().join("ledger");
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let producer = tokio::spawn(produce(url.clone(), seed, stopped));

    for round in 0..rounds {
        let worker = WorkerProcess::start(&url, &ledger);
        // The point of the kill is what is random here; nothing is waited for.
        tokio::time::sleep(Duration::from_millis(rng.random_range(30..300))).await;
        if round % 2 == 0 {
            server.stop_immediate().await.unwrap();
            server.start_again().await.unwrap();
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..150))).await;
        }
        drop(worker);
    }
    stop.send_replace(true);
    let enqueued = producer.await.unwrap();

    // A worker that nobody kills takes the rest; what killed ones had claimed stays claimed.
    let last = fleet(&url, &ledger);
    let session = open(&target(&url)).await.unwrap();
    let ready = "SELECT (SELECT count(*) FROM awa.ready_entries)
                      - (SELECT coalesce(sum(job_count), 0) FROM awa.ready_claim_attempt_batches)::bigint
                      + (SELECT count(*) FROM awa.deferred_jobs)";
    let mut left = i64::MAX;
    for _ in 0..3000 {
        left = number(&session, ready).await;
        if left == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(left, 0, "ready jobs that a healthy worker does not get");
    last.shut_down().await;

    let executed = executed(&ledger);
    let unique: HashSet<i64> = executed.iter().copied().collect();
    assert_eq!(unique.len(), executed.len(), "a job ran twice although nothing rescues yet");
    let open = ids(
        &session,
        "SELECT b.job_ids[n]
         FROM awa.lease_claim_batches AS b, generate_series(1, cardinality(b.job_ids)) AS n
         WHERE NOT EXISTS (
             SELECT FROM awa.lease_claim_closure_batches AS c
             WHERE c.claim_slot = b.claim_slot AND c.batch_id = b.batch_id AND c.receipt_ranges @> (b.batch_id * 1024 + n - 1))",
    )
    .await;
    let lost: Vec<_> = enqueued.committed.iter().filter(|id| !unique.contains(id) && !open.contains(id)).collect();
    assert!(lost.is_empty(), "lost: {lost:?}");
    let invented: Vec<_> =
        unique.iter().filter(|id| !enqueued.committed.contains(id) && !enqueued.maybe.contains(id)).collect();
    assert!(invented.is_empty(), "ran without having been committed: {invented:?}");

    let completed = number(
        &session,
        "SELECT (SELECT coalesce(sum(job_count), 0) FROM awa.receipt_completion_batches)::bigint
              + (SELECT coalesce(sum(job_count), 0) FROM awa.queue_terminal_rollup_deltas WHERE state = 'completed')::bigint",
    )
    .await;
    let known: HashSet<i64> = unique.union(&open).copied().collect();
    assert_eq!(completed + open.len() as i64, known.len() as i64, "every job is completed or still claimed");
    assert!(!enqueued.committed.is_empty() && completed > 0);
    println!(
        "{rounds} rounds: {} committed, {} maybe, {} run, {} still claimed by killed workers",
        enqueued.committed.len(),
        enqueued.maybe.len(),
        executed.len(),
        open.len()
    );
    server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kills_of_worker_and_server_lose_nothing() {
    crash_rounds(8, 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "50 rounds; `kills_of_worker_and_server_lose_nothing` is its short twin"]
async fn fifty_kills_of_worker_and_server_lose_nothing() {
    crash_rounds(50, 2).await;
}
