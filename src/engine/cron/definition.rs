//! What is kept about a cron job, and the changes to it. Each is one SQL call; the database's clock says when it begins.

use chrono::{DateTime, Utc};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use tokio_postgres::Client;

use super::schedule::Schedule;
use crate::engine::enqueue::{DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE};
use crate::engine::error::{EngineError, Result};
use crate::engine::fields::whole;
use crate::engine::schema::Schema;
use crate::engine::worker::RawJson;

/// A cron job as it is defined, on the command line or in `workers.yaml`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `schedule` and `kind`")]
pub struct Definition {
    /// A cron expression.
    pub schedule: String,
    /// An IANA time zone.
    #[serde(default = "utc")]
    pub timezone: String,
    pub kind: String,
    #[serde(default = "default_queue")]
    pub queue: String,
    #[serde(default, deserialize_with = "json")]
    pub args: RawJson,
    #[serde(default = "default_priority", deserialize_with = "whole::<_, _, 1, 4>")]
    pub priority: i32,
    #[serde(default = "default_max_attempts", deserialize_with = "whole::<_, _, 1, 1000>")]
    pub max_attempts: i32,
    #[serde(default)]
    pub tags: Vec<String>,
    #[serde(default, deserialize_with = "json")]
    pub metadata: RawJson,
}

fn utc() -> String {
    "UTC".into()
}

fn default_queue() -> String {
    DEFAULT_QUEUE.into()
}

fn default_priority() -> i32 {
    DEFAULT_PRIORITY.into()
}

fn default_max_attempts() -> i32 {
    DEFAULT_MAX_ATTEMPTS.into()
}

/// JSON out of any format.
fn json<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<RawJson, D::Error> {
    let value = serde_json::Value::deserialize(deserializer)?;
    RawJson::from_serialize(&value).map_err(D::Error::custom)
}

impl Definition {
    /// One with the defaults.
    pub fn new(schedule: impl Into<String>, kind: impl Into<String>) -> Self {
        Self {
            schedule: schedule.into(),
            timezone: utc(),
            kind: kind.into(),
            queue: default_queue(),
            args: RawJson::EMPTY_OBJECT,
            priority: default_priority(),
            max_attempts: default_max_attempts(),
            tags: Vec::new(),
            metadata: RawJson::EMPTY_OBJECT,
        }
    }

    /// When it comes due. Refuses an expression or a zone that is none.
    pub fn parse(&self) -> Result<Schedule> {
        Schedule::parse(&self.schedule, &self.timezone)
    }

    /// Whether its schedule comes due after `now`; one that never does is a mistake.
    pub fn check_comes_due(&self, now: DateTime<Utc>) -> Result<()> {
        match self.parse()?.next_after(now) {
            Some(_) => Ok(()),
            None => Err(EngineError::invalid("cron expression", format!("{:?} never comes due", self.schedule))),
        }
    }
}

/// What putting a definition did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Put {
    Added,
    Changed,
    /// It was there, the same.
    Unchanged,
    /// Another of that name is there, and was not to be replaced.
    Exists,
}

/// Adds a cron job; changes the one of that name if `replace`. Its first occurrence is the first one from now on.
pub async fn put(client: &Client, schema: &Schema, name: &str, job: &Definition, replace: bool) -> Result<Put> {
    let now = client.query_one("SELECT clock_timestamp()", &[]).await?.try_get(0)?;
    job.check_comes_due(now)?;
    let sql = schema.render("SELECT {schema}.put_cron_job($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)");
    let row = client
        .query_one(
            &sql,
            &[
                &name,
                &job.schedule,
                &job.timezone,
                &job.kind,
                &job.queue,
                &job.args,
                &job.priority,
                &job.max_attempts,
                &job.tags,
                &job.metadata,
                &replace,
            ],
        )
        .await
        .map_err(refused)?;
    Ok(match row.try_get(0)? {
        "added" => Put::Added,
        "changed" => Put::Changed,
        "unchanged" => Put::Unchanged,
        _ => Put::Exists,
    })
}

/// What the database refuses by name is wrong input, and not the database's trouble.
fn refused(error: tokio_postgres::Error) -> EngineError {
    match error.as_db_error() {
        Some(db) if db.code().code() == "23514" => EngineError::invalid(db.column().unwrap_or("job"), db.message()),
        _ => error.into(),
    }
}

/// A cron job as it stands.
#[derive(Debug, Clone, Serialize)]
pub struct CronJob {
    pub name: String,
    pub cron_expr: String,
    pub timezone: String,
    pub kind: String,
    pub queue: String,
    pub args: serde_json::Value,
    pub priority: i16,
    pub max_attempts: i16,
    pub tags: Vec<String>,
    pub metadata: serde_json::Value,
    pub paused: bool,
    /// The first occurrence that is not dealt with. In the past when nobody leads; `None` when there is none, or while it
    /// is paused.
    pub next_due_at: Option<DateTime<Utc>>,
    /// The occurrence fired last, and when that was.
    pub last_due_at: Option<DateTime<Utc>>,
    pub last_fired_at: Option<DateTime<Utc>>,
    pub last_job_id: Option<i64>,
    /// Occurrences that made no job: coalesced into a later one, or refused.
    pub missed_count: i64,
    pub last_error: Option<String>,
    pub last_error_at: Option<DateTime<Utc>>,
    pub created_at: DateTime<Utc>,
    pub updated_at: DateTime<Utc>,
}

/// All of them, by name.
pub async fn list(client: &Client, schema: &Schema) -> Result<Vec<CronJob>> {
    let sql = schema.render(
        "SELECT c.name, c.cron_expr, c.timezone, c.kind, c.queue, c.args, c.priority, c.max_attempts, c.tags, c.metadata,
                c.paused, greatest(c.cursor_at, c.last_enqueued_at) AS after_at, c.last_enqueued_at, c.last_fired_at,
                c.last_job_id, c.missed_count, c.last_error, c.last_error_at, c.created_at, c.updated_at
         FROM {schema}.cron_jobs AS c
         ORDER BY c.name",
    );
    let rows = client.query(&sql, &[]).await?;
    rows.iter()
        .map(|row| {
            let mut job = CronJob {
                name: row.try_get("name")?,
                cron_expr: row.try_get("cron_expr")?,
                timezone: row.try_get("timezone")?,
                kind: row.try_get("kind")?,
                queue: row.try_get("queue")?,
                args: shown(&row.try_get("args")?),
                priority: row.try_get("priority")?,
                max_attempts: row.try_get("max_attempts")?,
                tags: row.try_get("tags")?,
                metadata: shown(&row.try_get("metadata")?),
                paused: row.try_get("paused")?,
                next_due_at: None,
                last_due_at: row.try_get("last_enqueued_at")?,
                last_fired_at: row.try_get("last_fired_at")?,
                last_job_id: row.try_get("last_job_id")?,
                missed_count: row.try_get("missed_count")?,
                last_error: row.try_get("last_error")?,
                last_error_at: row.try_get("last_error_at")?,
                created_at: row.try_get("created_at")?,
                updated_at: row.try_get("updated_at")?,
            };
            match Schedule::parse(&job.cron_expr, &job.timezone) {
                Ok(schedule) if !job.paused => job.next_due_at = schedule.next_after(row.try_get("after_at")?),
                Ok(_) => {}
                // Written past us, and no leader has met it yet.
                Err(error) => job.last_error = job.last_error.or(Some(error.to_string())),
            }
            Ok(job)
        })
        .collect()
}

/// jsonb holds numbers that no float does; such a document is shown as its text.
fn shown(json: &RawJson) -> serde_json::Value {
    json.parse().unwrap_or_else(|_| json.as_str().into())
}

/// Forgets it; jobs that it made stay. Says whether it was there.
pub async fn remove(client: &Client, schema: &Schema, name: &str) -> Result<bool> {
    let sql = schema.render("DELETE FROM {schema}.cron_jobs AS c WHERE c.name = $1");
    Ok(client.execute(&sql, &[&name]).await? > 0)
}

/// Enqueues its job now, whatever its schedule says and without moving it. `None` when there is none of that name.
pub async fn trigger(client: &Client, schema: &Schema, name: &str) -> Result<Option<i64>> {
    let sql = schema.render("SELECT {schema}.trigger_cron($1)");
    Ok(client.query_one(&sql, &[&name]).await.map_err(refused)?.try_get(0)?)
}

/// Pauses it, or resumes it from now on. `None` when there is none of that name, `false` when it was so already.
pub async fn pause(client: &Client, schema: &Schema, name: &str, paused: bool) -> Result<Option<bool>> {
    let sql = schema.render("SELECT {schema}.pause_cron($1, $2)");
    Ok(client.query_one(&sql, &[&name, &paused]).await?.try_get(0)?)
}
