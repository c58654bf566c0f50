//! One queue's loop: permits first, then a claim of as many jobs as there are permits, plus a small bounded prefetch.
//!
//! What is claimed ahead only has to last while the next claim is on its way. So the prefetch grows while workers stand
//! idle at the answer of a full claim, as with jobs of no length, and goes back while jobs wait for workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{Notify, Semaphore, watch};

use super::attempts::Attempts;
use super::callbacks::Callbacks;
use super::completer::{Ended, Finished};
use super::context::{CancelReason, JobContext};
use super::fleet::QueueOptions;
use super::guard::{run_guarded, run_now};
use super::handler::{Registry, Worker};
use super::link::{Link, Prepared, jittered, within};
use super::listener::Bell;
use super::outcome::Outcome;
use super::pool::{Bucket, Pool};
use super::stats::Stats;
use crate::engine::claim::{Claim, ClaimOptions, Claimed, Claims, MAX_CLAIM};
use crate::engine::error::Result;
use crate::engine::schema::Schema;
use crate::engine::target::Target;
use crate::engine::timeline;

/// After an empty claim a queue that had work this recently is asked again shortly, without the ceremony of sleeping.
const WARM: Duration = Duration::from_millis(20);
const WARM_PAUSE: Duration = Duration::from_millis(1);

/// Jobs claimed ahead, unless the queue's options say otherwise.
const MAX_PREFETCH: usize = 256;

/// A lane that is in another claim is asked again after this long, doubled each time in a row up to the longest.
const FIRST_BUSY_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_BUSY_PAUSE: Duration = Duration::from_millis(50);

/// Results that may wait for the database before claiming stops.
const MAX_UNFLUSHED: usize = 4096;

/// How far a shutdown has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(super) enum Phase {
    Running,
    /// Claim nothing more; finish what runs.
    Draining,
    /// Stop what still runs.
    Aborting,
}

/// What the queues of one process share.
pub(super) struct Shared {
    pub instance: String,
    pub registry: Registry,
    pub stats: Arc<Stats>,
    pub results: UnboundedSender<Finished>,
    pub unflushed: Arc<Unflushed>,
    pub phase: watch::Receiver<Phase>,
    pub attempts: Arc<Attempts>,
    pub callbacks: Arc<Callbacks>,
    pub pool: Option<Arc<Pool>>,
}

/// Results handed over and not yet written.
#[derive(Default)]
pub(super) struct Unflushed {
    count: AtomicUsize,
    fewer: Notify,
}

impl Unflushed {
    pub fn flushed(&self, n: usize) {
        self.count.fetch_sub(n, Ordering::AcqRel);
        self.fewer.notify_waiters();
    }

    async fn wait_for_room(&self) {
        loop {
            let mut fewer = std::pin::pin!(self.fewer.notified());
            fewer.as_mut().enable();
            if self.count.load(Ordering::Acquire) < MAX_UNFLUSHED {
                return;
            }
            fewer.await;
        }
    }
}

impl Shared {
    fn finish(&self, finished: Finished) {
        self.unflushed.count.fetch_add(1, Ordering::AcqRel);
        // The completer outlives every dispatcher.
        let _ = self.results.send(finished);
    }
}

/// Jobs claimed and not finished, of one queue.
#[derive(Default)]
struct Outstanding {
    count: AtomicUsize,
    fewer: Notify,
}

/// Takes itself out of the count however the task ends.
struct Counted(Arc<Outstanding>);

impl Counted {
    fn new(outstanding: &Arc<Outstanding>) -> Self {
        outstanding.count.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(outstanding))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.fewer.notify_one();
    }
}

impl Prepared for Claim {
    async fn prepare(client: &tokio_postgres::Client, schema: &Schema) -> Result<Self> {
        timeline::enter(client, schema).await?;
        Self::prepare(client, schema).await
    }
}

pub(super) struct Dispatcher {
    queue: Arc<str>,
    /// The queue's number in the pool.
    number: usize,
    bucket: Option<Bucket>,
    deadline: Option<Duration>,
    aging: Option<Duration>,
    receipts: bool,
    workers: usize,
    /// Jobs claimed ahead at most; moves within `prefetch_bounds`.
    prefetch: usize,
    prefetch_bounds: (usize, usize),
    /// Jobs asked for at most: fewer after each error, since the answer may have been too big for the server (an array has
    /// 1 GB at most) or for the line in time; more again with each claim that goes well.
    claim_limit: usize,
    permits: Arc<Semaphore>,
    poll_interval: Duration,
    bell: Bell,
    shared: Arc<Shared>,
    outstanding: Arc<Outstanding>,
    link: Link<Claim>,
}

impl Dispatcher {
    pub fn new(
        target: Target,
        (number, queue): (usize, Arc<str>),
        options: &QueueOptions,
        poll_interval: Duration,
        bell: Bell,
        shared: Arc<Shared>,
    ) -> Self {
        let workers = options.workers.min(shared.pool.as_ref().map_or(usize::MAX, |pool| pool.size()));
        let prefetch = options.prefetch.unwrap_or(workers.min(MAX_PREFETCH));
        Self {
            queue,
            number,
            bucket: options.rate_limit.map(Bucket::new),
            deadline: options.deadline,
            aging: options.priority_aging,
            receipts: options.lease_claim_receipts,
            workers,
            prefetch,
            prefetch_bounds: (prefetch, options.prefetch.unwrap_or(MAX_PREFETCH)),
            claim_limit: MAX_CLAIM,
            permits: Arc::new(Semaphore::new(workers)),
            poll_interval,
            bell,
            shared,
            outstanding: Arc::default(),
            link: Link::new(target),
        }
    }

    /// Until the fleet drains and the last job has ended.
    pub async fn run(mut self) {
        let mut phase = self.shared.phase.clone();
        let mut last_work = Instant::now();
        let mut last_probe = Instant::now();
        let mut woken = false;
        let mut busy_pause = FIRST_BUSY_PAUSE;
        while *phase.borrow_and_update() == Phase::Running {
            let free = tokio::select! {
                free = self.room() => free,
                _ = phase.wait_for(|p| *p > Phase::Running) => break,
            };
            let allowed = self.bucket.as_mut().map_or(usize::MAX, Bucket::available);
            if let (0, Some(bucket)) = (allowed, &self.bucket) {
                pause_for(bucket.until_next(), &mut phase).await;
                continue;
            }
            let probe = woken || last_probe.elapsed() >= self.poll_interval;
            if probe {
                last_probe = Instant::now();
            }
            woken = false;
            let limit = free.min(allowed).min(self.claim_limit);
            let claimed = self.claim(limit, probe, &mut phase).await;
            if !matches!(&claimed, Ok(claims) if claims.busy && claims.jobs.is_empty()) {
                busy_pause = FIRST_BUSY_PAUSE;
            }
            match claimed {
                Ok(claims) if !claims.jobs.is_empty() => {
                    last_work = Instant::now();
                    self.claim_limit = (self.claim_limit + self.claim_limit / 8 + 1).min(MAX_CLAIM);
                    self.adapt_prefetch(claims.jobs.len() == free);
                    self.bell.unregister(&self.queue);
                    if let Some(bucket) = &mut self.bucket {
                        bucket.take(claims.jobs.len());
                    }
                    for claimed in claims.jobs {
                        self.dispatch(claimed);
                    }
                }
                Ok(claims) if claims.busy => {
                    Stats::add(&self.shared.stats.busy_claims, 1);
                    pause_for(jittered(busy_pause), &mut phase).await;
                    busy_pause = (busy_pause * 2).min(LONGEST_BUSY_PAUSE);
                }
                Ok(_) => {
                    Stats::add(&self.shared.stats.empty_claims, 1);
                    woken = self.idle(last_work, &mut phase).await;
                }
                Err(error) => {
                    Stats::add(&self.shared.stats.reconnects, 1);
                    self.claim_limit = (limit / 2).max(1);
                    tracing::warn!(queue = &*self.queue, error = %error, "could not claim");
                    pause_for(self.link.pause(), &mut phase).await;
                }
            }
        }
        while self.outstanding.count.load(Ordering::Acquire) > 0 {
            self.outstanding.fewer.notified().await;
        }
    }

    /// Called with the answer of a claim, before its jobs are counted.
    fn adapt_prefetch(&mut self, full: bool) {
        let (least, most) = self.prefetch_bounds;
        let idle_workers = self.outstanding.count.load(Ordering::Acquire) < self.workers;
        match (full, idle_workers) {
            (true, true) => self.prefetch = (self.prefetch * 2).min(most),
            (_, false) => self.prefetch = (self.prefetch / 2).max(least),
            (false, true) => {}
        }
    }

    /// How many jobs there is room for, once a claim is worth it: while every worker is busy nothing is gained by a claim
    /// for each job that ends, so half of the prefetch is used up first.
    async fn room(&self) -> usize {
        self.shared.unflushed.wait_for_room().await;
        loop {
            let outstanding = self.outstanding.count.load(Ordering::Acquire);
            let free = (self.workers + self.prefetch).saturating_sub(outstanding);
            if free > 0 && (outstanding < self.workers || free >= self.prefetch / 2) {
                return free.min(MAX_CLAIM);
            }
            self.outstanding.fewer.notified().await;
        }
    }

    /// Connecting is given up when the fleet drains. A claim that was sent is waited for until it aborts: its jobs are ours.
    async fn claim(&mut self, limit: usize, probe: bool, phase: &mut watch::Receiver<Phase>) -> Result<Claims> {
        let shared = &self.shared;
        let options = ClaimOptions { deadline: self.deadline, probe, aging: self.aging, receipts: self.receipts };
        let ready = tokio::select! {
            ready = self.link.ready() => ready,
            _ = phase.wait_for(|p| *p > Phase::Running) => return Ok(Claims::default()),
        };
        let outcome = match ready {
            Ok((client, claim)) => {
                let intern = |kind: &str| shared.registry.intern(kind);
                tokio::select! {
                    claims = within(claim.run(client, &self.queue, limit, &shared.instance, options, intern)) => claims,
                    _ = phase.wait_for(|p| *p == Phase::Aborting) => return Ok(Claims::default()),
                }
            }
            Err(error) => Err(error),
        };
        let claims = self.link.settle(outcome)?;
        Stats::add(&shared.stats.claims, 1);
        Stats::add(&shared.stats.claimed, claims.jobs.len());
        Ok(claims)
    }

    /// Nothing to do: ask again soon if the queue is warm, else sleep until somebody enqueues or the poll is due. Says
    /// whether somebody did.
    async fn idle(&self, last_work: Instant, phase: &mut watch::Receiver<Phase>) -> bool {
        if last_work.elapsed() < WARM {
            pause_for(WARM_PAUSE, phase).await;
            return false;
        }
        tokio::select! {
            rung = self.bell.sleep(&self.queue, self.poll_interval) => rung,
            _ = phase.wait_for(|p| *p > Phase::Running) => false,
        }
    }

    fn dispatch(&self, claimed: Claimed) {
        let Claimed { receipt, job } = claimed;
        let Some(worker) = self.shared.registry.get(&job.kind) else {
            let result = Ended::of(Outcome::Unhandled, &job, None);
            self.shared.finish(Finished { receipt, result, beat: false, stopped: None });
            return;
        };
        if let Some(outcome) = run_now(&**worker, &job) {
            let result = Ended::of(outcome, &job, None);
            self.shared.finish(Finished { receipt, result, beat: false, stopped: None });
            return;
        }
        let worker = Arc::clone(worker);
        let counted = Counted::new(&self.outstanding);
        let (shared, permits, deadline) = (Arc::clone(&self.shared), Arc::clone(&self.permits), self.deadline);
        let number = self.number;
        // Known from now on: also a job that waits for its permit must not be taken for lost.
        let ctx = JobContext::claimed(job, receipt, Arc::clone(&shared.callbacks));
        shared.attempts.insert(&receipt, &ctx);
        tokio::spawn(async move {
            let _counted = counted;
            let result = run(&*worker, &ctx, &shared, &permits, number, deadline).await;
            let beat = shared.attempts.remove(&receipt);
            match result {
                Some(result) => shared.finish(Finished { receipt, result, beat, stopped: ctx.cancel_reason() }),
                None => Stats::add(&shared.stats.waiting, 1),
            }
        });
    }
}

/// One attempt from its permit to its end; `None` when it goes on waiting for a callback.
async fn run(
    worker: &dyn Worker,
    ctx: &JobContext,
    shared: &Shared,
    permits: &Semaphore,
    number: usize,
    deadline: Option<Duration>,
) -> Option<Ended> {
    let mut phase = shared.phase.clone();
    let permit = async {
        let own = permits.acquire().await;
        match &shared.pool {
            Some(pool) => (own, Some(pool.place(number).await)),
            None => (own, None),
        }
    };
    let permit = tokio::select! {
        biased;
        permit = permit => permit,
        _ = phase.wait_for(|p| *p > Phase::Running) => return Some(Ended::handed_back()),
        reason = ctx.cancelled() => return Some(Ended::of(Outcome::stopped(reason), ctx.job(), None)),
    };
    let mut outcome = attend(worker, ctx, deadline, &mut phase).await;
    drop(permit);
    if let Outcome::WaitForCallback(token) = outcome {
        let mut left = std::pin::pin!(ctx.leave_waiting(&token));
        let left = tokio::select! {
            biased;
            left = &mut left => left,
            _ = phase.wait_for(|p| *p == Phase::Aborting) => Err(Outcome::stopped(CancelReason::Shutdown)),
        };
        match left {
            Ok(()) => return None,
            Err(instead) => outcome = instead,
        }
    }
    Some(Ended::of(outcome, ctx.job(), ctx.take_progress()))
}

/// Sleeps, but not over the end of the fleet.
async fn pause_for(pause: Duration, phase: &mut watch::Receiver<Phase>) {
    tokio::select! {
        () = tokio::time::sleep(pause) => {}
        _ = phase.wait_for(|p| *p > Phase::Running) => {}
    }
}

/// Runs the handler; when the fleet aborts, asks it to stop, and gives it up after its grace.
async fn attend(
    worker: &dyn Worker,
    ctx: &JobContext,
    deadline: Option<Duration>,
    phase: &mut watch::Receiver<Phase>,
) -> Outcome {
    let mut run = std::pin::pin!(run_guarded(worker, ctx, deadline));
    tokio::select! {
        biased;
        outcome = &mut run => return outcome,
        _ = phase.wait_for(|p| *p == Phase::Aborting) => ctx.cancel(CancelReason::Shutdown),
    }
    match tokio::time::timeout(worker.stop_grace(), run).await {
        Ok(outcome) => outcome,
        Err(_) => Outcome::stopped(CancelReason::Shutdown),
    }
}
