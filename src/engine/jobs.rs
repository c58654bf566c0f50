//! Jobs as they are shown: by filter, or one with where it lies and what its attempts failed with.

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::{Client, Row};

use super::error::Result;
use super::schema::Schema;
use super::worker::RawJson;

/// Every state a job can be in, by the name the database gives it.
pub const STATES: [&str; 8] =
    ["scheduled", "available", "running", "completed", "retryable", "failed", "cancelled", "waiting_external"];

/// A job, the columns of `awa.jobs`, and where it is stored.
#[derive(Debug, Clone, Serialize)]
pub struct ShownJob {
    pub id: i64,
    pub kind: String,
    pub queue: String,
    pub args: serde_json::Value,
    pub state: String,
    pub priority: i16,
    pub attempt: i16,
    pub max_attempts: i16,
    pub run_at: DateTime<Utc>,
    pub heartbeat_at: Option<DateTime<Utc>>,
    pub deadline_at: Option<DateTime<Utc>>,
    pub attempted_at: Option<DateTime<Utc>>,
    pub finalized_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    /// What its attempts failed with, oldest first.
    pub errors: Vec<serde_json::Value>,
    pub metadata: serde_json::Value,
    pub tags: Vec<String>,
    /// In hexadecimal.
    pub unique_key: Option<String>,
    pub unique_states: Option<String>,
    pub callback_id: Option<String>,
    pub callback_timeout_at: Option<DateTime<Utc>>,
    pub run_lease: i64,
    pub progress: Option<serde_json::Value>,
    /// available, claim, lease, deferred, history, dlq or retained.
    pub stored_in: String,
}

/// Which jobs; all that is given must match.
#[derive(Debug, Clone, Default)]
pub struct JobFilter {
    pub states: Vec<String>,
    pub queue: Option<String>,
    pub kind: Option<String>,
    pub tag: Option<String>,
    pub id: Option<i64>,
    pub limit: Option<i64>,
}

/// The jobs that match. Of a large table this reads what is asked for, not more.
pub async fn list_jobs(client: &Client, schema: &Schema, filter: &JobFilter) -> Result<Vec<ShownJob>> {
    let sql = schema.render(
        "SELECT id, kind, queue, args, state::text, priority, attempt, max_attempts, run_at, heartbeat_at, deadline_at,
                attempted_at, finalized_at, created_at, to_jsonb(coalesce(errors, '{}')), coalesce(metadata, '{}'),
                coalesce(tags, '{}'), encode(unique_key, 'hex'), unique_states::text, callback_id::text, callback_timeout_at,
                run_lease, progress, stored_in
         FROM {schema}.list_jobs($1::text[]::{schema}.job_state[], $2, $3, $4, $5, $6)",
    );
    let states = (!filter.states.is_empty()).then_some(&filter.states);
    let rows =
        client.query(&sql, &[&states, &filter.queue, &filter.kind, &filter.tag, &filter.id, &filter.limit]).await?;
    rows.iter().map(read).collect()
}

fn read(row: &Row) -> Result<ShownJob> {
    let json = |n: usize| -> Result<Option<serde_json::Value>> {
        let text: Option<RawJson> = row.try_get(n)?;
        // Numbers beyond a double and nesting beyond 127 levels are shown as the text they are.
        Ok(text.map(|text| text.parse().unwrap_or_else(|_| serde_json::Value::from(text.as_str()))))
    };
    let errors = match json(14)? {
        Some(serde_json::Value::Array(errors)) => errors,
        _ => Vec::new(),
    };
    Ok(ShownJob {
        id: row.try_get(0)?,
        kind: row.try_get(1)?,
        queue: row.try_get(2)?,
        args: json(3)?.unwrap_or_default(),
        state: row.try_get(4)?,
        priority: row.try_get(5)?,
        attempt: row.try_get(6)?,
        max_attempts: row.try_get(7)?,
        run_at: row.try_get(8)?,
        heartbeat_at: row.try_get(9)?,
        deadline_at: row.try_get(10)?,
        attempted_at: row.try_get(11)?,
        finalized_at: row.try_get(12)?,
        created_at: row.try_get(13)?,
        errors,
        metadata: json(15)?.unwrap_or_default(),
        tags: row.try_get(16)?,
        unique_key: row.try_get(17)?,
        unique_states: row.try_get(18)?,
        callback_id: row.try_get(19)?,
        callback_timeout_at: row.try_get(20)?,
        run_lease: row.try_get(21)?,
        progress: json(22)?,
        stored_in: row.try_get(23)?,
    })
}

/// Ids of held jobs: of the DLQ, or of failed jobs kept for a retry (`retained`), oldest failure first.
pub async fn held_jobs(
    client: &Client,
    schema: &Schema,
    held: &str,
    queue: Option<&str>,
    kind: Option<&str>,
    limit: i64,
) -> Result<Vec<i64>> {
    let sql = schema.render(
        "SELECT job_id FROM {schema}.dlq_entries
         WHERE held = $1 AND ($2::text IS NULL OR queue = $2) AND ($3::text IS NULL OR kind = $3)
         ORDER BY failed_at, job_id LIMIT $4",
    );
    let rows = client.query(&sql, &[&held, &queue, &kind, &limit]).await?;
    Ok(rows.iter().map(|row| row.try_get(0)).collect::<Result<_, _>>()?)
}
