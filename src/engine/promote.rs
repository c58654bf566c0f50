//! Promote: due deferred jobs become ready, in due order (engine.md, Maintenance).
//!
//! One call of `{schema}.promote_queue` a queue, each its own transaction, so that unique keys are taken in their order; it
//! locks the due rows and passes over those that somebody else holds. Guarded by `tests/engine_queues.rs`.

use tokio_postgres::Client;
use tokio_postgres::types::Type;

use super::error::Result;
use super::schema::Schema;

/// Moves about `limit` due jobs, shared out evenly among the queues that have some; returns how many.
pub async fn promote(client: &Client, schema: &Schema, limit: i32) -> Result<i32> {
    let queues = client.query_typed(&schema.render("SELECT q FROM {schema}.due_queues() AS q"), &[]).await?;
    if queues.is_empty() {
        return Ok(0);
    }
    let each = (limit / queues.len() as i32).max(1);
    let promote = schema.render("SELECT {schema}.promote_queue($1, $2)");
    let mut moved = 0;
    for queue in &queues {
        let queue: &str = queue.try_get(0)?;
        let row = client.query_typed_one(&promote, &[(&queue, Type::TEXT), (&each, Type::INT4)]).await?;
        moved += row.try_get::<_, i32>(0)?;
    }
    Ok(moved)
}
