//! Close: every end of an attempt but plain success (engine.md, Fail / retry / snooze / cancel).
//!
//! One call of `{schema}.close_attempts`, under the same batch locks and fences as complete; the closure and what becomes
//! of the job are one transaction. Guarded by `tests/engine_complete.rs`.

use std::time::Duration;

use tokio_postgres::{Client, Statement};

use super::claim::Receipt;
use super::complete::{Lost, ReceiptColumns, read_lost};
use super::error::Result;
use super::schema::Schema;
use super::worker::RawJson;

/// How an attempt ends when it does not simply succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// For good.
    Failed,
    Cancelled,
    /// Comes back while attempts are left, else fails; after the delay, or without one after the backoff that the
    /// database reckons.
    Retry(Option<Duration>),
    /// Comes back after the delay; the attempt does not count.
    Snooze(Duration),
}

/// A thousand years: no time is reached by it that cannot be stored.
const LONGEST_DELAY: Duration = Duration::from_secs(1000 * 365 * 24 * 3600);

impl Ending {
    /// The 0.5 name of the state it asks for.
    pub fn state(self) -> &'static str {
        match self {
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Retry(_) => "retryable",
            Self::Snooze(_) => "scheduled",
        }
    }

    fn delay(self) -> Option<f64> {
        match self {
            Self::Retry(delay) => delay.map(|d| d.min(LONGEST_DELAY).as_secs_f64()),
            Self::Snooze(delay) => Some(delay.min(LONGEST_DELAY).as_secs_f64()),
            Self::Failed | Self::Cancelled => None,
        }
    }
}

/// One attempt to close.
#[derive(Debug, Clone)]
pub struct Closing {
    pub receipt: Receipt,
    pub ending: Ending,
    pub error: Option<String>,
    pub progress: Option<RawJson>,
}

/// The prepared call, bound to one session.
#[derive(Clone)]
pub struct Close {
    statement: Statement,
}

impl Close {
    /// Prepares it on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let sql = schema.render(
            "SELECT place, reason
             FROM {schema}.close_attempts($1, $2, $3, $4, $5::text[]::{schema}.job_state[], $6,
                 ARRAY(SELECT make_interval(secs => d) FROM unnest($7::float8[]) WITH ORDINALITY AS t (d, n) ORDER BY n), $8)",
        );
        Ok(Self { statement: client.prepare(&sql).await? })
    }

    /// Closes the attempts; returns the losers.
    pub async fn run(&self, client: &Client, closings: &[Closing]) -> Result<Vec<Lost>> {
        let columns = ReceiptColumns::of(closings.iter().map(|c| &c.receipt));
        let states: Vec<&str> = closings.iter().map(|c| c.ending.state()).collect();
        let errors: Vec<Option<&str>> = closings.iter().map(|c| c.error.as_deref()).collect();
        let delays: Vec<Option<f64>> = closings.iter().map(|c| c.ending.delay()).collect();
        let progress: Vec<Option<&RawJson>> = closings.iter().map(|c| c.progress.as_ref()).collect();
        let rows = client
            .query(
                &self.statement,
                &[
                    &columns.claim_slots,
                    &columns.receipt_ids,
                    &columns.job_ids,
                    &columns.run_leases,
                    &states,
                    &errors,
                    &delays,
                    &progress,
                ],
            )
            .await?;
        rows.iter().map(read_lost).collect()
    }
}
