//! Maintenance: one leader at a time rotates, prunes, promotes and trims, each task on its own interval, each failure and
//! each skip counted with its reason (engine.md, Maintenance).
//!
//! `lead` is who does it and how that is lost, `tasks` what is done. Every task is safe with two leaders, so leadership saves
//! work and is not what correctness rests on. Guarded by `tests/engine_leadership.rs` and `tests/worker_fleet/failover.rs`.

mod lead;
mod tasks;

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until};
use tokio_postgres::Client;

use lead::Passes;
pub use lead::{Lead, LeaderInfo, NotLeading, leader};
use tasks::{Task, fit_cursors_after_restore};

use super::connect::Session;
use super::error::{Result, is_forbidden, is_read_only};
use super::ring::Ring;
use super::schema::Schema;
use super::target::Target;
use super::worker::link::within;

/// How long a pass that is under way may still take once it is asked to end.
const LAST_PASS: Duration = Duration::from_secs(3);

/// How maintenance runs.
#[derive(Debug, Clone)]
pub struct MaintenanceOptions {
    /// How often the rings turn while they are used.
    pub rotate_every: Duration,
    pub prune_every: Duration,
    pub promote_every: Duration,
    pub trim_every: Duration,
    /// How often a follower tries to lead.
    pub lead_every: Duration,
    /// How long a leader may be silent before the server takes the lead from it.
    pub lead_lease: Duration,
    /// Sealed queue slots that are kept for reading, although they could be pruned. The rest of the ring is headroom.
    pub keep_sealed: usize,
    /// How long a prune waits for its partitions' exclusive locks.
    pub lock_timeout: Duration,
    /// Jobs per promotion; more are due at once only in turns.
    pub promote_limit: i32,
    pub rescue_every: Duration,
    /// How long a worker may give no sign of life before its attempts are taken from it.
    pub stale_after: Duration,
    /// Claim batches a rescue looks at in each claim slot, and leases.
    pub rescue_limit: i32,
    /// How often it is looked whether a cron job is due.
    pub cron_every: Duration,
}

impl Default for MaintenanceOptions {
    fn default() -> Self {
        Self {
            rotate_every: Duration::from_secs(1),
            prune_every: Duration::from_millis(500),
            promote_every: Duration::from_millis(100),
            trim_every: Duration::from_secs(5),
            lead_every: Duration::from_secs(2),
            lead_lease: Duration::from_secs(15),
            keep_sealed: 4,
            lock_timeout: Duration::from_millis(50),
            promote_limit: 5000,
            rescue_every: Duration::from_millis(500),
            stale_after: Duration::from_secs(90),
            rescue_limit: 500,
            cron_every: Duration::from_millis(500),
        }
    }
}

/// What was done and skipped so far.
#[derive(Debug, Clone, Default, Serialize)]
pub struct MaintenanceReport {
    pub leading: bool,
    /// How often it began to lead.
    pub led: u64,
    pub rotated: BTreeMap<&'static str, u64>,
    pub pruned: BTreeMap<&'static str, u64>,
    pub promoted: u64,
    pub trimmed: u64,
    /// Attempts taken from lost workers, ended by their deadline, or by their callback's timeout.
    pub rescued: BTreeMap<&'static str, u64>,
    /// Jobs enqueued by cron, and occurrences that made none: coalesced into a later one, or refused.
    pub cron_fired: u64,
    pub cron_missed: u64,
    /// Failed jobs that were held long enough.
    pub expired: u64,
    /// Stretches of deep backlogs counted once, so that nobody else has to.
    pub backlog_stretches_counted: u64,
    /// By task and reason.
    pub skipped: BTreeMap<String, u64>,
    /// By task; the last error's text.
    pub failed: BTreeMap<&'static str, String>,
}

impl MaintenanceReport {
    fn skip(&mut self, task: &str, ring: Ring, reason: Option<&str>) {
        *self.skipped.entry(format!("{task} {}: {}", ring.name(), reason.unwrap_or("unknown"))).or_default() += 1;
    }
}

/// One pass of every task, once, on the caller's session, leader or not.
pub async fn once(client: &Client, schema: &Schema, options: &MaintenanceOptions) -> Result<MaintenanceReport> {
    let mut report = MaintenanceReport::default();
    fit_cursors_after_restore(client, schema).await?;
    for task in Task::ALL {
        task.pass(client, schema, options, &mut report).await?;
    }
    Ok(report)
}

/// Maintenance as a background task.
pub struct Maintenance {
    stop: watch::Sender<bool>,
    report: Arc<Mutex<MaintenanceReport>>,
    task: tokio::task::JoinHandle<()>,
}

impl Maintenance {
    /// Starts it: it leads as soon as it can, over as many connections as it takes.
    pub fn start(target: &Target, options: MaintenanceOptions) -> Self {
        let (stop, stopped) = watch::channel(false);
        let report = Arc::new(Mutex::new(MaintenanceReport::default()));
        let leader = Leader {
            lead_target: target.clone().for_writing().with_application_name("awactl leader"),
            pass_target: target.clone().for_writing().with_application_name("awactl maintenance"),
            options,
            report: Arc::clone(&report),
        };
        Self { stop, report, task: tokio::spawn(leader.run(stopped)) }
    }

    /// What it has done so far.
    pub fn report(&self) -> MaintenanceReport {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it after the pass it is in, unless that takes too long; returns the last report.
    pub async fn stop(self) -> MaintenanceReport {
        self.stop.send_replace(true);
        let _ = self.task.await;
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Leader {
    lead_target: Target,
    pass_target: Target,
    options: MaintenanceOptions,
    report: Arc<Mutex<MaintenanceReport>>,
}

impl Leader {
    async fn run(self, mut stop: watch::Receiver<bool>) {
        // A follower keeps its connection, rather than make one for each try.
        let mut following = None;
        loop {
            let lead = tokio::select! {
                lead = self.try_to_lead(&mut following) => lead,
                () = told(&mut stop) => return,
            };
            match lead {
                Ok(lead) => {
                    let ended = self.lead(&lead, &mut stop).await;
                    self.note(|r| r.leading = false);
                    lead.give_up().await;
                    if let Err(error) = ended {
                        tracing::warn!(error = %error, "lost the lead of maintenance");
                        self.note(|r| drop(r.failed.insert("lead", error.to_string())));
                    }
                }
                Err(NotLeading::Refused(reason)) => {
                    self.note(|r| *r.skipped.entry(format!("lead: {reason}")).or_default() += 1);
                }
                Err(NotLeading::Failed(error)) => {
                    tracing::warn!(error = %error, "could not try to lead maintenance");
                    self.note(|r| drop(r.failed.insert("lead", error.to_string())));
                }
            }
            tokio::select! {
                () = sleep(self.options.lead_every) => {}
                () = told(&mut stop) => return,
            }
        }
    }

    async fn try_to_lead(&self, following: &mut Option<Session>) -> Result<Lead, NotLeading> {
        let session = match following.take().filter(|session| !session.is_closed()) {
            Some(session) => session,
            None => within(super::connect(&self.lead_target)).await?,
        };
        let (outcome, session) = Lead::take(session, &self.lead_target.schema, self.options.lead_lease).await;
        *following = session;
        outcome
    }

    /// Leads until the lead is lost, or it is told to stop.
    async fn lead(&self, lead: &Lead, stop: &mut watch::Receiver<bool>) -> Result<()> {
        self.note(|r| {
            r.leading = true;
            r.led += 1;
        });
        // Beside the passes and not only between them, so that one under way ends with the lead.
        tokio::select! {
            biased;
            lost = lead.keep() => Err(lost),
            ended = self.maintain(lead, stop) => ended,
        }
    }

    async fn maintain(&self, lead: &Lead, stop: &mut watch::Receiver<bool>) -> Result<()> {
        let mut passes = Passes::open(&self.pass_target, lead).await?;
        passes.run(fit_cursors_after_restore(passes.client(), &self.pass_target.schema)).await?;
        let mut due: Vec<(Task, Instant)> = Task::ALL.iter().map(|task| (*task, Instant::now())).collect();
        loop {
            due.sort_by_key(|(_, at)| *at);
            let (task, at) = due[0];
            tokio::select! {
                biased;
                () = told(stop) => {
                    passes.close().await;
                    return Ok(());
                }
                () = sleep_until(at) => {}
            }
            let (held, usable) = tokio::join!(lead.renew(), passes.check(lead));
            held?;
            if usable.is_err() {
                // One that cannot get back leaves the lead to somebody who can.
                passes = Passes::open(&self.pass_target, lead).await?;
            }
            let mut done = self.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let mut stop_now = pin!(async {
                told(stop).await;
                sleep(LAST_PASS).await;
            });
            let outcome = tokio::select! {
                outcome = passes.run(task.pass(passes.client(), &self.pass_target.schema, &self.options, &mut done)) => outcome,
                () = &mut stop_now => return Ok(()),
            };
            if let Err(error) = outcome {
                // A server that takes no writes, or a role that may not: somebody else may do better.
                if is_read_only(&error) || is_forbidden(&error) {
                    return Err(error);
                }
                tracing::warn!(task = task.name(), error = %error, "a maintenance task failed");
                done.failed.insert(task.name(), error.to_string());
            }
            self.note(|r| *r = done);
            due[0].1 = Instant::now() + task.interval(&self.options);
        }
    }

    fn note(&self, change: impl FnOnce(&mut MaintenanceReport)) {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Until it is told to stop, or nobody is left who could.
async fn told(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}
