//! Writes results: whatever accumulated while the last flush was in flight goes into the next. No timer, so a lone job
//! completes at once and a flood completes in big batches. A computed result survives the loss of the database.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::watch;
use tokio_postgres::Client;

use super::context::CancelReason;
use super::link::{Link, Prepared, within};
use super::outcome::Outcome;
use super::stats::Stats;
use super::{Job, RawJson};
use crate::engine::claim::Receipt;
use crate::engine::close::{Close, Closing, Ending};
use crate::engine::complete::{Complete, Lost};
use crate::engine::error::{EngineError, Result};
use crate::engine::heartbeat::Heartbeat;
use crate::engine::schema::Schema;
use crate::engine::target::Target;

/// The most results in one flush.
const MAX_FLUSH: usize = 2048;

/// One attempt that is over for the worker.
#[derive(Debug)]
pub(super) struct Finished {
    pub receipt: Receipt,
    pub result: Ended,
    /// The database may hold state of it.
    pub beat: bool,
    /// What it was told to stop for, if it was.
    pub stopped: Option<CancelReason>,
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
            Outcome::Retry { error, after } => (Ending::Retry(after), Some(error)),
            Outcome::Snooze(delay) => (Ending::Snooze(delay), None),
            Outcome::Cancel { reason } => (Ending::Cancelled, Some(reason)),
            // Only where there was no context to register it with.
            Outcome::WaitForCallback(_) => (Ending::Retry(None), Some("it has no callback to wait for".into())),
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
    enough: watch::Receiver<bool>,
}

impl Completer {
    /// `flushed` hears how many results left after each flush; once `enough` is true nothing is waited for any more.
    pub fn new(
        target: Target,
        stats: Arc<Stats>,
        inbox: UnboundedReceiver<Finished>,
        enough: watch::Receiver<bool>,
        flushed: impl Fn(usize) + Send + 'static,
    ) -> Self {
        Self { link: Link::new(target), stats, inbox, flushed: Box::new(flushed), enough }
    }

    /// Until every sender is gone and everything is written, or it was enough.
    pub async fn run(mut self) {
        let mut batch = Vec::with_capacity(MAX_FLUSH);
        loop {
            let received = tokio::select! {
                biased;
                received = self.inbox.recv_many(&mut batch, MAX_FLUSH) => received,
                () = is_enough(&mut self.enough) => 0,
            };
            if received == 0 {
                return;
            }
            let count = batch.len();
            let mut completed = Vec::with_capacity(count);
            let mut beaten = Vec::new();
            let mut closings = Vec::new();
            let mut handed_back = Vec::new();
            let mut cancelled = Vec::new();
            for finished in batch.drain(..) {
                if finished.stopped == Some(CancelReason::Requested) {
                    cancelled.push(finished.receipt);
                }
                match finished.result {
                    Ended::Completed => {
                        completed.push(finished.receipt);
                        beaten.extend(finished.beat.then_some(finished.receipt));
                    }
                    Ended::Otherwise { ending, error, progress, handed_back: back } => {
                        // What a drain stopped goes back at once, whoever of us put it so.
                        let drained = finished.stopped == Some(CancelReason::Shutdown);
                        let at_once = matches!(ending, Ending::Snooze(Duration::ZERO));
                        handed_back.push(back || (drained && at_once));
                        closings.push(Closing { receipt: finished.receipt, ending, error, progress });
                    }
                }
            }
            self.complete(&completed, &cancelled).await;
            if !beaten.is_empty() {
                // What stays behind is trimmed some day.
                let _ = self.attempt(Results::Beaten(&beaten), BATCH_TRIES).await;
            }
            self.close(&closings, &handed_back, &cancelled).await;
            (self.flushed)(count);
        }
    }

    async fn complete(&mut self, completed: &[Receipt], cancelled: &[Receipt]) {
        if completed.is_empty() {
            return;
        }
        let Written { lost, unwritten, .. } = self.insist(Results::Completed(completed)).await;
        Stats::add(&self.stats.completed, completed.len() - lost.len() - unwritten.len());
        self.report(&lost, cancelled, |place| completed[place]);
    }

    async fn close(&mut self, closings: &[Closing], handed_back: &[bool], cancelled: &[Receipt]) {
        if closings.is_empty() {
            return;
        }
        let Written { lost, unwritten, .. } = self.insist(Results::Otherwise(closings)).await;
        for (n, closing) in closings.iter().enumerate() {
            if lost.iter().any(|l| l.place == n) || unwritten.contains(&n) {
                continue;
            }
            let counter = match closing.ending {
                _ if handed_back[n] => &self.stats.handed_back,
                Ending::Failed => &self.stats.failed,
                Ending::Cancelled => &self.stats.cancelled,
                Ending::Retry(_) => &self.stats.retried,
                Ending::Snooze(_) => &self.stats.snoozed,
            };
            Stats::add(counter, 1);
        }
        self.report(&lost, cancelled, |place| closings[place].receipt);
    }

    /// Tries until the database has answered. Trying again is safe: what a lost answer had written loses as closed. When an
    /// error that does not pass comes back, each result is written by itself, so that one which cannot be costs the
    /// others nothing; the attempt of one that is given up stays open until it is rescued.
    async fn insist(&mut self, results: Results<'_>) -> Written {
        let mut written = Written::default();
        match self.attempt(results, BATCH_TRIES).await {
            Ok(lost) => written.lost = lost,
            Err(GaveUp::Enough) => written.unwritten = (0..results.len()).collect(),
            Err(GaveUp::Error(_)) => {
                let mut tries = SINGLE_TRIES;
                for place in 0..results.len() {
                    match self.attempt(results.only(place), tries).await {
                        Ok(lost) => {
                            written.lost.extend(lost.into_iter().map(|l| Lost { place, ..l }));
                            tries = SINGLE_TRIES;
                        }
                        Err(GaveUp::Enough) => written.unwritten.push(place),
                        Err(GaveUp::Error(error)) => {
                            let receipt = results.receipt(place);
                            tracing::error!(
                                job_id = receipt.job_id,
                                run_lease = receipt.run_lease,
                                error = %error,
                                "gave up writing a result; its attempt stays open until rescued"
                            );
                            Stats::add(&self.stats.unwritten, 1);
                            written.given_up += 1;
                            written.unwritten.push(place);
                            // Where nothing can be written, patience with each would hold up all.
                            tries = 1;
                        }
                    }
                }
            }
        }
        self.report_unwritten(results, &written);
        written
    }

    /// Writes them, over as many connections and transient errors as it takes.
    async fn attempt(&mut self, results: Results<'_>, tries: u32) -> Result<Vec<Lost>, GaveUp> {
        let mut persistent = 0;
        loop {
            if *self.enough.borrow() {
                return Err(GaveUp::Enough);
            }
            let write = async {
                let (client, writers) = self.link.ready().await?;
                within(results.write(client, writers)).await
            };
            let outcome = tokio::select! {
                biased;
                outcome = write => outcome,
                () = is_enough(&mut self.enough) => return Err(GaveUp::Enough),
            };
            Stats::add(&self.stats.flushes, 1);
            match self.link.settle(outcome) {
                Ok(lost) => return Ok(lost),
                Err(error) => {
                    Stats::add(&self.stats.reconnects, 1);
                    persistent += u32::from(!may_pass(&error));
                    if persistent >= tries {
                        return Err(GaveUp::Error(error));
                    }
                    tracing::warn!(error = %error, "could not write results; they are kept");
                    let pause = self.link.pause();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = is_enough(&mut self.enough) => {}
                    }
                }
            }
        }
    }

    /// Tells of results that the end of the fleet left no time for.
    fn report_unwritten(&self, results: Results<'_>, written: &Written) {
        let left = written.unwritten.len() - written.given_up;
        if left > 0 {
            Stats::add(&self.stats.unwritten, left);
            let job_ids: Vec<i64> = written.unwritten.iter().take(NAMED).map(|n| results.receipt(*n).job_id).collect();
            tracing::error!(
                count = left,
                ?job_ids,
                "results could not be written in time; their attempts stay open until rescued"
            );
        }
    }

    fn report(&self, lost: &[Lost], cancelled: &[Receipt], receipt: impl Fn(usize) -> Receipt) {
        Stats::add(&self.stats.lost, lost.len());
        for Lost { place, reason } in lost {
            let receipt = receipt(*place);
            let Receipt { job_id, run_lease, .. } = receipt;
            // The worker may not have heard of it, and the database may have reclaimed what it knew.
            if cancelled.contains(&receipt) || reason == CANCELLED {
                tracing::info!(
                    job_id,
                    run_lease,
                    reason,
                    "an operator cancelled the job while it ran; its result is not kept"
                );
            } else {
                tracing::warn!(job_id, run_lease, reason, "a result lost");
            }
        }
    }
}

/// How often an error that does not pass may come back for a batch, and for a single result.
const BATCH_TRIES: u32 = 3;
const SINGLE_TRIES: u32 = 8;

/// What `{schema}.why_lost` says of an attempt that was cancelled.
const CANCELLED: &str = "already closed: cancelled";

/// Jobs that a message about many names.
const NAMED: usize = 20;

/// What became of results, by their place.
#[derive(Default)]
struct Written {
    lost: Vec<Lost>,
    unwritten: Vec<usize>,
    /// Of those, how many were given up for an error.
    given_up: usize,
}

enum GaveUp {
    /// The fleet's time is over.
    Enough,
    Error(EngineError),
}

/// Until it is enough; never when nobody is left to say so.
async fn is_enough(enough: &mut watch::Receiver<bool>) {
    if enough.wait_for(|e| *e).await.is_err() {
        std::future::pending().await
    }
}

/// Whether the server may stop giving this error with nothing changed here: also a full disk, or an operator's doing.
fn may_pass(error: &EngineError) -> bool {
    error.is_transient()
        || matches!(error, EngineError::Database(source)
            if source.code().is_some_and(|code| ["53", "57", "58"].iter().any(|class| code.code().starts_with(class))))
}

/// The calls a completer makes.
struct Writers {
    complete: Complete,
    close: Close,
    heartbeat: Heartbeat,
}

impl Prepared for Writers {
    async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        Ok(Self {
            complete: Complete::prepare(client, schema).await?,
            close: Close::prepare(client, schema).await?,
            heartbeat: Heartbeat::prepare(client, schema).await?,
        })
    }
}

#[derive(Clone, Copy)]
enum Results<'a> {
    Completed(&'a [Receipt]),
    Otherwise(&'a [Closing]),
    /// Completed attempts whose state is to be forgotten.
    Beaten(&'a [Receipt]),
}

impl Results<'_> {
    fn len(self) -> usize {
        match self {
            Self::Completed(receipts) | Self::Beaten(receipts) => receipts.len(),
            Self::Otherwise(closings) => closings.len(),
        }
    }

    fn receipt(self, place: usize) -> Receipt {
        match self {
            Self::Completed(receipts) | Self::Beaten(receipts) => receipts[place],
            Self::Otherwise(closings) => closings[place].receipt,
        }
    }

    /// That one alone.
    fn only(self, place: usize) -> Self {
        match self {
            Self::Completed(receipts) => Self::Completed(&receipts[place..=place]),
            Self::Otherwise(closings) => Self::Otherwise(&closings[place..=place]),
            Self::Beaten(receipts) => Self::Beaten(&receipts[place..=place]),
        }
    }

    async fn write(self, client: &Client, writers: &Writers) -> Result<Vec<Lost>> {
        match self {
            Self::Completed(receipts) => writers.complete.run(client, receipts).await,
            Self::Otherwise(closings) => writers.close.run(client, closings).await,
            Self::Beaten(receipts) => writers.heartbeat.forget(client, receipts).await.map(|()| Vec::new()),
        }
    }
}
