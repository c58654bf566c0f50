//! The leader's pass: fires what is due.
//!
//! The database says what is due and what time it is; the schedule says which occurrences that makes. Of those only the
//! latest is fired, the others are counted. `{schema}.fire_cron` locks the row, refuses if its revision is not the one the
//! occurrences were computed from, and enqueues and moves the cursor in one transaction: of any leaders one wins, and one
//! that dies on the way has done nothing. Guarded by `tests/engine_cron.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio_postgres::{Client, Statement};

use super::schedule::Schedule;
use crate::engine::error::{EngineError, Result, chain, is_connection_loss};
use crate::engine::schema::Schema;

/// Jobs a pass looks at, and occurrences of one that it counts: the other tasks of the leader must not wait for long.
const MAX_JOBS: i32 = 500;
const MAX_OCCURRENCES: usize = 20_000;

/// When one that cannot be computed or enqueued is looked at again.
const RETRY_IN: Duration = Duration::from_secs(30);

/// What a pass did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    pub fired: u64,
    /// Occurrences that made no job.
    pub missed: u64,
    /// Passed over: somebody else was first, or it was paused or edited meanwhile; by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Why what could not be fired, by name.
    pub failed: BTreeMap<String, String>,
}

/// One that was due, and what came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fired {
    pub outcome: String,
    pub job_id: Option<i64>,
    pub error: Option<String>,
}

struct Due {
    name: String,
    cron_expr: String,
    timezone: String,
    revision: i64,
    after: DateTime<Utc>,
    now: DateTime<Utc>,
}

/// What a schedule makes of the time since the cursor.
struct Step {
    /// The cursor's next place, and the occurrence to fire if `fire`.
    through: DateTime<Utc>,
    fire: bool,
    missed: i64,
    next: Option<DateTime<Utc>>,
}

/// Fires everything that is due now. One that fails does not keep the others back.
pub async fn pass(client: &Client, schema: &Schema) -> Result<Passed> {
    let mut passed = Passed::default();
    let sql =
        schema.render("SELECT name, cron_expr, timezone, revision, after_at, now_at FROM {schema}.due_cron_jobs($1)");
    let rows = client.query(&sql, &[&MAX_JOBS]).await?;
    if rows.is_empty() {
        return Ok(passed);
    }
    let fire = client
        .prepare(
            &schema
                .render("SELECT outcome, job_id, error FROM {schema}.fire_cron($1, $2, $3, $4, $5, to_timestamp($6))"),
        )
        .await?;
    for row in rows {
        let due = Due {
            name: row.try_get(0)?,
            cron_expr: row.try_get(1)?,
            timezone: row.try_get(2)?,
            revision: row.try_get(3)?,
            after: row.try_get(4)?,
            now: row.try_get(5)?,
        };
        let outcome = match Schedule::parse(&due.cron_expr, &due.timezone) {
            Ok(schedule) => {
                let step = step(&schedule, due.after, due.now);
                let fired = run(client, &fire, &due, &step).await;
                if let Ok(Fired { outcome, error, .. }) = &fired {
                    match outcome.as_str() {
                        "fired" => {
                            passed.fired += 1;
                            passed.missed += step.missed.unsigned_abs();
                        }
                        "refused" => {
                            passed.missed += step.missed.unsigned_abs() + 1;
                            passed.failed.insert(due.name.clone(), error.clone().unwrap_or_default());
                        }
                        "moved" => passed.missed += step.missed.unsigned_abs(),
                        reason => *passed.skipped.entry(reason.to_owned()).or_default() += 1,
                    }
                }
                fired.map(|_| ())
            }
            Err(error) => Err(error),
        };
        match outcome {
            Ok(()) => {}
            Err(error @ EngineError::Unreachable { .. }) => return Err(error),
            Err(error) => {
                note(client, schema, &due, &error).await?;
                passed.failed.insert(due.name, error.to_string());
            }
        }
        // Computing many occurrences must not keep the runtime's thread.
        tokio::task::yield_now().await;
    }
    Ok(passed)
}

fn step(schedule: &Schedule, after: DateTime<Utc>, now: DateTime<Utc>) -> Step {
    let mut due = schedule.upcoming(after).take_while(|at| *at <= now);
    let mut latest = None;
    let mut count = 0;
    while count < MAX_OCCURRENCES {
        match due.next() {
            Some(at) => (latest, count) = (Some(at), count + 1),
            None => break,
        }
    }
    match latest {
        None => Step { through: after, fire: false, missed: 0, next: schedule.next_after(after) },
        Some(through) => {
            let next = schedule.next_after(through);
            // With more of them due, the latest is not among these: a later pass finds it.
            let fire = next.is_none_or(|next| next > now);
            Step { through, fire, missed: count as i64 - i64::from(fire), next }
        }
    }
}

async fn run(client: &Client, fire: &Statement, due: &Due, step: &Step) -> Result<Fired> {
    let next = step.next.map_or(f64::INFINITY, |at| at.timestamp() as f64);
    let row =
        client.query_one(fire, &[&due.name, &due.revision, &step.through, &step.fire, &step.missed, &next]).await?;
    Ok(Fired { outcome: row.try_get(0)?, job_id: row.try_get(1)?, error: row.try_get(2)? })
}

async fn note(client: &Client, schema: &Schema, due: &Due, error: &EngineError) -> Result<()> {
    let text = match error {
        EngineError::Database(source) if !is_connection_loss(source) => chain(source),
        other => other.to_string(),
    };
    let sql = schema.render("SELECT {schema}.note_cron_error($1, $2, $3, make_interval(secs => $4))");
    client.query_one(&sql, &[&due.name, &due.revision, &text, &RETRY_IN.as_secs_f64()]).await?;
    Ok(())
}
