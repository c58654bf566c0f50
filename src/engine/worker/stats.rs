//! What a fleet has done so far, for progress bars, metrics and tests.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters that only grow.
        #[derive(Debug, Default)]
        pub struct Stats { $($(#[$doc])* pub $name: AtomicU64),* }

        /// [`Stats`] at one moment.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize)]
        pub struct StatsNow { $($(#[$doc])* pub $name: u64),* }

        impl Stats {
            /// Reads all counters.
            pub fn now(&self) -> StatsNow {
                StatsNow { $($name: self.$name.load(Ordering::Relaxed)),* }
            }
        }
    };
}

counters! {
    /// Claim calls, with or without jobs.
    claims,
    /// Claim calls that found nothing.
    empty_claims,
    /// Claim calls that found a lane taken.
    busy_claims,
    /// Jobs claimed.
    claimed,
    /// Attempts completed, and won.
    completed,
    /// Attempts whose handler said failed, cancelled, retry, or snooze. A retry with no attempt left fails in the database.
    failed,
    cancelled,
    retried,
    snoozed,
    /// Attempts whose handler returned and that wait for their callback.
    waiting,
    /// Attempts given back: not run, stopped by a drain, or of a kind without a handler. Not among the snoozed.
    handed_back,
    /// Results that lost: the attempt was over in the database.
    lost,
    /// Results that could not be written: the database refused them, or was away when the fleet ended.
    unwritten,
    /// Calls that write results.
    flushes,
    /// Attempts that the database was told of as alive.
    heartbeats,
    /// Connections that had to be made anew.
    reconnects,
    /// Notifications heard.
    wakeups,
}

impl Stats {
    pub(crate) fn add(counter: &AtomicU64, n: usize) {
        counter.fetch_add(n as u64, Ordering::Relaxed);
    }
}
