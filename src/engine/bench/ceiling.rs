//! What the server can do at best with the same rows and no queue at all.
//!
//! In it: one producer with binary COPY, 1,000 rows a transaction, into a table with the columns and the index of
//! `ready_entries`; one consumer that reads ordered batches of 256 above its cursor, bodies included, and appends one small
//! row a batch in a transaction; both at once, the producer at most 4,000 rows ahead, as in the throughput scenarios. Not in
//! it: claims, receipts, fences, partitions, rotation, handlers.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::SinkExt;
use serde::Serialize;

use super::ledger::jobs;
use crate::engine::Target;
use crate::engine::enqueue::{Reserved, begin_copy, copy_into, end_copy};
use crate::engine::error::Result;
use crate::engine::worker::{RawJson, open};

const DEPTH: i64 = 4000;
const COPY_ROWS: i64 = 1000;
const READ_ROWS: i64 = 256;

#[derive(Debug, Clone, Copy, Serialize)]
pub struct Ceiling {
    pub jobs_per_s: f64,
    pub wal_bytes_per_job: f64,
}

/// Measures it for `duration`, after a second of warming up.
pub async fn ceiling(target: &Target, payload: usize, duration: Duration) -> Result<Ceiling> {
    let session = open(target).await?;
    session.batch_execute(&target.schema.render(include_str!("../../../migrations/bench/ceiling.sql"))).await?;
    let read = Arc::new(AtomicI64::new(0));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let producer = tokio::spawn(produce(target.clone(), payload, Arc::clone(&read), stopped.clone()));
    let consumer = tokio::spawn(consume(target.clone(), Arc::clone(&read), stopped));
    tokio::time::sleep(Duration::from_secs(1).min(duration)).await;
    let (began, from, wal) = (Instant::now(), read.load(Ordering::Relaxed), super::run::wal_position(&session).await?);
    tokio::time::sleep(duration).await;
    let count = (read.load(Ordering::Relaxed) - from) as f64;
    let measured = Ceiling {
        jobs_per_s: count / began.elapsed().as_secs_f64(),
        wal_bytes_per_job: (super::run::wal_position(&session).await? - wal) / count.max(1.0),
    };
    stop.send_replace(true);
    for task in [producer, consumer] {
        task.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    }
    let drop = "DROP TABLE {schema}.bench_ceiling_rows, {schema}.bench_ceiling_batches";
    session.batch_execute(&target.schema.render(drop)).await?;
    Ok(measured)
}

async fn produce(
    target: Target,
    payload: usize,
    read: Arc<AtomicI64>,
    stop: tokio::sync::watch::Receiver<bool>,
) -> Result<()> {
    let mut session = open(&target).await?;
    let copy = copy_into(&target.schema, "bench_ceiling_rows");
    let batch = jobs(0..COPY_ROWS as usize, payload);
    let mut next: i64 = 1;
    while !*stop.borrow() {
        if next - 1 - read.load(Ordering::Relaxed) > DEPTH - COPY_ROWS {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        let numbers: Vec<i64> = (next..next + COPY_ROWS).collect();
        let mut rows = Reserved {
            lane_id: 1,
            ready_slot: 0,
            enqueued_at: chrono::Utc::now(),
            job_ids: numbers.clone().into_iter(),
            lane_seqs: numbers.into_iter(),
        };
        let mut out = BytesMut::with_capacity(batch.len() * (payload + 160));
        begin_copy(&mut out);
        for job in &batch {
            rows.write(job, &mut out)?;
        }
        end_copy(&mut out);
        let transaction = session.transaction().await?;
        {
            let mut sink = pin!(transaction.copy_in::<_, Bytes>(&copy).await?);
            sink.send(out.freeze()).await?;
            sink.finish().await?;
        }
        transaction.commit().await?;
        next += COPY_ROWS;
    }
    Ok(())
}

async fn consume(target: Target, read: Arc<AtomicI64>, stop: tokio::sync::watch::Receiver<bool>) -> Result<()> {
    let session = open(&target).await?;
    let sql = "SELECT job_id, lane_seq, kind, args, attempt, max_attempts, run_at, created_at FROM {schema}.bench_ceiling_rows
               WHERE lane_id = 1 AND lane_seq > $1 ORDER BY lane_seq LIMIT $2";
    let select = session.prepare(&target.schema.render(sql)).await?;
    let sql = "INSERT INTO {schema}.bench_ceiling_batches (lane_lo, lane_hi, job_count) VALUES ($1, $2, $3)";
    let append = session.prepare(&target.schema.render(sql)).await?;
    let mut cursor = 0i64;
    while !*stop.borrow() {
        let rows = session.query(&select, &[&cursor, &READ_ROWS]).await?;
        let mut last = cursor;
        for row in &rows {
            last = row.try_get(1)?;
            std::hint::black_box((row.try_get::<_, &str>(2)?, row.try_get::<_, RawJson>(3)?));
        }
        if rows.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
            continue;
        }
        session.execute(&append, &[&(cursor + 1), &last, &(rows.len() as i32)]).await?;
        cursor = last;
        read.store(cursor, Ordering::Relaxed);
    }
    Ok(())
}
