//! The leader's pass: fires what is due.
//!
//! The database says what is due and what time it is; the schedule says which occurrences that makes. Of those only the
//! latest is fired, the others are counted. `{schema}.fire_cron` locks the row, refuses if its revision is not the one the
//! occurrences were computed from, and enqueues and moves the cursor in one transaction: of any leaders one wins, and one
//! that dies on the way has done nothing. Guarded by `tests/engine_cron.rs`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::schedule::Schedule;
use crate::engine::error::{EngineError, Result};
use crate::engine::schema::Schema;

/// A pass goes no further than this, and the next one goes on: the other tasks of the leader must not wait for long.
const MAX_JOBS: i32 = 1000;
const MAX_OCCURRENCES: usize = 5000;
const MAX_TIME: Duration = Duration::from_millis(500);

/// When one that cannot be computed or enqueued is looked at again.
const RETRY_IN: Duration = Duration::from_secs(30);

/// What a pass did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    pub fired: u64,
    /// Occurrences that made no job.
    pub missed: i64,
    /// Passed over: somebody else was first, or it was paused or edited meanwhile; by reason.
    pub skipped: BTreeMap<String, u64>,
    /// Why what could not be fired, by name.
    pub failed: BTreeMap<String, String>,
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
    let started = Instant::now();
    let sql =
        schema.render("SELECT name, cron_expr, timezone, revision, after_at, now_at FROM {schema}.due_cron_jobs($1)");
    let rows = client.query_typed(&sql, &[(&MAX_JOBS, Type::INT4)]).await?;
    if rows.is_empty() {
        return Ok(passed);
    }
    let fire = schema.render("SELECT outcome, error FROM {schema}.fire_cron($1, $2, $3, $4, $5, to_timestamp($6))");
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
            Ok(schedule) => run(client, &fire, &due, &step(&schedule, due.after, due.now), &mut passed).await,
            Err(error) => Err(error),
        };
        match outcome {
            Ok(()) => {}
            Err(error @ EngineError::Unreachable { .. }) => return Err(error),
            Err(error) => {
                let error = error.to_string();
                note(client, schema, &due, &error).await?;
                passed.failed.insert(due.name, error);
            }
        }
        if started.elapsed() > MAX_TIME {
            break;
        }
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

async fn run(client: &Client, fire: &str, due: &Due, step: &Step, passed: &mut Passed) -> Result<()> {
    let next = step.next.map_or(f64::INFINITY, |at| at.timestamp() as f64);
    let params: [(&(dyn ToSql + Sync), Type); 6] = [
        (&due.name, Type::TEXT),
        (&due.revision, Type::INT8),
        (&step.through, Type::TIMESTAMPTZ),
        (&step.fire, Type::BOOL),
        (&step.missed, Type::INT8),
        (&next, Type::FLOAT8),
    ];
    let row = client.query_typed_one(fire, &params).await?;
    match row.try_get(0)? {
        "fired" => {
            passed.fired += 1;
            passed.missed += step.missed;
        }
        "refused" => {
            passed.missed += step.missed + 1;
            passed.failed.insert(due.name.clone(), row.try_get(1)?);
        }
        "moved" => passed.missed += step.missed,
        reason => *passed.skipped.entry(reason.to_owned()).or_default() += 1,
    }
    Ok(())
}

/// Keeps the reason where an operator looks for it.
async fn note(client: &Client, schema: &Schema, due: &Due, error: &str) -> Result<()> {
    let sql = schema.render("SELECT {schema}.note_cron_error($1, $2, $3, make_interval(secs => $4))");
    let params: [(&(dyn ToSql + Sync), Type); 4] = [
        (&due.name, Type::TEXT),
        (&due.revision, Type::INT8),
        (&error, Type::TEXT),
        (&RETRY_IN.as_secs_f64(), Type::FLOAT8),
    ];
    client.query_typed_one(&sql, &params).await?;
    Ok(())
}
