//! Counts per queue and state: exact at one instant, and never by scanning a backlog (engine.md, Counts).
//! Guarded by `tests/engine_counts.rs`.

use serde::Serialize;
use tokio_postgres::Client;

use super::error::Result;
use super::schema::Schema;

#[derive(Debug, Clone, Serialize)]
pub struct QueueCounts {
    pub queues: Vec<QueueCount>,
}

/// One queue.
#[derive(Debug, Clone, Default, Serialize)]
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

impl QueueCount {
    /// The count of a state, by the name the database gives it.
    fn of_state(&mut self, state: &str) -> Option<&mut i64> {
        Some(match state {
            "available" => &mut self.available,
            "scheduled" => &mut self.scheduled,
            "retryable" => &mut self.retryable,
            "running" => &mut self.running,
            "waiting_external" => &mut self.waiting,
            "completed" => &mut self.completed,
            "failed" => &mut self.failed,
            "cancelled" => &mut self.cancelled,
            "dlq" => &mut self.dlq,
            _ => return None,
        })
    }
}

/// Every queue that ever had a job.
pub async fn queue_counts(client: &Client, schema: &Schema) -> Result<QueueCounts> {
    let sql = schema.render(
        "SELECT queue, state, job_count, is_exact, oldest_ready_age_s FROM {schema}.queue_counts() ORDER BY queue",
    );
    let mut queues: Vec<QueueCount> = Vec::new();
    for row in client.query(&sql, &[]).await? {
        let (name, state): (&str, &str) = (row.try_get(0)?, row.try_get(1)?);
        if queues.last().is_none_or(|q| q.queue != name) {
            queues.push(QueueCount { queue: name.to_owned(), available_exact: true, ..QueueCount::default() });
        }
        let Some(queue) = queues.last_mut() else { continue };
        if let Some(count) = queue.of_state(state) {
            *count = row.try_get(2)?;
        }
        if state == "available" {
            queue.available_exact = row.try_get(3)?;
            queue.oldest_ready_age_s = row.try_get(4)?;
        }
    }
    let paused = client.query(&schema.render("SELECT queue FROM {schema}.queue_meta WHERE paused"), &[]).await?;
    for row in paused {
        let name: &str = row.try_get(0)?;
        if let Some(queue) = queues.iter_mut().find(|q| q.queue == name) {
            queue.paused = true;
        }
    }
    Ok(QueueCounts { queues })
}
