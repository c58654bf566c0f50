//! The rings with everything that keeps a slot from being pruned, by name. Never reads the jobs of a big slot.
//! Guarded by `tests/engine_counts.rs`.

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::Client;

use super::error::Result;
use super::ring::{self, Ring, SlotState};
use super::schema::Schema;

#[derive(Debug, Clone, Serialize)]
pub struct RingsReport {
    pub schema: String,
    pub rings: Vec<RingReport>,
}

#[derive(Debug, Clone, Serialize)]
pub struct RingReport {
    pub ring: Ring,
    pub slot_count: usize,
    pub current_slot: i16,
    pub generation: i64,
    pub rotated_at: DateTime<Utc>,
    /// What the next rotation would do.
    pub rotation: RotationOutlook,
    pub slots: Vec<SlotReport>,
}

#[derive(Debug, Clone, Serialize)]
pub struct RotationOutlook {
    /// The slot it opens; none when it is skipped.
    pub opens: Option<i16>,
    /// Why it is skipped: idle, no pruned slot, or another rotator.
    pub skipped: Option<String>,
}

#[derive(Debug, Clone, Serialize)]
pub struct SlotReport {
    pub slot: i16,
    pub generation: Option<i64>,
    pub state: SlotState,
    /// Queue ring: jobs. Claim ring: receipts.
    pub rows: i64,
    /// False when estimated from the partition's size.
    pub rows_exact: bool,
    /// Queue ring: jobs nobody claimed yet. Claim ring: attempts that are not over.
    pub open: i64,
    pub bytes: i64,
    pub dead_tuples: i64,
    /// What keeps a sealed slot from being pruned now; none when the next prune may take it.
    pub blockers: Vec<Blocker>,
}

#[derive(Debug, Clone, Serialize)]
pub struct Blocker {
    pub reason: String,
    pub detail: String,
}

/// The rings named.
pub async fn rings(client: &Client, schema: &Schema, which: &[Ring]) -> Result<RingsReport> {
    let mut reports = Vec::new();
    for ring in which {
        reports.push(ring_report(client, schema, *ring).await?);
    }
    Ok(RingsReport { schema: schema.as_str().to_owned(), rings: reports })
}

async fn ring_report(client: &Client, schema: &Schema, ring: Ring) -> Result<RingReport> {
    let states = ring::slots(client, schema, ring).await?;
    let contents = schema
        .render("SELECT row_count, is_exact, open_count, bytes, dead::bigint FROM {schema}.slot_contents($1, $2)");
    let contents = client.prepare(&contents).await?;
    let mut slots = Vec::with_capacity(states.len());
    let mut current = (0, 0, DateTime::UNIX_EPOCH);
    for state in states {
        let row = client.query_one(&contents, &[&ring.name(), &state.slot]).await?;
        if state.state == SlotState::Open {
            current = (state.slot, state.generation.unwrap_or_default(), state.opened_at.unwrap_or_default());
        }
        let blockers = match state.state {
            SlotState::Sealed => blockers(client, schema, ring, state.slot).await?,
            SlotState::Open | SlotState::Pruned => Vec::new(),
        };
        slots.push(SlotReport {
            slot: state.slot,
            generation: state.generation,
            state: state.state,
            rows: row.try_get(0)?,
            rows_exact: row.try_get(1)?,
            open: row.try_get(2)?,
            bytes: row.try_get(3)?,
            dead_tuples: row.try_get(4)?,
            blockers,
        });
    }
    let (current_slot, generation, rotated_at) = current;
    let outlook = schema.render("SELECT slot, reason FROM {schema}.rotation_outlook($1)");
    let row = client.query_one(&outlook, &[&ring.name()]).await?;
    let rotation = RotationOutlook { opens: row.try_get(0)?, skipped: row.try_get(1)? };
    Ok(RingReport { ring, slot_count: slots.len(), current_slot, generation, rotated_at, rotation, slots })
}

/// The proof that fails, who pins the slot, and who reads its partitions.
async fn blockers(client: &Client, schema: &Schema, ring: Ring, slot: i16) -> Result<Vec<Blocker>> {
    let sql = schema.render("SELECT reason, coalesce(detail, '') FROM {schema}.slot_blockers($1, $2)");
    let rows = client.query(&sql, &[&ring.name(), &slot]).await?;
    rows.iter().map(|row| Ok(Blocker { reason: row.try_get(0)?, detail: row.try_get(1)? })).collect()
}
