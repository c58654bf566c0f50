//! A process's workers: one dispatcher a queue, one completer, one listener, one heart, and maintenance beside them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::attempts::Attempts;
use super::callbacks::Callbacks;
use super::completer::Completer;
use super::config::QueueConfig;
use super::dispatcher::{Dispatcher, Phase, Shared, Unflushed};
use super::handler::Registry;
use super::heart::Heart;
use super::listener::Listener;
use super::pool::Pool;
use super::stats::{Stats, StatsNow};
use crate::engine::maintenance::{Maintenance, MaintenanceOptions};
use crate::engine::target::Target;

/// How long the last results may take when running jobs used up the shutdown timeout.
const LAST_WRITES: Duration = Duration::from_secs(3);

/// How long what should end at once may take.
const PATIENCE: Duration = Duration::from_secs(1);

/// One queue to work on.
#[derive(Debug, Clone)]
pub struct QueueOptions {
    pub name: String,
    /// Jobs at the same time.
    pub workers: usize,
    /// Jobs claimed ahead of a free worker; `None` is as many as workers, and up to 256 while that keeps them busy.
    pub prefetch: Option<usize>,
    /// How long an attempt may take.
    pub deadline: Option<Duration>,
    /// Jobs per second that this process starts at most.
    pub rate_limit: Option<f64>,
    /// The share of [`FleetOptions::max_workers`] when queues compete for it, relative to the others'.
    pub weight: u16,
    /// How long the head of a lower priority waits before it counts as one higher; `None` keeps priorities strict.
    pub priority_aging: Option<Duration>,
    /// False claims into `leases` instead of receipts.
    pub lease_claim_receipts: bool,
}

impl QueueOptions {
    /// The defaults.
    pub fn new(name: impl Into<String>, workers: usize) -> Self {
        Self { workers, ..Self::of(name, &QueueConfig::default()) }
    }

    /// A queue as workers.yaml configures it.
    pub fn of(name: impl Into<String>, config: &QueueConfig) -> Self {
        Self {
            name: name.into(),
            workers: usize::from(config.workers),
            prefetch: None,
            deadline: config.deadline,
            rate_limit: config.rate_limit,
            weight: config.weight,
            priority_aging: config.priority_aging,
            lease_claim_receipts: config.lease_claim_receipts,
        }
    }
}

/// How a fleet runs.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    pub queues: Vec<QueueOptions>,
    /// Jobs of all queues at the same time; only handlers that answer at once are not counted.
    pub max_workers: Option<usize>,
    /// How soon an unannounced job is found.
    pub poll_interval: Duration,
    /// How long running jobs may go on after a shutdown was asked for.
    pub shutdown_timeout: Duration,
    /// How long an attempt runs before the database is told that it lives, and again each time. Must be well below
    /// [`MaintenanceOptions::stale_after`].
    pub heartbeat_interval: Duration,
    /// `None` leaves maintenance to other processes.
    pub maintenance: Option<MaintenanceOptions>,
    /// What claims are signed with.
    pub instance: String,
}

impl FleetOptions {
    /// The defaults, for these queues.
    pub fn new(queues: Vec<QueueOptions>) -> Self {
        Self {
            queues,
            max_workers: None,
            poll_interval: Duration::from_millis(200),
            shutdown_timeout: Duration::from_secs(30),
            heartbeat_interval: Duration::from_secs(15),
            maintenance: Some(MaintenanceOptions::default()),
            instance: instance_name(),
        }
    }
}

/// A name that no other process has: host, process, and a random part against reuse.
pub fn instance_name() -> String {
    let host = nix::unistd::gethostname().map(|h| h.to_string_lossy().into_owned()).unwrap_or_default();
    format!("{host}:{}:{:08x}", std::process::id(), rand::random::<u32>())
}

/// A running fleet. Dropping it without [`Fleet::shut_down`] leaves its attempts open until they are rescued.
pub struct Fleet {
    phase: watch::Sender<Phase>,
    enough: watch::Sender<bool>,
    stats: Arc<Stats>,
    dispatchers: JoinSet<()>,
    completer: tokio::task::JoinHandle<()>,
    listener: tokio::task::JoinHandle<()>,
    /// Ended by dropping it.
    heart: JoinSet<()>,
    maintenance: Option<Maintenance>,
    bell: super::listener::Bell,
    shutdown_timeout: Duration,
    longest_grace: Duration,
}

impl Fleet {
    /// Starts it. Needs no database yet: what cannot be reached is tried again.
    pub fn start(target: &Target, registry: Registry, options: FleetOptions) -> Self {
        let target = &target.clone().for_writing();
        let stats = Arc::new(Stats::default());
        let (phase, phase_seen) = watch::channel(Phase::Running);
        let (results, inbox) = unbounded_channel();
        let (enough, told_enough) = watch::channel(false);
        let longest_grace = registry.longest_grace();
        let unflushed = Arc::new(Unflushed::default());
        let flushed = Arc::clone(&unflushed);
        let completer =
            Completer::new(target.clone(), Arc::clone(&stats), inbox, told_enough, move |n| flushed.flushed(n));
        let attempts = Arc::new(Attempts::default());
        let names: Vec<Arc<str>> = options.queues.iter().map(|q| Arc::from(&*q.name)).collect();
        let (listener, bell) =
            Listener::new(target.clone(), names.iter().cloned(), Arc::clone(&attempts), Arc::clone(&stats));
        let heart = Heart::new(target.clone(), Arc::clone(&attempts), options.heartbeat_interval, Arc::clone(&stats));
        let weights = options.queues.iter().map(|queue| queue.weight);
        let shared = Arc::new(Shared {
            instance: options.instance.clone(),
            registry,
            stats: Arc::clone(&stats),
            results,
            unflushed,
            phase: phase_seen,
            attempts,
            callbacks: Arc::new(Callbacks::new(target.clone(), options.poll_interval)),
            pool: options.max_workers.map(|size| Pool::new(size, weights)),
        });
        let mut dispatchers = JoinSet::new();
        for (queue, name) in options.queues.iter().zip(names.into_iter().enumerate()) {
            let dispatcher =
                Dispatcher::new(target.clone(), name, queue, options.poll_interval, bell.clone(), Arc::clone(&shared));
            dispatchers.spawn(dispatcher.run());
        }
        Self {
            phase,
            enough,
            stats,
            dispatchers,
            completer: tokio::spawn(completer.run()),
            listener: tokio::spawn(listener.run()),
            heart: JoinSet::from_iter([heart.run()]),
            maintenance: options.maintenance.map(|o| Maintenance::start(target, o)),
            bell,
            shutdown_timeout: options.shutdown_timeout,
            longest_grace,
        }
    }

    /// What it has done so far.
    pub fn stats(&self) -> StatsNow {
        self.stats.now()
    }

    /// The counters themselves, for whoever outlives a borrow of the fleet.
    pub fn counters(&self) -> Arc<Stats> {
        Arc::clone(&self.stats)
    }

    /// Stops claiming, lets running jobs end within the shutdown timeout, hands back the rest, writes every result; those
    /// that the database does not take in time are counted in [`StatsNow::unwritten`].
    pub async fn shut_down(mut self) -> StatsNow {
        let end = Instant::now() + self.shutdown_timeout;
        self.phase.send_replace(Phase::Draining);
        self.bell.ring_all();
        if timeout_at(end, self.all_ended()).await.is_err() {
            self.phase.send_replace(Phase::Aborting);
            if timeout(self.longest_grace + PATIENCE, self.all_ended()).await.is_err() {
                // One that blocks its thread hears nothing; waiting for it would be for ever.
                tracing::error!("a handler does not stop; its attempt stays open until rescued");
                self.dispatchers.shutdown().await;
            }
        }
        self.heart.abort_all();
        // The dispatchers held the last senders, so the completer ends when all is written.
        if timeout_at(end.max(Instant::now() + LAST_WRITES), &mut self.completer).await.is_err() {
            self.enough.send_replace(true);
            if let Err(error) = self.completer.await {
                tracing::error!(error = %error, "the completer ended early");
            }
        }
        if let Some(maintenance) = self.maintenance {
            maintenance.stop().await;
        }
        drop(self.bell);
        if timeout(PATIENCE, &mut self.listener).await.is_err() {
            self.listener.abort();
        }
        self.stats.now()
    }

    async fn all_ended(&mut self) {
        while self.dispatchers.join_next().await.is_some() {}
    }
}
