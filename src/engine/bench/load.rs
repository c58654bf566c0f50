//! Producers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::ledger::{Ledger, jobs};
use super::scenario::Load;
use crate::engine::Target;
use crate::engine::enqueue::BulkEnqueue;
use crate::engine::error::Result;
use crate::engine::worker::open;

/// The most jobs in one transaction.
const BATCH: usize = 1000;

pub(super) struct Producer {
    pub target: Target,
    pub ledger: Arc<Ledger>,
    pub payload: usize,
    pub abort_fraction: f64,
}

/// What a producer did.
#[derive(Default)]
pub(super) struct Produced {
    pub sent: u64,
    /// How long each COMMIT, with the calls before it, took.
    pub transactions: Vec<Duration>,
}

impl Producer {
    /// Sends until `stop`, or the ledger is full.
    pub async fn run(self, load: Load, first: usize, stop: tokio::sync::watch::Receiver<bool>) -> Result<Produced> {
        let mut session = open(&self.target).await?;
        let bulk = BulkEnqueue::prepare(&session, &self.target.schema).await?;
        let mut rng = StdRng::seed_from_u64(7);
        let mut produced = Produced::default();
        let start = Instant::now();
        let mut next = first;
        while !*stop.borrow() && next < self.ledger.capacity() {
            let wanted = match &load {
                Load::DepthTarget(depth) => {
                    (depth + self.ledger.ran.load(Ordering::Relaxed)).saturating_sub(produced.sent) as usize
                }
                Load::Rate(rate) => (start.elapsed().as_secs_f64() * *rate as f64) as usize - (next - first),
                Load::OneAtATime(_) | Load::Fill(_) => unreachable!("driven elsewhere"),
            };
            let enough = match &load {
                Load::DepthTarget(depth) => (*depth as usize / 8).clamp(1, BATCH),
                _ => 1,
            };
            if wanted < enough {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            }
            let numbers = next..(next + wanted.min(BATCH)).min(self.ledger.capacity());
            next = numbers.end;
            let batch = jobs(numbers.clone(), self.payload);
            let began = Instant::now();
            for n in numbers.clone() {
                let due = match &load {
                    Load::Rate(rate) => start + Duration::from_secs_f64((n - first) as f64 / *rate as f64),
                    _ => began,
                };
                self.ledger.send(n, due);
            }
            let transaction = session.transaction().await?;
            bulk.run(&transaction, &batch).await?;
            if self.abort_fraction > 0.0 && rng.random_bool(self.abort_fraction) {
                transaction.rollback().await?;
                continue;
            }
            // Before the acknowledgement: a worker may be faster than it.
            numbers.clone().for_each(|n| self.ledger.commit(n));
            transaction.commit().await?;
            produced.sent += numbers.len() as u64;
            produced.transactions.push(began.elapsed());
        }
        Ok(produced)
    }
}
