//! What was sent and what ran, kept outside the engine so that it can convict it; and the workers that write it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;

use super::scenario::{Fate, Mix};
use crate::engine::enqueue::NewJob;
use crate::engine::worker::{Job, JobContext, Outcome, Worker};

/// One entry a job, by the number in its args.
pub(super) struct Ledger {
    start: Instant,
    /// Microseconds after `start` at which it was due; 0 is never sent.
    due: Box<[AtomicU64]>,
    /// Microseconds from due to the start of its handler.
    pickup: Box<[AtomicU32]>,
    committed: Box<[AtomicU8]>,
    runs: Box<[AtomicU8]>,
    pub ran: AtomicU64,
    /// Jobs whose transaction is committed, and one above the highest number sent: for the progress shown only.
    pub sent: AtomicU64,
    pub top: AtomicUsize,
}

#[derive(Debug, Default)]
pub(super) struct Verdict {
    pub committed: u64,
    pub lost: u64,
    pub executed_twice: u64,
    pub invented: u64,
}

impl Ledger {
    pub fn new(capacity: usize) -> Self {
        Self {
            start: Instant::now(),
            due: (0..capacity).map(|_| AtomicU64::new(0)).collect(),
            pickup: (0..capacity).map(|_| AtomicU32::new(0)).collect(),
            committed: (0..capacity).map(|_| AtomicU8::new(0)).collect(),
            runs: (0..capacity).map(|_| AtomicU8::new(0)).collect(),
            ran: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            top: AtomicUsize::new(0),
        }
    }

    pub fn capacity(&self) -> usize {
        self.due.len()
    }

    pub fn send(&self, n: usize, due: Instant) {
        self.due[n].store(((due - self.start).as_micros() as u64).max(1), Ordering::Relaxed);
    }

    pub fn commit(&self, n: usize) {
        self.committed[n].store(1, Ordering::Relaxed);
    }

    pub fn ran(&self, n: usize) -> bool {
        self.runs[n].load(Ordering::Acquire) > 0
    }

    /// Microseconds from due to its start, of one that ran.
    pub fn pickup(&self, n: usize) -> Option<u32> {
        self.ran(n).then(|| self.pickup[n].load(Ordering::Relaxed))
    }

    fn run(&self, n: usize) {
        let due = Duration::from_micros(self.due[n].load(Ordering::Relaxed));
        let waited = self.start.elapsed().saturating_sub(due).as_micros();
        self.pickup[n].store(waited.min(u128::from(u32::MAX)) as u32, Ordering::Relaxed);
        self.runs[n].fetch_add(1, Ordering::Release);
        self.ran.fetch_add(1, Ordering::Relaxed);
    }

    /// Pickup times of jobs due between two instants, in microseconds.
    pub fn pickups(&self, from: Instant, to: Instant) -> hdrhistogram::Histogram<u64> {
        let mut histogram = micros();
        let window = (from - self.start).as_micros() as u64..(to - self.start).as_micros() as u64;
        for n in 0..self.capacity() {
            let due = self.due[n].load(Ordering::Relaxed);
            if due != 0 && window.contains(&due) && self.runs[n].load(Ordering::Relaxed) > 0 {
                histogram.saturating_record(u64::from(self.pickup[n].load(Ordering::Relaxed)).max(1));
            }
        }
        histogram
    }

    pub fn verdict(&self) -> Verdict {
        let mut verdict = Verdict::default();
        for (committed, runs) in self.committed.iter().zip(&self.runs) {
            let (committed, runs) = (committed.load(Ordering::Relaxed) > 0, runs.load(Ordering::Relaxed));
            verdict.committed += u64::from(committed);
            verdict.lost += u64::from(committed && runs == 0);
            verdict.executed_twice += u64::from(runs > 1);
            verdict.invented += u64::from(!committed && runs > 0);
        }
        verdict
    }
}

/// The queue and kind of every bench job.
pub(super) const QUEUE: &str = "bench";
const KIND: &str = "bench";

/// The jobs numbered `numbers`, each with args of about `payload` bytes.
pub(super) fn jobs(numbers: std::ops::Range<usize>, payload: usize) -> Vec<NewJob> {
    let filler = "x".repeat(payload.saturating_sub(24));
    numbers
        .map(|n| {
            // The number comes first in jsonb's order too: shorter keys are before longer ones, and n before p.
            let args = format!(r#"{{"n": {n}, "p": "{filler}"}}"#);
            let mut job = NewJob::new(KIND, serde_json::from_str(&args).unwrap_or_default());
            job.queue = QUEUE.into();
            job
        })
        .collect()
}

/// Records the start of each job, then takes as long as the scenario says.
pub(super) struct Recorder {
    pub ledger: Arc<Ledger>,
    pub takes: Duration,
    pub mix: Mix,
}

impl Recorder {
    /// Records a run, the last one of a job that has two, and says what comes of it.
    fn record(&self, job: &Job) -> Outcome {
        let digits = job.args.as_str().trim_start_matches(r#"{"n": "#);
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        if let Ok(n) = digits[..end].parse::<usize>()
            && n < self.ledger.capacity()
        {
            let soon = Duration::from_millis(100);
            match self.mix.fate(n) {
                Fate::RetryOnce if job.run_lease == 1 => {
                    return Outcome::Retry { error: "the first time fails".into(), after: Some(soon) };
                }
                Fate::SnoozeOnce if job.run_lease == 1 => return Outcome::Snooze(soon),
                fate => {
                    self.ledger.run(n);
                    match fate {
                        Fate::Fail => return Outcome::fail("this one fails"),
                        Fate::Cancel => return Outcome::Cancel { reason: "this one is cancelled".into() },
                        _ => {}
                    }
                }
            }
        }
        Outcome::Complete
    }
}

impl Worker for Recorder {
    fn kind(&self) -> &str {
        KIND
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        let outcome = self.record(ctx.job());
        Box::pin(async {
            tokio::time::sleep(self.takes).await;
            outcome
        })
    }

    fn perform_now(&self, job: &Job) -> Option<Outcome> {
        if !self.takes.is_zero() {
            return None;
        }
        Some(self.record(job))
    }
}

/// For times from a microsecond to ten minutes; longer ones count as that.
pub(super) fn micros() -> hdrhistogram::Histogram<u64> {
    let made = hdrhistogram::Histogram::new_with_bounds(1, 600_000_000, 3);
    made.unwrap_or_else(|_| unreachable!("the bounds are allowed"))
}
