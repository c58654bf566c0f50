//! How many jobs run: all queues of a process together ([`Pool`]), and one queue per second ([`Bucket`]).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

/// Places that the queues of a process share. A place that falls free goes to the waiting queue that has the fewest for
/// its weight, so a queue with nothing to do lends its share and gets it back as jobs end.
pub(super) struct Pool {
    size: usize,
    state: Mutex<State>,
}

struct State {
    taken: usize,
    queues: Vec<Share>,
}

struct Share {
    weight: f64,
    taken: usize,
    waiting: VecDeque<oneshot::Sender<Place>>,
}

/// A place, given back when it is dropped.
pub(super) struct Place {
    pool: Arc<Pool>,
    queue: usize,
}

impl Pool {
    /// The queues are known by their place among the weights.
    pub fn new(size: usize, weights: impl Iterator<Item = u16>) -> Arc<Self> {
        let share = |weight| Share { weight: f64::from(weight), taken: 0, waiting: VecDeque::new() };
        Arc::new(Self { size, state: Mutex::new(State { taken: 0, queues: weights.map(share).collect() }) })
    }

    pub fn size(&self) -> usize {
        self.size
    }

    pub async fn place(self: &Arc<Self>, queue: usize) -> Place {
        loop {
            let given = {
                let mut state = self.lock();
                if state.taken < self.size {
                    return self.give(&mut state, queue);
                }
                let (sender, given) = oneshot::channel();
                state.queues[queue].waiting.push_back(sender);
                given
            };
            // The sender is only dropped by sending.
            if let Ok(place) = given.await {
                return place;
            }
        }
    }

    fn give(self: &Arc<Self>, state: &mut State, queue: usize) -> Place {
        state.taken += 1;
        state.queues[queue].taken += 1;
        Place { pool: Arc::clone(self), queue }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The waiter whose turn it is, and its queue.
    fn next(&mut self) -> Option<(usize, oneshot::Sender<Place>)> {
        for share in &mut self.queues {
            while share.waiting.front().is_some_and(oneshot::Sender::is_closed) {
                share.waiting.pop_front();
            }
        }
        let would_have = |share: &Share| (share.taken + 1) as f64 / share.weight;
        let waiting = self.queues.iter().enumerate().filter(|(_, share)| !share.waiting.is_empty());
        let (queue, _) = waiting.min_by(|(_, a), (_, b)| would_have(a).total_cmp(&would_have(b)))?;
        self.queues[queue].waiting.pop_front().map(|sender| (queue, sender))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.taken -= 1;
        state.queues[self.queue].taken -= 1;
        let Some((queue, sender)) = state.next() else { return };
        let place = self.pool.give(&mut state, queue);
        drop(state);
        // If nobody waits there any more, the place comes back and is dropped here, which passes it on.
        let _ = sender.send(place);
    }
}

/// A rate as a bucket of tokens, a tenth of a second's worth at most, so that jobs are spread and not sent in a burst.
pub(super) struct Bucket {
    per_s: f64,
    tokens: f64,
    filled: Instant,
}

impl Bucket {
    pub fn new(per_s: f64) -> Self {
        Self { per_s, tokens: 1.0, filled: Instant::now() }
    }

    /// How many jobs may be claimed now.
    pub fn available(&mut self) -> usize {
        let now = Instant::now();
        let grown = self.tokens + now.duration_since(self.filled).as_secs_f64() * self.per_s;
        self.tokens = grown.min((self.per_s / 10.0).max(1.0));
        self.filled = now;
        self.tokens as usize
    }

    pub fn take(&mut self, jobs: usize) {
        self.tokens -= jobs as f64;
    }

    /// How long until the next job may be claimed.
    pub fn until_next(&self) -> Duration {
        Duration::from_secs_f64(((1.0 - self.tokens) / self.per_s).clamp(0.001, 3600.0))
    }
}
