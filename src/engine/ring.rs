//! The rings: rotate and prune (ADR-023, Rotation and prune). One implementation; what differs between the rings is data.
//!
//! Each call is one transaction of its own. Locks are taken without waiting, or within a short `lock_timeout`; losing one
//! is a skip with its reason. Guarded by `tests/engine_rings.rs`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::error::Result;
use super::schema::Schema;

/// A ring of partitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ring {
    /// Job bodies and what became of them.
    Queue,
    /// Receipts and their closures.
    Claim,
    /// Attempts with a mutable row of their own.
    Lease,
}

impl Ring {
    pub const ALL: [Ring; 3] = [Ring::Queue, Ring::Claim, Ring::Lease];

    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Claim => "claim",
            Self::Lease => "lease",
        }
    }
}

/// What a slot is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SlotState {
    /// Being written.
    Open,
    /// Rotated away from.
    Sealed,
    /// Truncated, or never opened.
    Pruned,
}

#[derive(Debug, Clone, Serialize)]
pub struct Slot {
    pub slot: i16,
    pub generation: Option<i64>,
    pub state: SlotState,
    pub opened_at: Option<DateTime<Utc>>,
}

/// Every slot of a ring, by number.
pub async fn slots(client: &Client, schema: &Schema, ring: Ring) -> Result<Vec<Slot>> {
    let sql = schema.render("SELECT slot, generation, state, opened_at FROM {schema}.ring_slots($1)");
    let rows = client.query_typed(&sql, &[(&ring.name(), Type::TEXT)]).await?;
    rows.iter()
        .map(|row| {
            let state: &str = row.try_get(2)?;
            Ok(Slot {
                slot: row.try_get(0)?,
                generation: row.try_get(1)?,
                state: match state {
                    "open" => SlotState::Open,
                    "sealed" => SlotState::Sealed,
                    _ => SlotState::Pruned,
                },
                opened_at: row.try_get(3)?,
            })
        })
        .collect()
}

/// The sealed slots, oldest generation first.
pub fn sealed(slots: &[Slot]) -> Vec<&Slot> {
    let mut sealed: Vec<&Slot> = slots.iter().filter(|s| s.state == SlotState::Sealed).collect();
    sealed.sort_by_key(|s| s.generation);
    sealed
}

/// What a rotation did; without `rotated`, why not.
#[derive(Debug, Clone, Serialize)]
pub struct Rotated {
    pub ring: Ring,
    pub rotated: bool,
    pub generation: Option<i64>,
    pub slot: Option<i16>,
    pub reason: Option<String>,
}

/// Opens the ring's next pruned slot. Skips while the open one is empty, unless `force`.
pub async fn rotate(client: &Client, schema: &Schema, ring: Ring, force: bool) -> Result<Rotated> {
    let sql = schema.render("SELECT rotated, generation, slot, reason FROM {schema}.rotate($1, $2)");
    let row = client.query_typed_one(&sql, &[(&ring.name(), Type::TEXT), (&force, Type::BOOL)]).await?;
    Ok(Rotated {
        ring,
        rotated: row.try_get(0)?,
        generation: row.try_get(1)?,
        slot: row.try_get(2)?,
        reason: row.try_get(3)?,
    })
}

/// What a prune of one slot did; without `pruned`, why not and who is in the way.
#[derive(Debug, Clone, Serialize)]
pub struct Pruned {
    pub ring: Ring,
    pub slot: i16,
    pub pruned: bool,
    pub generation: Option<i64>,
    pub reason: Option<String>,
    pub detail: Option<String>,
}

/// Truncates one sealed slot if everything in it is proven over.
pub async fn prune(client: &Client, schema: &Schema, ring: Ring, slot: i16, lock_timeout: Duration) -> Result<Pruned> {
    let sql = schema
        .render("SELECT pruned, generation, reason, detail FROM {schema}.prune($1, $2, make_interval(secs => $3))");
    let timeout = lock_timeout.as_secs_f64();
    let row = client
        .query_typed_one(&sql, &[(&ring.name(), Type::TEXT), (&slot, Type::INT2), (&timeout, Type::FLOAT8)])
        .await?;
    Ok(Pruned {
        ring,
        slot,
        pruned: row.try_get(0)?,
        generation: row.try_get(1)?,
        reason: row.try_get(2)?,
        detail: row.try_get(3)?,
    })
}
