//! `awactl demo`: the whole way of many jobs on a private server, in under a minute.

use std::io::{BufWriter, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Serialize;
use serde_json::json;

use super::Context;
use super::exit::{CommandError, ExitCode};
use super::inspect::{dead_tuples_table, rings_table};
use super::output::{Table, human_duration, thousands};
use super::progress::{bar, embedded_progress};
use super::values::whole;
use crate::engine::bench::wal_position;
use crate::engine::counts::queue_counts;
use crate::engine::dead_tuples::{DeadTuplesReport, dead_tuples};
use crate::engine::embedded::{Embedded, Options};
use crate::engine::enqueue_stream::{StreamOptions, enqueue_stream};
use crate::engine::inspect_rings::{RingsReport, rings};
use crate::engine::migrations::MIGRATIONS;
use crate::engine::ring::Ring;
use crate::engine::worker::{Config, Fleet, FleetOptions, QueueOptions, StatsNow, open};
use crate::engine::{Schema, Session, Target, migrate};

const WORKERS: &str = include_str!("../../examples/demo-workers.yaml");

/// Install, enqueue real work, run workers until it is done, and look at what is left
///
/// Starts a private PostgreSQL, kept only with --embedded=DIR. The jobs are written to a file of JSON lines and go the
/// way of `awactl enqueue --file`; the workers are those of examples/demo-workers.yaml.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// How many jobs
    #[arg(long, default_value_t = 60_000, value_parser = whole::<u32>(1_000, 10_000_000))]
    jobs: u32,
}

#[derive(Serialize)]
struct Report {
    server: String,
    jobs: u32,
    install_s: f64,
    enqueue_s: f64,
    work_s: f64,
    wal_bytes_per_job: f64,
    stats: StatsNow,
    rings: RingsReport,
    dead_tuples: DeadTuplesReport,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    if context.names_a_target() {
        return Err(CommandError::usage(
            "demo takes no database",
            "it fills one with made-up jobs, so it runs on a private server only",
            "leave --database-url and --context out; --embedded=DIR keeps the server's folder",
        )
        .into());
    }
    let options = match context.embedded_dir() {
        Some(dir) => Options::in_dir(dir),
        None => Options::ephemeral(),
    };
    let mut options = options.setting("shared_buffers", "256MB");
    options.progress = Some(embedded_progress(context.shows_progress()));
    let server = Embedded::start(options).await?;
    // Dropping the server stops it too; done here to hear of a failure.
    let outcome = on_server(&server, &args, context).await;
    server.stop().await?;
    let report = outcome?;
    context.output.print(&report, summary)?;
    Ok(ExitCode::Done)
}

async fn on_server(server: &Embedded, args: &Args, context: &Context) -> anyhow::Result<Report> {
    let target = Target::parse(&server.url(), Schema::default(), "demo", &|_| None)?;
    let mut session = open(&target).await?;

    let started = Instant::now();
    migrate::run(&mut session, &target.schema, MIGRATIONS, &|_| {}).await?;
    let install = started.elapsed();
    context.note(&format!("installed schema {} in {}", target.schema.as_str(), human_duration(install)));

    let before = counted(&session, &target.schema).await?;
    if before.waiting > 0 {
        return Err(CommandError::refused(
            "the demo did not start",
            format!(
                "{} jobs of an earlier one, which was cut off, are still in that folder",
                thousands(before.waiting)
            ),
            "remove the folder, or name another",
        )
        .into());
    }
    let folder = tempfile::tempdir().context("making a folder for the jobs file")?;
    let file = folder.path().join("jobs.ndjson");
    write_jobs(&file, args.jobs).context("writing the jobs file")?;
    let wal_start = wal_position(&session).await?;
    let started = Instant::now();
    let enqueued = enqueue(&mut session, &target.schema, &file, args.jobs, context).await?;
    let enqueue = started.elapsed();

    let started = Instant::now();
    let stats = work(&session, &target, enqueued, before.ended, context).await?;
    let work = started.elapsed();
    let wal = wal_position(&session).await? - wal_start;

    Ok(Report {
        server: server.version().to_string(),
        jobs: args.jobs,
        install_s: install.as_secs_f64(),
        enqueue_s: enqueue.as_secs_f64(),
        work_s: work.as_secs_f64(),
        wal_bytes_per_job: wal / f64::from(args.jobs),
        stats,
        rings: rings(&session, &target.schema, &Ring::ALL).await?,
        dead_tuples: dead_tuples(&session, &target.schema, false).await?,
    })
}

/// A mix of kinds, queues, priorities and sizes, the same each time; some of it runs programs, some fails.
fn write_jobs(file: &Path, jobs: u32) -> std::io::Result<()> {
    let mut rng = StdRng::seed_from_u64(23);
    let mut out = BufWriter::new(std::fs::File::create(file)?);
    for n in 0..jobs {
        let text = |rng: &mut StdRng, low: usize, high: usize| "x".repeat(rng.random_range(low..high));
        let job = match n % 1000 {
            // Starting a program costs a thousand times what a job does.
            0..=2 => json!({"kind": "checksum", "queue": "reports", "args": {"document": text(&mut rng, 200, 4000)}}),
            3..=4 => json!({"kind": "count_bytes", "queue": "reports", "args": [1, 2, {"deep": ["é", null]}]}),
            5 => json!({"kind": "broken_import", "queue": "reports", "args": {"row": n, "terminal": true}}),
            6..=9 => json!({"kind": "fetch_avatar", "queue": "images", "args": {"user": n}, "tags": ["retry-me"]}),
            10..=99 => json!({"kind": "resize_image", "queue": "images", "priority": rng.random_range(1..=4),
                              "args": {"image": n, "exif": text(&mut rng, 20, 1500)}}),
            100..=499 => json!({"kind": "send_receipt", "queue": "mail", "priority": rng.random_range(1..=4),
                                "args": {"order": n, "lines": text(&mut rng, 50, 600)}, "metadata": {"tenant": n % 7}}),
            _ => {
                json!({"kind": "send_welcome", "queue": "mail", "args": {"user": n, "body": text(&mut rng, 100, 400)}})
            }
        };
        serde_json::to_writer(&mut out, &job)?;
        out.write_all(b"\n")?;
    }
    out.flush()
}

async fn enqueue(
    session: &mut Session,
    schema: &Schema,
    file: &Path,
    jobs: u32,
    context: &Context,
) -> anyhow::Result<u64> {
    let progress = bar(context.shows_progress(), "enqueue", u64::from(jobs));
    let reader = tokio::io::BufReader::with_capacity(1 << 20, tokio::fs::File::open(file).await?);
    let report = enqueue_stream(session, schema, reader, StreamOptions::default(), |so_far| {
        progress.set_position(so_far.enqueued);
    })
    .await?;
    progress.finish_and_clear();
    Ok(report.enqueued)
}

/// Runs workers and maintenance until every job has ended, retries included.
async fn work(
    session: &Session,
    target: &Target,
    jobs: u64,
    ended_before: i64,
    context: &Context,
) -> anyhow::Result<StatsNow> {
    let config = Config::parse(WORKERS)?;
    let queues = config.queues.iter().map(|(name, queue)| QueueOptions::of(name.to_string(), queue)).collect();
    let fleet = Fleet::start(target, config.registry()?, FleetOptions::new(queues));
    let progress = bar(context.shows_progress(), "work", jobs);
    loop {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let stats = fleet.stats();
        let ended = stats.completed + stats.failed + stats.cancelled;
        progress.set_position(ended);
        if stats.lost > 0 {
            anyhow::bail!("{} results lost, which cannot happen on a server of our own", stats.lost);
        }
        if ended >= jobs {
            break;
        }
    }
    progress.finish_and_clear();
    let stats = fleet.shut_down().await;
    let ended = counted(session, &target.schema).await?.ended - ended_before;
    if u64::try_from(ended) != Ok(jobs) {
        anyhow::bail!("{jobs} jobs were enqueued and the database counts {ended} as ended");
    }
    Ok(stats)
}

struct Counted {
    waiting: i64,
    ended: i64,
}

/// A folder that is kept has the jobs of earlier demos in it.
async fn counted(session: &Session, schema: &Schema) -> anyhow::Result<Counted> {
    let queues = queue_counts(session, schema).await?.queues;
    Ok(Counted {
        waiting: queues.iter().map(|q| q.available + q.scheduled + q.retryable + q.running + q.waiting).sum(),
        ended: queues.iter().map(|q| q.completed + q.failed + q.cancelled).sum(),
    })
}

fn summary(report: &Report) -> Table {
    let rate = |seconds: f64| thousands((f64::from(report.jobs) / seconds) as i64);
    let stats = &report.stats;
    Table::facts([
        ("server", format!("PostgreSQL {}, started for this and stopped again", report.server)),
        (
            "enqueued",
            format!(
                "{} in {:.1} s: {}/s, from a file",
                thousands(i64::from(report.jobs)),
                report.enqueue_s,
                rate(report.enqueue_s)
            ),
        ),
        ("worked", format!("{:.1} s, programs and retries included", report.work_s)),
        ("completed", thousands(stats.completed as i64)),
        ("failed for good", thousands(stats.failed as i64)),
        ("retried", thousands(stats.retried as i64)),
        ("WAL", format!("{:.0} bytes a job", report.wal_bytes_per_job)),
    ])
    .then(rings_table(&report.rings, false))
    .then(dead_tuples_table(&report.dead_tuples, false))
}
