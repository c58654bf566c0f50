//! Heartbeat: a worker says of its longer attempts that they live, and how far they are (engine.md, Heartbeat, progress).
//!
//! One call of `{schema}.heartbeat` for many attempts, under the claim batches' advisory locks in ascending order. Guarded by
//! `tests/engine_heartbeat.rs`.

use tokio_postgres::{Client, Statement};

use super::claim::Receipt;
use super::complete::{Lost, ReceiptColumns, read_lost};
use super::error::Result;
use super::schema::Schema;
use super::worker::RawJson;

/// The prepared calls, bound to one session.
#[derive(Clone)]
pub struct Heartbeat {
    beat: Statement,
    drop: Statement,
}

impl Heartbeat {
    /// Prepares them on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        Ok(Self {
            beat: client
                .prepare(&schema.render("SELECT place, reason FROM {schema}.heartbeat($1, $2, $3, $4, $5)"))
                .await?,
            drop: client.prepare(&schema.render("SELECT {schema}.drop_attempt_state($1, $2)")).await?,
        })
    }

    /// Keeps the attempts alive and stores the progress that is given; returns those that are over.
    pub async fn beat(&self, client: &Client, attempts: &[(Receipt, Option<RawJson>)]) -> Result<Vec<Lost>> {
        let columns = ReceiptColumns::of(attempts.iter().map(|(receipt, _)| receipt));
        let progress: Vec<Option<&RawJson>> = attempts.iter().map(|(_, progress)| progress.as_ref()).collect();
        let rows = client
            .query(
                &self.beat,
                &[&columns.claim_slots, &columns.receipt_ids, &columns.job_ids, &columns.run_leases, &progress],
            )
            .await?;
        rows.iter().map(read_lost).collect()
    }

    /// Forgets what was stored of attempts that completed.
    pub async fn forget(&self, client: &Client, attempts: &[Receipt]) -> Result<()> {
        let columns = ReceiptColumns::of(attempts.iter());
        client.query(&self.drop, &[&columns.job_ids, &columns.run_leases]).await?;
        Ok(())
    }
}
