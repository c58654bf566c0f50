//! `awactl job`: look at jobs, and cancel, retry, delete or move them.

use anyhow::Context as _;
use clap::Subcommand;
use serde::Serialize;

use super::enqueue::first_ids;
use super::exit::{CommandError, ExitCode};
use super::output::{Table, short_time, thousands};
use super::progress::bar;
use super::values::{job_id, whole};
use super::{Access, Context};
use crate::engine::jobs::{JobFilter, STATES, ShownJob, list_jobs};
use crate::engine::operate::{Operate, Operated, Operation, Seen};
use crate::engine::{Schema, Session};

/// List, show, cancel, retry, delete and move jobs
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The jobs that match, in no particular order
    List {
        #[command(flatten)]
        filter: Filter,
        /// At most so many
        #[arg(long, default_value_t = 50, value_parser = whole::<i64>(1, 1_000_000))]
        limit: i64,
    },
    /// One job with everything that is known of it
    Show {
        /// Id of the job
        #[arg(value_parser = job_id)]
        id: i64,
    },
    /// End jobs, running or not; handlers of running ones are told
    Cancel {
        #[command(flatten)]
        which: Which,
        /// Kept among the job's errors
        #[arg(long)]
        reason: Option<String>,
    },
    /// Make scheduled, retryable, failed or cancelled jobs available now
    ///
    /// Failed and cancelled ones get all their attempts anew.
    Retry {
        #[command(flatten)]
        which: Which,
        /// Into this queue
        #[arg(long)]
        to_queue: Option<String>,
        /// At this priority, 1 (first) to 4
        #[arg(long, value_parser = whole::<i32>(1, 4))]
        to_priority: Option<i32>,
    },
    /// Forget jobs; running ones must be cancelled first
    Delete {
        #[command(flatten)]
        which: Which,
    },
    /// Give waiting jobs another queue, another priority, or both
    #[command(group(clap::ArgGroup::new("to").args(["to_queue", "to_priority"]).required(true).multiple(true)))]
    Move {
        #[command(flatten)]
        which: Which,
        /// Into this queue
        #[arg(long)]
        to_queue: Option<String>,
        /// To this priority, 1 (first) to 4
        #[arg(long, value_parser = whole::<i32>(1, 4))]
        to_priority: Option<i32>,
    },
}

/// Jobs by what they are; all that is given must match.
#[derive(Debug, Clone, clap::Args)]
pub struct Filter {
    /// Of this queue
    #[arg(long)]
    queue: Option<String>,
    /// Of this kind
    #[arg(long)]
    kind: Option<String>,
    /// With this tag
    #[arg(long)]
    tag: Option<String>,
    /// In this state; may be repeated
    #[arg(long = "state", value_parser = clap::builder::PossibleValuesParser::new(STATES))]
    states: Vec<String>,
}

impl Filter {
    fn is_empty(&self) -> bool {
        self.queue.is_none() && self.kind.is_none() && self.tag.is_none() && self.states.is_empty()
    }

    fn with_limit(&self, limit: i64) -> JobFilter {
        JobFilter {
            states: self.states.clone(),
            queue: self.queue.clone(),
            kind: self.kind.clone(),
            tag: self.tag.clone(),
            id: None,
            limit: Some(limit),
        }
    }
}

/// Which jobs a change is for.
#[derive(Debug, Clone, clap::Args)]
pub struct Which {
    /// Ids of jobs
    #[arg(value_parser = job_id)]
    ids: Vec<i64>,
    #[command(flatten)]
    filter: Filter,
    /// At most so many of those that match
    #[arg(long, default_value_t = 10_000, value_parser = whole::<i64>(1, 1_000_000))]
    limit: i64,
    /// Change nothing; say which
    #[arg(long)]
    dry_run: bool,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List { filter, limit } => list(context, &filter.with_limit(limit)).await,
        Command::Show { id } => show(context, id).await,
        Command::Cancel { which, reason } => change(context, &which, &Operation::Cancel { reason }).await,
        Command::Retry { which, to_queue, to_priority } => {
            change(context, &which, &Operation::Retry { queue: to_queue, priority: to_priority }).await
        }
        Command::Delete { which } => change(context, &which, &Operation::Delete).await,
        Command::Move { which, to_queue, to_priority } => {
            change(context, &which, &Operation::Move { queue: to_queue, priority: to_priority }).await
        }
    }
}

async fn list(context: &Context, filter: &JobFilter) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let jobs = list_jobs(&session, &resolved.target.schema, filter).await?;
    session.close().await;
    context.output.print(&jobs, |jobs| jobs_table(jobs))?;
    Ok(ExitCode::Done)
}

pub(super) fn jobs_table(jobs: &[ShownJob]) -> Table {
    let mut table = Table::new(&["id", "queue", "kind", "state", "prio", "attempt", "run at"])
        .numbers(&[0, 4])
        .whole(&[3, 5, 6])
        .when_empty("no job matches");
    let mut errors = Table::new(&["id", "last error"]).numbers(&[0]);
    for job in jobs {
        table.row([
            job.id.to_string(),
            job.queue.clone(),
            job.kind.clone(),
            job.state.clone(),
            job.priority.to_string(),
            format!("{}/{}", job.attempt, job.max_attempts),
            short_time(job.run_at),
        ]);
        let error = last_error(job);
        if !error.is_empty() {
            errors.row([job.id.to_string(), error]);
        }
    }
    table.then_if_any(errors)
}

fn last_error(job: &ShownJob) -> String {
    let text = job.errors.last().and_then(|e| e.get("error")).and_then(|e| e.as_str()).unwrap_or_default();
    let mut line: String = text.lines().next().unwrap_or_default().chars().take(200).collect();
    if line.len() < text.len() {
        line.push('…');
    }
    line
}

async fn show(context: &Context, id: i64) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let filter = JobFilter { id: Some(id), ..JobFilter::default() };
    let mut jobs = list_jobs(&session, &resolved.target.schema, &filter).await?;
    session.close().await;
    // A job that a retry moved between two reads may be seen twice; the later lease is the truth.
    jobs.sort_by_key(|job| job.run_lease);
    let Some(job) = jobs.pop() else {
        return Err(CommandError::no_such_job(id).into());
    };
    context.output.print(&job, |job| {
        let time = |t: Option<chrono::DateTime<chrono::Utc>>| t.map_or_else(|| "-".to_owned(), |t| t.to_rfc3339());
        let mut facts = vec![
            ("id", job.id.to_string()),
            ("kind", job.kind.clone()),
            ("queue", job.queue.clone()),
            ("state", job.state.clone()),
            ("stored in", job.stored_in.clone()),
            ("priority", job.priority.to_string()),
            ("attempt", format!("{} of {}", job.attempt, job.max_attempts)),
            ("run lease", job.run_lease.to_string()),
            ("created at", job.created_at.to_rfc3339()),
            ("run at", job.run_at.to_rfc3339()),
            ("attempted at", time(job.attempted_at)),
            ("heartbeat at", time(job.heartbeat_at)),
            ("deadline at", time(job.deadline_at)),
            ("finalized at", time(job.finalized_at)),
            ("args", job.args.to_string()),
            ("metadata", job.metadata.to_string()),
            ("tags", job.tags.join(", ")),
            ("progress", job.progress.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string)),
        ];
        if let Some(token) = &job.callback_id {
            facts.push(("callback", format!("{token}, until {}", time(job.callback_timeout_at))));
        }
        if let Some(key) = &job.unique_key {
            facts.push(("unique key", key.clone()));
        }
        let table = Table::facts(facts);
        if job.errors.is_empty() {
            return table;
        }
        let mut errors = Table::new(&["attempt", "at", "error"]).numbers(&[0]);
        for error in &job.errors {
            let text = |name: &str| match error.get(name) {
                Some(serde_json::Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
                None => String::new(),
            };
            errors.row([text("attempt"), text("at"), text("error")]);
        }
        table.then(errors)
    })?;
    Ok(ExitCode::Done)
}

/// Jobs that a table lists.
const LISTED: usize = 20;

/// What a change did to each job.
#[derive(Serialize)]
pub(super) struct Changed {
    pub operation: &'static str,
    pub dry_run: bool,
    /// How many a dry run would do it to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub would: Option<usize>,
    pub done: usize,
    pub jobs: Vec<Operated>,
}

async fn change(context: &Context, which: &Which, operation: &Operation) -> anyhow::Result<ExitCode> {
    if which.ids.is_empty() && which.filter.is_empty() {
        return Err(CommandError::usage(
            format!("which jobs to {}?", operation.name()),
            "neither ids nor a filter were given",
            "give ids, or at least one of --queue, --kind, --tag and --state",
        )
        .into());
    }
    let access = if which.dry_run { Access::Read } else { Access::Change };
    let (session, resolved) = context.connect_installed(access).await?;
    let schema = &resolved.target.schema;
    let ids = if which.filter.is_empty() {
        which.ids.clone()
    } else {
        // Ids that are given are looked for among all that match.
        let limit = if which.ids.is_empty() { which.limit } else { i64::MAX };
        let mut ids: Vec<i64> = list_jobs(&session, schema, &suiting(&which.filter, limit, operation))
            .await?
            .iter()
            .map(|j| j.id)
            .collect();
        if !which.ids.is_empty() {
            ids.retain(|id| which.ids.contains(id));
        } else if ids.len() as i64 == which.limit {
            context.note(&format!("more may match: this is for {} at a time, see --limit", thousands(which.limit)));
        }
        ids
    };
    if which.dry_run {
        return would(context, &session, schema, &ids, operation).await;
    }
    let jobs = if ids.len() == 1 { "job" } else { "jobs" };
    let what = format!("{} {} {jobs}", operation.name(), thousands(ids.len() as i64));
    match operation {
        _ if ids.is_empty() => {}
        // A cancelled job can be retried, one given by its id was meant.
        Operation::Cancel { .. } if which.filter.is_empty() => context.confirm_change(&what).await?,
        Operation::Cancel { .. } | Operation::Delete => context.confirm_irreversible(&what).await?,
        Operation::Retry { .. } | Operation::Move { .. } => context.confirm_change(&what).await?,
    }
    let jobs = operate_on(context, &session, schema, &ids, operation).await?;
    session.close().await;
    let done = jobs.iter().filter(|job| job.done).count();
    let all_done = done == jobs.len();
    let changed = Changed { operation: operation.name(), dry_run: false, would: None, done, jobs };
    context.output.print(&changed, changed_table)?;
    Ok(if all_done { ExitCode::Done } else { ExitCode::Failed })
}

/// Says which jobs a change would be for, and why not for the others.
pub(super) async fn would(
    context: &Context,
    session: &Session,
    schema: &Schema,
    ids: &[i64],
    operation: &Operation,
) -> anyhow::Result<ExitCode> {
    let operate = Operate::prepare(session, schema).await?;
    let bar = bar(context.shows_progress() && ids.len() > 100, "looked at", ids.len() as u64);
    let mut jobs = Vec::with_capacity(ids.len());
    for ids in ids.chunks(Seen::AT_ONCE) {
        let seen = operate.see(session, ids).await?;
        for id in ids {
            jobs.push(operate.would(session, *id, operation, &seen).await?);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    let would = jobs.iter().filter(|job| job.reason.is_none()).count();
    let all = would == jobs.len();
    let changed = Changed { operation: operation.name(), dry_run: true, would: Some(would), done: 0, jobs };
    context.output.print(&changed, changed_table)?;
    Ok(if all { ExitCode::Done } else { ExitCode::Failed })
}

/// A filter without a state means the states that the operation suits.
fn suiting(filter: &Filter, limit: i64, operation: &Operation) -> JobFilter {
    let mut filter = filter.with_limit(limit);
    if filter.states.is_empty() {
        let states: &[&str] = match operation {
            Operation::Cancel { .. } => &["scheduled", "available", "running", "retryable", "waiting_external"],
            Operation::Retry { .. } => &["failed", "cancelled"],
            Operation::Delete => &["scheduled", "available", "retryable", "completed", "failed", "cancelled"],
            Operation::Move { .. } => &["scheduled", "available", "retryable"],
        };
        filter.states = states.iter().map(|s| (*s).to_owned()).collect();
    }
    filter
}

/// One after the other, each its own transaction.
pub(super) async fn operate_on(
    context: &Context,
    session: &Session,
    schema: &Schema,
    ids: &[i64],
    operation: &Operation,
) -> anyhow::Result<Vec<Operated>> {
    let operate = Operate::prepare(session, schema).await?;
    let bar = bar(context.shows_progress() && ids.len() > 100, operation.name(), ids.len() as u64);
    let mut jobs = Vec::with_capacity(ids.len());
    for some in ids.chunks(Seen::AT_ONCE) {
        let seen = operate.see(session, some).await?;
        for id in some {
            let operated = operate
                .run(session, *id, operation, &seen)
                .await
                .with_context(|| format!("{} of {} jobs were done before job {id}", jobs.len(), ids.len()))?;
            jobs.push(operated);
            bar.inc(1);
        }
    }
    bar.finish_and_clear();
    Ok(jobs)
}

pub(super) fn changed_table(changed: &Changed) -> Table {
    let refused: Vec<&Operated> = changed.jobs.iter().filter(|job| job.reason.is_some()).collect();
    let counted = match changed.would {
        Some(would) => [("would", changed.operation.to_owned()), ("jobs", thousands(would as i64))],
        None => [("operation", changed.operation.to_owned()), ("done", thousands(changed.done as i64))],
    };
    let mut facts = counted.to_vec();
    if !refused.is_empty() || changed.would.is_none() {
        facts.push((if changed.would.is_some() { "not" } else { "not done" }, thousands(refused.len() as i64)));
    }
    if changed.would.is_some_and(|would| would > 0) {
        let ids: Vec<i64> = changed.jobs.iter().filter(|job| job.reason.is_none()).map(|job| job.job_id).collect();
        facts.push(("job ids", first_ids(&ids)));
    }
    let table = Table::facts(facts);
    if refused.is_empty() {
        return table;
    }
    let mut why = Table::new(&["job", "why not"]).numbers(&[0]);
    for job in refused.iter().take(LISTED) {
        why.row([job.job_id.to_string(), job.reason.clone().unwrap_or_default()]);
    }
    if refused.len() > LISTED {
        why.row([
            "…".to_owned(),
            format!("and {} more; -o json lists all", thousands((refused.len() - LISTED) as i64)),
        ]);
    }
    table.then(why)
}
