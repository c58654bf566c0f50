//! `awactl queue`: look at queues, pause and resume them, set what they keep, cancel what waits in them.

use clap::Subcommand;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::inspect::queues_table;
use super::output::{Table, human_duration, thousands};
use super::progress::bar;
use super::values::whole;
use super::{Access, Context};
use crate::engine::counts::queue_counts;
use crate::engine::duration;
use crate::engine::queues::{self, QueueChange, QueueSettings};
use crate::engine::worker::instance_name;
use crate::engine::{Schema, Session};

/// List, pause, resume, drain and set queues
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Every queue with its jobs by state and its settings
    List,
    /// Let nothing be claimed from a queue; what runs goes on, enqueuing too
    Pause {
        /// Name of the queue
        queue: String,
    },
    /// Let claims go on
    Resume {
        /// Name of the queue
        queue: String,
    },
    /// Cancel everything that waits in a queue; what runs goes on
    Drain {
        /// Name of the queue
        queue: String,
        /// Kept among the errors of each job
        #[arg(long)]
        reason: Option<String>,
        /// Only say how many
        #[arg(long)]
        dry_run: bool,
    },
    /// Change what is set for a queue
    #[command(group = clap::ArgGroup::new("change").required(true).multiple(true))]
    Set {
        /// Name of the queue
        queue: String,
        /// Lanes that producers are spread over, 1 to 64; as many claims of one priority can go on at a time
        #[arg(long, group = "change", value_parser = whole::<i32>(1, 64))]
        enqueue_shards: Option<i32>,
        /// Hold jobs that fail for good in the DLQ
        #[arg(long, group = "change", value_name = "on|off", value_parser = on_off)]
        dlq: Option<bool>,
        /// How long the DLQ holds a job, such as 30d
        #[arg(long, group = "change", value_name = "DURATION")]
        dlq_retention: Option<String>,
        /// How long a failed job can be retried where there is no DLQ, such as 72h
        #[arg(long, group = "change", value_name = "DURATION")]
        failed_retention: Option<String>,
    },
}

fn on_off(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("it must be on or off".into()),
    }
}

#[derive(Serialize)]
struct Outcome {
    queue: String,
    changed: bool,
    paused: bool,
    /// Whether a job was ever enqueued to it.
    had_jobs: bool,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List => list(context).await,
        Command::Pause { queue } => pause(context, queue).await,
        Command::Resume { queue } => resume(context, queue).await,
        Command::Drain { queue, dry_run: true, .. } => would_drain(context, queue).await,
        Command::Drain { queue, reason, .. } => drain(context, queue, reason).await,
        Command::Set { queue, enqueue_shards, dlq, dlq_retention, failed_retention } => {
            let change = QueueChange {
                enqueue_shards,
                dlq,
                dlq_retention: length("--dlq-retention", dlq_retention)?,
                failed_retention: length("--failed-retention", failed_retention)?,
            };
            set(context, &queue, change).await
        }
    }
}

fn length(flag: &str, text: Option<String>) -> anyhow::Result<Option<std::time::Duration>> {
    let parsed = text.as_deref().map(duration::parse).transpose();
    Ok(parsed
        .map_err(|e| CommandError::usage(format!("{flag} is not usable"), e.to_string(), "say it like 72h or 30d"))?)
}

#[derive(Serialize)]
struct Listed {
    #[serde(flatten)]
    counts: crate::engine::counts::QueueCounts,
    settings: Vec<QueueSettings>,
}

async fn list(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let schema = &resolved.target.schema;
    let listed =
        Listed { counts: queue_counts(&session, schema).await?, settings: queues::settings(&session, schema).await? };
    session.close().await;
    context.output.print(&listed, |listed| {
        let table = queues_table(&listed.counts);
        if listed.settings.is_empty() { table } else { table.then(settings_table(&listed.settings)) }
    })?;
    Ok(ExitCode::Done)
}

fn settings_table(settings: &[QueueSettings]) -> Table {
    let mut table = Table::new(&["queue", "shards", "dlq", "dlq keeps", "failed kept", "paused by"]).numbers(&[1]);
    for s in settings {
        let span = |seconds: f64| human_duration(std::time::Duration::from_secs_f64(seconds.max(0.0)));
        table.row([
            s.queue.clone(),
            s.enqueue_shards.to_string(),
            if s.dlq { "on" } else { "off" }.to_owned(),
            span(s.dlq_retention_s),
            span(s.failed_retention_s),
            s.paused_by.clone().unwrap_or_default(),
        ]);
    }
    table
}

const SEE_LIST: &str = "see `awactl queue list`";

/// A queue is made by its first job, so to change one before is legitimate; but its name may also be mistyped.
async fn had_jobs(
    context: &Context,
    session: &Session,
    schema: &Schema,
    queue: &str,
    hint: &str,
) -> anyhow::Result<bool> {
    let had_jobs = queues::had_jobs(session, schema, queue).await?;
    if !had_jobs {
        context.note(&format!("no job was ever enqueued to queue {queue}; {hint}"));
    }
    Ok(had_jobs)
}

async fn pause(context: &Context, queue: String) -> anyhow::Result<ExitCode> {
    context.confirm_change(&format!("pause queue {queue}")).await?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let changed = queues::pause(&session, &resolved.target.schema, &queue, &instance_name()).await?;
    let had_jobs = had_jobs(context, &session, &resolved.target.schema, &queue, "its first ones will wait").await?;
    session.close().await;
    outcome(context, Outcome { queue, changed, paused: true, had_jobs })
}

async fn resume(context: &Context, queue: String) -> anyhow::Result<ExitCode> {
    context.confirm_change(&format!("resume queue {queue}")).await?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let changed = queues::resume(&session, &resolved.target.schema, &queue).await?;
    let had_jobs = had_jobs(context, &session, &resolved.target.schema, &queue, SEE_LIST).await?;
    session.close().await;
    outcome(context, Outcome { queue, changed, paused: false, had_jobs })
}

fn outcome(context: &Context, outcome: Outcome) -> anyhow::Result<ExitCode> {
    context.output.print(&outcome, |o| {
        let state = if o.paused { "paused" } else { "not paused" };
        let state = if o.changed { state.to_owned() } else { format!("{state}, as before") };
        Table::facts([("queue", o.queue.clone()), ("now", state)])
    })?;
    Ok(ExitCode::Done)
}

#[derive(Serialize)]
struct Drained {
    queue: String,
    dry_run: bool,
    cancelled: u64,
    had_jobs: bool,
}

async fn would_drain(context: &Context, queue: String) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let counts = queue_counts(&session, &resolved.target.schema).await?;
    let had_jobs = had_jobs(context, &session, &resolved.target.schema, &queue, SEE_LIST).await?;
    session.close().await;
    let waiting = counts.queues.iter().filter(|q| q.queue == queue).map(|q| q.available + q.scheduled + q.retryable);
    let cancelled = waiting.sum::<i64>().unsigned_abs();
    context.output.print(&Drained { queue, dry_run: true, cancelled, had_jobs }, |d| {
        Table::facts([("queue", d.queue.clone()), ("would cancel", thousands(d.cancelled as i64))])
    })?;
    Ok(ExitCode::Done)
}

async fn drain(context: &Context, queue: String, reason: Option<String>) -> anyhow::Result<ExitCode> {
    context.confirm_irreversible(&format!("cancel everything that waits in queue {queue}")).await?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let bar = bar(context.shows_progress(), "cancelled", 0);
    let mut so_far = 0;
    let drained = queues::drain(&session, &resolved.target.schema, &queue, reason.as_deref(), |n| {
        so_far = n;
        bar.set_position(n);
    })
    .await;
    bar.finish_and_clear();
    if drained.is_err() {
        context.note(&format!("{} jobs are cancelled so far; drain again for the rest", thousands(so_far as i64)));
    }
    let cancelled = drained?;
    let had_jobs = had_jobs(context, &session, &resolved.target.schema, &queue, SEE_LIST).await?;
    session.close().await;
    context.output.print(&Drained { queue, dry_run: false, cancelled, had_jobs }, |d| {
        Table::facts([("queue", d.queue.clone()), ("cancelled", thousands(d.cancelled as i64))])
    })?;
    Ok(ExitCode::Done)
}

async fn set(context: &Context, queue: &str, change: QueueChange) -> anyhow::Result<ExitCode> {
    context.confirm_change(&format!("change queue {queue}")).await?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let settings = queues::set(&session, &resolved.target.schema, queue, change).await?;
    had_jobs(context, &session, &resolved.target.schema, queue, "the settings wait for its first").await?;
    session.close().await;
    context.output.print(&settings, |s| settings_table(std::slice::from_ref(s)))?;
    Ok(ExitCode::Done)
}
