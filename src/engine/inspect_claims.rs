//! Attempts that are open, and where one job is.

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::Client;

use super::error::Result;
use super::schema::Schema;

#[derive(Debug, Clone, Serialize)]
pub struct ClaimsReport {
    pub claims: Vec<OpenClaim>,
    pub leases: Vec<OpenLease>,
}

/// A claim batch with open receipts.
#[derive(Debug, Clone, Serialize)]
pub struct OpenClaim {
    pub claim_slot: i16,
    pub batch_id: i64,
    pub queue: String,
    pub open: i64,
    pub first_open_job: i64,
    pub claimed_at: DateTime<Utc>,
    pub age_s: f64,
    pub claimed_by: Option<String>,
}

/// An attempt with a row of its own.
#[derive(Debug, Clone, Serialize)]
pub struct OpenLease {
    pub lease_slot: i16,
    pub job_id: i64,
    pub queue: String,
    pub state: String,
    pub claimed_at: DateTime<Utc>,
    pub age_s: f64,
    pub claimed_by: Option<String>,
    pub callback_timeout_at: Option<DateTime<Utc>>,
}

/// The oldest open claim batches and leases, at most `limit` of each.
pub async fn open_claims(client: &Client, schema: &Schema, limit: i64) -> Result<ClaimsReport> {
    let claims = schema.render(
        "SELECT s.slot, o.batch_id, l.queue, o.open_count, o.first_open_job, o.claimed_at,
                extract(epoch FROM clock_timestamp() - o.claimed_at)::float8, o.claimed_by
         FROM {schema}.claim_ring_slots AS s
         CROSS JOIN LATERAL {schema}.open_claims(s.slot) AS o
         JOIN {schema}.queue_lanes AS l ON l.lane_id = o.lane_id
         ORDER BY o.batch_id LIMIT $1",
    );
    let leases = schema.render(
        "SELECT lease_slot, job_id, queue, state::text, claimed_at,
                extract(epoch FROM clock_timestamp() - claimed_at)::float8, claimed_by, callback_timeout_at
         FROM {schema}.leases ORDER BY claimed_at, job_id LIMIT $1",
    );
    let mut report = ClaimsReport { claims: Vec::new(), leases: Vec::new() };
    for row in client.query(&claims, &[&limit]).await? {
        report.claims.push(OpenClaim {
            claim_slot: row.try_get(0)?,
            batch_id: row.try_get(1)?,
            queue: row.try_get(2)?,
            open: row.try_get(3)?,
            first_open_job: row.try_get(4)?,
            claimed_at: row.try_get(5)?,
            age_s: row.try_get(6)?,
            claimed_by: row.try_get(7)?,
        });
    }
    for row in client.query(&leases, &[&limit]).await? {
        report.leases.push(OpenLease {
            lease_slot: row.try_get(0)?,
            job_id: row.try_get(1)?,
            queue: row.try_get(2)?,
            state: row.try_get(3)?,
            claimed_at: row.try_get(4)?,
            age_s: row.try_get(5)?,
            claimed_by: row.try_get(6)?,
            callback_timeout_at: row.try_get(7)?,
        });
    }
    Ok(report)
}

/// Where a job lies.
#[derive(Debug, Clone, Serialize)]
pub struct JobPlace {
    pub job_id: i64,
    /// ready, claim, lease, deferred, dlq or history.
    pub place: String,
    pub state: String,
    /// Of history: deleted, or retried since.
    pub hidden: bool,
    pub ready_slot: Option<i16>,
    pub lane_id: Option<i32>,
    pub lane_seq: Option<i64>,
    pub run_lease: Option<i64>,
    pub claim_slot: Option<i16>,
    pub receipt_id: Option<i64>,
}

/// `None` when nothing is known of such a job.
pub async fn job_place(client: &Client, schema: &Schema, job_id: i64) -> Result<Option<JobPlace>> {
    let sql = schema.render(
        "SELECT place, state::text, hidden, ready_slot, lane_id, lane_seq, run_lease, claim_slot, receipt_id
         FROM {schema}.find_job($1) WHERE place IS NOT NULL",
    );
    let row = client.query_opt(&sql, &[&job_id]).await?;
    row.map(|row| {
        Ok(JobPlace {
            job_id,
            place: row.try_get(0)?,
            state: row.try_get(1)?,
            hidden: row.try_get(2)?,
            ready_slot: row.try_get(3)?,
            lane_id: row.try_get(4)?,
            lane_seq: row.try_get(5)?,
            run_lease: row.try_get(6)?,
            claim_slot: row.try_get(7)?,
            receipt_id: row.try_get(8)?,
        })
    })
    .transpose()
}
