//! Operate: cancel, retry, delete and move jobs, in whatever state they are (engine.md, Transitions).
//!
//! One call of `{schema}.operate` a job, each its own transaction, under the lock of the place where the job lies. Guarded by
//! `tests/engine_operate.rs`.

use std::collections::HashMap;

use serde::Serialize;
use tokio_postgres::{Client, Statement};

use super::error::Result;
use super::schema::Schema;

/// What an operator wants done with a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// Ends it, running or not; the reason is kept among its errors.
    Cancel { reason: Option<String> },
    /// Makes it available now; a failed or cancelled one with all its attempts anew.
    Retry { queue: Option<String>, priority: Option<i32> },
    /// Forgets it. A running one is cancelled first.
    Delete,
    /// To another queue, another priority, or both; its time and attempts stay.
    Move { queue: Option<String>, priority: Option<i32> },
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cancel { .. } => "cancel",
            Self::Retry { .. } => "retry",
            Self::Delete => "delete",
            Self::Move { .. } => "move",
        }
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Operated {
    pub job_id: i64,
    pub done: bool,
    /// The 0.5 name of the state it was found in; `None` when there is no such job.
    pub state: Option<String>,
    /// Why not; `None` when done.
    pub reason: Option<String>,
}

const LOOKS: usize = 10;

/// The prepared calls, bound to one session.
pub struct Operate {
    statement: Statement,
    look: Statement,
    see: Statement,
}

/// Where jobs of the queue ring were seen: finding one there costs the reading of it, once for all that are looked for together.
#[derive(Debug, Default)]
pub struct Seen(HashMap<i64, String>);

impl Seen {
    /// How many jobs to look for together.
    pub const AT_ONCE: usize = 1000;

    fn of(&self, job_id: i64) -> Option<&str> {
        self.0.get(&job_id).map(String::as_str)
    }
}

impl Operate {
    /// Prepares it on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let sql = schema.render(
            "SELECT job_id, done, state::text, reason
             FROM {schema}.operate($1, $2, $3, $4, $5, $6::text::{schema}.ready_place)",
        );
        let look = schema.render(
            "SELECT f.state::text, {schema}.why_not($2, f.state, f.place)
             FROM {schema}.find_job($1, $3::text::{schema}.ready_place) AS f WHERE f.place IS NOT NULL AND NOT f.hidden",
        );
        let see = schema.render("SELECT p.job_id, p::text FROM {schema}.last_ready_places($1) AS p");
        Ok(Self {
            statement: client.prepare(&sql).await?,
            look: client.prepare(&look).await?,
            see: client.prepare(&see).await?,
        })
    }

    /// Looks for these jobs, at most [`Seen::AT_ONCE`]. What moves on before its turn is looked for again then.
    pub async fn see(&self, client: &Client, job_ids: &[i64]) -> Result<Seen> {
        let rows = client.query(&self.see, &[&job_ids]).await?;
        Ok(Seen(rows.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect::<Result<_>>()?))
    }

    /// What it would do to one job as that is now: never done, and a reason where it would not be.
    pub async fn would(&self, client: &Client, job_id: i64, operation: &Operation, seen: &Seen) -> Result<Operated> {
        // Between two places a job is in neither for a reader without locks: look again before denying it.
        for look in 0..LOOKS {
            let seen = seen.of(job_id).filter(|_| look == 0);
            if let Some(row) = client.query_opt(&self.look, &[&job_id, &operation.name(), &seen]).await? {
                return Ok(Operated { job_id, done: false, state: row.try_get(0)?, reason: row.try_get(1)? });
            }
        }
        Ok(Operated { job_id, done: false, state: None, reason: Some("no such job".into()) })
    }

    /// Does it to one job.
    pub async fn run(&self, client: &Client, job_id: i64, operation: &Operation, seen: &Seen) -> Result<Operated> {
        let (reason, queue, priority) = match operation {
            Operation::Cancel { reason } => (reason.as_deref(), None, None),
            Operation::Retry { queue, priority } | Operation::Move { queue, priority } => {
                (None, queue.as_deref(), *priority)
            }
            Operation::Delete => (None, None, None),
        };
        let row = client
            .query_one(&self.statement, &[&job_id, &operation.name(), &reason, &queue, &priority, &seen.of(job_id)])
            .await?;
        Ok(Operated { job_id: row.try_get(0)?, done: row.try_get(1)?, state: row.try_get(2)?, reason: row.try_get(3)? })
    }
}
