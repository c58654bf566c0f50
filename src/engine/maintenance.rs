//! Maintenance: one leader at a time rotates, prunes, promotes and trims, each task on its own interval, each failure and
//! each skip counted with its reason (engine.md, Maintenance).
//!
//! Leadership is a session advisory lock. Every task is safe with two leaders, so leadership saves work and is not what
//! correctness rests on; it is lost with the session, at once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_postgres::Client;

use super::connect::Session;
use super::cron;
use super::error::{EngineError, Result};
use super::promote::promote;
use super::rescue::rescue;
use super::ring::{self, Ring, SlotState};
use super::schema::Schema;
use super::target::Target;
use super::worker::link;

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Task {
    Promote,
    Rescue,
    Rotate,
    Prune,
    Trim,
    Cron,
}

impl Task {
    const ALL: [Task; 6] = [Task::Promote, Task::Cron, Task::Rescue, Task::Rotate, Task::Prune, Task::Trim];

    fn name(self) -> &'static str {
        match self {
            Self::Promote => "promote",
            Self::Rescue => "rescue",
            Self::Rotate => "rotate",
            Self::Prune => "prune",
            Self::Trim => "trim",
            Self::Cron => "cron",
        }
    }

    fn interval(self, options: &MaintenanceOptions) -> Duration {
        match self {
            Self::Promote => options.promote_every,
            Self::Rescue => options.rescue_every,
            Self::Rotate => options.rotate_every,
            Self::Prune => options.prune_every,
            Self::Trim => options.trim_every,
            Self::Cron => options.cron_every,
        }
    }

    async fn pass(
        self,
        client: &Client,
        schema: &Schema,
        options: &MaintenanceOptions,
        report: &mut MaintenanceReport,
    ) -> Result<()> {
        match self {
            Self::Promote => {
                // As long as there is more, but not so long that the other tasks starve.
                for _ in 0..10 {
                    let moved = promote(client, schema, options.promote_limit).await?;
                    report.promoted += moved.unsigned_abs() as u64;
                    if moved == 0 {
                        break;
                    }
                }
            }
            Self::Cron => {
                let passed = cron::pass(client, schema).await?;
                report.cron_fired += passed.fired;
                report.cron_missed += passed.missed.unsigned_abs();
                for (reason, n) in passed.skipped {
                    *report.skipped.entry(format!("cron: {reason}")).or_default() += n;
                }
                for (name, error) in passed.failed {
                    tracing::warn!(cron = name, error, "a cron job could not be fired");
                    report.failed.insert("cron", format!("{name}: {error}"));
                }
            }
            Self::Rescue => {
                let rescued = rescue(client, schema, options.stale_after, options.rescue_limit).await?;
                for (why, n) in rescued.by_reason() {
                    if n > 0 {
                        *report.rescued.entry(why).or_default() += n;
                    }
                }
            }
            Self::Rotate => {
                for ring in Ring::ALL {
                    let outcome = ring::rotate(client, schema, ring, false).await?;
                    if outcome.rotated {
                        *report.rotated.entry(ring.name()).or_default() += 1;
                    } else {
                        report.skip("rotate", ring, outcome.reason.as_deref());
                    }
                }
            }
            Self::Prune => prune_rings(client, schema, options, report).await?,
            Self::Trim => {
                for ring in Ring::ALL {
                    let sql = schema.render("SELECT {schema}.trim_ring_state($1)");
                    let gone: i64 = client.query_one(&sql, &[&ring.name()]).await?.try_get(0)?;
                    report.trimmed += gone.unsigned_abs();
                }
                let sql = schema.render("SELECT {schema}.settle_backlog_segments(), {schema}.trim_backlog_segments()");
                let row = client.query_one(&sql, &[]).await?;
                report.backlog_stretches_counted += row.try_get::<_, i32>(0)?.unsigned_abs() as u64;
                report.trimmed += row.try_get::<_, i64>(1)?.unsigned_abs();
                let sql = schema.render(
                    "SELECT {schema}.trim_attempt_state(), {schema}.purge_expired(), {schema}.fold_terminal_rollups()",
                );
                let row = client.query_one(&sql, &[]).await?;
                report.trimmed += row.try_get::<_, i64>(0)?.unsigned_abs();
                report.expired += row.try_get::<_, i32>(1)?.unsigned_abs() as u64;
                report.trimmed += row.try_get::<_, i64>(2)?.unsigned_abs();
            }
        }
        Ok(())
    }
}

/// The claim ring first: what it proves pruned is the cheapest proof for the queue ring.
async fn prune_rings(
    client: &Client,
    schema: &Schema,
    options: &MaintenanceOptions,
    report: &mut MaintenanceReport,
) -> Result<()> {
    client.query(&schema.render("SELECT {schema}.advance_idle_cursors()"), &[]).await?;
    for (ring, keep) in [(Ring::Claim, 0), (Ring::Lease, 0), (Ring::Queue, options.keep_sealed)] {
        let slots = ring::slots(client, schema, ring).await?;
        let sealed = ring::sealed(&slots);
        let excess = sealed.len().saturating_sub(keep);
        for slot in &sealed[..excess] {
            debug_assert_eq!(slot.state, SlotState::Sealed);
            let outcome = ring::prune(client, schema, ring, slot.slot, options.lock_timeout).await?;
            if outcome.pruned {
                *report.pruned.entry(ring.name()).or_default() += 1;
            } else {
                report.skip("prune", ring, outcome.reason.as_deref());
            }
        }
    }
    Ok(())
}

/// A dump of a working queue has claim cursors ahead of its tables; see `80_restore.sql`.
async fn fit_cursors_after_restore(client: &Client, schema: &Schema) -> Result<()> {
    let sql = schema.render("SELECT {schema}.fit_cursors_after_restore()");
    let lanes: i32 = client.query_one(&sql, &[]).await?.try_get(0)?;
    if lanes > 0 {
        tracing::warn!(lanes, "this schema was restored: took claim cursors back to the jobs that nobody claimed");
    }
    Ok(())
}

/// Maintenance as a background task.
pub struct Maintenance {
    stop: watch::Sender<bool>,
    report: Arc<Mutex<MaintenanceReport>>,
    task: tokio::task::JoinHandle<()>,
}

impl Maintenance {
    /// Starts it: it leads as soon as it can, for as long as its session lives.
    pub fn start(target: &Target, options: MaintenanceOptions) -> Self {
        let (stop, stopped) = watch::channel(false);
        let report = Arc::new(Mutex::new(MaintenanceReport::default()));
        let leader = Leader { target: target.clone(), options, report: Arc::clone(&report) };
        Self { stop, report, task: tokio::spawn(leader.run(stopped)) }
    }

    /// What it has done so far.
    pub fn report(&self) -> MaintenanceReport {
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Ends it after the pass it is in; returns the last report.
    pub async fn stop(self) -> MaintenanceReport {
        self.stop.send_replace(true);
        let _ = self.task.await;
        self.report.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

struct Leader {
    target: Target,
    options: MaintenanceOptions,
    report: Arc<Mutex<MaintenanceReport>>,
}

impl Leader {
    async fn run(self, mut stopped: watch::Receiver<bool>) {
        loop {
            let leading = tokio::select! {
                outcome = self.lead() => outcome,
                _ = stopped.wait_for(|s| *s) => {
                    self.note(|r| r.leading = false);
                    return;
                }
            };
            self.note(|r| r.leading = false);
            if let Err(error) = leading {
                tracing::warn!(error = %error, "maintenance lost its session");
            }
            tokio::select! {
                () = tokio::time::sleep(self.options.lead_every) => {}
                _ = stopped.wait_for(|s| *s) => return,
            }
        }
    }

    /// Tries to lead, and does while it can. `Ok` when somebody else leads.
    async fn lead(&self) -> Result<()> {
        let target = self.target.clone().with_application_name("awactl maintenance");
        let session = link::open(&target).await?;
        let schema = &self.target.schema;
        let Some(backend) = take_lead(&session, schema).await? else {
            session.close().await;
            return Ok(());
        };
        self.note(|r| r.leading = true);
        fit_cursors_after_restore(&session, schema).await?;
        let mut due: Vec<(Task, Instant)> = Task::ALL.iter().map(|task| (*task, Instant::now())).collect();
        loop {
            due.sort_by_key(|(_, at)| *at);
            let (task, at) = due[0];
            tokio::time::sleep_until(at).await;
            if !still_leading(&session, schema, backend).await? {
                return Err(EngineError::Unreachable {
                    target: self.target.redacted(),
                    why: "the session was exchanged under its lock, as a transaction pooler does".into(),
                    source: None,
                });
            }
            let mut done = self.report.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let outcome = task.pass(&session, schema, &self.options, &mut done).await;
            match outcome {
                Ok(()) => {}
                Err(error @ EngineError::Unreachable { .. }) => return Err(error),
                Err(error) => {
                    tracing::warn!(task = task.name(), error = %error, "a maintenance task failed");
                    done.failed.insert(task.name(), error.to_string());
                }
            }
            self.note(|r| *r = done);
            due[0].1 = Instant::now() + task.interval(&self.options);
        }
    }

    fn note(&self, change: impl FnOnce(&mut MaintenanceReport)) {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// Who leads.
#[derive(Debug, Clone, Serialize)]
pub struct LeaderInfo {
    pub pid: i32,
    pub application_name: String,
    pub client: Option<String>,
    pub since: DateTime<Utc>,
}

/// The session that holds the lead; `None` when nobody maintains.
pub async fn leader(client: &Client, schema: &Schema) -> Result<Option<LeaderInfo>> {
    let sql = schema.render(
        "SELECT a.pid, a.application_name, host(a.client_addr), a.backend_start
         FROM pg_locks AS l
         JOIN pg_stat_activity AS a ON a.pid = l.pid
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.objid = 0 AND a.datname = current_database()
           AND l.database = a.datid AND l.classid = '{schema}.queue_terminal_rollup_deltas'::regclass::oid",
    );
    let row = client.query_opt(&sql, &[]).await?;
    row.map(|row| {
        Ok(LeaderInfo {
            pid: row.try_get(0)?,
            application_name: row.try_get(1)?,
            client: row.try_get(2)?,
            since: row.try_get(3)?,
        })
    })
    .transpose()
}

/// The backend that holds the lead, if it could be had.
async fn take_lead(session: &Session, schema: &Schema) -> Result<Option<i32>> {
    let sql = schema.render(
        "SELECT pg_backend_pid() WHERE pg_try_advisory_lock('{schema}.queue_terminal_rollup_deltas'::regclass::oid::integer, 0)",
    );
    Ok(session.query_opt(&sql, &[]).await?.map(|row| row.try_get(0)).transpose()?)
}

async fn still_leading(session: &Session, schema: &Schema, backend: i32) -> Result<bool> {
    let sql = schema.render(
        "SELECT pg_backend_pid() = $1 AND EXISTS (
             SELECT FROM pg_locks AS l
             WHERE l.locktype = 'advisory' AND l.pid = pg_backend_pid() AND l.granted AND l.objsubid = 2 AND l.objid = 0
               AND l.classid = '{schema}.queue_terminal_rollup_deltas'::regclass::oid)",
    );
    Ok(session.query_one(&sql, &[&backend]).await?.try_get(0)?)
}
