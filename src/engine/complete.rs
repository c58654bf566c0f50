//! Complete: many successful attempts in one statement (engine.md, Complete; ADR-023, Hot path).
//!
//! One call of `{schema}.complete_runs`, or of `{schema}.complete` where the receipts make no runs. Both take the advisory
//! lock of each claim batch in ascending order and append two rows per batch. Guarded by `tests/engine_complete.rs`.

use tokio_postgres::{Client, Statement};

use super::claim::{RECEIPTS_PER_BATCH, Receipt};
use super::error::Result;
use super::schema::Schema;

/// An attempt whose writer lost: somebody closed it before, or it was never claimed so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Its place in what was passed, from 0.
    pub place: usize,
    pub reason: String,
}

/// Below this many attempts a run, proving run by run costs the server more than one by one.
const WORTHWHILE_RUN: usize = 4;

/// The prepared calls, bound to one session.
#[derive(Clone)]
pub struct Complete {
    one_by_one: Statement,
    by_runs: Statement,
}

impl Complete {
    /// Prepares them on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let one_by_one = schema.render("SELECT place, reason FROM {schema}.complete($1, $2, $3, $4)");
        let by_runs = schema.render("SELECT place, reason FROM {schema}.complete_runs($1, $2, $3, $4, $5)");
        Ok(Self { one_by_one: client.prepare(&one_by_one).await?, by_runs: client.prepare(&by_runs).await? })
    }

    /// Completes the attempts; returns the losers, so everyone else has won. Of an attempt named twice the first wins.
    pub async fn run(&self, client: &Client, attempts: &[Receipt]) -> Result<Vec<Lost>> {
        if attempts.is_sorted_by_key(|a| a.receipt_id) {
            return self.run_sorted(client, attempts).await;
        }
        // Jobs end in any order; sorted by receipt they make longer runs.
        let mut order: Vec<usize> = (0..attempts.len()).collect();
        order.sort_by_key(|&n| attempts[n].receipt_id);
        let sorted: Vec<Receipt> = order.iter().map(|&n| attempts[n]).collect();
        let mut lost = self.run_sorted(client, &sorted).await?;
        for l in &mut lost {
            l.place = order[l.place];
        }
        lost.sort_by_key(|l| l.place);
        Ok(lost)
    }

    async fn run_sorted(&self, client: &Client, attempts: &[Receipt]) -> Result<Vec<Lost>> {
        let runs = Runs::of(attempts);
        let rows = if runs.stops.len() * WORTHWHILE_RUN <= attempts.len() {
            client
                .query(
                    &self.by_runs,
                    &[&runs.claim_slots, &runs.first_receipts, &runs.run_leases, &runs.stops, &runs.job_ids],
                )
                .await?
        } else {
            let columns = ReceiptColumns::of(attempts.iter());
            client
                .query(
                    &self.one_by_one,
                    &[&columns.claim_slots, &columns.receipt_ids, &columns.job_ids, &columns.run_leases],
                )
                .await?
        };
        rows.iter().map(read_lost).collect()
    }
}

/// Receipts as runs of consecutive ones with the same lease, as `complete_runs` takes them.
#[derive(Debug, Default)]
struct Runs {
    claim_slots: Vec<i16>,
    first_receipts: Vec<i64>,
    run_leases: Vec<i64>,
    /// Where each run's job ids end.
    stops: Vec<i32>,
    job_ids: Vec<i64>,
}

impl Runs {
    fn of(attempts: &[Receipt]) -> Self {
        let mut runs = Self { job_ids: attempts.iter().map(|a| a.job_id).collect(), ..Self::default() };
        let mut stop = 0;
        for run in attempts.chunk_by(|a, b| {
            b.receipt_id == a.receipt_id + 1
                && b.receipt_id % RECEIPTS_PER_BATCH != 0
                && (b.claim_slot, b.run_lease) == (a.claim_slot, a.run_lease)
        }) {
            stop += run.len();
            runs.claim_slots.push(run[0].claim_slot);
            runs.first_receipts.push(run[0].receipt_id);
            runs.run_leases.push(run[0].run_lease);
            runs.stops.push(stop as i32);
        }
        runs
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
