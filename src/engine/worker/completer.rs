//! Writes results: whatever accumulated while the last flush was in flight goes into the next. No timer, so a lone job
//! completes at once and a flood completes in big batches. A computed result survives the loss of the database.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio_postgres::Client;

use super::link::{Link, Prepared, jittered, within};
use super::outcome::Outcome;
use super::stats::Stats;
use super::{Job, RawJson};
use crate::engine::claim::Receipt;
use crate::engine::close::{Close, Closing, Ending};
use crate::engine::complete::{Complete, Lost};
use crate::engine::error::Result;
use crate::engine::schema::Schema;
use crate::engine::target::Target;

/// The most results in one flush.
const MAX_FLUSH: usize = 2048;

/// One attempt that is over for the worker.
#[derive(Debug)]
pub(super) struct Finished {
    pub receipt: Receipt,
    pub result: Ended,
}

#[derive(Debug)]
pub(super) enum Ended {
    Completed,
    Otherwise { ending: Ending, error: Option<String>, progress: Option<RawJson>, handed_back: bool },
}

impl Ended {
    /// What a handler's outcome means for the attempt.
    pub fn of(outcome: Outcome, job: &Job, progress: Option<RawJson>) -> Self {
        let (ending, error) = match outcome {
            Outcome::Complete => return Self::Completed,
            Outcome::Fail { error } => (Ending::Failed, Some(error)),
            Outcome::Retry { error, after } => (Ending::Retry(after.or(Some(backoff(job.attempt)))), Some(error)),
            Outcome::Snooze(delay) => (Ending::Snooze(delay), None),
            Outcome::Cancel { reason } => (Ending::Cancelled, Some(reason)),
            Outcome::Unhandled => return Self::unhandled(job),
        };
        Self::Otherwise { ending, error, progress, handed_back: false }
    }

    /// Back to the queue for somebody else, later and later: half the job's age.
    fn unhandled(job: &Job) -> Self {
        let age = (job.claimed_at - job.created_at).to_std().unwrap_or_default();
        let delay = (age / 2).clamp(Duration::from_secs(1), Duration::from_secs(300));
        tracing::warn!(
            job_id = job.id,
            kind = &*job.kind,
            queue = &*job.queue,
            ?delay,
            "no handler for this kind; handed back"
        );
        Self::Otherwise { ending: Ending::Snooze(delay), error: None, progress: None, handed_back: true }
    }

    /// Claimed but not run: the next worker may have it at once.
    pub fn handed_back() -> Self {
        Self::Otherwise { ending: Ending::Snooze(Duration::ZERO), error: None, progress: None, handed_back: true }
    }
}

pub(super) struct Completer {
    link: Link<Writers>,
    stats: Arc<Stats>,
    inbox: UnboundedReceiver<Finished>,
    flushed: Box<dyn Fn(usize) + Send>,
}

impl Completer {
    /// `flushed` hears how many results left after each flush.
    pub fn new(
        target: Target,
        stats: Arc<Stats>,
        inbox: UnboundedReceiver<Finished>,
        flushed: impl Fn(usize) + Send + 'static,
    ) -> Self {
        Self { link: Link::new(target), stats, inbox, flushed: Box::new(flushed) }
    }

    /// Until every sender is gone and everything is written.
    pub async fn run(mut self) {
        let mut batch = Vec::with_capacity(MAX_FLUSH);
        while self.inbox.recv_many(&mut batch, MAX_FLUSH).await > 0 {
            let count = batch.len();
            let mut completed = Vec::with_capacity(count);
            let mut closings = Vec::new();
            let mut handed_back = 0;
            for finished in batch.drain(..) {
                match finished.result {
                    Ended::Completed => completed.push(finished.receipt),
                    Ended::Otherwise { ending, error, progress, handed_back: back } => {
                        handed_back += usize::from(back);
                        closings.push(Closing { receipt: finished.receipt, ending, error, progress });
                    }
                }
            }
            self.complete(&completed).await;
            self.close(&closings).await;
            Stats::add(&self.stats.handed_back, handed_back);
            (self.flushed)(count);
        }
    }

    async fn complete(&mut self, completed: &[Receipt]) {
        if completed.is_empty() {
            return;
        }
        let lost = self.insist(Results::Completed(completed)).await;
        Stats::add(&self.stats.completed, completed.len() - lost.len());
        self.report(&lost, |place| completed[place]);
    }

    async fn close(&mut self, closings: &[Closing]) {
        if closings.is_empty() {
            return;
        }
        let lost = self.insist(Results::Otherwise(closings)).await;
        for (n, closing) in closings.iter().enumerate() {
            if lost.iter().any(|l| l.place == n) {
                continue;
            }
            let counter = match closing.ending {
                Ending::Failed => &self.stats.failed,
                Ending::Cancelled => &self.stats.cancelled,
                Ending::Retry(_) => &self.stats.retried,
                Ending::Snooze(_) => &self.stats.snoozed,
            };
            Stats::add(counter, 1);
        }
        self.report(&lost, |place| closings[place].receipt);
    }

    /// Tries until the database has answered. Trying again is safe: what a lost answer had written loses as closed. An
    /// error that comes back every time gives the flush up; its attempts stay open and are rescued.
    async fn insist(&mut self, results: Results<'_>) -> Vec<Lost> {
        let mut persistent = 0;
        loop {
            let outcome = match self.link.ready().await {
                Ok((client, writers)) => within(results.write(client, writers)).await,
                Err(error) => Err(error),
            };
            Stats::add(&self.stats.flushes, 1);
            match self.link.settle(outcome) {
                Ok(lost) => return lost,
                Err(error) => {
                    Stats::add(&self.stats.reconnects, 1);
                    persistent += u32::from(!error.is_transient());
                    if persistent >= GIVE_UP_AFTER {
                        tracing::error!(error = %error, "gave up writing results; their attempts stay open until rescued");
                        return Vec::new();
                    }
                    tracing::warn!(error = %error, "could not write results; they are kept");
                    tokio::time::sleep(self.link.pause()).await;
                }
            }
        }
    }

    fn report(&self, lost: &[Lost], receipt: impl Fn(usize) -> Receipt) {
        Stats::add(&self.stats.lost, lost.len());
        for l in lost {
            let receipt = receipt(l.place);
            tracing::warn!(job_id = receipt.job_id, run_lease = receipt.run_lease, reason = l.reason, "a result lost");
        }
    }
}

/// Doubling from a second, an hour at most, jittered so that jobs that failed together do not come back together.
fn backoff(attempt: i16) -> Duration {
    let doublings = u32::from(attempt.clamp(1, 13).unsigned_abs()) - 1;
    jittered(Duration::from_secs(1 << doublings).min(Duration::from_secs(3600)))
}

/// How often an error that is not transient may come back for the same flush.
const GIVE_UP_AFTER: u32 = 20;

/// The two calls a completer makes.
struct Writers {
    complete: Complete,
    close: Close,
}

impl Prepared for Writers {
    async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        Ok(Self { complete: Complete::prepare(client, schema).await?, close: Close::prepare(client, schema).await? })
    }
}

#[derive(Clone, Copy)]
enum Results<'a> {
    Completed(&'a [Receipt]),
    Otherwise(&'a [Closing]),
}

impl Results<'_> {
    async fn write(self, client: &Client, writers: &Writers) -> Result<Vec<Lost>> {
        match self {
            Self::Completed(receipts) => writers.complete.run(client, receipts).await,
            Self::Otherwise(closings) => writers.close.run(client, closings).await,
        }
    }
}
