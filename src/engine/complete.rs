//! Complete: many successful attempts in one statement (engine.md, Complete; ADR-023, Hot path).
//!
//! One call of `{schema}.complete`, which takes the advisory lock of each claim batch in ascending order and appends two
//! rows per batch. Guarded by `tests/engine_complete.rs`.

use tokio_postgres::{Client, Statement};

use super::claim::Receipt;
use super::error::Result;
use super::schema::Schema;

/// An attempt whose writer lost: somebody closed it before, or it was never claimed so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Its place in what was passed, from 0.
    pub place: usize,
    pub reason: String,
}

/// The prepared call, bound to one session.
#[derive(Clone)]
pub struct Complete {
    statement: Statement,
}

impl Complete {
    /// Prepares it on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let sql = schema.render("SELECT place, reason FROM {schema}.complete($1, $2, $3, $4)");
        Ok(Self { statement: client.prepare(&sql).await? })
    }

    /// Completes the attempts; returns the losers, so everyone else has won.
    pub async fn run(&self, client: &Client, attempts: &[Receipt]) -> Result<Vec<Lost>> {
        let columns = ReceiptColumns::of(attempts.iter());
        let rows = client
            .query(
                &self.statement,
                &[&columns.claim_slots, &columns.receipt_ids, &columns.job_ids, &columns.run_leases],
            )
            .await?;
        rows.iter().map(read_lost).collect()
    }
}

/// Receipts as the four arrays the SQL functions take.
pub(super) struct ReceiptColumns {
    pub claim_slots: Vec<i16>,
    pub receipt_ids: Vec<i64>,
    pub job_ids: Vec<i64>,
    pub run_leases: Vec<i64>,
}

impl ReceiptColumns {
    pub fn of<'a>(receipts: impl ExactSizeIterator<Item = &'a Receipt>) -> Self {
        let n = receipts.len();
        let mut columns = Self {
            claim_slots: Vec::with_capacity(n),
            receipt_ids: Vec::with_capacity(n),
            job_ids: Vec::with_capacity(n),
            run_leases: Vec::with_capacity(n),
        };
        for receipt in receipts {
            columns.claim_slots.push(receipt.claim_slot);
            columns.receipt_ids.push(receipt.receipt_id);
            columns.job_ids.push(receipt.job_id);
            columns.run_leases.push(receipt.run_lease);
        }
        columns
    }
}

pub(super) fn read_lost(row: &tokio_postgres::Row) -> Result<Lost> {
    let place: i32 = row.try_get(0)?;
    Ok(Lost { place: (place - 1) as usize, reason: row.try_get(1)? })
}
