//! `exec`: a job is a run of a program.
//!
//! The program gets the arguments as JSON on stdin and the job's fields in the environment
//! (`AWA_JOB_ID`, `_KIND`, `_QUEUE`, `_ATTEMPT`, `_MAX_ATTEMPTS`, `_PRIORITY`, `_RUN_LEASE`,
//! `_RUN_AT`, `_CREATED_AT`, `_DEADLINE_AT` if there is one, `_TAGS`, `_METADATA`; times in
//! RFC 3339, the last two as JSON and left out when longer than 96 KiB, which no system could
//! pass on). It answers by its exit status and, if it likes, by JSON in its last line of output:
//!
//! | it ends with | the job |
//! |---|---|
//! | 0 | completes |
//! | 75 (`EX_TEMPFAIL`) | retries |
//! | 64–69 (`EX_USAGE`…`EX_UNAVAILABLE`) | fails for good |
//! | another status, a signal | retries |
//! | 0 or 75 and `{"snooze":"30s"}` | comes back later, the attempt does not count |
//! | anything but 64–69 and `{"retry_after":"10s"}` | retries then |
//! | anything and `{"progress":…}` | keeps that as its progress |
//!
//! The program leads a process group of its own, and the attempt ends with the program: what is
//! left of the group then is killed. A deadline, a cancellation or the worker's shutdown sends the
//! group SIGTERM and, after [`KILL_GRACE`], SIGKILL; whatever it answers then is not heard.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use chrono::SecondsFormat;
use futures_util::future::{BoxFuture, FutureExt};
use nix::sys::signal::Signal;
use serde_json::value::RawValue;
use tokio::process::Command;

use super::process::{Process, Tail};
use crate::engine::duration;
use crate::engine::worker::context::{CancelReason, JobContext};
use crate::engine::worker::handler::Worker;
use crate::engine::worker::job::Job;
use crate::engine::worker::json::RawJson;
use crate::engine::worker::outcome::Outcome;

/// How long a program told to stop may take to obey.
pub const KILL_GRACE: Duration = Duration::from_secs(2);

/// Killing, reaping and reading the rest come after the grace.
const STOP_GRACE: Duration = KILL_GRACE.saturating_add(Duration::from_secs(4));

const STDOUT_TAIL: usize = 64 * 1024;
const STDERR_TAIL: usize = 4 * 1024;

/// Linux refuses to start a program with a longer variable (128 KiB with its name).
const ENV_LIMIT: usize = 96 * 1024;

/// What to run, and how.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Exec {
    /// Program and arguments; no shell looks at them. Looked up in `PATH` without a `/` in it.
    pub argv: Vec<String>,
    /// Set on top of the worker's own environment.
    pub env: BTreeMap<String, String>,
    /// Where it runs; the worker's own directory without one.
    pub cwd: Option<PathBuf>,
    /// Stops it after this long, whatever the job's deadline.
    pub timeout: Option<Duration>,
    /// Starts from an empty environment (no `PATH` either) instead of the worker's.
    pub clear_env: bool,
}

/// Runs the jobs of one kind with [`Exec`].
#[derive(Debug)]
pub struct ExecWorker {
    kind: String,
    exec: Exec,
}

impl ExecWorker {
    /// Takes the jobs of `kind`; `exec.argv` must not be empty.
    pub fn new(kind: impl Into<String>, exec: Exec) -> Self {
        Self { kind: kind.into(), exec }
    }

    async fn run(&self, ctx: &JobContext) -> Outcome {
        let job = ctx.job();
        let Some(program) = self.exec.argv.first() else {
            return Outcome::retry("exec has no program to run");
        };
        let mut process = match Process::spawn(self.command(program, job), STDOUT_TAIL, STDERR_TAIL) {
            Ok(process) => process,
            Err(error) => return Outcome::retry(self.why_not_started(program, &error)),
        };
        let timed_out = async {
            match self.exec.timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        let outcome = tokio::select! {
            biased;
            status = process.run(job.args.as_str().as_bytes()) => {
                process.finish().await;
                match status {
                    Ok(status) => answer(status, &process, ctx),
                    Err(error) => Outcome::retry(format!("cannot wait for `{program}`: {error}")),
                }
            }
            reason = ctx.cancelled() => {
                process.stop(KILL_GRACE).await;
                match reason {
                    CancelReason::Deadline => retry(Outcome::stopped(reason), &process),
                    _ => Outcome::stopped(reason),
                }
            }
            () = timed_out => {
                process.stop(KILL_GRACE).await;
                let timeout = duration::format(self.exec.timeout.unwrap_or_default());
                retry(Outcome::retry(format!("timed out after {timeout}")), &process)
            }
        };
        if outcome == Outcome::Complete && !process.stderr_tail.bytes().is_empty() {
            let stderr = lossy(process.stderr_tail.bytes());
            tracing::debug!(job_id = job.id, kind = &*job.kind, %stderr, "the program's stderr");
        }
        outcome
    }

    fn command(&self, program: &str, job: &Job) -> Command {
        let mut command = Command::new(program);
        command.args(&self.exec.argv[1..]);
        if let Some(cwd) = &self.exec.cwd {
            command.current_dir(cwd);
        }
        if self.exec.clear_env {
            command.env_clear();
        }
        let time = |at: chrono::DateTime<chrono::Utc>| at.to_rfc3339_opts(SecondsFormat::Micros, true);
        command
            .envs(&self.exec.env)
            .env("AWA_JOB_ID", job.id.to_string())
            .env("AWA_JOB_KIND", &*job.kind)
            .env("AWA_JOB_QUEUE", &*job.queue)
            .env("AWA_JOB_ATTEMPT", job.attempt.to_string())
            .env("AWA_JOB_MAX_ATTEMPTS", job.max_attempts.to_string())
            .env("AWA_JOB_PRIORITY", job.priority.to_string())
            .env("AWA_JOB_RUN_LEASE", job.run_lease.to_string())
            .env("AWA_JOB_RUN_AT", time(job.run_at))
            .env("AWA_JOB_CREATED_AT", time(job.created_at));
        let tags = serde_json::Value::from(job.tags()).to_string();
        for (name, value) in [
            ("AWA_JOB_DEADLINE_AT", job.deadline_at.map(time)),
            ("AWA_JOB_TAGS", Some(tags)),
            ("AWA_JOB_METADATA", Some(job.metadata().to_string())),
        ] {
            match value {
                Some(value) if value.len() <= ENV_LIMIT => command.env(name, value),
                // The worker may itself run inside a job, whose value this must not be.
                _ => command.env_remove(name),
            };
        }
        command
    }

    fn why_not_started(&self, program: &str, error: &io::Error) -> String {
        // A missing directory and a missing program are the same error to the system.
        if let Some(cwd) = self.exec.cwd.as_ref().filter(|cwd| !cwd.is_dir()) {
            let cwd = cwd.display();
            return format!("cannot start `{program}`: its cwd `{cwd}` is not a directory");
        }
        format!("cannot start `{program}`: {error}")
    }
}

impl Worker for ExecWorker {
    fn kind(&self) -> &str {
        &self.kind
    }

    fn perform<'a>(&'a self, ctx: &'a JobContext) -> BoxFuture<'a, Outcome> {
        self.run(ctx).boxed()
    }

    fn stop_grace(&self) -> Duration {
        STOP_GRACE
    }
}

/// What the program's end and last line mean.
fn answer(status: ExitStatus, process: &Process, ctx: &JobContext) -> Outcome {
    let control = Control::read(&process.stdout_tail);
    if let Some(progress) = &control.progress {
        match RawJson::from_json(progress.get()) {
            Ok(progress) => ctx.set_progress(progress),
            Err(error) => {
                let job = ctx.job();
                tracing::warn!(job_id = job.id, kind = &*job.kind, %error, "progress not kept");
            }
        }
    }
    let code = status.code();
    if matches!(code, Some(64..=69)) {
        return Outcome::fail(with_stderr(describe(status), process));
    }
    let wishes = control.snooze.transpose().and_then(|snooze| Ok((snooze, control.retry_after.transpose()?)));
    match (code, wishes) {
        (Some(0 | 75), Ok((Some(snooze), _))) => Outcome::Snooze(snooze),
        (Some(0), Ok((None, None))) => Outcome::Complete,
        (Some(0), Ok((None, after))) => {
            Outcome::Retry { error: with_stderr("the program asked for a retry".into(), process), after }
        }
        (_, Ok((_, after))) => Outcome::Retry { error: with_stderr(describe(status), process), after },
        // Completing would drop what the program asked for.
        (_, Err(wrong)) => {
            Outcome::retry(with_stderr(format!("{}, and its last line of output: {wrong}", describe(status)), process))
        }
    }
}

/// The last line of output as far as it means something; all `None` when it is ordinary output.
#[derive(Default)]
struct Control {
    snooze: Option<Result<Duration, String>>,
    retry_after: Option<Result<Duration, String>>,
    progress: Option<Box<RawValue>>,
}

impl Control {
    fn read(stdout: &Tail) -> Self {
        let bytes = stdout.bytes().trim_ascii_end();
        let start = match bytes.iter().rposition(|&byte| byte == b'\n') {
            Some(newline) => newline + 1,
            // The start of the line is lost, so it cannot be told what it was.
            None if stdout.is_truncated() => return Self::default(),
            None => 0,
        };
        let line = bytes[start..].trim_ascii();
        let fields: Option<BTreeMap<String, Box<RawValue>>> =
            line.starts_with(b"{").then(|| serde_json::from_slice(line).ok()).flatten();
        let mut fields = fields.unwrap_or_default();
        let mut field = |name| fields.remove(name).filter(|value| value.get() != "null");
        Self {
            snooze: field("snooze").map(|value| wait("snooze", &value)),
            retry_after: field("retry_after").map(|value| wait("retry_after", &value)),
            progress: field("progress"),
        }
    }
}

/// A duration as text with units, or a number of seconds.
fn wait(field: &str, value: &RawValue) -> Result<Duration, String> {
    let wrong = |reason: String| format!("`{field}`: {reason}");
    if let Ok(text) = serde_json::from_str::<String>(value.get()) {
        return duration::parse(&text).map_err(|error| wrong(error.to_string()));
    }
    serde_json::from_str::<f64>(value.get())
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|duration| *duration <= duration::MAX)
        .ok_or_else(|| {
            let max = duration::MAX.as_secs();
            wrong(format!("must be a duration such as \"30s\" or a number of seconds from 0 to {max}"))
        })
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exited with status {code}"),
        (None, Some(number)) => {
            let name = Signal::try_from(number).map_or("unknown", Signal::as_str);
            format!("killed by signal {number} ({name})")
        }
        (None, None) => status.to_string(),
    }
}

fn retry(outcome: Outcome, process: &Process) -> Outcome {
    match outcome {
        Outcome::Retry { error, after } => Outcome::Retry { error: with_stderr(error, process), after },
        other => other,
    }
}

fn with_stderr(mut error: String, process: &Process) -> String {
    let stderr = lossy(process.stderr_tail.bytes());
    if !stderr.is_empty() {
        error.push_str(if process.stderr_tail.is_truncated() { "; stderr ends: …" } else { "; stderr: " });
        error.push_str(&stderr);
    }
    error
}

/// Text of `bytes` without U+0000, trimmed, and without the half character a cut leaves in front.
fn lossy(bytes: &[u8]) -> String {
    let half = bytes.iter().take(3).take_while(|&&byte| byte & 0xC0 == 0x80);
    let text = String::from_utf8_lossy(&bytes[half.count()..]).replace('\0', "");
    text.trim().to_owned()
}
