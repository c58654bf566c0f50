//! Leases and callbacks: an attempt that waits for somebody outside gets a mutable row (engine.md, Callback wait).
//!
//! Materialising takes the claim batch's advisory lock, everything after it the lease's row lock. A token is answered once.
//! Guarded by `tests/engine_callbacks.rs`.

use std::time::Duration;

use serde::Serialize;
use tokio_postgres::Client;

use super::claim::Receipt;
use super::error::{EngineError, Result};
use super::schema::Schema;
use super::worker::RawJson;

/// What the holder of a token answers.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The job is done.
    Complete { payload: Option<RawJson> },
    /// The job failed for good.
    Fail { error: Option<String>, payload: Option<RawJson> },
    /// The job is tried again at once, with all its attempts.
    Retry { error: Option<String> },
    /// The handler goes on, with this.
    Resume { payload: Option<RawJson> },
}

impl Answer {
    fn parts(&self) -> (&'static str, Option<&RawJson>, Option<&str>) {
        match self {
            Self::Complete { payload } => ("complete", payload.as_ref(), None),
            Self::Fail { error, payload } => ("fail", payload.as_ref(), error.as_deref()),
            Self::Retry { error } => ("retry", None, error.as_deref()),
            Self::Resume { payload } => ("resume", payload.as_ref(), None),
        }
    }
}

/// What an answer did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answered {
    pub job_id: i64,
    /// The 0.5 name of the state the job is in now.
    pub state: String,
}

/// Where an attempt that asked to wait stands.
#[derive(Debug, Clone, PartialEq)]
pub enum Waiting {
    Yes,
    /// The callback came, with this.
    Resumed(Option<RawJson>),
    /// The attempt ended meanwhile: answered, timed out, cancelled.
    Over,
}

/// Registers a callback for a running attempt, in place of an earlier one; its token, or `None` when the attempt is over.
pub async fn register_callback(
    client: &Client,
    schema: &Schema,
    attempt: &Receipt,
    timeout: Duration,
) -> Result<Option<String>> {
    let sql = schema.render("SELECT {schema}.register_callback($1, $2, $3, $4, make_interval(secs => $5))::text");
    let row = client
        .query_one(
            &sql,
            &[&attempt.claim_slot, &attempt.receipt_id, &attempt.job_id, &attempt.run_lease, &timeout.as_secs_f64()],
        )
        .await?;
    Ok(row.try_get(0)?)
}

/// The attempt now waits for its callback.
pub async fn wait_for_callback(client: &Client, schema: &Schema, attempt: &Receipt, token: &str) -> Result<Waiting> {
    let sql = schema.render("SELECT {schema}.wait_for_callback($1, $2, $3, $4::text::uuid)");
    let row = client.query_one(&sql, &[&attempt.receipt_id, &attempt.job_id, &attempt.run_lease, &token]).await?;
    match row.try_get::<_, &str>(0)? {
        "waiting" => Ok(Waiting::Yes),
        "over" => Ok(Waiting::Over),
        _ => callback_result(client, schema, attempt).await,
    }
}

/// Whether what an attempt waits for has come.
pub async fn callback_result(client: &Client, schema: &Schema, attempt: &Receipt) -> Result<Waiting> {
    let sql = schema.render("SELECT is_over, resumed, payload FROM {schema}.callback_result($1, $2, $3)");
    let row = client.query_one(&sql, &[&attempt.receipt_id, &attempt.job_id, &attempt.run_lease]).await?;
    Ok(match (row.try_get(0)?, row.try_get(1)?) {
        (true, _) => Waiting::Over,
        (false, true) => Waiting::Resumed(row.try_get(2)?),
        (false, false) => Waiting::Yes,
    })
}

/// Answers a callback; `None` when the token is unknown, used, timed out, or its attempt over.
pub async fn resolve_callback(
    client: &Client,
    schema: &Schema,
    token: &str,
    answer: &Answer,
) -> Result<Option<Answered>> {
    if !is_token(token) {
        return Err(EngineError::invalid("callback token", "it must be a UUID, as register_callback gives them"));
    }
    let (action, payload, error) = answer.parts();
    let sql = schema.render("SELECT job_id, state::text FROM {schema}.resolve_callback($1::text::uuid, $2, $3, $4)");
    let row = client.query_opt(&sql, &[&token, &action, &payload, &error]).await?;
    row.map(|row| Ok(Answered { job_id: row.try_get(0)?, state: row.try_get(1)? })).transpose()
}

/// Puts off a callback's timeout; false when the token is unknown or used.
pub async fn extend_callback(client: &Client, schema: &Schema, token: &str, timeout: Duration) -> Result<bool> {
    let sql = schema.render("SELECT {schema}.extend_callback($1::text::uuid, make_interval(secs => $2))");
    Ok(client.query_one(&sql, &[&token, &timeout.as_secs_f64()]).await?.try_get(0)?)
}

fn is_token(token: &str) -> bool {
    token.len() == 36
        && token.bytes().enumerate().all(|(n, b)| match n {
            8 | 13 | 18 | 23 => b == b'-',
            _ => b.is_ascii_hexdigit(),
        })
}
