//! What the tests of fleets share: a database, a target on it, handlers that wait to be let go.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use awactl::engine::embedded::{Embedded, Options};
use awactl::engine::migrate;
use awactl::engine::migrations::MIGRATIONS;
use awactl::engine::worker::{
    Fleet, FleetOptions, JobContext, Outcome, QueueConfig, QueueOptions, Registry, open, worker_fn,
};
use awactl::engine::{Schema, Session as EngineSession, Target};
use tokio::sync::Semaphore;

use crate::common::server::server;
use crate::common::{Db, Session};

/// Long enough for any machine: only a hang takes it.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("it hangs")
}

pub async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A database, a session on it, and how a fleet reaches it.
pub struct Ground {
    pub db: Db,
    pub session: Session,
    pub target: Target,
}

impl Ground {
    pub async fn new() -> Self {
        let db = Db::new().await;
        let config = db.config();
        let target = target(&server().url_of(config.get_dbname().unwrap()));
        Self { session: db.session().await, db, target }
    }

    /// How many jobs of a state there are among the finished ones.
    pub async fn finished(&self, state: &str) -> i64 {
        self.session.one(&format!("SELECT count(*) FROM @terminal_jobs WHERE state = '{state}'")).await
    }
}

pub fn target(url: &str) -> Target {
    Target::parse(url, Schema::default(), "test", &|_| None).unwrap().with_application_name("fleet")
}

/// A server of its own, for tests that stop it; with the schema installed.
pub struct OwnServer {
    pub server: Embedded,
    pub target: Target,
}

impl OwnServer {
    pub async fn start() -> Self {
        let options = Options::ephemeral().setting("shared_buffers", "32MB").setting("fsync", "off");
        let server = Embedded::start(options).await.unwrap();
        let target = target(&server.url());
        let mut session = open(&target).await.unwrap();
        migrate::run(&mut session, &Schema::default(), MIGRATIONS, &|_| {}).await.unwrap();
        Self { server, target }
    }

    pub async fn session(&self) -> EngineSession {
        open(&self.target).await.unwrap()
    }

    /// Enqueues one job of kind k.
    pub async fn enqueue(&self) {
        self.session().await.batch_execute("SELECT awa.enqueue('k', 'q')").await.unwrap();
    }
}

pub fn queue(name: &str, workers: u16) -> QueueOptions {
    QueueOptions::of(name, &QueueConfig { workers, ..QueueConfig::default() })
}

/// A fleet for the queue q without maintenance, changed by `adjust`.
pub fn fleet(target: &Target, registry: Registry, workers: u16, adjust: impl FnOnce(&mut FleetOptions)) -> Fleet {
    let mut options = FleetOptions::new(vec![queue("q", workers)]);
    options.maintenance = None;
    options.poll_interval = Duration::from_millis(50);
    adjust(&mut options);
    Fleet::start(target, registry, options)
}

/// A registry with one handler, for the kind k.
pub fn one<F, Fut>(run: F) -> Registry
where
    F: Fn(JobContext) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Outcome> + Send + 'static,
{
    let mut registry = Registry::new();
    registry.insert(worker_fn("k", run)).unwrap();
    registry
}

/// Handlers wait at it until they are let go, one by one.
#[derive(Clone)]
pub struct Gate {
    started: Arc<AtomicUsize>,
    ended: Arc<AtomicUsize>,
    go: Arc<Semaphore>,
}

impl Gate {
    pub fn new() -> Self {
        Self { started: Arc::default(), ended: Arc::default(), go: Arc::new(Semaphore::new(0)) }
    }

    pub async fn pass(&self) {
        self.started.fetch_add(1, Ordering::SeqCst);
        self.go.acquire().await.unwrap().forget();
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    pub fn open(&self, n: usize) {
        self.go.add_permits(n);
    }

    pub fn started(&self) -> usize {
        self.started.load(Ordering::SeqCst)
    }

    pub fn waiting(&self) -> usize {
        self.started() - self.ended.load(Ordering::SeqCst)
    }

    /// A registry whose only handler passes this gate and answers so.
    pub fn registry(&self, outcome: Outcome) -> Registry {
        let gate = self.clone();
        one(move |_| {
            let (gate, outcome) = (gate.clone(), outcome.clone());
            async move {
                gate.pass().await;
                outcome
            }
        })
    }
}
