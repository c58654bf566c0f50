//! `awactl maintenance`: a maintenance-only role, single passes, and who leads.

use std::time::Duration;

use clap::Subcommand;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::output::{Table, thousands};
use super::signals::{Signals, exit_now};
use super::values::whole;
use super::{Access, Context};
use crate::engine::duration;
use crate::engine::maintenance::{self, Maintenance, MaintenanceOptions, MaintenanceReport, leader};
use crate::engine::promote::promote;
use crate::engine::rescue::rescue;
use crate::engine::ring::{self, Pruned, Ring, Rotated};

/// Rotate, prune, promote and rescue: as a role, or one pass
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Maintain until SIGTERM or Ctrl-C; of all processes that do, one leads
    ///
    /// The leader holds a transaction open on a connection of its own ("awactl leader"). It pins nothing, and holds through a
    /// transaction pooler, where it takes one of the pool's connections.
    Run,
    /// One pass of every task, leader or not
    Once,
    /// Open the next slot of the rings
    Rotate {
        /// Only this one
        #[arg(long, value_enum)]
        ring: Option<RingArg>,
        /// Also if the open slot is empty
        #[arg(long)]
        force: bool,
    },
    /// Truncate the sealed slots that are proven over
    Prune {
        /// Only this one
        #[arg(long, value_enum)]
        ring: Option<RingArg>,
        /// Only this slot of the ring
        #[arg(long, requires = "ring")]
        slot: Option<i16>,
    },
    /// Make due deferred jobs ready
    Promote {
        /// At most so many
        #[arg(long, default_value_t = 10_000, value_parser = whole::<i32>(1, 1_000_000))]
        limit: i32,
    },
    /// End attempts of lost workers, past deadlines and unanswered callbacks
    Rescue {
        /// How long a worker may give no sign of life
        #[arg(long, value_name = "DURATION", default_value = "90s")]
        stale_after: String,
        /// Claim batches looked at in each claim slot, and leases
        #[arg(long, default_value_t = 500, value_parser = whole::<i32>(1, 100_000))]
        limit: i32,
    },
    /// Who leads
    Status,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum RingArg {
    Queue,
    Claim,
    Lease,
}

impl RingArg {
    pub fn rings(ring: Option<Self>) -> Vec<Ring> {
        match ring {
            Some(Self::Queue) => vec![Ring::Queue],
            Some(Self::Claim) => vec![Ring::Claim],
            Some(Self::Lease) => vec![Ring::Lease],
            None => Ring::ALL.to_vec(),
        }
    }
}

const LOCK_TIMEOUT: Duration = Duration::from_millis(50);

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::Run => forever(context).await,
        Command::Once => once(context).await,
        Command::Rotate { ring, force } => rotate(context, &RingArg::rings(ring), force).await,
        Command::Prune { ring, slot } => prune(context, &RingArg::rings(ring), slot).await,
        Command::Promote { limit } => promote_once(context, limit).await,
        Command::Rescue { stale_after, limit } => rescue_once(context, &stale_after, limit).await,
        Command::Status => status(context).await,
    }
}

async fn forever(context: &Context) -> anyhow::Result<ExitCode> {
    let mut signals = Signals::listen()?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    session.close().await;
    let maintenance = Maintenance::start(&resolved.target, MaintenanceOptions::default());
    let signal = signals.next().await;
    context.note(&format!("{signal}: ending after this pass"));
    let report = tokio::select! {
        report = maintenance.stop() => report,
        signal = signals.next() => exit_now(context, signal),
    };
    context.output.print(&report, report_table)?;
    Ok(ExitCode::Done)
}

async fn once(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let options = MaintenanceOptions { keep_sealed: 0, ..MaintenanceOptions::default() };
    let report = maintenance::once(&session, &resolved.target.schema, &options).await?;
    session.close().await;
    context.output.print(&report, report_table)?;
    Ok(ExitCode::Done)
}

async fn rotate(context: &Context, rings: &[Ring], force: bool) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let mut outcomes = Vec::new();
    for ring in rings {
        outcomes.push(ring::rotate(&session, &resolved.target.schema, *ring, force).await?);
    }
    session.close().await;
    context.output.print(&outcomes, |outcomes: &Vec<Rotated>| {
        let mut table = Table::new(&["ring", "slot", "generation", "rotated", "why not"]).numbers(&[1, 2]);
        for o in outcomes {
            table.row([
                o.ring.name().to_owned(),
                o.slot.map(|s| s.to_string()).unwrap_or_default(),
                o.generation.map(|g| g.to_string()).unwrap_or_default(),
                if o.rotated { "yes" } else { "no" }.to_owned(),
                o.reason.clone().unwrap_or_default(),
            ]);
        }
        table
    })?;
    Ok(ExitCode::Done)
}

async fn prune(context: &Context, rings: &[Ring], slot: Option<i16>) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let schema = &resolved.target.schema;
    let mut outcomes = Vec::new();
    // The claim ring first: its pruned slots are the cheapest proof for the queue ring.
    for ring in rings.iter().rev() {
        let slots = ring::slots(&session, schema, *ring).await?;
        let numbers = match slot {
            Some(slot) if slots.iter().any(|s| s.slot == slot) => vec![slot],
            Some(slot) => {
                return Err(CommandError::failed(
                    format!("there is no slot {slot} in the {} ring", ring.name()),
                    format!("it has {}, from 0 on", slots.len()),
                    "see `awactl inspect rings --all`",
                )
                .into());
            }
            None => ring::sealed(&slots).iter().map(|s| s.slot).collect(),
        };
        for slot in numbers {
            outcomes.push(ring::prune(&session, schema, *ring, slot, LOCK_TIMEOUT).await?);
        }
    }
    session.close().await;
    context.output.print(&outcomes, |outcomes: &Vec<Pruned>| {
        let mut table =
            Table::new(&["ring", "slot", "pruned", "why not"]).numbers(&[1]).when_empty("no slot is sealed");
        for o in outcomes {
            let why = match (&o.reason, &o.detail) {
                (Some(reason), Some(detail)) => format!("{reason}: {detail}"),
                (Some(reason), None) => reason.clone(),
                _ => String::new(),
            };
            let pruned = if o.pruned { "yes" } else { "no" };
            table.row([o.ring.name().to_owned(), o.slot.to_string(), pruned.to_owned(), why]);
        }
        table
    })?;
    // A pass may find nothing to do; a slot that was named was meant.
    let done = slot.is_none() || outcomes.iter().all(|o| o.pruned);
    Ok(if done { ExitCode::Done } else { ExitCode::Failed })
}

#[derive(Serialize)]
struct Promoted {
    promoted: i32,
}

async fn promote_once(context: &Context, limit: i32) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let promoted = promote(&session, &resolved.target.schema, limit).await?;
    session.close().await;
    context.output.print(&Promoted { promoted }, |p| Table::facts([("promoted", thousands(i64::from(p.promoted)))]))?;
    Ok(ExitCode::Done)
}

async fn rescue_once(context: &Context, stale_after: &str, limit: i32) -> anyhow::Result<ExitCode> {
    let stale_after = duration::parse(stale_after)
        .map_err(|e| CommandError::usage("--stale-after is not usable", e.to_string(), "say it like 90s or 5m"))?;
    let (session, resolved) = context.connect_installed(Access::Change).await?;
    let rescued = rescue(&session, &resolved.target.schema, stale_after, limit).await?;
    session.close().await;
    context.output.print(&rescued, |r| {
        Table::facts([
            ("stale", thousands(r.stale.into())),
            ("past their deadline", thousands(r.deadline.into())),
            ("callback timed out", thousands(r.callback_timeout.into())),
        ])
    })?;
    Ok(ExitCode::Done)
}

async fn status(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let leader = leader(&session, &resolved.target.schema).await?;
    session.close().await;
    context.output.print(&leader, |leader| match leader {
        None => Table::facts([("leader", "nobody: rings do not turn, deferred jobs do not come due")]),
        Some(l) => Table::facts([
            ("leader", format!("pid {}", l.pid)),
            ("application", l.application_name.clone()),
            ("from", l.client.clone().unwrap_or_else(|| "a local socket".into())),
            ("leads since", l.since.map(since).unwrap_or_default()),
        ]),
    })?;
    Ok(ExitCode::Done)
}

fn since(at: chrono::DateTime<chrono::Utc>) -> String {
    at.to_rfc3339_opts(chrono::SecondsFormat::Secs, true)
}

fn report_table(report: &MaintenanceReport) -> Table {
    let mut table = Table::new(&["task", "outcome", "times"]).numbers(&[2]).when_empty("nothing to do");
    let n = |n: &u64| thousands(*n as i64);
    for (ring, times) in &report.rotated {
        table.row([format!("rotate {ring}"), "opened the next slot".into(), n(times)]);
    }
    for (ring, times) in &report.pruned {
        table.row([format!("prune {ring}"), "truncated a slot".into(), n(times)]);
    }
    if report.promoted > 0 {
        table.row(["promote".to_owned(), "jobs became ready".into(), n(&report.promoted)]);
    }
    if report.cron_fired > 0 {
        table.row(["cron".to_owned(), "due jobs were enqueued".into(), n(&report.cron_fired)]);
    }
    if report.cron_missed > 0 {
        table.row(["cron".to_owned(), "occurrences made no job".into(), n(&report.cron_missed)]);
    }
    if report.trimmed > 0 {
        table.row(["trim".to_owned(), "old cursor rows removed".into(), n(&report.trimmed)]);
    }
    for (what, times) in &report.skipped {
        let (task, reason) = what.split_once(": ").unwrap_or((what, ""));
        table.row([task.to_owned(), format!("skipped: {reason}"), n(times)]);
    }
    for (task, error) in &report.failed {
        table.row([(*task).to_owned(), format!("failed: {error}"), String::new()]);
    }
    table
}
