//! Claim: makes ready jobs belong to one attempt each (engine.md, Claim; ADR-023, Hot path).
//!
//! One call of `{schema}.claim`, which takes the lanes' advisory locks without waiting. The attempts exist once the call
//! has committed, whether or not its answer arrives: what is lost on the way back is rescued later.
//! Guarded by `tests/engine_claim.rs`.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio_postgres::{Client, Row, Statement};

use super::error::Result;
use super::schema::Schema;
use super::worker::{Job, JobExtras, RawJson};

/// Receipts per batch: `receipt_id = batch_id * RECEIPTS_PER_BATCH + index`.
pub const RECEIPTS_PER_BATCH: i64 = 1024;

/// The most jobs one claim gives.
pub const MAX_CLAIM: usize = RECEIPTS_PER_BATCH as usize;

/// Names one attempt for ever. Every later write about it shows all four and loses if one does not match.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Receipt {
    pub claim_slot: i16,
    pub receipt_id: i64,
    pub job_id: i64,
    pub run_lease: i64,
}

/// One claimed job with what closes its attempt.
#[derive(Debug, Clone)]
pub struct Claimed {
    pub receipt: Receipt,
    pub job: Job,
}

/// What a claim gave.
#[derive(Debug, Default)]
pub struct Claims {
    pub jobs: Vec<Claimed>,
    /// A lane with work was in another claim: ask again soon.
    pub busy: bool,
}

/// How to claim.
#[derive(Debug, Clone, Copy)]
pub struct ClaimOptions {
    /// How long each attempt may take, by the database's clock.
    pub deadline: Option<Duration>,
    /// Also look for jobs of producers that committed late; once per poll interval and on wake-up.
    pub probe: bool,
    /// A lane rises one priority each time its head has waited so long; `None` keeps priorities strict.
    pub aging: Option<Duration>,
    /// False makes every attempt a lease from the beginning, as before ADR-023 (`lease_claim_receipts`).
    pub receipts: bool,
}

impl Default for ClaimOptions {
    fn default() -> Self {
        Self { deadline: None, probe: false, aging: None, receipts: true }
    }
}

/// The prepared call, bound to one session.
#[derive(Clone)]
pub struct Claim {
    statement: Statement,
}

impl Claim {
    /// Prepares it on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let sql = schema.render(
            "SELECT batch_id, claim_slot, priority, claimed_at, deadline_at, job_ids, run_leases, attempts, max_attempts,
                    run_ats, created_ats, kinds, args, extras
             FROM {schema}.claim($1, $2, make_interval(secs => $3), $4, $5, make_interval(secs => $6), $7)",
        );
        Ok(Self { statement: client.prepare(&sql).await? })
    }

    /// Claims up to `limit` jobs of `queue` (at most [`MAX_CLAIM`]). `intern` makes a kind's shared name.
    pub async fn run(
        &self,
        client: &Client,
        queue: &Arc<str>,
        limit: usize,
        claimed_by: &str,
        options: ClaimOptions,
        intern: impl Fn(&str) -> Arc<str>,
    ) -> Result<Claims> {
        let deadline = options.deadline.map(|d| d.as_secs_f64());
        let limit = limit.min(MAX_CLAIM) as i32;
        let aging = options.aging.map(|d| d.as_secs_f64());
        let rows = client
            .query(
                &self.statement,
                &[&&**queue, &limit, &deadline, &claimed_by, &options.probe, &aging, &options.receipts],
            )
            .await?;
        let mut claims = Claims::default();
        for row in &rows {
            if row.try_get::<_, Option<i64>>(0)?.is_none() {
                claims.busy = true;
                continue;
            }
            read_batch(row, queue, &intern, &mut claims.jobs)?;
        }
        Ok(claims)
    }
}

#[derive(Deserialize)]
struct Extras<'a> {
    tags: Option<Vec<String>>,
    #[serde(borrow)]
    metadata: Option<&'a RawValue>,
    #[serde(borrow)]
    errors: Option<Vec<&'a RawValue>>,
    #[serde(borrow)]
    progress: Option<&'a RawValue>,
}

fn read_batch(row: &Row, queue: &Arc<str>, intern: &impl Fn(&str) -> Arc<str>, out: &mut Vec<Claimed>) -> Result<()> {
    let batch_id: i64 = row.try_get(0)?;
    let claim_slot: i16 = row.try_get(1)?;
    let priority: i16 = row.try_get(2)?;
    let claimed_at: DateTime<Utc> = row.try_get(3)?;
    let deadline_at: Option<DateTime<Utc>> = row.try_get(4)?;
    let job_ids: Vec<i64> = row.try_get(5)?;
    let run_leases: Vec<i64> = row.try_get(6)?;
    let attempts: Vec<i16> = row.try_get(7)?;
    let max_attempts: Vec<i16> = row.try_get(8)?;
    let run_ats: Vec<DateTime<Utc>> = row.try_get(9)?;
    let created_ats: Vec<DateTime<Utc>> = row.try_get(10)?;
    let kinds: Vec<&str> = row.try_get(11)?;
    let args: Vec<RawJson> = row.try_get(12)?;
    let extras: Vec<Option<RawJson>> = row.try_get(13)?;

    out.reserve(job_ids.len());
    for (n, args) in args.into_iter().enumerate() {
        let receipt = Receipt {
            claim_slot,
            receipt_id: batch_id * RECEIPTS_PER_BATCH + n as i64,
            job_id: job_ids[n],
            run_lease: run_leases[n],
        };
        let job = Job {
            id: job_ids[n],
            kind: intern(kinds[n]),
            queue: Arc::clone(queue),
            args,
            priority,
            attempt: attempts[n],
            max_attempts: max_attempts[n],
            run_lease: run_leases[n],
            run_at: run_ats[n],
            created_at: created_ats[n],
            claimed_at,
            deadline_at,
            extras: extras[n].as_ref().map(read_extras),
        };
        out.push(Claimed { receipt, job });
    }
    Ok(())
}

fn read_extras(json: &RawJson) -> Box<JobExtras> {
    // The server built it a moment ago; what does not parse would be a bug there, and costs the extras, not the job.
    let Ok(extras) = serde_json::from_str::<Extras<'_>>(json.as_str()) else {
        tracing::error!("the extras of a job could not be read");
        return Box::default();
    };
    Box::new(JobExtras {
        tags: extras.tags.unwrap_or_default(),
        metadata: extras.metadata.map_or(RawJson::EMPTY_OBJECT, RawJson::from_raw),
        errors: extras.errors.unwrap_or_default().into_iter().map(RawJson::from_raw).collect(),
        progress: extras.progress.map(RawJson::from_raw),
    })
}
