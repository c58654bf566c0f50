//! What a leader does: one pass of each task.

use std::time::Duration;

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::{MaintenanceOptions, MaintenanceReport};
use crate::engine::cron;
use crate::engine::error::Result;
use crate::engine::promote::promote;
use crate::engine::rescue::rescue;
use crate::engine::ring::{self, Ring, SlotState};
use crate::engine::schema::Schema;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    Promote,
    Rescue,
    Rotate,
    Prune,
    Trim,
    Cron,
}

impl Task {
    pub const ALL: [Task; 6] = [Task::Promote, Task::Cron, Task::Rescue, Task::Rotate, Task::Prune, Task::Trim];

    pub fn name(self) -> &'static str {
        match self {
            Self::Promote => "promote",
            Self::Rescue => "rescue",
            Self::Rotate => "rotate",
            Self::Prune => "prune",
            Self::Trim => "trim",
            Self::Cron => "cron",
        }
    }

    pub fn interval(self, options: &MaintenanceOptions) -> Duration {
        match self {
            Self::Promote => options.promote_every,
            Self::Rescue => options.rescue_every,
            Self::Rotate => options.rotate_every,
            Self::Prune => options.prune_every,
            Self::Trim => options.trim_every,
            Self::Cron => options.cron_every,
        }
    }

    /// One pass. Each of its statements is sent whole, so that it also gets through a transaction pooler.
    pub async fn pass(
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
                    let gone: i64 = client.query_typed_one(&sql, &[(&ring.name(), Type::TEXT)]).await?.try_get(0)?;
                    report.trimmed += gone.unsigned_abs();
                }
                let settle = "{schema}.settle_backlog_segments(p_first => $1, p_last => $2)";
                report.backlog_stretches_counted += each_lane(client, schema, settle).await?;
                let sql = schema.render("SELECT {schema}.trim_backlog_segments()");
                let gone: i64 = client.query_typed_one(&sql, &[]).await?.try_get(0)?;
                report.trimmed += gone.unsigned_abs();
                let sql = schema.render(
                    "SELECT {schema}.trim_attempt_state(), {schema}.purge_expired(), {schema}.fold_terminal_rollups()",
                );
                let row = client.query_typed_one(&sql, &[]).await?;
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
    each_lane(client, schema, "{schema}.advance_idle_cursors($1, $2)").await?;
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

/// Lanes looked at in one transaction: each costs it three locks, and the server's lock table is shared.
const LANES_AT_A_TIME: i32 = 256;

/// Calls a function of a first and a last lane for all of them; the sum of what it returns.
async fn each_lane(client: &Client, schema: &Schema, call: &str) -> Result<u64> {
    let sql = schema.render("SELECT coalesce(max(l.lane_id), 0) FROM {schema}.queue_lanes AS l");
    let newest: i32 = client.query_typed_one(&sql, &[]).await?.try_get(0)?;
    let sql = schema.render(&format!("SELECT {call}"));
    let mut sum = 0;
    for first in (0..=newest).step_by(LANES_AT_A_TIME as usize) {
        let last = first.saturating_add(LANES_AT_A_TIME - 1);
        let row = client.query_typed_one(&sql, &[(&first, Type::INT4), (&last, Type::INT4)]).await?;
        sum += u64::from(row.try_get::<_, i32>(0)?.unsigned_abs());
    }
    Ok(sum)
}

/// A dump of a working queue has claim cursors ahead of its tables; see `80_restore.sql`.
pub(super) async fn fit_cursors_after_restore(client: &Client, schema: &Schema) -> Result<()> {
    let sql = schema.render("SELECT {schema}.was_restored()");
    if !client.query_typed_one(&sql, &[]).await?.try_get(0)? {
        return Ok(());
    }
    let lanes = each_lane(client, schema, "{schema}.fit_cursors_after_restore($1, $2)").await?;
    client.query_typed(&schema.render("SELECT {schema}.settle_in()"), &[]).await?;
    if lanes > 0 {
        tracing::warn!(lanes, "this schema was restored: took claim cursors back to the jobs that nobody claimed");
    }
    Ok(())
}
