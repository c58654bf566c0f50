//! Queues as a whole: pause, resume, settings, drain. Guarded by `tests/engine_queues.rs`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, Row};

use super::error::{EngineError, Result};
use super::schema::Schema;

/// What is set for a queue.
#[derive(Debug, Clone, Serialize)]
pub struct QueueSettings {
    pub queue: String,
    pub paused: bool,
    pub paused_at: Option<DateTime<Utc>>,
    pub paused_by: Option<String>,
    pub enqueue_shards: i16,
    pub dlq: bool,
    pub dlq_retention_s: f64,
    pub failed_retention_s: f64,
}

/// What to set; `None` stays.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueChange {
    /// Lanes that producers are spread over: as many claims of one priority can go on at a time.
    pub enqueue_shards: Option<i32>,
    /// Whether jobs that fail for good are held for an operator.
    pub dlq: Option<bool>,
    pub dlq_retention: Option<Duration>,
    /// How long failed jobs stay retryable without a DLQ.
    pub failed_retention: Option<Duration>,
}

const COLUMNS: &str = "queue, paused, paused_at, paused_by, enqueue_shards, dlq,
    extract(epoch FROM dlq_retention)::float8, extract(epoch FROM failed_retention)::float8";

fn read(row: &Row) -> Result<QueueSettings> {
    Ok(QueueSettings {
        queue: row.try_get(0)?,
        paused: row.try_get(1)?,
        paused_at: row.try_get(2)?,
        paused_by: row.try_get(3)?,
        enqueue_shards: row.try_get(4)?,
        dlq: row.try_get(5)?,
        dlq_retention_s: row.try_get(6)?,
        failed_retention_s: row.try_get(7)?,
    })
}

/// What SQL refused by the name of a field is wrong input.
fn refused(error: tokio_postgres::Error) -> EngineError {
    match error.as_db_error().map(|e| (e.code(), e.column(), e.message())) {
        Some((&SqlState::CHECK_VIOLATION, Some(field), message)) => {
            EngineError::invalid(field, message.replacen(field, "it", 1))
        }
        _ => error.into(),
    }
}

/// Every queue with settings of its own, by name.
pub async fn settings(client: &Client, schema: &Schema) -> Result<Vec<QueueSettings>> {
    let sql = schema.render(&format!("SELECT {COLUMNS} FROM {{schema}}.queue_meta ORDER BY queue"));
    client.query(&sql, &[]).await?.iter().map(read).collect()
}

/// Sets what is given; returns all of it.
pub async fn set(client: &Client, schema: &Schema, queue: &str, change: QueueChange) -> Result<QueueSettings> {
    let sql = schema.render(&format!(
        "SELECT {COLUMNS} FROM {{schema}}.set_queue($1, $2, $3, make_interval(secs => $4), make_interval(secs => $5))"
    ));
    let secs = |d: Option<Duration>| d.map(|d| d.as_secs_f64());
    let row = client
        .query_one(
            &sql,
            &[&queue, &change.enqueue_shards, &change.dlq, &secs(change.dlq_retention), &secs(change.failed_retention)],
        )
        .await
        .map_err(refused)?;
    read(&row)
}

/// Whether a job was ever enqueued to a queue.
pub async fn had_jobs(client: &Client, schema: &Schema, queue: &str) -> Result<bool> {
    let sql = schema.render(
        "SELECT EXISTS (SELECT FROM {schema}.queue_lanes WHERE queue = $1)
             OR EXISTS (SELECT FROM {schema}.deferred_jobs WHERE queue = $1)
             OR EXISTS (SELECT FROM {schema}.queue_terminal_rollups WHERE queue = $1)
             OR EXISTS (SELECT FROM {schema}.queue_terminal_rollup_deltas WHERE queue = $1)
             OR EXISTS (SELECT FROM {schema}.dlq_entries WHERE queue = $1)
             OR EXISTS (SELECT FROM {schema}.done_entries WHERE queue = $1)",
    );
    Ok(client.query_one(&sql, &[&queue]).await?.try_get(0)?)
}

/// Stops claims from a queue; what runs goes on. False when it was paused already.
pub async fn pause(client: &Client, schema: &Schema, queue: &str, by: &str) -> Result<bool> {
    let sql = schema.render("SELECT {schema}.pause_queue($1, $2)");
    Ok(client.query_one(&sql, &[&queue, &by]).await.map_err(refused)?.try_get(0)?)
}

/// Lets claims go on. False when it was not paused.
pub async fn resume(client: &Client, schema: &Schema, queue: &str) -> Result<bool> {
    let sql = schema.render("SELECT {schema}.resume_queue($1)");
    Ok(client.query_one(&sql, &[&queue]).await?.try_get(0)?)
}

/// Jobs a drain cancels in one transaction.
const DRAIN_BATCH: i32 = 10_000;

/// Cancels what waits in a queue, one bounded transaction after the other; `step` hears the total. Returns it.
pub async fn drain(
    client: &Client,
    schema: &Schema,
    queue: &str,
    reason: Option<&str>,
    mut step: impl FnMut(u64),
) -> Result<u64> {
    let sql = client.prepare(&schema.render("SELECT {schema}.drain_queue($1, $2, $3)")).await?;
    let mut total = 0;
    loop {
        let cancelled: i32 = client.query_one(&sql, &[&queue, &reason, &DRAIN_BATCH]).await?.try_get(0)?;
        total += u64::from(cancelled.unsigned_abs());
        step(total);
        // Fewer were all there were. A producer that goes on would keep an empty answer away for ever.
        if cancelled < DRAIN_BATCH {
            return Ok(total);
        }
    }
}
