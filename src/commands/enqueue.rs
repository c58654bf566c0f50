//! `awactl enqueue`: one job, several alike, or a stream of JSON lines.

use std::cell::Cell;
use std::future::Future;
use std::io;
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::task::{self, Poll};
use std::time::Duration;

use anyhow::Context as _;
use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::Notify;

use super::exit::{CommandError, ExitCode};
use super::output::{Table, thousands};
use super::progress::bar;
use super::signals::{Caught, Signals, exit_now};
use super::values::{time, whole};
use super::{Access, Context};
use crate::engine::enqueue::{BulkEnqueue, DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE, Enqueued, NewJob};
use crate::engine::enqueue_stream::{OnError, StreamOptions, StreamReport, enqueue_stream};
use crate::engine::unique::UniqueOptions;
use crate::engine::worker::RawJson;
use crate::engine::{EngineError, Session, Target, duration};

/// Enqueue one job, or a file of them
///
/// A file has one JSON object a line with the fields kind, queue, args, priority, max_attempts, run_at, tags,
/// metadata and unique; all but kind have defaults. unique is an object with by_queue (false), by_args (true), by_period
/// (none, or a duration such as "1h") and states (a list of state names). It is read as a stream, a batch a transaction. With --on-error stop (the default)
/// a bad line keeps its whole batch out, and the line to resume from is said; with skip it alone is left out, and the
/// exit code is 1 only if nothing was enqueued. SIGTERM or Ctrl-C ends it after the batch, and says the line to resume from. A line may have 16 MiB. Of bad lines and of duplicates the last 100 are
/// listed, all are counted.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("what").args(["kind", "file"]).required(true)))]
pub struct Args {
    /// Kind of the job: which handler runs it
    kind: Option<String>,

    /// Arguments as JSON
    #[arg(default_value = "{}")]
    args: String,

    /// Queue it goes to
    #[arg(long, default_value = DEFAULT_QUEUE, conflicts_with = "file")]
    queue: String,

    /// 1 (first) to 4
    #[arg(long, default_value_t = DEFAULT_PRIORITY, value_parser = whole::<i16>(1, 4), conflicts_with = "file")]
    priority: i16,

    /// 1 to 1000
    #[arg(long, default_value_t = DEFAULT_MAX_ATTEMPTS, value_parser = whole::<i16>(1, 1000), conflicts_with = "file")]
    max_attempts: i16,

    /// When it may run, as RFC 3339 time
    #[arg(long, value_name = "TIME", value_parser = time, conflicts_with = "file")]
    run_at: Option<DateTime<Utc>>,

    /// How long from now it may run, such as 90s or 2h, by the database's clock
    #[arg(long = "in", value_name = "DURATION", allow_hyphen_values = true, conflicts_with_all = ["run_at", "file"])]
    delay: Option<String>,

    /// A tag; may be repeated, up to 20 times
    #[arg(long = "tag", value_name = "TAG", conflicts_with = "file")]
    tags: Vec<String>,

    /// A JSON object to keep with the job
    #[arg(long, value_name = "JSON", conflicts_with = "file")]
    metadata: Option<String>,

    /// What another job must share for this one not to be enqueued beside it
    ///
    /// kind, and any of queue, args, period=DURATION (only within the same period, by the database's clock) and
    /// states=STATE+STATE (only while the other is in one of these; default
    /// scheduled+available+running+completed+retryable). Example: --unique kind,args,period=1h
    #[arg(long, value_name = "PARTS", conflicts_with = "file")]
    unique: Option<UniqueOptions>,

    /// How many of it, in one transaction
    #[arg(long, default_value_t = 1, value_parser = whole::<u32>(1, 1_000_000), conflicts_with = "file")]
    count: u32,

    /// Jobs as JSON lines; - is standard input
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,

    /// Lines per transaction; fewer when they come to 16 MiB
    #[arg(long, default_value_t = 1000, value_parser = whole::<u32>(1, 100_000), requires = "file")]
    batch: u32,

    /// What to do about a bad line
    #[arg(long, value_enum, default_value_t, requires = "file")]
    on_error: OnErrorArg,
}

#[derive(Debug, Clone, Copy, Default, clap::ValueEnum)]
enum OnErrorArg {
    #[default]
    Stop,
    Skip,
}

#[derive(Serialize)]
struct Report {
    enqueued: usize,
    job_ids: Vec<i64>,
    /// Jobs that were there already and hold the unique key, once for each that was not enqueued.
    duplicates_of: Vec<i64>,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match &args.file {
        Some(file) => from_file(&args, file, context).await,
        None => alike(args, context).await,
    }
}

async fn alike(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    let json = |field: &str, text: &str| {
        RawJson::from_json(text).map_err(|e| {
            CommandError::usage(format!("{field} is not usable"), e.to_string(), "give JSON, in quotes for the shell")
        })
    };
    let mut job = NewJob::new(args.kind.unwrap_or_default(), json("ARGS", &args.args)?);
    job.queue = args.queue;
    job.priority = args.priority;
    job.max_attempts = args.max_attempts;
    job.tags = args.tags;
    job.metadata = args.metadata.as_deref().map(|text| json("--metadata", text)).transpose()?;
    job.run_at = args.run_at;
    job.unique = args.unique;
    let delay = args.delay.as_deref().map(duration::parse).transpose();
    let delay = delay
        .map_err(|e| CommandError::usage("--in is not usable", e.to_string(), "say it like 250ms, 90s, 5m or 2h"))?;
    job.check()?;

    let (mut session, resolved) = context.connect_installed(Access::Change).await?;
    context.confirm_change("enqueue into it").await?;
    if let Some(delay) = delay {
        job.run_at = Some(database_time_in(&session, delay).await?);
    }
    let all = insert(&mut session, &resolved.target, &job, args.count).await?;
    session.close().await;
    let ids = |duplicate| all.iter().filter(|e| e.duplicate == duplicate).map(|e| e.job_id).collect::<Vec<i64>>();
    let report = Report { enqueued: ids(false).len(), job_ids: ids(false), duplicates_of: ids(true) };
    context.output.print(&report, |r| {
        let mut facts = vec![("enqueued", thousands(r.enqueued as i64))];
        if !r.job_ids.is_empty() {
            facts.push(("job ids", first_ids(&r.job_ids)));
        }
        if !r.duplicates_of.is_empty() {
            facts.push(("duplicates", thousands(r.duplicates_of.len() as i64)));
            facts.push(("of job", first_ids(&r.duplicates_of)));
        }
        Table::facts(facts)
    })?;
    Ok(ExitCode::Done)
}

/// The first of them, as a table shows them.
pub(super) fn first_ids(ids: &[i64]) -> String {
    let mut distinct = ids.to_vec();
    distinct.dedup();
    let more = if distinct.len() > 10 { ", …" } else { "" };
    let first: Vec<String> = distinct.iter().take(10).map(i64::to_string).collect();
    first.join(", ") + more
}

async fn insert(session: &mut Session, target: &Target, job: &NewJob, count: u32) -> anyhow::Result<Vec<Enqueued>> {
    let bulk = BulkEnqueue::prepare(session, &target.schema).await?;
    let transaction = session.transaction().await?;
    let mut enqueued = Vec::new();
    let mut left = count as usize;
    while left > 0 {
        let jobs = vec![job.clone(); left.min(1000)];
        left -= jobs.len();
        enqueued.extend(bulk.run(&transaction, &jobs).await?);
    }
    transaction.commit().await?;
    Ok(enqueued)
}

async fn database_time_in(session: &Session, delay: Duration) -> anyhow::Result<DateTime<Utc>> {
    let sql = "SELECT clock_timestamp() + make_interval(secs => $1)";
    Ok(session.query_one(sql, &[&delay.as_secs_f64()]).await?.try_get(0)?)
}

async fn from_file(args: &Args, file: &PathBuf, context: &Context) -> anyhow::Result<ExitCode> {
    let stdin = file.as_os_str() == "-";
    let (reader, size): (Box<dyn tokio::io::AsyncRead + Unpin>, u64) = if stdin {
        (Box::new(tokio::io::stdin()), 0)
    } else {
        let opened = tokio::fs::File::open(file).await;
        let opened = opened.map_err(|e| {
            CommandError::usage(
                format!("{} cannot be read", file.display()),
                e.to_string(),
                "name a file of JSON lines, or - for standard input",
            )
        })?;
        let size = opened.metadata().await.context("reading the file's size")?.len();
        (Box::new(opened), size)
    };
    let (mut session, resolved) = context.connect_installed(Access::Change).await?;
    context.confirm_change("enqueue into it").await?;
    let options = StreamOptions {
        batch: args.batch as usize,
        on_error: match args.on_error {
            OnErrorArg::Stop => OnError::Stop,
            OnErrorArg::Skip => OnError::Skip,
        },
    };
    let progress = bar(context.shows_progress() && size > 0, "bytes", size);
    let rest = Rest::default();
    let reader = tokio::io::BufReader::with_capacity(1 << 20, Noted { reader, rest: &rest });
    let mut signals = Signals::listen()?;
    let came = Cell::new((0, None));
    let outcome = {
        let stream = enqueue_stream(&mut session, &resolved.target.schema, reader, options, |so_far| {
            progress.set_position(so_far.bytes);
            progress.set_message(format!("{} jobs", thousands(so_far.enqueued as i64)));
            came.set((so_far.enqueued, so_far.resume_from));
            // The line that was read last made the batch full and is not in it.
            rest.after_batch(so_far.lines);
        });
        until_told(stream, &rest, &mut signals, context).await
    };
    progress.finish_and_clear();
    let came = came.get();
    let outcome = match outcome {
        Ended::Itself(outcome) => outcome,
        Ended::Told(signal) => {
            session.close().await;
            let enqueued = thousands(came.0 as i64);
            context.note(&format!("{signal}: {enqueued} jobs are enqueued; resume from line {}", rest.next_line.get()));
            context.close().await?;
            std::process::exit(signal.exit_code());
        }
    };
    if let (Err(error), (enqueued, Some(line))) = (&outcome, came) {
        let enqueued = thousands(enqueued as i64);
        // Refused is not in; but where the connection was lost it may be the answer to COMMIT that was.
        context.note(&match error {
            EngineError::Unreachable { .. } => format!(
                "{enqueued} jobs are enqueued; whether those of line {line} and up to {} more are too is not known: \
                 look before resuming from there",
                args.batch - 1
            ),
            _ => format!("{enqueued} jobs are enqueued; resume from line {line}"),
        });
    }
    let report = outcome?;
    session.close().await;
    not_listed(context, report.bad_lines_not_listed, "bad lines");
    for bad in &report.bad_lines {
        context.note(&format!("line {}: {}", bad.line, bad.why));
    }
    not_listed(context, report.duplicate_lines_not_listed, "duplicates");
    for duplicate in &report.duplicate_lines {
        context.note(&format!("line {}: a duplicate of job {}", duplicate.line, duplicate.duplicate_of));
    }
    if let Some(line) = report.resume_from {
        context.note(&format!("stopped; correct the file and resume from line {line}"));
    }
    context.output.print(&report, file_table)?;
    let nothing = report.enqueued == 0 && report.skipped > 0;
    Ok(if report.resume_from.is_some() || nothing { ExitCode::Failed } else { ExitCode::Done })
}

/// Where a stream can be stopped without a doubt about what is in: between two batches, or while it waits for input.
struct Rest {
    reading: Cell<bool>,
    batches: Cell<u64>,
    next_line: Cell<u64>,
    reached: Notify,
}

impl Default for Rest {
    fn default() -> Self {
        Self { reading: Cell::new(false), batches: Cell::new(0), next_line: Cell::new(1), reached: Notify::new() }
    }
}

impl Rest {
    fn after_batch(&self, next_line: u64) {
        self.batches.set(self.batches.get() + 1);
        self.next_line.set(next_line);
        self.reached.notify_one();
    }
}

/// A reader that says when it waits.
struct Noted<'a, R> {
    reader: R,
    rest: &'a Rest,
}

impl<R: AsyncRead + Unpin> AsyncRead for Noted<'_, R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut task::Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.reader).poll_read(cx, buffer);
        self.rest.reading.set(read.is_pending());
        if read.is_pending() {
            self.rest.reached.notify_one();
        }
        read
    }
}

enum Ended {
    Itself(Result<StreamReport, EngineError>),
    Told(Caught),
}

/// Lets a batch that is on its way be committed first: cut off in its COMMIT, nobody knows whether it is in.
async fn until_told(
    stream: impl Future<Output = Result<StreamReport, EngineError>>,
    rest: &Rest,
    signals: &mut Signals,
    context: &Context,
) -> Ended {
    let mut stream = pin!(stream);
    let signal = tokio::select! {
        outcome = &mut stream => return Ended::Itself(outcome),
        signal = signals.next() => signal,
    };
    let batches = rest.batches.get();
    while !rest.reading.get() && rest.batches.get() == batches {
        tokio::select! {
            outcome = &mut stream => return Ended::Itself(outcome),
            () = rest.reached.notified() => {}
            again = signals.next() => exit_now(context, again),
        }
    }
    Ended::Told(signal)
}

fn not_listed(context: &Context, count: u64, what: &str) {
    if count > 0 {
        context.note(&format!("{} {what} before these are counted and not listed", thousands(count as i64)));
    }
}

fn file_table(report: &StreamReport) -> Table {
    let mut facts = vec![
        ("enqueued", thousands(report.enqueued as i64)),
        ("lines read", thousands(report.lines as i64)),
        ("bad lines", thousands(report.skipped as i64)),
        ("duplicates", thousands(report.duplicates as i64)),
    ];
    if let Some(line) = report.resume_from {
        facts.push(("resume from line", line.to_string()));
    }
    Table::facts(facts)
}
