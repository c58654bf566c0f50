//! What a run is at, for whoever shows it.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::ledger::{Ledger, micros};

#[derive(Debug, Clone)]
pub enum Progress {
    /// A phase of so many steps (milliseconds, or jobs) begins.
    Phase { name: String, steps: u64 },
    /// How far it is.
    Tick { step: u64, jobs_per_s: f64, depth: u64, pickup_p99: Option<Duration> },
}

pub type Watcher<'a> = &'a (dyn Fn(Progress) + Sync);

const TICK: Duration = Duration::from_millis(250);

/// Jobs whose pickup times the shown p99 is of.
const RECENT: usize = 20_000;

/// Ticks of one phase, with the rate since the one before.
pub(super) struct Ticker<'a> {
    watcher: Watcher<'a>,
    ledger: &'a Ledger,
    last: (Instant, u64),
}

impl<'a> Ticker<'a> {
    pub fn start(watcher: Watcher<'a>, ledger: &'a Ledger, name: String, steps: u64) -> Self {
        watcher(Progress::Phase { name, steps });
        Self { watcher, ledger, last: (Instant::now(), ledger.ran.load(Ordering::Relaxed)) }
    }

    pub fn tick(&mut self, step: u64) {
        let (now, ran) = (Instant::now(), self.ledger.ran.load(Ordering::Relaxed));
        let passed = now - self.last.0;
        if passed < TICK {
            return;
        }
        (self.watcher)(Progress::Tick {
            step,
            jobs_per_s: ran.saturating_sub(self.last.1) as f64 / passed.as_secs_f64(),
            depth: self.ledger.sent.load(Ordering::Relaxed).saturating_sub(ran),
            pickup_p99: self.ledger.recent_p99(RECENT),
        });
        self.last = (now, ran);
    }

    /// Lets a phase pass.
    pub async fn pass(mut self, lasts: Duration) {
        let began = Instant::now();
        while let Some(left) = lasts.checked_sub(began.elapsed()).filter(|left| !left.is_zero()) {
            tokio::time::sleep(left.min(TICK)).await;
            self.tick(began.elapsed().as_millis() as u64);
        }
    }
}

impl Ledger {
    fn recent_p99(&self, count: usize) -> Option<Duration> {
        let top = self.top.load(Ordering::Relaxed).min(self.capacity());
        let mut times = micros();
        for waited in (top.saturating_sub(count)..top).filter_map(|n| self.pickup(n)) {
            times.saturating_record(u64::from(waited).max(1));
        }
        (!times.is_empty()).then(|| Duration::from_micros(times.value_at_quantile(0.99)))
    }
}
