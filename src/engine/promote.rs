//! Promote: due deferred jobs become ready, in due order (engine.md, Maintenance).
//!
//! One call of `{schema}.promote`, which locks the due rows and passes over those that somebody else holds.
//! Guarded by `tests/engine_complete.rs`.

use tokio_postgres::Client;

use super::error::Result;
use super::schema::Schema;

/// Moves at most `limit` due jobs; returns how many.
pub async fn promote(client: &Client, schema: &Schema, limit: i32) -> Result<i32> {
    let sql = schema.render("SELECT {schema}.promote($1)");
    Ok(client.query_one(&sql, &[&limit]).await?.try_get(0)?)
}
