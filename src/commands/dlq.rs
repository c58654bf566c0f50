//! `awactl dlq`: jobs that failed for good, held for an operator.

use clap::Subcommand;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::job::{Changed, changed_table, jobs_table, operate_on, would};
use super::output::{Table, thousands};
use super::values::{job_id, whole};
use super::{Access, Context};
use crate::engine::counts::queue_counts;
use crate::engine::jobs::{JobFilter, held_jobs, list_jobs};
use crate::engine::operate::Operation;

/// List, count, retry and purge jobs that failed for good
///
/// A queue has a DLQ after `awactl queue set QUEUE --dlq on`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The jobs that are held
    List {
        #[command(flatten)]
        of: Of,
        /// At most so many
        #[arg(long, default_value_t = 50, value_parser = whole::<i64>(1, 1_000_000))]
        limit: i64,
    },
    /// How many a queue holds
    Depth,
    /// Make held jobs available again with all their attempts
    Retry {
        /// Ids of jobs; without any, all that match
        #[arg(value_parser = job_id)]
        ids: Vec<i64>,
        #[command(flatten)]
        of: Of,
        /// All of them, of every queue and kind
        #[arg(long, conflicts_with_all = ["ids", "queue", "kind"])]
        all: bool,
        /// Into this queue
        #[arg(long)]
        to_queue: Option<String>,
        /// At this priority, 1 (first) to 4
        #[arg(long, value_parser = whole::<i32>(1, 4))]
        to_priority: Option<i32>,
        /// At most so many of those that match
        #[arg(long, default_value_t = 10_000, value_parser = whole::<i64>(1, 1_000_000))]
        limit: i64,
        /// Change nothing; say which
        #[arg(long)]
        dry_run: bool,
    },
    /// Forget held jobs
    Purge {
        /// Ids of jobs; without any, all that match
        #[arg(value_parser = job_id)]
        ids: Vec<i64>,
        #[command(flatten)]
        of: Of,
        /// All of them, of every queue and kind
        #[arg(long, conflicts_with_all = ["ids", "queue", "kind"])]
        all: bool,
        /// At most so many of those that match
        #[arg(long, default_value_t = 10_000, value_parser = whole::<i64>(1, 1_000_000))]
        limit: i64,
        /// Change nothing; say which
        #[arg(long)]
        dry_run: bool,
    },
}

#[derive(Debug, Clone, clap::Args)]
pub struct Of {
    /// Of this queue
    #[arg(long)]
    queue: Option<String>,
    /// Of this kind
    #[arg(long)]
    kind: Option<String>,
}

#[derive(Serialize)]
struct Depth {
    queue: String,
    held: i64,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List { of, limit } => list(context, of, limit).await,
        Command::Depth => depth(context).await,
        Command::Retry { ids, of, all, to_queue, to_priority, limit, dry_run } => {
            let operation = Operation::Retry { queue: to_queue, priority: to_priority };
            change(context, Which { ids, of, all, limit, dry_run }, &operation).await
        }
        Command::Purge { ids, of, all, limit, dry_run } => {
            change(context, Which { ids, of, all, limit, dry_run }, &Operation::Delete).await
        }
    }
}

async fn list(context: &Context, of: Of, limit: i64) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let schema = &resolved.target.schema;
    let filter = JobFilter {
        states: vec!["failed".into()],
        queue: of.queue,
        kind: of.kind,
        limit: Some(limit),
        ..JobFilter::default()
    };
    // Held jobs come first among the failed ones.
    let mut jobs = list_jobs(&session, schema, &filter).await?;
    session.close().await;
    jobs.retain(|job| job.stored_in == "dlq");
    context.output.print(&jobs, |jobs| jobs_table(jobs))?;
    Ok(ExitCode::Done)
}

async fn depth(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let counts = queue_counts(&session, &resolved.target.schema).await?;
    session.close().await;
    let depths: Vec<Depth> =
        counts.queues.into_iter().filter(|q| q.dlq > 0).map(|q| Depth { queue: q.queue, held: q.dlq }).collect();
    context.output.print(&depths, |depths| {
        let mut table = Table::new(&["queue", "held"]).numbers(&[1]).when_empty("no job is held");
        for d in depths {
            table.row([d.queue.clone(), thousands(d.held)]);
        }
        table
    })?;
    Ok(ExitCode::Done)
}

/// Which held jobs a change is for.
struct Which {
    ids: Vec<i64>,
    of: Of,
    all: bool,
    limit: i64,
    dry_run: bool,
}

async fn change(context: &Context, which: Which, operation: &Operation) -> anyhow::Result<ExitCode> {
    let Which { ids, of, all, limit, dry_run } = which;
    if ids.is_empty() && of.queue.is_none() && of.kind.is_none() && !all {
        return Err(CommandError::usage(
            format!("which jobs to {}?", operation.name()),
            "neither ids nor a filter were given",
            "give ids, --queue, --kind, or --all",
        )
        .into());
    }
    let access = if dry_run { Access::Read } else { Access::Change };
    let (session, resolved) = context.connect_installed(access).await?;
    let schema = &resolved.target.schema;
    // Ids that are given are looked for among all.
    let limit = if ids.is_empty() { limit } else { i64::MAX };
    let held = held_jobs(&session, schema, "dlq", of.queue.as_deref(), of.kind.as_deref(), limit).await?;
    let (chosen, missing): (Vec<i64>, Vec<i64>) =
        if ids.is_empty() { (held, Vec::new()) } else { ids.into_iter().partition(|id| held.contains(id)) };
    if chosen.len() as i64 == limit {
        context.note(&format!("more may be held: this is for {} at a time, see --limit", thousands(limit)));
    }
    if let Some(id) = missing.first() {
        return Err(CommandError::failed(
            format!("the DLQ does not hold job {id}"),
            "it is elsewhere, or nowhere",
            format!("see `awactl inspect job {id}`"),
        )
        .into());
    }
    if dry_run {
        return would(context, &session, schema, &chosen, operation).await;
    }
    let jobs = if chosen.len() == 1 { "job" } else { "jobs" };
    let what = format!("{} {} held {jobs}", operation.name(), thousands(chosen.len() as i64));
    match operation {
        _ if chosen.is_empty() => {}
        Operation::Delete => context.confirm_irreversible(&what).await?,
        _ => context.confirm_change(&what).await?,
    }
    let jobs = operate_on(context, &session, schema, &chosen, operation).await?;
    session.close().await;
    let done = jobs.iter().filter(|job| job.done).count();
    let all_done = done == jobs.len();
    context
        .output
        .print(&Changed { operation: operation.name(), dry_run: false, would: None, done, jobs }, changed_table)?;
    Ok(if all_done { ExitCode::Done } else { ExitCode::Failed })
}
