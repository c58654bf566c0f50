//! `awactl run-workers`: the worker fleet's process.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use super::exit::{CommandError, ExitCode};
use super::output::{Table, thousands};
use super::signals::{Signals, exit_now};
use super::values::some_time;
use super::{Access, Context};
use crate::engine::cron::{self, Put};
use crate::engine::maintenance::MaintenanceOptions;
use crate::engine::worker::{Config, Fleet, FleetOptions, MAX_WORKERS, QueueOptions, Registry, StatsNow};
use crate::engine::{EngineError, connect, duration, migrate};

/// Run jobs until SIGTERM or Ctrl-C
///
/// The first signal drains: nothing more is claimed, running jobs may end within --shutdown-timeout, what is not started is
/// handed back, every result is written, exit 0; exit 1 if the database did not take some of them in time. A second signal
/// exits at once with 143 (SIGTERM) or 130 (SIGINT) and kills the programs that run; their jobs are rescued later.
/// Runs maintenance too; of all processes that do, one leads. With several hosts in the address it follows a failover. Through a
/// transaction pooler nobody is notified: jobs are found within --poll-interval.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Queues and handlers; see examples/workers.yaml
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// A queue to work on, and how many jobs at a time; added to the config's, or changing them
    #[arg(long = "queue", value_name = "NAME[:N]")]
    queues: Vec<QueueArg>,

    /// How soon a job is found that nobody announced
    #[arg(long, default_value = "200ms", value_name = "DURATION", value_parser = some_time)]
    poll_interval: Duration,

    /// How long running jobs may go on after a signal
    #[arg(long, default_value = "30s", value_name = "DURATION", value_parser = some_time)]
    shutdown_timeout: Duration,

    /// How long a job runs before the database is told that it lives, and again each time; 45s at most
    #[arg(long, default_value = "15s", value_name = "DURATION", value_parser = parse_heartbeat)]
    heartbeat_interval: Duration,

    /// Leave maintenance to other processes
    #[arg(long)]
    no_maintenance: bool,
}

#[derive(Debug, Clone)]
struct QueueArg {
    name: String,
    workers: Option<u16>,
}

impl FromStr for QueueArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, workers) = match text.rsplit_once(':') {
            Some((name, number)) => {
                let workers = number.parse().ok().filter(|n| (1..=MAX_WORKERS).contains(n));
                (name, Some(workers.ok_or(format!("N in NAME:N must be 1 to {MAX_WORKERS}, not {number:?}"))?))
            }
            None => (text, None),
        };
        if name.is_empty() || name.chars().count() > 200 {
            return Err("a queue's name has 1 to 200 characters".into());
        }
        Ok(Self { name: name.to_owned(), workers })
    }
}

/// Two beats at least before a worker is taken for lost.
fn parse_heartbeat(text: &str) -> Result<Duration, String> {
    let longest = MaintenanceOptions::default().stale_after / 2;
    match some_time(text)? {
        interval if interval > longest => Err(format!("it must be at most {}", duration::format(longest))),
        interval => Ok(interval),
    }
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    // From the start, so that a signal during start-up is not the default's sudden end.
    let mut signals = Signals::listen()?;
    let Setting { queues, max_workers, registry, cron_jobs } = setting(&args)?;
    let resolved = context.target(Access::Change).await?;
    if !prepare(context, &mut signals, &cron_jobs).await? {
        return Ok(ExitCode::Done);
    }

    let mut options = FleetOptions::new(queues);
    options.max_workers = max_workers.map(usize::from);
    options.poll_interval = args.poll_interval;
    options.heartbeat_interval = args.heartbeat_interval;
    options.shutdown_timeout = args.shutdown_timeout;
    if args.no_maintenance {
        options.maintenance = None;
    }
    let listed: Vec<String> = options.queues.iter().map(|q| format!("{}:{}", q.name, q.workers)).collect();
    context.note(&format!(
        "instance {}: working on {} with handlers for {}{}",
        options.instance,
        listed.join(", "),
        registry.kinds().join(", "),
        if registry.handles_any() { " and any other kind" } else { "" },
    ));
    let fleet = Fleet::start(&resolved.target, registry, options);
    let signal = signals.next().await;
    context.note(&format!("{signal}: draining, at most {}", duration::format(args.shutdown_timeout)));
    let stats = tokio::select! {
        stats = fleet.shut_down() => stats,
        signal = signals.next() => exit_now(context, signal),
    };
    context.output.print(&stats, stats_table)?;
    if stats.unwritten > 0 {
        let results = if stats.unwritten == 1 { "result" } else { "results" };
        context.note(&format!(
            "{} {results} could not be written; their attempts stay open until they are rescued, and run again",
            thousands(stats.unwritten as i64)
        ));
        return Ok(ExitCode::Failed);
    }
    Ok(ExitCode::Done)
}

type CronJobs = BTreeMap<String, cron::Definition>;

struct Setting {
    queues: Vec<QueueOptions>,
    max_workers: Option<u16>,
    registry: Registry,
    cron_jobs: CronJobs,
}

/// The config's queues, changed by the flags, the handlers, and the cron jobs.
fn setting(args: &Args) -> anyhow::Result<Setting> {
    let config = match &args.config {
        Some(path) => Config::load(path).map_err(|e| {
            CommandError::usage(format!("{} is not usable", path.display()), e.to_string(), "see examples/workers.yaml")
        })?,
        None => Config::default(),
    };
    let registry = config.registry()?;
    let Config { mut queues, max_workers, cron: cron_jobs, .. } = config;
    for arg in &args.queues {
        let queue = queues.entry(arg.name.clone()).or_default();
        if let Some(workers) = arg.workers {
            queue.workers = workers;
        }
    }
    if registry.is_empty() {
        return Err(CommandError::usage(
            "there is no handler",
            "without one every job would only be handed back",
            "name a file with handlers: --config workers.yaml (an example is examples/workers.yaml)",
        )
        .into());
    }
    if queues.is_empty() {
        return Err(CommandError::usage(
            "there is no queue to work on",
            "neither the config nor a flag names one",
            "add --queue NAME, or queues to the config",
        )
        .into());
    }
    let queues = queues.into_iter().map(|(name, queue)| QueueOptions::of(name, &queue)).collect();
    Ok(Setting { queues, max_workers, registry, cron_jobs })
}

/// Checks the schema and puts the cron jobs in place. Waits for a database that is down; says no when a signal came first.
async fn prepare(context: &Context, signals: &mut Signals, cron_jobs: &CronJobs) -> anyhow::Result<bool> {
    let target = &context.target(Access::Change).await?.target;
    let mut told = false;
    loop {
        let checked = async {
            let session = connect(target).await?;
            migrate::require_current(&session, &target.schema).await?;
            for (name, job) in cron_jobs {
                match cron::put(&session, &target.schema, name, job, true).await? {
                    Put::Added => context.note(&format!("cron job {name}: added")),
                    Put::Changed => context.note(&format!("cron job {name}: changed to what the config says")),
                    Put::Unchanged | Put::Exists => {}
                }
            }
            Ok(())
        };
        let checked = tokio::select! {
            checked = checked => checked,
            _ = signals.next() => return Ok(false),
        };
        match checked {
            Ok(()) => return Ok(true),
            Err(error @ EngineError::Unreachable { .. }) => {
                if !told {
                    context.note(&format!("waiting for the database: {error}"));
                    told = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            _ = signals.next() => return Ok(false),
        }
    }
}

fn stats_table(stats: &StatsNow) -> Table {
    let number = |n: u64| thousands(n as i64);
    Table::facts([
        ("claimed", number(stats.claimed)),
        ("completed", number(stats.completed)),
        ("failed for good", number(stats.failed)),
        ("cancelled", number(stats.cancelled)),
        ("retried", number(stats.retried)),
        ("snoozed", number(stats.snoozed)),
        ("left waiting", number(stats.waiting)),
        ("handed back", number(stats.handed_back)),
        ("results that lost", number(stats.lost)),
        ("results not written", number(stats.unwritten)),
    ])
}
