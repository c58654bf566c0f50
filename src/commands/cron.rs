//! `awactl cron`: jobs by a schedule.

use chrono::{DateTime, Utc};
use clap::Subcommand;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::output::{Table, short_time, thousands};
use super::values::whole;
use super::{Access, Context};
use crate::engine::cron::{self, CronJob, Definition, Put};
use crate::engine::enqueue::{DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE};
use crate::engine::worker::RawJson;
use crate::engine::{Schema, Session};

/// List, add, remove, pause and trigger cron jobs
///
/// The leader of maintenance enqueues a job each time a schedule comes due, by the database's clock. What came due while
/// nobody led is fired once, the latest; the others are counted as missed.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// All of them: when each is due, fired last, and why it could not be
    List,
    Add(Box<AddArgs>),
    /// Forget some; the jobs that they made stay
    Remove {
        /// Names of the cron jobs
        #[arg(required = true)]
        names: Vec<String>,
    },
    /// Enqueue one's job now; its schedule goes on as it was
    Trigger {
        /// Name of the cron job
        name: String,
    },
    /// Let one make no job until it is resumed
    Pause {
        /// Name of the cron job
        name: String,
    },
    /// Let one go on from now; what came due while it was paused is not made up for
    Resume {
        /// Name of the cron job
        name: String,
    },
}

/// Add one, or change it
///
/// The schedule is a cron expression: minute, hour, day of month, month, day of week; seconds may stand before them. With
/// both kinds of day given, either is enough. In a zone with daylight saving a time that the clock skips comes due when it
/// has jumped, and a time that it shows twice comes due the first time only. A schedule for every hour of the day (such as
/// 0 * * * * or */15 * * * *) goes by the time that passes instead: it comes due in both passes of a doubled hour.
#[derive(Debug, clap::Args)]
struct AddArgs {
    /// Name of the cron job
    name: String,

    /// Cron expression, in quotes for the shell
    schedule: String,

    /// Kind of the jobs
    kind: String,

    /// Their arguments as JSON
    #[arg(default_value = "{}")]
    args: String,

    /// IANA time zone of the schedule
    #[arg(long, value_name = "ZONE", default_value = "UTC")]
    timezone: String,

    /// Queue of the jobs
    #[arg(long, default_value = DEFAULT_QUEUE)]
    queue: String,

    /// 1 (first) to 4
    #[arg(long, default_value_t = DEFAULT_PRIORITY, value_parser = whole::<i16>(1, 4))]
    priority: i16,

    /// 1 to 1000
    #[arg(long, default_value_t = DEFAULT_MAX_ATTEMPTS, value_parser = whole::<i16>(1, 1000))]
    max_attempts: i16,

    /// A tag; may be repeated, up to 20 times
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,

    /// A JSON object to keep with the jobs
    #[arg(long, value_name = "JSON", default_value = "{}")]
    metadata: String,

    /// Change the one of this name, if there is one that differs
    #[arg(long)]
    replace: bool,

    /// Change nothing; say when it would come due, in its zone and in UTC
    #[arg(long)]
    dry_run: bool,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List => list(context).await,
        Command::Add(args) => add(*args, context).await,
        Command::Remove { names } => remove(&names, context).await,
        Command::Trigger { name } => trigger(&name, context).await,
        Command::Pause { name } => pause(name, true, context).await,
        Command::Resume { name } => pause(name, false, context).await,
    }
}

#[derive(Serialize)]
struct Listed {
    cron_jobs: Vec<CronJob>,
}

async fn list(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let cron_jobs = cron::list(&session, &resolved.target.schema).await?;
    session.close().await;
    context.output.print(&Listed { cron_jobs }, |listed| {
        let mut jobs = Table::new(&["name", "schedule", "time zone", "kind"]).when_empty("there is no cron job");
        let mut times = Table::new(&["name", "next due", "last fire", "missed"]).numbers(&[3]).whole(&[1, 2]);
        let mut errors = Table::new(&["name", "last error"]);
        for job in &listed.cron_jobs {
            let next = match job.next_due_at {
                _ if job.paused => "paused".to_owned(),
                next => time(next),
            };
            jobs.row([&job.name, &job.cron_expr, &job.timezone, &job.kind]);
            times.row([job.name.clone(), next, time(job.last_fired_at), thousands(job.missed_count)]);
            if let Some(error) = &job.last_error {
                errors.row([&job.name, error]);
            }
        }
        jobs.then_if_any(times).then_if_any(errors)
    })?;
    Ok(ExitCode::Done)
}

fn time(at: Option<DateTime<Utc>>) -> String {
    at.map(short_time).unwrap_or_default()
}

/// One time it would come due.
#[derive(Serialize)]
struct Upcoming {
    local: String,
    utc: DateTime<Utc>,
}

#[derive(Serialize)]
struct Added {
    name: String,
    /// `None` when it was only asked for.
    result: Option<Put>,
    dry_run: bool,
    next: Vec<Upcoming>,
}

async fn add(args: AddArgs, context: &Context) -> anyhow::Result<ExitCode> {
    let json = |field: &str, text: &str| {
        RawJson::from_json(text).map_err(|e| {
            CommandError::usage(format!("{field} is not usable"), e.to_string(), "give JSON, in quotes for the shell")
        })
    };
    let mut job = Definition::new(args.schedule, args.kind);
    job.args = json("ARGS", &args.args)?;
    job.metadata = json("--metadata", &args.metadata)?;
    job.timezone = args.timezone;
    job.queue = args.queue;
    job.priority = args.priority.into();
    job.max_attempts = args.max_attempts.into();
    job.tags = args.tags;
    let schedule = job.parse()?;

    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let now: DateTime<Utc> = session.query_one("SELECT clock_timestamp()", &[]).await?.try_get(0)?;
    job.check_comes_due(now)?;
    let result = if args.dry_run {
        None
    } else {
        context.confirm_change(&format!("add the cron job {}", args.name)).await?;
        Some(cron::put(&session, &resolved.target.schema, &args.name, &job, args.replace).await?)
    };
    session.close().await;
    if result == Some(Put::Exists) {
        return Err(CommandError::refused(
            format!("did not add the cron job {}", args.name),
            "there is one of this name, and it differs",
            "add --replace to change it, or take another name",
        )
        .into());
    }
    let next = schedule.upcoming(now).take(5).map(|utc| Upcoming { local: schedule.local(utc), utc }).collect();
    context.output.print(&Added { name: args.name, result, dry_run: args.dry_run, next }, |added| {
        let what = match added.result {
            Some(Put::Added) => "added",
            Some(Put::Changed) => "changed",
            Some(Put::Unchanged | Put::Exists) => "there already, the same",
            None => "not added: a dry run",
        };
        let mut times = Table::new(&["next due", "in UTC"]);
        for at in &added.next {
            times.row([at.local.clone(), time(Some(at.utc))]);
        }
        Table::facts([("cron job", added.name.as_str()), ("result", what)]).then(times)
    })?;
    Ok(ExitCode::Done)
}

#[derive(Serialize)]
struct Removed {
    removed: Vec<String>,
}

async fn remove(names: &[String], context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let schema = &resolved.target.schema;
    let there = names_of(&session, schema).await?;
    // All are looked for before any is removed.
    if let Some(name) = names.iter().find(|name| !there.contains(name)) {
        return Err(unknown(name, &there));
    }
    context.confirm_irreversible(&format!("remove {}", names.join(", "))).await?;
    let mut removed = Vec::new();
    for name in names {
        if cron::remove(&session, schema, name).await? {
            removed.push(name.clone());
        }
    }
    session.close().await;
    context.output.print(&Removed { removed }, |r| Table::facts([("removed", r.removed.join(", "))]))?;
    Ok(ExitCode::Done)
}

#[derive(Serialize)]
struct Triggered {
    name: String,
    job_id: i64,
}

async fn trigger(name: &str, context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let schema = &resolved.target.schema;
    context.confirm_change(&format!("enqueue the job of {name}")).await?;
    let Some(job_id) = cron::trigger(&session, schema, name).await? else {
        return Err(unknown(name, &names_of(&session, schema).await?));
    };
    session.close().await;
    let triggered = Triggered { name: name.to_owned(), job_id };
    context
        .output
        .print(&triggered, |t| Table::facts([("triggered", t.name.clone()), ("job id", t.job_id.to_string())]))?;
    Ok(ExitCode::Done)
}

#[derive(Serialize)]
struct Paused {
    name: String,
    paused: bool,
    changed: bool,
}

async fn pause(name: String, paused: bool, context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let schema = &resolved.target.schema;
    context.confirm_change(&format!("{} {name}", if paused { "pause" } else { "resume" })).await?;
    let Some(changed) = cron::pause(&session, schema, &name, paused).await? else {
        return Err(unknown(&name, &names_of(&session, schema).await?));
    };
    session.close().await;
    context.output.print(&Paused { name, paused, changed }, |p| {
        let state = if p.paused { "paused" } else { "running" };
        Table::facts([("cron job", p.name.clone()), ("now", state.into())])
    })?;
    Ok(ExitCode::Done)
}

async fn names_of(session: &Session, schema: &Schema) -> anyhow::Result<Vec<String>> {
    Ok(cron::list(session, schema).await?.into_iter().map(|job| job.name).collect())
}

fn unknown(name: &str, there: &[String]) -> anyhow::Error {
    let why =
        if there.is_empty() { "there is none at all".to_owned() } else { format!("there are {}", there.join(", ")) };
    CommandError::failed(format!("there is no cron job {name}"), why, "see `awactl cron list`").into()
}
