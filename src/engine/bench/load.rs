//! Producers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::sync::watch;

use super::ledger::{Ledger, jobs};
use super::scenario::Load;
use crate::engine::enqueue::BulkEnqueue;
use crate::engine::error::Result;
use crate::engine::worker::open;
use crate::engine::{Session, Target};

/// The most jobs in one transaction.
const BATCH: usize = 1000;

pub(super) struct Producer {
    session: Session,
    bulk: BulkEnqueue,
    ledger: Arc<Ledger>,
    payload: usize,
    abort_fraction: f64,
}

/// How many jobs at `rate` a second are due by `at`.
fn due_by(start: Instant, rate: u64, at: Instant) -> usize {
    (at.saturating_duration_since(start).as_secs_f64() * rate as f64) as usize
}

/// What a producer did.
#[derive(Default)]
pub(super) struct Produced {
    pub sent: u64,
    /// How long each COMMIT, with the calls before it, took.
    pub transactions: Vec<Duration>,
}

impl Producer {
    /// Connected, so that a rate is due from its first moment.
    pub async fn connect(target: &Target, ledger: &Arc<Ledger>, payload: usize, abort_fraction: f64) -> Result<Self> {
        let session = open(target).await?;
        let bulk = BulkEnqueue::prepare(&session, &target.schema).await?;
        Ok(Self { session, bulk, ledger: Arc::clone(ledger), payload, abort_fraction })
    }

    /// Sends until `stop` names an instant, or the ledger is full. At a fixed rate everything that was due before that
    /// instant is sent, however late: what a slow server keeps from being sent in time is what it must be judged by.
    pub async fn run(
        mut self,
        load: Load,
        first: usize,
        start: Instant,
        stop: watch::Receiver<Option<Instant>>,
    ) -> Result<Produced> {
        let mut rng = StdRng::seed_from_u64(7);
        let mut produced = Produced::default();
        let mut next = first;
        while next < self.ledger.capacity() {
            let stopped = *stop.borrow();
            let wanted = match &load {
                Load::DepthTarget(depth) => {
                    (depth + self.ledger.ran.load(Ordering::Relaxed)).saturating_sub(produced.sent) as usize
                }
                Load::Rate(rate) => due_by(start, *rate, stopped.unwrap_or_else(Instant::now)) - (next - first),
                Load::OneAtATime(_) | Load::Fill(_) => unreachable!("driven elsewhere"),
            };
            let enough = match &load {
                Load::DepthTarget(depth) => (*depth as usize / 8).clamp(1, BATCH),
                _ => 1,
            };
            if stopped.is_some() && (wanted == 0 || !matches!(load, Load::Rate(_))) {
                break;
            }
            if wanted < enough {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let numbers = next..(next + wanted.min(BATCH)).min(self.ledger.capacity());
            next = numbers.end;
            self.ledger.top.store(next, Ordering::Relaxed);
            let batch = jobs(numbers.clone(), self.payload);
            let began = Instant::now();
            for n in numbers.clone() {
                let due = match &load {
                    Load::Rate(rate) => start + Duration::from_secs_f64((n - first) as f64 / *rate as f64),
                    _ => began,
                };
                self.ledger.send(n, due);
            }
            let transaction = self.session.transaction().await?;
            self.bulk.run(&transaction, &batch).await?;
            if self.abort_fraction > 0.0 && rng.random_bool(self.abort_fraction) {
                transaction.rollback().await?;
                continue;
            }
            // Before the acknowledgement: a worker may be faster than it.
            numbers.clone().for_each(|n| self.ledger.commit(n));
            transaction.commit().await?;
            produced.sent += numbers.len() as u64;
            self.ledger.sent.fetch_add(numbers.len() as u64, Ordering::Relaxed);
            produced.transactions.push(began.elapsed());
        }
        Ok(produced)
    }
}
