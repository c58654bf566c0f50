//! Says of the longer attempts of a process that they live, and how far they are: many in one call, none of those that end
//! within the interval (engine.md, Heartbeat).

use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::Client;

use super::attempts::Attempts;
use super::context::{CancelReason, JobContext};
use super::json::RawJson;
use super::link::{Link, Prepared, within};
use super::stats::Stats;
use crate::engine::claim::Receipt;
use crate::engine::error::Result;
use crate::engine::heartbeat::Heartbeat;
use crate::engine::schema::Schema;
use crate::engine::target::Target;

/// The most attempts in one call, whose locks are held together.
const MAX_BEAT: usize = 1000;

/// How late progress may be stored.
const LONGEST_TICK: Duration = Duration::from_secs(1);
const SHORTEST_TICK: Duration = Duration::from_millis(10);

impl Prepared for Heartbeat {
    async fn prepare(client: &Client, schema: &Schema) -> Result<Self> {
        Self::prepare(client, schema).await
    }
}

pub(super) struct Heart {
    link: Link<Heartbeat>,
    attempts: Arc<Attempts>,
    interval: Duration,
    stats: Arc<Stats>,
}

/// One attempt, and the progress to store with its beat.
struct Beat {
    ctx: JobContext,
    receipt: Receipt,
    progress: Option<RawJson>,
}

impl Heart {
    pub fn new(target: Target, attempts: Arc<Attempts>, interval: Duration, stats: Arc<Stats>) -> Self {
        Self { link: Link::new(target), attempts, interval, stats }
    }

    /// Until it is aborted.
    pub async fn run(mut self) {
        let tick = (self.interval / 4).clamp(SHORTEST_TICK, LONGEST_TICK);
        loop {
            tokio::time::sleep(tick).await;
            let due = self.attempts.due(self.interval).into_iter();
            let beats: Vec<Beat> = due
                .filter_map(|(ctx, progress)| {
                    let receipt = *ctx.receipt()?;
                    Some(Beat { ctx, receipt, progress })
                })
                .collect();
            for beats in beats.chunks(MAX_BEAT) {
                self.beat(beats).await;
            }
        }
    }

    async fn beat(&mut self, beats: &[Beat]) {
        match self.write(beats, true).await {
            Ok(()) => {}
            Err(error) if error.is_transient() => {
                tracing::warn!(error = %error, count = beats.len(), "could not write heartbeats; trying again");
                for beat in beats {
                    self.attempts.not_told(&beat.receipt, &beat.ctx, beat.progress.is_some());
                }
                tokio::time::sleep(self.link.pause()).await;
            }
            // Something cannot be stored. One by one, so that nobody is taken for lost because of a neighbour.
            Err(_) => {
                for beat in beats {
                    let beat = std::slice::from_ref(beat);
                    let Err(error) = self.write(beat, true).await else { continue };
                    tracing::warn!(job_id = beat[0].receipt.job_id, error = %error, "progress not stored");
                    if let Err(error) = self.write(beat, false).await {
                        tracing::warn!(job_id = beat[0].receipt.job_id, error = %error, "could not write a heartbeat");
                        self.attempts.not_told(&beat[0].receipt, &beat[0].ctx, false);
                    }
                }
            }
        }
    }

    async fn write(&mut self, beats: &[Beat], with_progress: bool) -> Result<()> {
        let attempts: Vec<_> =
            beats.iter().map(|b| (b.receipt, b.progress.clone().filter(|_| with_progress))).collect();
        let outcome = match self.link.ready().await {
            Ok((client, heartbeat)) => within(heartbeat.beat(client, &attempts)).await,
            Err(error) => Err(error),
        };
        let over = self.link.settle(outcome)?;
        Stats::add(&self.stats.heartbeats, beats.len() - over.len());
        for lost in over {
            beats[lost.place].ctx.cancel(CancelReason::LeaseLost);
        }
        Ok(())
    }
}
