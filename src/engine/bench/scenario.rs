//! A scenario file.

use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::engine::duration;
use crate::engine::fields::{reworded, whole};

/// One run: a load, the workers that meet it, phases, and what must come out.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `name`, `description`, `workers`, `load` and `checks`")]
pub struct Scenario {
    pub name: String,
    pub description: String,
    /// Jobs at the same time; 0 for scenarios that claim by hand.
    #[serde(deserialize_with = "whole::<_, _, 0, { u16::MAX as i64 }>")]
    pub workers: u16,
    /// How long each job takes; nothing unless given.
    #[serde(default)]
    pub job_ms: u64,
    /// Size of the args.
    #[serde(default = "default_payload")]
    pub payload_bytes: usize,
    #[serde(with = "serde_yaml::with::singleton_map")]
    pub load: Load,
    /// Share of the producer's transactions that abort.
    #[serde(default)]
    pub abort_fraction: f64,
    pub held_producers: Option<HeldProducers>,
    /// What becomes of the jobs; all complete unless given.
    #[serde(default)]
    pub mix: Mix,
    /// Measure `bench ceiling` first, on the same server.
    #[serde(default)]
    pub ceiling: bool,
    #[serde(default)]
    pub phases: Vec<Phase>,
    pub checks: Vec<Check>,
}

fn default_payload() -> usize {
    256
}

/// Where the jobs come from; one of these.
#[derive(Debug, Clone, Deserialize, PartialEq)]
#[serde(
    rename_all = "snake_case",
    deny_unknown_fields,
    expecting = "one of `depth_target`, `rate`, `one_at_a_time` and `fill` with its value"
)]
pub enum Load {
    /// One producer keeps so many jobs queued.
    DepthTarget(u64),
    /// So many jobs a second, due at even times whatever happens: a late one counts from when it was due.
    Rate(u64),
    /// One job into an idle queue, again and again.
    OneAtATime(u32),
    /// So many jobs queued, then claims of 256 by hand; for each depth.
    Fill(Vec<u64>),
}

/// Transactions that enqueue one job each and stay open for the measured phases.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `count`")]
pub struct HeldProducers {
    #[serde(deserialize_with = "whole::<_, _, 1, { u16::MAX as i64 }>")]
    pub count: u16,
}

/// Shares of the jobs that do not simply complete.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, expecting = "a map with `retry_once`, `snooze_once`, `fail` and `cancel`")]
pub struct Mix {
    /// Fail once, and complete the second time.
    pub retry_once: f64,
    /// Are put off once, and then complete.
    pub snooze_once: f64,
    /// Fail for good.
    pub fail: f64,
    /// Cancel themselves.
    pub cancel: f64,
}

/// What becomes of one job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    Complete,
    RetryOnce,
    SnoozeOnce,
    Fail,
    Cancel,
}

impl Mix {
    /// By the job's number, so that it is the same in each attempt.
    pub fn fate(&self, n: usize) -> Fate {
        let mut at = (n as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) as f64 / u64::MAX as f64;
        for (share, fate) in [
            (self.retry_once, Fate::RetryOnce),
            (self.snooze_once, Fate::SnoozeOnce),
            (self.fail, Fate::Fail),
            (self.cancel, Fate::Cancel),
        ] {
            if at < share {
                return fate;
            }
            at -= share;
        }
        Fate::Complete
    }

    fn check(&self) -> Result<(), String> {
        let shares = [self.retry_once, self.snooze_once, self.fail, self.cancel];
        if shares.iter().any(|s| !(0.0..=1.0).contains(s)) || shares.iter().sum::<f64>() > 1.0 {
            return Err("mix: each share must be from 0 to 1, and together at most 1".into());
        }
        Ok(())
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `kind` and `duration`")]
pub struct Phase {
    pub kind: PhaseKind,
    #[serde(deserialize_with = "duration::deserialize")]
    pub duration: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case", expecting = "one of `warmup`, `clean` and `idle-in-tx`")]
pub enum PhaseKind {
    /// Not measured.
    Warmup,
    Clean,
    /// Measured while a session that has written keeps its transaction open.
    IdleInTx,
}

impl PhaseKind {
    pub fn is_measured(self) -> bool {
        self != Self::Warmup
    }
}

/// What a metric must be.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `metric` and `min` or `max`")]
pub struct Check {
    pub metric: String,
    pub min: Option<f64>,
    pub max: Option<f64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    #[error("{path} cannot be read: {source}")]
    Unreadable { path: String, source: std::io::Error },
    #[error("{path}: {message}")]
    Invalid { path: String, message: String },
}

impl Scenario {
    /// Reads and checks a file.
    pub fn load(path: &Path) -> Result<Self, ScenarioError> {
        let name = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| ScenarioError::Unreadable { path: name.clone(), source })?;
        Self::parse(&text, &name)
    }

    /// Reads and checks the text of one; `origin` names it in errors.
    pub fn parse(text: &str, origin: &str) -> Result<Self, ScenarioError> {
        let invalid = |message: String| ScenarioError::Invalid { path: origin.to_owned(), message };
        let scenario: Self = serde_yaml::from_str(text).map_err(|e| invalid(reworded(&e.to_string())))?;
        scenario.check().map_err(invalid)?;
        Ok(scenario)
    }

    fn check(&self) -> Result<(), String> {
        self.mix.check()?;
        let by_hand = matches!(self.load, Load::Fill(_));
        if by_hand != (self.workers == 0) {
            return Err("workers must be 0 with load.fill, and 1 or more otherwise".into());
        }
        if !(0.0..1.0).contains(&self.abort_fraction) {
            return Err(format!("abort_fraction must be from 0 to below 1, not {}", self.abort_fraction));
        }
        let timed = matches!(self.load, Load::DepthTarget(_) | Load::Rate(_));
        if timed && !self.phases.iter().any(|p| p.kind.is_measured()) {
            return Err("phases must have at least one of kind clean or idle-in-tx".into());
        }
        if !timed && (!self.phases.is_empty() || self.held_producers.is_some() || self.abort_fraction > 0.0) {
            return Err("phases, held_producers and abort_fraction go with load.depth_target or load.rate".into());
        }
        if let Some(check) = self.checks.iter().find(|c| c.min.is_none() && c.max.is_none()) {
            return Err(format!("the check of {} needs min or max", check.metric));
        }
        Ok(())
    }

    /// With every phase, count and depth shortened in proportion.
    pub fn scaled(mut self, scale: f64) -> Self {
        for phase in &mut self.phases {
            phase.duration = phase.duration.mul_f64(scale);
        }
        let shorter = |n: u64| ((n as f64 * scale) as u64).max(1);
        match &mut self.load {
            Load::OneAtATime(times) => *times = shorter(u64::from(*times)) as u32,
            Load::Fill(depths) => depths.iter_mut().for_each(|d| *d = shorter(*d).max(1000)),
            Load::DepthTarget(_) | Load::Rate(_) => {}
        }
        self
    }
}
