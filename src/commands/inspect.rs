//! `awactl inspect`: what the engine is doing, and why it is not.

use std::future::Future;
use std::io::IsTerminal as _;
use std::time::Duration;

use clap::Subcommand;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::maintenance::RingArg;
use super::output::{Format, Reader, Table, human_bytes, human_duration, short_time, thousands};
use super::signals::Signals;
use super::values::{job_id, some_time, whole};
use super::{Access, Context};
use crate::engine::counts::{QueueCounts, queue_counts};
use crate::engine::dead_tuples::{DeadTuplesReport, dead_tuples};
use crate::engine::inspect_claims::{ClaimsReport, JobPlace, job_place, open_claims};
use crate::engine::inspect_rings::{RingReport, RingsReport, SlotReport, rings};
use crate::engine::ring::SlotState;

/// Look at rings, dead tuples and queues
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,

    /// Look again every INTERVAL until Ctrl-C; JSON then has one document a line
    #[arg(long, global = true, value_name = "INTERVAL", num_args = 0..=1, require_equals = true, default_missing_value = "2s", value_parser = some_time)]
    watch: Option<Duration>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Every slot with generation, state, rows, bytes, dead tuples, and what blocks its prune
    Rings {
        /// Also the slots that hold nothing
        #[arg(long)]
        all: bool,
        /// Only this one
        #[arg(long)]
        ring: Option<RingArg>,
    },
    /// Dead tuples by table family
    DeadTuples {
        /// Count them with pgstattuple instead of asking the statistics; reads every table
        #[arg(long)]
        exact: bool,
        /// One row a table instead of one a family
        #[arg(long)]
        all: bool,
    },
    /// Jobs per queue and state
    Queues,
    /// Attempts that are open: who holds them, since when, and in which slot
    Claims {
        /// At most so many claim batches, and leases
        #[arg(long, default_value_t = 50, value_parser = whole::<i64>(1, 100_000))]
        limit: i64,
    },
    /// Where one job is
    Job {
        /// Id of the job
        #[arg(value_parser = job_id)]
        id: i64,
    },
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    let watch = args.watch;
    let (session, resolved) = context.connect_installed(Access::Read).await?;
    let schema = &resolved.target.schema;
    match args.command {
        Command::Rings { all, ring } => {
            let which = RingArg::rings(ring);
            let look = async || Ok(rings(&session, schema, &which).await?);
            shown(context, watch, look, |report| rings_table(report, all)).await
        }
        Command::DeadTuples { exact, all } => {
            let look = async || Ok(dead_tuples(&session, schema, exact).await?);
            shown(context, watch, look, |report| dead_tuples_table(report, all)).await
        }
        Command::Claims { limit } => {
            let look = async || Ok(open_claims(&session, schema, limit).await?);
            shown(context, watch, look, claims_table).await
        }
        Command::Job { id } => {
            let look = async || {
                let place = job_place(&session, schema, id).await?;
                place.ok_or_else(|| CommandError::no_such_job(id).into())
            };
            shown(context, watch, look, place_table).await
        }
        Command::Queues => {
            let look = async || Ok(queue_counts(&session, schema).await?);
            shown(context, watch, look, queues_table).await
        }
    }
}

/// Prints one look, or one every interval.
async fn shown<T: Serialize, F: Future<Output = anyhow::Result<T>>>(
    context: &Context,
    watch: Option<Duration>,
    look: impl Fn() -> F,
    table: impl Fn(&T) -> Table,
) -> anyhow::Result<ExitCode> {
    let Some(interval) = watch else {
        context.output.print(&look().await?, table)?;
        return Ok(ExitCode::Done);
    };
    let mut signals = Signals::listen()?;
    loop {
        let data = look().await?;
        let reader = match context.output.format() {
            Format::Json => context.output.raw(format!("{}\n", serde_json::to_string(&data)?).as_bytes())?,
            Format::Yaml => context.output.raw(format!("---\n{}", serde_yaml::to_string(&data)?).as_bytes())?,
            Format::Table => {
                if std::io::stdout().is_terminal() {
                    // Home, and clear what is below.
                    context.output.raw(b"\x1b[H\x1b[2J")?;
                }
                context.output.print(&data, &table)?
            }
        };
        if reader == Reader::Left {
            return Ok(ExitCode::Done);
        }
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            _ = signals.next() => return Ok(ExitCode::Done),
        }
    }
}

/// A row a slot, and below why each is as it is; pruned ones are left out unless `all`, since they hold nothing.
pub fn rings_table(report: &RingsReport, all: bool) -> Table {
    let mut table =
        Table::new(&["ring", "slot", "gen", "state", "rows", "open", "size", "dead"]).numbers(&[1, 2, 4, 5, 6, 7]);
    let mut reasons = Table::new(&["ring", "slot", "why"]).whole(&[0, 1]);
    for ring in &report.rings {
        for slot in ring.slots.iter().filter(|s| all || s.state != SlotState::Pruned) {
            table.row([
                ring.ring.name().to_owned(),
                slot.slot.to_string(),
                slot.generation.map(|g| g.to_string()).unwrap_or_default(),
                format!("{:?}", slot.state).to_lowercase(),
                format!("{}{}", if slot.rows_exact { "" } else { "~" }, thousands(slot.rows)),
                thousands(slot.open),
                human_bytes(slot.bytes.unsigned_abs()),
                thousands(slot.dead_tuples),
            ]);
            if slot.state != SlotState::Pruned {
                reasons.row([ring.ring.name().to_owned(), slot.slot.to_string(), why(ring, slot)]);
            }
        }
        if !all {
            let pruned = ring.slots.iter().filter(|s| s.state == SlotState::Pruned).count();
            let free = format!("free: {pruned} of {} slots are pruned", ring.slot_count);
            reasons.row([ring.ring.name().to_owned(), "others".to_owned(), free]);
        }
    }
    table.then(reasons)
}

fn why(ring: &RingReport, slot: &SlotReport) -> String {
    match slot.state {
        SlotState::Open => {
            let age = (chrono::Utc::now() - ring.rotated_at).to_std().unwrap_or_default();
            let next = match (&ring.rotation.opens, &ring.rotation.skipped) {
                (_, Some(reason)) => format!("would not be rotated: {reason}"),
                (Some(slot), None) => format!("a rotation opens slot {slot}"),
                (None, None) => String::new(),
            };
            format!("written to for {}; {next}", human_duration(age))
        }
        SlotState::Pruned => "free".into(),
        SlotState::Sealed if slot.blockers.is_empty() => "kept to be read; can be pruned".into(),
        SlotState::Sealed => {
            let blockers: Vec<String> = slot.blockers.iter().map(|b| format!("{}: {}", b.reason, b.detail)).collect();
            blockers.join("; ")
        }
    }
}

/// A row a family that holds something, or a table with `all`.
pub fn dead_tuples_table(report: &DeadTuplesReport, all: bool) -> Table {
    let mut table = Table::new(&["table", "live", "dead", "size", "last autovacuum"]).numbers(&[1, 2, 3]).whole(&[0]);
    let rows = if all { report.tables.clone() } else { report.by_family() };
    let (rows, empty): (Vec<_>, Vec<_>) = rows.into_iter().partition(|row| all || row.live > 0 || row.dead > 0);
    for row in rows {
        table.row([
            row.table,
            thousands(row.live),
            thousands(row.dead),
            human_bytes(row.bytes.unsigned_abs()),
            row.last_autovacuum
                .map(|t| t.to_rfc3339_opts(chrono::SecondsFormat::Secs, true))
                .unwrap_or_else(|| "never".into()),
        ]);
    }
    if !empty.is_empty() {
        let bytes: u64 = empty.iter().map(|row| row.bytes.unsigned_abs()).sum();
        let others = format!("{} others", empty.len());
        table.row([others, thousands(0), thousands(0), human_bytes(bytes), "hold nothing".to_owned()]);
    }
    let how = if report.exact { "counted" } else { "by the server's statistics" };
    table.row(["total".into(), String::new(), thousands(report.total), String::new(), how.into()]);
    table.row([
        "catalog (TRUNCATE)".into(),
        String::new(),
        thousands(report.catalog),
        String::new(),
        "not in the total".into(),
    ]);
    table
}

fn claims_table(report: &ClaimsReport) -> Table {
    let mut batches = Table::new(&["slot", "batch", "queue", "open", "first job", "age", "claimed by"])
        .numbers(&[0, 1, 3, 4])
        .whole(&[5])
        .when_empty("no claim is open");
    for c in &report.claims {
        batches.row([
            c.claim_slot.to_string(),
            c.batch_id.to_string(),
            c.queue.clone(),
            thousands(c.open),
            c.first_open_job.to_string(),
            human_duration(Duration::from_secs_f64(c.age_s.max(0.0))),
            c.claimed_by.clone().unwrap_or_default(),
        ]);
    }
    let mut leases = Table::new(&["slot", "job", "queue", "state", "age", "waits until", "claimed by"])
        .numbers(&[0, 1])
        .whole(&[3, 4, 5])
        .when_empty("no attempt has a lease");
    for l in &report.leases {
        leases.row([
            l.lease_slot.to_string(),
            l.job_id.to_string(),
            l.queue.clone(),
            // As it is called, the line is too long for a terminal.
            if l.state == "waiting_external" { "waiting".to_owned() } else { l.state.clone() },
            human_duration(Duration::from_secs_f64(l.age_s.max(0.0))),
            l.callback_timeout_at.map_or_else(String::new, short_time),
            l.claimed_by.clone().unwrap_or_default(),
        ]);
    }
    batches.then(leases)
}

fn place_table(place: &JobPlace) -> Table {
    let number = |n: Option<i64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    Table::facts([
        ("job", place.job_id.to_string()),
        ("place", place.place.clone()),
        ("state", place.state.clone()),
        ("deleted or retried since", if place.hidden { "yes" } else { "no" }.to_owned()),
        ("queue slot", number(place.ready_slot.map(i64::from))),
        ("lane", number(place.lane_id.map(i64::from))),
        ("lane_seq", number(place.lane_seq)),
        ("run lease", number(place.run_lease)),
        ("claim slot", number(place.claim_slot.map(i64::from))),
        ("receipt", number(place.receipt_id)),
    ])
}

pub(super) fn queues_table(report: &QueueCounts) -> Table {
    let mut table = Table::new(&[
        "queue", "avail", "sched", "retry", "run", "wait", "done", "failed", "dlq", "cancel", "oldest", "",
    ])
    .numbers(&[1, 2, 3, 4, 5, 6, 7, 8, 9])
    .whole(&[10, 11])
    .without_idle(&[2, 3, 5, 8, 9, 10, 11])
    .when_empty("no queue ever had a job");
    for q in &report.queues {
        table.row([
            q.queue.clone(),
            format!("{}{}", if q.available_exact { "" } else { "~" }, thousands(q.available)),
            thousands(q.scheduled),
            thousands(q.retryable),
            thousands(q.running),
            thousands(q.waiting),
            thousands(q.completed),
            thousands(q.failed),
            thousands(q.dlq),
            thousands(q.cancelled),
            q.oldest_ready_age_s.map(|s| human_duration(Duration::from_secs_f64(s.max(0.0)))).unwrap_or_default(),
            if q.paused { "paused" } else { "" }.to_owned(),
        ]);
    }
    table
}
