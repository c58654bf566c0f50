//! Counts per queue and state: exact, and never by scanning a backlog (engine.md, Counts).
//! Guarded by `tests/cli_commands.rs`.

use serde::Serialize;
use tokio_postgres::Client;

use super::error::Result;
use super::schema::Schema;

#[derive(Debug, Clone, Serialize)]
pub struct QueueCounts {
    pub queues: Vec<QueueCount>,
}

/// One queue. What this build has no feature for (pausing, callbacks, a DLQ) is none.
#[derive(Debug, Clone, Serialize)]
pub struct QueueCount {
    pub queue: String,
    pub paused: bool,
    pub available: i64,
    /// False where a producer that stays open keeps a deep backlog from being counted.
    pub available_exact: bool,
    pub scheduled: i64,
    pub retryable: i64,
    pub running: i64,
    pub waiting: i64,
    pub completed: i64,
    pub failed: i64,
    pub cancelled: i64,
    pub dlq: i64,
    /// Since the next job to be claimed could have run.
    pub oldest_ready_age_s: Option<f64>,
}

/// Every queue that ever had a job.
pub async fn queue_counts(client: &Client, schema: &Schema) -> Result<QueueCounts> {
    let sql = schema.render(
        "SELECT queue, available, available_exact, scheduled, retryable, running, completed, failed, cancelled, oldest_ready_age_s
         FROM {schema}.queue_counts()",
    );
    let rows = client.query(&sql, &[]).await?;
    let queue = |row: &tokio_postgres::Row| {
        Ok(QueueCount {
            queue: row.try_get(0)?,
            paused: false,
            available: row.try_get(1)?,
            available_exact: row.try_get(2)?,
            scheduled: row.try_get(3)?,
            retryable: row.try_get(4)?,
            running: row.try_get(5)?,
            waiting: 0,
            completed: row.try_get(6)?,
            failed: row.try_get(7)?,
            cancelled: row.try_get(8)?,
            dlq: 0,
            oldest_ready_age_s: row.try_get(9)?,
        })
    };
    Ok(QueueCounts { queues: rows.iter().map(queue).collect::<Result<_>>()? })
}
