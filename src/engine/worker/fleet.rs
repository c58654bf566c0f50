//! A process's workers: one dispatcher a queue, one completer, one listener, and maintenance beside them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::completer::Completer;
use super::config::QueueConfig;
use super::dispatcher::{Dispatcher, Phase, Shared, Unflushed};
use super::handler::Registry;
use super::listener::Listener;
use super::stats::{Stats, StatsNow};
use crate::engine::maintenance::{Maintenance, MaintenanceOptions};
use crate::engine::target::Target;

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
            priority_aging: config.priority_aging,
            lease_claim_receipts: config.lease_claim_receipts,
        }
    }
}

/// How a fleet runs.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    pub queues: Vec<QueueOptions>,
    /// How soon an unannounced job is found.
    pub poll_interval: Duration,
    /// How long running jobs may go on after a shutdown was asked for.
    pub shutdown_timeout: Duration,
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
            poll_interval: Duration::from_millis(200),
            shutdown_timeout: Duration::from_secs(30),
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
    stats: Arc<Stats>,
    dispatchers: JoinSet<()>,
    completer: tokio::task::JoinHandle<()>,
    listener: tokio::task::JoinHandle<()>,
    maintenance: Option<Maintenance>,
    bell: super::listener::Bell,
    shutdown_timeout: Duration,
}

impl Fleet {
    /// Starts it. Needs no database yet: what cannot be reached is tried again.
    pub fn start(target: &Target, registry: Registry, options: FleetOptions) -> Self {
        let stats = Arc::new(Stats::default());
        let (phase, phase_seen) = watch::channel(Phase::Running);
        let (results, inbox) = unbounded_channel();
        let unflushed = Arc::new(Unflushed::default());
        let flushed = Arc::clone(&unflushed);
        let completer = Completer::new(target.clone(), Arc::clone(&stats), inbox, move |n| flushed.flushed(n));
        let names: Vec<Arc<str>> = options.queues.iter().map(|q| Arc::from(&*q.name)).collect();
        let (listener, bell) = Listener::new(target.clone(), names.iter().cloned(), Arc::clone(&stats));
        let shared = Arc::new(Shared {
            instance: options.instance.clone(),
            registry,
            stats: Arc::clone(&stats),
            results,
            unflushed,
            phase: phase_seen,
        });
        let mut dispatchers = JoinSet::new();
        for (queue, name) in options.queues.iter().zip(names) {
            let dispatcher =
                Dispatcher::new(target.clone(), name, queue, options.poll_interval, bell.clone(), Arc::clone(&shared));
            dispatchers.spawn(dispatcher.run());
        }
        Self {
            phase,
            stats,
            dispatchers,
            completer: tokio::spawn(completer.run()),
            listener: tokio::spawn(listener.run()),
            maintenance: options.maintenance.map(|o| Maintenance::start(target, o)),
            bell,
            shutdown_timeout: options.shutdown_timeout,
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

    /// Stops claiming, lets running jobs end within the shutdown timeout, hands back the rest, writes every result.
    pub async fn shut_down(mut self) -> StatsNow {
        self.phase.send_replace(Phase::Draining);
        self.bell.ring_all();
        let all_ended = async { while self.dispatchers.join_next().await.is_some() {} };
        if tokio::time::timeout(self.shutdown_timeout, all_ended).await.is_err() {
            self.phase.send_replace(Phase::Aborting);
            while self.dispatchers.join_next().await.is_some() {}
        }
        // The dispatchers held the last senders, so the completer ends when all is written.
        if let Err(error) = self.completer.await {
            tracing::error!(error = %error, "the completer ended early");
        }
        if let Some(maintenance) = self.maintenance {
            maintenance.stop().await;
        }
        drop(self.bell);
        let _ = self.listener.await;
        self.stats.now()
    }
}
