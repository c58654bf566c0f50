//! Handlers for trying and testing.

use std::time::Duration;

use futures_util::future::{BoxFuture, FutureExt, ready};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::engine::worker::context::JobContext;
use crate::engine::worker::handler::Worker;
use crate::engine::worker::job::Job;
use crate::engine::worker::outcome::Outcome;

/// Which one, with its settings.
#[derive(Debug, Clone, PartialEq)]
pub enum Builtin {
    /// Completes at once, without looking at the job.
    Noop,
    /// Completes after the milliseconds in `args.ms`, else after `duration`.
    Sleep { duration: Option<Duration> },
    /// Writes the arguments to the log (level info) and completes.
    Echo,
    /// Does not complete: with `args.terminal` true it fails for good, else it retries; the error
    /// is `args.error`.
    Fail,
    /// Retries by the rule in the arguments (`fail_times` or `probability`), else by this one,
    /// and completes otherwise.
    Flaky(FlakyRule),
}

/// When `flaky` fails.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FlakyRule {
    /// The first so many attempts.
    FailTimes(u32),
    /// Any attempt with this probability, 0.0..=1.0.
    Probability(f64),
}

impl Default for FlakyRule {
    fn default() -> Self {
        Self::FailTimes(1)
    }
}

impl Builtin {
    /// The names, as `workers.yaml` writes them.
    pub const NAMES: [&str; 5] = ["noop", "sleep", "echo", "fail", "flaky"];

    /// Its name, one of [`Self::NAMES`].
    pub fn name(&self) -> &'static str {
        match self {
            Self::Noop => "noop",
            Self::Sleep { .. } => "sleep",
            Self::Echo => "echo",
            Self::Fail => "fail",
            Self::Flaky(_) => "flaky",
        }
    }
}

/// Runs the jobs of one kind with a [`Builtin`].
#[derive(Debug)]
pub struct BuiltinWorker {
    kind: String,
    builtin: Builtin,
}

impl BuiltinWorker {
    /// Takes the jobs of `kind`.
    pub fn new(kind: impl Into<String>, builtin: Builtin) -> Self {
        Self { kind: kind.into(), builtin }
    }

    /// The answer at once, or how long to sleep first.
    fn decide(&self, job: &Job) -> Result<Outcome, Duration> {
        let outcome = match &self.builtin {
            Builtin::Noop => Ok(Outcome::Complete),
            Builtin::Sleep { duration } => match sleep_time(job, *duration) {
                Ok(duration) => return Err(duration),
                Err(error) => Err(error),
            },
            Builtin::Echo => {
                let (id, kind, args) = (job.id, &*job.kind, job.args.as_str());
                tracing::info!(job_id = id, kind, args, "echo");
                Ok(Outcome::Complete)
            }
            Builtin::Fail => fail(job),
            Builtin::Flaky(rule) => flaky(job, *rule),
        };
        // Arguments that make no sense make none next time either.
        Ok(outcome.unwrap_or_else(|error| Outcome::fail(format!("builtin `{}`: {error}", self.builtin.name()))))
    }
}

impl Worker for BuiltinWorker {
    fn kind(&self) -> &str {
        &self.kind
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        match self.decide(ctx.job()) {
            Ok(outcome) => ready(outcome).boxed(),
            Err(duration) => async move {
                tokio::select! {
                    reason = ctx.cancelled() => Outcome::stopped(reason),
                    () = tokio::time::sleep(duration) => Outcome::Complete,
                }
            }
            .boxed(),
        }
    }

    fn perform_now(&self, job: &Job) -> Option<Outcome> {
        match self.builtin {
            Builtin::Sleep { .. } => None,
            _ => self.decide(job).ok(),
        }
    }
}

#[derive(Default, Deserialize)]
struct SleepArgs {
    ms: Option<u64>,
}

#[derive(Default, Deserialize)]
struct FailArgs {
    error: Option<String>,
    #[serde(default)]
    terminal: bool,
}

#[derive(Default, Deserialize)]
struct FlakyArgs {
    fail_times: Option<u32>,
    probability: Option<f64>,
}

fn sleep_time(job: &Job, default: Option<Duration>) -> Result<Duration, String> {
    let args: SleepArgs = args_of(job)?;
    args.ms
        .map(Duration::from_millis)
        .or(default)
        .ok_or_else(|| "needs args {\"ms\": N}, or a `duration` in workers.yaml".into())
}

fn fail(job: &Job) -> Result<Outcome, String> {
    let args: FailArgs = args_of(job)?;
    let error = args.error.unwrap_or_else(|| "failed as asked".into());
    Ok(if args.terminal { Outcome::fail(error) } else { Outcome::retry(error) })
}

fn flaky(job: &Job, default: FlakyRule) -> Result<Outcome, String> {
    let args: FlakyArgs = args_of(job)?;
    let rule = FlakyRule::from_fields(args.fail_times, args.probability)
        .map_err(|error| format!("args: {error}"))?
        .unwrap_or(default);
    let attempt = job.attempt;
    let fails = match rule {
        FlakyRule::FailTimes(times) => i64::from(attempt) <= i64::from(times),
        FlakyRule::Probability(probability) => rand::random_bool(probability),
    };
    Ok(if fails { Outcome::retry(format!("flaky: attempt {attempt} fails as asked")) } else { Outcome::Complete })
}

impl FlakyRule {
    /// The rule two optional fields spell, `None` without either.
    pub(crate) fn from_fields(fail_times: Option<u32>, probability: Option<f64>) -> Result<Option<Self>, String> {
        match (fail_times, probability) {
            (None, None) => Ok(None),
            (Some(times), None) => Ok(Some(Self::FailTimes(times))),
            (None, Some(probability)) if (0.0..=1.0).contains(&probability) => Ok(Some(Self::Probability(probability))),
            (None, Some(probability)) => Err(format!("`probability` is {probability}; 0.0 to 1.0 is allowed")),
            (Some(_), Some(_)) => Err("`fail_times` and `probability` exclude each other; give one".into()),
        }
    }
}

/// Arguments that are no object say nothing to a builtin, which then goes by its settings.
fn args_of<T: Default + DeserializeOwned>(job: &Job) -> Result<T, String> {
    if !job.args.as_str().trim_start().starts_with('{') {
        return Ok(T::default());
    }
    job.args.parse().map_err(|error| format!("args: {error}"))
}
