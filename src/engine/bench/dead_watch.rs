//! Dead tuples while a load runs: whether they grow with time is what matters, not how many there are.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::engine::Target;
use crate::engine::dead_tuples::dead_tuples;
use crate::engine::error::Result;
use crate::engine::worker::open;

/// Tables whose rows are changed in place by design; what may die there is bounded by what lives.
const MUTABLE: [&str; 5] = ["deferred_jobs", "attempt_state", "leases", "dlq_entries", "job_unique_claims"];

/// Samples of one run.
#[derive(Default)]
pub(super) struct DeadWatch {
    /// Of the tables that only grow, by measured phase, in the order of time.
    phases: Vec<Vec<i64>>,
    /// The most seen in each of the others.
    mutable: BTreeMap<String, i64>,
}

impl DeadWatch {
    /// Looks once a second for as long as the phase takes; at nothing where it is not measured.
    pub async fn watch(&mut self, target: &Target, duration: Option<Duration>) {
        let Some(duration) = duration else { return };
        let end = Instant::now() + duration;
        self.phases.push(Vec::new());
        if let Err(error) = self.sample(target, end).await {
            tracing::warn!(error = %error, "dead tuples could not be read");
        }
    }

    async fn sample(&mut self, target: &Target, end: Instant) -> Result<()> {
        let session = open(target).await?;
        let mut every = interval(Duration::from_secs(1).min(end.saturating_duration_since(Instant::now()) / 4));
        every.set_missed_tick_behavior(MissedTickBehavior::Skip);
        while Instant::now() < end {
            every.tick().await;
            let report = dead_tuples(&session, &target.schema, false).await?;
            let mut total = 0;
            for family in report.by_family() {
                if MUTABLE.contains(&family.table.as_str()) {
                    let most = self.mutable.entry(family.table).or_default();
                    *most = family.dead.max(*most);
                } else {
                    total += family.dead;
                }
            }
            if let Some(phase) = self.phases.last_mut() {
                phase.push(total);
            }
        }
        session.close().await;
        Ok(())
    }

    /// The most in the first and in the second half of the last measured phase, and what the second has more.
    pub fn report(&self, metrics: &mut BTreeMap<String, f64>) {
        let Some(samples) = self.phases.last().filter(|samples| samples.len() > 1) else { return };
        let (first, second) = samples.split_at(samples.len() / 2);
        let most = |samples: &[i64]| samples.iter().copied().max().unwrap_or_default() as f64;
        metrics.insert("dead_tuples_first_half".into(), most(first));
        metrics.insert("dead_tuples_second_half".into(), most(second));
        metrics.insert("dead_tuples_growth".into(), most(second) - most(first));
        for (family, dead) in &self.mutable {
            if *dead > 0 {
                metrics.insert(format!("dead_tuples_{family}"), *dead as f64);
            }
        }
    }
}
