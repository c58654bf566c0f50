//! Rescue: ends attempts whose worker is gone, whose deadline passed, or whose callback never came (engine.md, Maintenance;
//! ADR-023, Open-claim queries).
//!
//! One call of `{schema}.rescue`: bounded sweeps under try-locks, each attempt closed behind the same fence as by its own
//! worker. The database's clock decides (I7). Guarded by `tests/engine_rescue.rs`.

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Client;
use tokio_postgres::types::{ToSql, Type};

use super::error::Result;
use super::schema::Schema;

/// How many attempts one pass ended.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Rescued {
    pub stale: i32,
    pub deadline: i32,
    pub callback_timeout: i32,
}

impl Rescued {
    pub(super) fn by_reason(self) -> [(&'static str, u64); 3] {
        [
            ("stale", u64::from(self.stale.unsigned_abs())),
            ("deadline", u64::from(self.deadline.unsigned_abs())),
            ("callback_timeout", u64::from(self.callback_timeout.unsigned_abs())),
        ]
    }
}

/// One pass. `limit` bounds the claim batches looked at in each claim slot, the attempts after which no further slot is looked at,
/// and the leases.
pub async fn rescue(client: &Client, schema: &Schema, stale_after: Duration, limit: i32) -> Result<Rescued> {
    let sql =
        schema.render("SELECT stale, deadline, callback_timeout FROM {schema}.rescue(make_interval(secs => $1), $2)");
    let params: [(&(dyn ToSql + Sync), Type); 2] = [(&stale_after.as_secs_f64(), Type::FLOAT8), (&limit, Type::INT4)];
    let row = client.query_typed_one(&sql, &params).await?;
    Ok(Rescued { stale: row.try_get(0)?, deadline: row.try_get(1)?, callback_timeout: row.try_get(2)? })
}
