//! Enqueue: one job, many, or a bulk stream by binary COPY (engine.md, Enqueue).
//!
//! All three run inside the caller's transaction and are atomic with it (I6). The locks they take are shared, so an open
//! producer delays nobody. Guarded by `tests/engine_enqueue.rs` and `tests/engine_producers.rs`.

use std::pin::pin;

use bytes::{BufMut, Bytes, BytesMut};
use chrono::{DateTime, Datelike as _, Utc};
use futures_util::SinkExt;
use serde::Deserialize;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Statement, Transaction};

use super::error::{EngineError, Result};
use super::fields::{some_time, whole};
use super::schema::Schema;
use super::unique::UniqueOptions;
use super::worker::RawJson;

pub const MAX_NAME_CHARS: usize = 200;
pub const MAX_TAGS: usize = 20;
pub const DEFAULT_QUEUE: &str = "default";
pub const DEFAULT_PRIORITY: i16 = 2;
pub const DEFAULT_MAX_ATTEMPTS: i16 = 25;

/// A job to enqueue. Absent fields have the defaults of `{schema}.enqueue`.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "an object with `kind`")]
pub struct NewJob {
    pub kind: String,
    #[serde(default = "default_queue")]
    pub queue: String,
    #[serde(default)]
    pub args: RawJson,
    #[serde(default = "default_priority", deserialize_with = "whole::<_, _, 1, 4>")]
    pub priority: i16,
    #[serde(default = "default_max_attempts", deserialize_with = "whole::<_, _, 1, 1000>")]
    pub max_attempts: i16,
    /// When it may run; now if absent or past, by the database's clock.
    #[serde(default, deserialize_with = "some_time")]
    pub run_at: Option<DateTime<Utc>>,
    #[serde(default)]
    pub tags: Vec<String>,
    #[serde(default)]
    pub metadata: Option<RawJson>,
    /// What keeps a second such job out; nothing if absent.
    #[serde(default)]
    pub unique: Option<UniqueOptions>,
}

fn default_queue() -> String {
    DEFAULT_QUEUE.into()
}

fn default_priority() -> i16 {
    DEFAULT_PRIORITY
}

fn default_max_attempts() -> i16 {
    DEFAULT_MAX_ATTEMPTS
}

impl NewJob {
    /// A job with the defaults.
    pub fn new(kind: impl Into<String>, args: RawJson) -> Self {
        Self {
            kind: kind.into(),
            queue: default_queue(),
            args,
            priority: DEFAULT_PRIORITY,
            max_attempts: DEFAULT_MAX_ATTEMPTS,
            run_at: None,
            tags: Vec::new(),
            metadata: None,
            unique: None,
        }
    }

    /// What `{schema}.check_job` checks, for the path that does not go through it.
    pub fn check(&self) -> Result<()> {
        check_name("kind", &self.kind)?;
        check_name("queue", &self.queue)?;
        if !(1..=4).contains(&self.priority) {
            return Err(EngineError::invalid("priority", format!("it must be 1 (first) to 4, not {}", self.priority)));
        }
        if !(1..=1000).contains(&self.max_attempts) {
            return Err(EngineError::invalid(
                "max_attempts",
                format!("it must be 1 to 1000, not {}", self.max_attempts),
            ));
        }
        if self.tags.len() > MAX_TAGS {
            return Err(EngineError::invalid(
                "tags",
                format!("there may be at most {MAX_TAGS}, not {}", self.tags.len()),
            ));
        }
        if let Some(run_at) = self.run_at
            && !(1..=9999).contains(&run_at.year())
        {
            return Err(EngineError::invalid(
                "run_at",
                format!("it must be in the years 1 to 9999, not {}", run_at.year()),
            ));
        }
        if let Some(tag) = self.tags.iter().find(|t| t.contains('\0')) {
            return Err(EngineError::invalid(
                "tags",
                format!("{tag:?} contains U+0000, which PostgreSQL cannot store"),
            ));
        }
        if let Some(metadata) = &self.metadata
            && !metadata.as_str().trim_start().starts_with('{')
        {
            return Err(EngineError::invalid("metadata", "it must be a JSON object"));
        }
        Ok(())
    }

    fn is_plain(&self) -> bool {
        self.run_at.is_none() && self.unique.is_none()
    }
}

fn check_name(field: &str, name: &str) -> Result<()> {
    let chars = name.chars().count();
    if !(1..=MAX_NAME_CHARS).contains(&chars) {
        return Err(EngineError::invalid(field, format!("it must have 1 to {MAX_NAME_CHARS} characters, not {chars}")));
    }
    if name.contains('\0') {
        return Err(EngineError::invalid(field, "it contains U+0000, which PostgreSQL cannot store"));
    }
    Ok(())
}

/// What became of a job that was to be enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Enqueued {
    /// Of the job that exists now: the new one, or the one that holds its unique key.
    pub job_id: i64,
    pub duplicate: bool,
}

/// The prepared statements of a bulk producer, bound to one session.
#[derive(Clone)]
pub struct BulkEnqueue {
    reserve: Statement,
    wake: Statement,
    many: Statement,
    copy: String,
}

impl BulkEnqueue {
    /// Prepares them on `client`.
    pub async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        let reserve = schema.render(
            "SELECT lane_id, ready_slot, enqueued_at, job_ids, lane_seqs FROM {schema}.enqueue_reserve($1, $2, $3)",
        );
        let wake = schema.render("SELECT {schema}.wake_queue(q) FROM unnest($1::text[]) AS q");
        let many = schema.render(
            "SELECT job_id, duplicate_of IS NOT NULL
             FROM {schema}.enqueue_many((
                 SELECT array_agg(ROW(j.kind, j.queue, j.args, j.priority, j.max_attempts, j.run_at,
                            ARRAY(SELECT jsonb_array_elements_text(j.tags)), j.metadata, j.unique_key,
                            j.unique_states::bit(8))::{schema}.new_job ORDER BY j.n)
                 FROM unnest($1::text[], $2::text[], $3::jsonb[], $4::int2[], $5::int2[], $6::timestamptz[], $7::jsonb[], $8::jsonb[],
                             $9::bytea[], $10::text[])
                      WITH ORDINALITY AS j (kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key,
                           unique_states, n)))",
        );
        let copy = copy_into(schema, "ready_entries");
        Ok(Self {
            reserve: client.prepare(&reserve).await?,
            wake: client.prepare(&wake).await?,
            many: client.prepare_typed(&many, &[]).await?,
            copy,
        })
    }

    /// Enqueues all jobs within `transaction`, through COPY; those with a `run_at` or a unique key through `enqueue_many`.
    /// Returns what became of them in the jobs' order. Nothing is visible before the transaction commits.
    pub async fn run(&self, transaction: &Transaction<'_>, jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
        for (n, job) in jobs.iter().enumerate() {
            job.check().map_err(|e| at_place(e, n))?;
        }
        let mut enqueued = vec![Enqueued { job_id: 0, duplicate: false }; jobs.len()];
        let special: Vec<usize> = (0..jobs.len()).filter(|&n| !jobs[n].is_plain()).collect();
        if !special.is_empty() {
            self.enqueue_special(transaction, jobs, &special, &mut enqueued).await?;
        }
        if special.len() < jobs.len() {
            self.copy_plain(transaction, jobs, &mut enqueued).await?;
        }
        Ok(enqueued)
    }

    async fn copy_plain(
        &self,
        transaction: &Transaction<'_>,
        jobs: &[NewJob],
        enqueued: &mut [Enqueued],
    ) -> Result<()> {
        let mut lanes: Vec<(&str, i16, i32)> = Vec::new();
        let mut lane_of = Vec::with_capacity(jobs.len());
        for job in jobs.iter().filter(|job| job.is_plain()) {
            // A batch has few lanes, and its jobs mostly the last one seen.
            let lane = match lanes.iter().rposition(|l| l.1 == job.priority && l.0 == job.queue) {
                Some(lane) => lane,
                None => {
                    lanes.push((&job.queue, job.priority, 0));
                    lanes.len() - 1
                }
            };
            lanes[lane].2 += 1;
            lane_of.push(lane);
        }
        let queues: Vec<&str> = lanes.iter().map(|l| l.0).collect();
        let priorities: Vec<i16> = lanes.iter().map(|l| l.1).collect();
        let counts: Vec<i32> = lanes.iter().map(|l| l.2).collect();
        let rows = transaction.query(&self.reserve, &[&queues, &priorities, &counts]).await?;
        let mut reserved = Vec::with_capacity(rows.len());
        for row in &rows {
            reserved.push(Reserved {
                lane_id: row.try_get(0)?,
                ready_slot: row.try_get(1)?,
                enqueued_at: row.try_get(2)?,
                job_ids: row.try_get::<_, Vec<i64>>(3)?.into_iter(),
                lane_seqs: row.try_get::<_, Vec<i64>>(4)?.into_iter(),
            });
        }

        let mut out = BytesMut::with_capacity(128 + jobs.iter().map(|j| 160 + j.args.as_str().len()).sum::<usize>());
        begin_copy(&mut out);
        for ((n, job), lane) in jobs.iter().enumerate().filter(|(_, job)| job.is_plain()).zip(lane_of) {
            enqueued[n].job_id = reserved[lane].write(job, &mut out)?;
        }
        end_copy(&mut out);

        let sink = transaction.copy_in::<_, Bytes>(&self.copy).await?;
        let mut sink = pin!(sink);
        sink.send(out.freeze()).await?;
        sink.finish().await?;
        let mut woken = queues;
        woken.sort_unstable();
        woken.dedup();
        transaction.query(&self.wake, &[&woken]).await?;
        Ok(())
    }

    async fn enqueue_special(
        &self,
        transaction: &Transaction<'_>,
        jobs: &[NewJob],
        special: &[usize],
        enqueued: &mut [Enqueued],
    ) -> Result<()> {
        let pick = || special.iter().map(|&n| &jobs[n]);
        // The database's clock decides in which period a job is (I7).
        let mut now = DateTime::UNIX_EPOCH;
        if pick().any(|j| j.unique.as_ref().is_some_and(|u| u.by_period.is_some())) {
            now = transaction.query_one("SELECT clock_timestamp()", &[]).await?.try_get(0)?;
        }
        let key = |j: &NewJob| j.unique.as_ref().map(|u| u.key(&j.kind, &j.queue, &j.args, now).to_vec());
        let unique_keys: Vec<Option<Vec<u8>>> = pick().map(key).collect();
        let unique_states: Vec<Option<String>> =
            pick().map(|j| j.unique.as_ref().map(|u| u.states.to_string())).collect();
        let kinds: Vec<&str> = pick().map(|j| &*j.kind).collect();
        let queues: Vec<&str> = pick().map(|j| &*j.queue).collect();
        let args: Vec<&RawJson> = pick().map(|j| &j.args).collect();
        let priorities: Vec<i16> = pick().map(|j| j.priority).collect();
        let max_attempts: Vec<i16> = pick().map(|j| j.max_attempts).collect();
        let run_ats: Vec<Option<DateTime<Utc>>> = pick().map(|j| j.run_at).collect();
        let tags: Vec<serde_json::Value> = pick().map(|j| j.tags.clone().into()).collect();
        let metadata: Vec<Option<&RawJson>> = pick().map(|j| j.metadata.as_ref()).collect();
        let rows = transaction
            .query(
                &self.many,
                &[
                    &kinds,
                    &queues,
                    &args,
                    &priorities,
                    &max_attempts,
                    &run_ats,
                    &tags,
                    &metadata,
                    &unique_keys,
                    &unique_states,
                ],
            )
            .await?;
        for (row, &n) in rows.iter().zip(special) {
            enqueued[n] = Enqueued { job_id: row.try_get(0)?, duplicate: row.try_get(1)? };
        }
        Ok(())
    }
}

/// The COPY of the columns that [`Reserved::write`] writes.
pub(super) fn copy_into(schema: &Schema, table: &str) -> String {
    schema.render(&format!(
        "COPY {{schema}}.{table} (job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt,
             max_attempts, kind, args, tags, metadata) FROM STDIN BINARY"
    ))
}

/// Numbers for rows of one lane.
pub(super) struct Reserved {
    pub lane_id: i32,
    pub ready_slot: i16,
    pub enqueued_at: DateTime<Utc>,
    pub job_ids: std::vec::IntoIter<i64>,
    pub lane_seqs: std::vec::IntoIter<i64>,
}

/// What a binary COPY begins with: the signature, no flags, no header extension.
pub(super) fn begin_copy(out: &mut BytesMut) {
    out.put_slice(b"PGCOPY\n\xff\r\n\0");
    out.put_u64(0);
}

/// And ends with.
pub(super) fn end_copy(out: &mut BytesMut) {
    out.put_i16(-1);
}

impl Reserved {
    /// Appends the job as a row of the binary COPY format; returns its id.
    pub fn write(&mut self, job: &NewJob, out: &mut BytesMut) -> Result<i64> {
        // The server gave as many numbers as were asked for.
        let (Some(id), Some(seq)) = (self.job_ids.next(), self.lane_seqs.next()) else {
            return Err(EngineError::invalid("jobs", "the server reserved fewer numbers than asked for"));
        };
        // Microseconds since 2000-01-01, as timestamptz is on the wire.
        let at = self.enqueued_at.timestamp_micros() - 946_684_800_000_000;
        out.put_i16(13);
        put_i64(out, id);
        put_i64(out, seq);
        put_i64(out, 0);
        put_i64(out, at);
        put_i64(out, at);
        out.put_i32(4);
        out.put_i32(self.lane_id);
        put_i16(out, self.ready_slot);
        put_i16(out, 0);
        put_i16(out, job.max_attempts);
        out.put_i32(job.kind.len() as i32);
        out.put_slice(job.kind.as_bytes());
        put_jsonb(out, &job.args);
        if job.tags.is_empty() {
            out.put_i32(-1);
        } else {
            let start = out.len();
            out.put_i32(0);
            job.tags.to_sql(&Type::TEXT_ARRAY, out).map_err(|e| EngineError::invalid("tags", e.to_string()))?;
            let len = (out.len() - start - 4) as i32;
            out[start..start + 4].copy_from_slice(&len.to_be_bytes());
        }
        match &job.metadata {
            Some(metadata) if !metadata.is_empty_object() => put_jsonb(out, metadata),
            _ => out.put_i32(-1),
        }
        Ok(id)
    }
}

fn put_i64(out: &mut BytesMut, value: i64) {
    out.put_i32(8);
    out.put_i64(value);
}

fn put_i16(out: &mut BytesMut, value: i16) {
    out.put_i32(2);
    out.put_i16(value);
}

fn put_jsonb(out: &mut BytesMut, json: &RawJson) {
    out.put_i32(json.as_str().len() as i32 + 1);
    out.put_u8(1);
    out.put_slice(json.as_str().as_bytes());
}

fn at_place(error: EngineError, n: usize) -> EngineError {
    match error {
        EngineError::InvalidInput { field, message } => {
            EngineError::InvalidInput { field: format!("job {}: {field}", n + 1), message }
        }
        other => other,
    }
}
