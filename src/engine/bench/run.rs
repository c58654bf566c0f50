//! Runs a scenario and judges it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio_postgres::Client;

use super::ceiling::ceiling;
use super::dead_watch::DeadWatch;
use super::ledger::{Ledger, QUEUE, Recorder, jobs, micros};
use super::load::{Produced, Producer};
use super::progress::{Progress, Ticker, Watcher};
use super::scenario::{Load, PhaseKind, Scenario};
use crate::engine::claim::{Claim, ClaimOptions};
use crate::engine::dead_tuples::dead_tuples;
use crate::engine::enqueue::BulkEnqueue;
use crate::engine::error::{EngineError, Result};
use crate::engine::worker::{Fleet, FleetOptions, QueueOptions, Registry, open};
use crate::engine::{Session, Target};

/// What a run leaves behind.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub scenario: String,
    pub description: String,
    pub server: BTreeMap<String, String>,
    /// By name: rates per second, times in ms, sizes in bytes, the ledger's counts.
    pub metrics: BTreeMap<String, f64>,
    pub checks: Vec<CheckOutcome>,
    pub passed: bool,
}

#[derive(Debug, Serialize)]
pub struct CheckOutcome {
    pub metric: String,
    pub expected: String,
    pub actual: Option<f64>,
    pub passed: bool,
}

/// Bytes of WAL written so far.
pub async fn wal_position(client: &Client) -> Result<f64> {
    let sql = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8";
    Ok(client.query_one(sql, &[]).await?.try_get(0)?)
}

/// Runs it on a server whose schema is installed.
pub async fn run(target: &Target, scenario: &Scenario, watcher: Watcher<'_>) -> Result<Summary> {
    let session = open(target).await?;
    let mut metrics = BTreeMap::new();
    if scenario.ceiling {
        let seconds: f64 =
            scenario.phases.iter().filter(|p| p.kind == PhaseKind::Clean).map(|p| p.duration.as_secs_f64()).sum();
        let lasts = Duration::from_secs_f64(seconds.min(5.0));
        watcher(Progress::Phase { name: format!("ceiling for {lasts:.0?}"), steps: lasts.as_millis() as u64 });
        let measured = ceiling(target, scenario.payload_bytes, lasts).await?;
        metrics.insert("ceiling_per_s".to_owned(), measured.jobs_per_s);
        metrics.insert("ceiling_wal_bytes_per_job".to_owned(), measured.wal_bytes_per_job);
    }
    match &scenario.load {
        Load::DepthTarget(_) | Load::Rate(_) => timed(target, &session, scenario, watcher, &mut metrics).await?,
        Load::OneAtATime(times) => {
            one_at_a_time(target, &session, scenario, *times as usize, watcher, &mut metrics).await?
        }
        Load::Fill(depths) => fill(target, scenario, depths, watcher, &mut metrics).await?,
    }
    if let (Some(ceiling), Some(rate)) = (metrics.get("ceiling_per_s"), metrics.get("completed_per_s")) {
        metrics.insert("share_of_ceiling".to_owned(), rate / ceiling);
    }
    // Other sessions report their statistics within a second.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    let dead = dead_tuples(&session, &target.schema, false).await?;
    metrics.insert("dead_tuples".to_owned(), dead.total as f64);
    Ok(judge(scenario, metrics, settings(&session).await?))
}

async fn settings(client: &Client) -> Result<BTreeMap<String, String>> {
    let sql = "SELECT name, current_setting(name) FROM unnest(ARRAY[
                   'server_version', 'shared_buffers', 'fsync', 'synchronous_commit', 'full_page_writes', 'max_wal_size']) AS name";
    let rows = client.query(sql, &[]).await?;
    rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

fn judge(scenario: &Scenario, metrics: BTreeMap<String, f64>, server: BTreeMap<String, String>) -> Summary {
    let outcome = |metric: &str, min: Option<f64>, max: Option<f64>| {
        let actual = metrics.get(metric).copied();
        let expected = match (min, max) {
            (Some(min), Some(max)) => format!("{min} to {max}"),
            (Some(min), None) => format!("at least {min}"),
            (None, Some(max)) => format!("at most {max}"),
            (None, None) => String::new(),
        };
        let passed = actual.is_some_and(|a| min.is_none_or(|min| a >= min) && max.is_none_or(|max| a <= max));
        CheckOutcome { metric: metric.to_owned(), expected, actual, passed }
    };
    let mut checks: Vec<CheckOutcome> = scenario.checks.iter().map(|c| outcome(&c.metric, c.min, c.max)).collect();
    // What no scenario may get wrong.
    for metric in ["lost", "executed_twice", "invented", "results_lost"] {
        if metrics.contains_key(metric) {
            checks.push(outcome(metric, None, Some(0.0)));
        }
    }
    Summary {
        scenario: scenario.name.clone(),
        description: scenario.description.clone(),
        server,
        passed: checks.iter().all(|c| c.passed),
        metrics,
        checks,
    }
}

fn fleet(target: &Target, scenario: &Scenario, ledger: &Arc<Ledger>) -> Fleet {
    let mut registry = Registry::new();
    let recorder =
        Recorder { ledger: Arc::clone(ledger), takes: Duration::from_millis(scenario.job_ms), mix: scenario.mix };
    registry.insert(recorder).unwrap_or_else(|error| unreachable!("one handler: {error}"));
    let workers = usize::from(scenario.workers);
    Fleet::start(target, registry, FleetOptions::new(vec![QueueOptions::new(QUEUE, workers)]))
}

async fn timed(
    target: &Target,
    session: &Session,
    scenario: &Scenario,
    watcher: Watcher<'_>,
    metrics: &mut BTreeMap<String, f64>,
) -> Result<()> {
    let seconds: f64 = scenario.phases.iter().map(|p| p.duration.as_secs_f64()).sum();
    let held = scenario.held_producers.as_ref().map_or(0, |h| usize::from(h.count));
    let per_s = match scenario.load {
        Load::Rate(rate) => rate as f64 * 1.1,
        _ => 200_000.0,
    };
    let ledger = Arc::new(Ledger::new(held + 10_000 + (per_s * seconds) as usize));
    let holders = hold(target, held, scenario.payload_bytes).await?;
    let fleet = fleet(target, scenario, &ledger);
    let producer = Producer::connect(target, &ledger, scenario.payload_bytes, scenario.abort_fraction).await?;
    let (stop, stopped) = tokio::sync::watch::channel(None);
    let producer = tokio::spawn(producer.run(scenario.load.clone(), held, Instant::now(), stopped));

    let (mut clean, mut done, mut wal) = (Duration::ZERO, 0, 0.0);
    let mut window: Option<(Instant, Instant)> = None;
    let mut dead = DeadWatch::default();
    for phase in &scenario.phases {
        let name = format!("{:?} for {:.0?}", phase.kind, phase.duration).to_lowercase();
        let idle = match phase.kind {
            PhaseKind::IdleInTx => Some(idle_writer(target).await?),
            _ => None,
        };
        let ended = || {
            let stats = fleet.stats();
            stats.completed + stats.failed + stats.cancelled
        };
        let (began, before, wal_before) = (Instant::now(), ended(), wal_position(session).await?);
        let ticker = Ticker::start(watcher, &ledger, name, phase.duration.as_millis() as u64);
        tokio::join!(
            ticker.pass(phase.duration),
            dead.watch(target, phase.kind.is_measured().then_some(phase.duration))
        );
        if let Some(idle) = idle {
            idle.close().await;
        }
        if phase.kind.is_measured() {
            clean += began.elapsed();
            done += ended() - before;
            wal += wal_position(session).await? - wal_before;
            window = Some((window.map_or(began, |(from, _)| from), Instant::now()));
        }
    }
    stop.send_replace(Some(Instant::now()));
    let produced: Produced = producer.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    if held > 0 {
        release(holders, &ledger, metrics).await?;
    }
    drain(&ledger, produced.sent + held as u64, watcher).await;
    let stats = fleet.shut_down().await;
    dead.report(metrics);
    metrics.insert("completed_per_s".into(), done as f64 / clean.as_secs_f64());
    metrics.insert("wal_bytes_per_job".into(), wal / (done as f64).max(1.0));
    metrics.insert("results_lost".into(), stats.lost as f64);
    if let Some((from, to)) = window {
        times(metrics, "pickup_ms", &ledger.pickups(from, to));
    }
    let mut commits = micros();
    produced.transactions.iter().for_each(|t| commits.saturating_record(t.as_micros() as u64));
    times(metrics, "enqueue_ms", &commits);
    verdict(metrics, &ledger);
    Ok(())
}

/// A session that has written and keeps its transaction open, so that no dead row can be removed.
async fn idle_writer(target: &Target) -> Result<Session> {
    let session = open(target).await?;
    session.batch_execute("BEGIN; SELECT pg_current_xact_id()").await?;
    Ok(session)
}

/// Opens transactions that have enqueued one job each; the ledger counts them as sent when they commit.
async fn hold(target: &Target, count: usize, payload: usize) -> Result<Vec<Session>> {
    let mut sessions = Vec::with_capacity(count);
    for n in 0..count {
        let session = open(target).await?;
        let job = &jobs(n..n + 1, payload)[0];
        session.batch_execute("BEGIN").await?;
        let sql = target.schema.render("SELECT {schema}.enqueue(kind => $1, queue => $2, args => $3)");
        session.query(&sql, &[&job.kind, &job.queue, &job.args]).await?;
        sessions.push(session);
    }
    Ok(sessions)
}

/// Commits the held transactions and waits for their jobs.
async fn release(holders: Vec<Session>, ledger: &Ledger, metrics: &mut BTreeMap<String, f64>) -> Result<()> {
    let mut slowest = Duration::ZERO;
    for (n, session) in holders.into_iter().enumerate() {
        ledger.send(n, Instant::now());
        ledger.commit(n);
        session.batch_execute("COMMIT").await?;
        let committed = Instant::now();
        while !ledger.ran(n) && committed.elapsed() < Duration::from_secs(10) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        slowest = slowest.max(committed.elapsed());
    }
    metrics.insert("held_job_started_after_commit_ms".into(), slowest.as_secs_f64() * 1e3);
    Ok(())
}

/// Until everything sent has run, or nothing runs any more.
async fn drain(ledger: &Ledger, sent: u64, watcher: Watcher<'_>) {
    let mut last = (Instant::now(), 0);
    let mut ticker = Ticker::start(watcher, ledger, "drain".into(), sent);
    loop {
        let ran = ledger.ran.load(Ordering::Relaxed);
        if ran >= sent || last.0.elapsed() > Duration::from_secs(10) {
            return;
        }
        if ran != last.1 {
            last = (Instant::now(), ran);
        }
        ticker.tick(ran);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn one_at_a_time(
    target: &Target,
    session: &Session,
    scenario: &Scenario,
    times_: usize,
    watcher: Watcher<'_>,
    metrics: &mut BTreeMap<String, f64>,
) -> Result<()> {
    let ledger = Arc::new(Ledger::new(times_));
    let fleet = fleet(target, scenario, &ledger);
    let sql = target.schema.render("SELECT {schema}.enqueue(kind => $1, queue => $2, args => $3)");
    let enqueue = session.prepare(&sql).await?;
    let mut ticker = Ticker::start(watcher, &ledger, format!("{times_} jobs, one at a time"), times_ as u64);
    let began = Instant::now();
    for n in 0..times_ {
        // Long enough for the workers to have gone to sleep.
        tokio::time::sleep(Duration::from_millis(40)).await;
        let job = &jobs(n..n + 1, scenario.payload_bytes)[0];
        ledger.commit(n);
        ledger.send(n, Instant::now());
        session.query(&enqueue, &[&job.kind, &job.queue, &job.args]).await?;
        let committed = Instant::now();
        // A handler that started before the acknowledgement was read waited for nothing.
        if !ledger.ran(n) {
            ledger.send(n, committed);
        }
        while !ledger.ran(n) {
            if committed.elapsed() > Duration::from_secs(10) {
                return Err(EngineError::invalid("load", "a job was not picked up within 10 s"));
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        ledger.sent.fetch_add(1, Ordering::Relaxed);
        ledger.top.store(n + 1, Ordering::Relaxed);
        ticker.tick(n as u64 + 1);
    }
    let ended = Instant::now();
    let stats = fleet.shut_down().await;
    times(metrics, "pickup_ms", &ledger.pickups(began, ended));
    metrics.insert("results_lost".into(), stats.lost as f64);
    verdict(metrics, &ledger);
    Ok(())
}

/// Claims of 256 at each depth, by hand and without workers: the time of the call, at the client.
async fn fill(
    target: &Target,
    scenario: &Scenario,
    depths: &[u64],
    watcher: Watcher<'_>,
    metrics: &mut BTreeMap<String, f64>,
) -> Result<()> {
    const CLAIMS: usize = 150;
    let mut session = open(target).await?;
    let bulk = BulkEnqueue::prepare(&session, &target.schema).await?;
    let claim = Claim::prepare(&session, &target.schema).await?;
    let queue: Arc<str> = QUEUE.into();
    let mut queued: u64 = 0;
    let mut medians = Vec::new();
    for &depth in depths {
        watcher(Progress::Phase { name: format!("filling to {depth}"), steps: depth });
        let began = Instant::now();
        let before = queued;
        while queued < depth {
            let n = (depth - queued).min(1000) as usize;
            let batch = jobs(0..n, scenario.payload_bytes);
            let transaction = session.transaction().await?;
            bulk.run(&transaction, &batch).await?;
            transaction.commit().await?;
            queued += n as u64;
            let jobs_per_s = (queued - before) as f64 / began.elapsed().as_secs_f64();
            watcher(Progress::Tick { step: queued, jobs_per_s, depth: queued, pickup_p99: None });
        }
        metrics.insert("enqueued_per_s".into(), (queued - before) as f64 / began.elapsed().as_secs_f64());
        let claims = CLAIMS.min((depth / 256) as usize).max(1);
        let mut taken = micros();
        for _ in 0..claims {
            let called = Instant::now();
            let got = claim.run(&session, &queue, 256, "bench", ClaimOptions::default(), |kind| kind.into()).await?;
            taken.saturating_record(called.elapsed().as_micros() as u64);
            queued -= got.jobs.len() as u64;
        }
        let median = taken.value_at_quantile(0.5) as f64 / 1e3;
        metrics.insert(format!("claim_ms_p50_at_{depth}"), median);
        medians.push(median);
    }
    if let (Some(first), Some(last)) = (medians.first(), medians.last()) {
        metrics.insert("claim_cost_ratio".into(), last / first);
    }
    Ok(())
}

fn times(metrics: &mut BTreeMap<String, f64>, name: &str, times: &hdrhistogram::Histogram<u64>) {
    if times.is_empty() {
        return;
    }
    for (label, quantile) in [("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("max", 1.0)] {
        metrics.insert(format!("{name}_{label}"), times.value_at_quantile(quantile) as f64 / 1e3);
    }
}

fn verdict(metrics: &mut BTreeMap<String, f64>, ledger: &Ledger) {
    let verdict = ledger.verdict();
    metrics.insert("committed".into(), verdict.committed as f64);
    metrics.insert("lost".into(), verdict.lost as f64);
    metrics.insert("executed_twice".into(), verdict.executed_twice as f64);
    metrics.insert("invented".into(), verdict.invented as f64);
}
