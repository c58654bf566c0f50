//! Timeline: no number of a timeline that a failover cut off is used again (engine.md, I2).
//!
//! One call of `{schema}.enter_timeline` on every connection that will claim. Guarded by `tests/worker_fleet/failover.rs`.

use tokio_postgres::Client;

use super::error::Result;
use super::schema::Schema;

/// To be done before the first claim of a connection.
pub async fn enter(client: &Client, schema: &Schema) -> Result<()> {
    let row = client.query_one(&schema.render("SELECT {schema}.enter_timeline()"), &[]).await?;
    if row.try_get(0)? {
        tracing::warn!(
            "the server is on a new timeline: job and batch ids go on past all that the last one can have used"
        );
    }
    Ok(())
}
