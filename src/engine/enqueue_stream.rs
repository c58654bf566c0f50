//! Enqueue from a stream of JSON lines, of any length in constant memory: batches, each one transaction.

use std::collections::VecDeque;
use std::ops::Range;

use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use tokio_postgres::Client;

use super::enqueue::{BulkEnqueue, Enqueued, NewJob};
use super::error::{EngineError, Result};
use super::fields::reworded;
use super::schema::Schema;

/// The longest line taken.
pub const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;

/// How much of a longer line is read over to find the next one. What is longer still has no lines: a device, another
/// kind of file.
pub const MAX_SKIPPED_BYTES: usize = 4 * MAX_LINE_BYTES;

const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// Lines of one transaction have this many bytes at most, or there is only one.
pub const MAX_BATCH_BYTES: usize = 16 * 1024 * 1024;

/// What to do about a line that is no job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnError {
    /// Nothing of its batch is enqueued; earlier batches stay.
    Stop,
    /// It alone is left out.
    Skip,
}

#[derive(Debug, Clone, Copy)]
pub struct StreamOptions {
    /// Lines per transaction; fewer when they are long, see [`MAX_BATCH_BYTES`].
    pub batch: usize,
    pub on_error: OnError,
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self { batch: 1000, on_error: OnError::Stop }
    }
}

/// A line that was not enqueued.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BadLine {
    /// From 1.
    pub line: u64,
    pub why: String,
}

/// A line whose job was there already.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DuplicateLine {
    pub line: u64,
    /// The job that holds its unique key.
    pub duplicate_of: i64,
}

/// How far the stream came: every line is enqueued, left out, a duplicate or blank, or of a batch that was stopped.
#[derive(Debug, Clone, Default, Serialize)]
pub struct StreamReport {
    /// Lines read, blank ones too.
    pub lines: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Jobs enqueued and committed.
    pub enqueued: u64,
    /// Lines with nothing in them.
    pub blank: u64,
    /// Lines left out; the last [`KEPT_LINES`] of them are listed.
    pub skipped: u64,
    pub bad_lines: VecDeque<BadLine>,
    pub bad_lines_not_listed: u64,
    /// Lines whose job was there already; the last [`KEPT_LINES`] of them are listed.
    pub duplicates: u64,
    pub duplicate_lines: VecDeque<DuplicateLine>,
    pub duplicate_lines_not_listed: u64,
    /// Where to go on after the bad line that stopped it, or after an error: then whether this line's batch is in is not
    /// known.
    pub resume_from: Option<u64>,
}

/// Lines a report lists of each sort.
pub const KEPT_LINES: usize = 100;

/// Enqueues every line of `reader`. With [`OnError::Stop`] a bad line ends it: the report then has `resume_from`.
/// `on_progress` hears of the lines that are bad, of every batch that was committed, and of how far it came before an error.
pub async fn enqueue_stream(
    client: &mut Client,
    schema: &Schema,
    mut reader: impl AsyncBufRead + Unpin,
    options: StreamOptions,
    mut on_progress: impl FnMut(&StreamReport),
) -> Result<StreamReport> {
    let bulk = BulkEnqueue::prepare(client, schema).await?;
    let mut report = StreamReport::default();
    let mut batch = Batch::default();
    let mut line = Vec::new();
    loop {
        let read = read_line(&mut reader, &mut line, options.on_error, &mut report).await?;
        let full = batch.jobs.len() >= options.batch || batch.bytes + line.len() > MAX_BATCH_BYTES;
        // What follows an endless line is not to be had, and with `Skip` the lines before it are not to be lost for it.
        let last = read == Read::End || (read == Read::Endless && options.on_error == OnError::Skip);
        if full || last {
            let flushed = batch.flush(client, &bulk, options.on_error, &mut report).await;
            on_progress(&report);
            flushed?;
        }
        if read == Read::End || report.resume_from.is_some() {
            return Ok(report);
        }
        let parsed = match read {
            Read::TooLong => Err(format!("it is longer than {}, the most a line may have", mib(MAX_LINE_BYTES))),
            Read::Endless => Err(format!("it has no end within {}", mib(MAX_SKIPPED_BYTES))),
            Read::Line | Read::End => parse(without_mark(&line, report.lines)),
        };
        match parsed {
            Ok(Some(job)) => batch.push(job, report.lines, line.len()),
            Ok(None) => report.blank += 1,
            Err(why) => {
                report.bad(report.lines, why);
                if options.on_error == OnError::Stop || read == Read::Endless {
                    // Its whole batch stays out, so that a file can be corrected and gone on with.
                    report.resume_from = Some(batch.lines.first().copied().unwrap_or(report.lines));
                    on_progress(&report);
                    return Ok(report);
                }
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Read {
    Line,
    /// Only its beginning was kept, and with `Stop` only that was read.
    TooLong,
    Endless,
    End,
}

/// The next line without its end.
async fn read_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    on_error: OnError,
    report: &mut StreamReport,
) -> Result<Read> {
    let unreadable = |e: std::io::Error| EngineError::invalid("file", format!("it cannot be read: {e}"));
    line.clear();
    let mut length = 0;
    loop {
        let buffer = reader.fill_buf().await.map_err(unreadable)?;
        if buffer.is_empty() && length == 0 {
            return Ok(Read::End);
        }
        let end = buffer.iter().position(|b| *b == b'\n');
        let taken = end.map_or(buffer.len(), |at| at + 1);
        let ended = end.is_some() || buffer.is_empty();
        let room = MAX_LINE_BYTES.saturating_sub(line.len());
        line.extend_from_slice(&buffer[..end.unwrap_or(buffer.len()).min(room)]);
        reader.consume(taken);
        report.bytes += taken as u64;
        length += taken;
        let too_long = length - usize::from(end.is_some()) > MAX_LINE_BYTES;
        let endless = length > MAX_SKIPPED_BYTES;
        if ended || endless || (too_long && on_error == OnError::Stop) {
            report.lines += 1;
            return Ok(match (endless, too_long) {
                (true, _) => Read::Endless,
                (false, true) => Read::TooLong,
                (false, false) => Read::Line,
            });
        }
    }
}

fn mib(bytes: usize) -> String {
    format!("{} MiB", bytes / (1024 * 1024))
}

/// Some editors and exports begin a file with a byte order mark.
fn without_mark(line: &[u8], number: u64) -> &[u8] {
    line.strip_prefix(BYTE_ORDER_MARK).filter(|_| number == 1).unwrap_or(line)
}

/// The job of a line; `None` for a blank one.
fn parse(line: &[u8]) -> Result<Option<NewJob>, String> {
    let text = std::str::from_utf8(line).map_err(|e| format!("it is not UTF-8 after byte {}", e.valid_up_to()))?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    // An array of the fields' values would do for serde, and is more likely a mistake.
    if !text.trim_start().starts_with('{') {
        return Err("it is not a JSON object".into());
    }
    let job: NewJob = serde_json::from_str(text).map_err(|error| explain(text, &error))?;
    job.check().map_err(|e| e.to_string())?;
    Ok(Some(job))
}

/// What is wrong with a line, and where in it; its own number is said by the caller.
fn explain(text: &str, error: &serde_json::Error) -> String {
    let message = if error.is_data() {
        // Read once more, slowly, for the path: good lines need none.
        let again = serde_path_to_error::deserialize::<_, NewJob>(&mut serde_json::Deserializer::from_str(text));
        let path = again.err().map(|error| error.path().to_string()).filter(|path| path != ".");
        reworded(&path.map_or_else(|| error.to_string(), |path| format!("{path}: {error}")))
    } else {
        format!("it is not JSON: {}", error.to_string().replace("EOF while parsing", "it ends within"))
    };
    message.replace(" at line 1 column ", ", at column ").replace("(line 1 column ", "(column ")
}

impl StreamReport {
    fn bad(&mut self, line: u64, why: String) {
        self.skipped += 1;
        keep(&mut self.bad_lines, &mut self.bad_lines_not_listed, BadLine { line, why });
    }

    fn count(&mut self, lines: &[u64], enqueued: &[Enqueued]) {
        for (&line, job) in lines.iter().zip(enqueued) {
            if !job.duplicate {
                self.enqueued += 1;
                continue;
            }
            self.duplicates += 1;
            let duplicate = DuplicateLine { line, duplicate_of: job.job_id };
            keep(&mut self.duplicate_lines, &mut self.duplicate_lines_not_listed, duplicate);
        }
    }
}

fn keep<T>(listed: &mut VecDeque<T>, not_listed: &mut u64, one: T) {
    if listed.len() == KEPT_LINES {
        listed.pop_front();
        *not_listed += 1;
    }
    listed.push_back(one);
}

#[derive(Default)]
struct Batch {
    jobs: Vec<NewJob>,
    /// The line of each job.
    lines: Vec<u64>,
    bytes: usize,
}

impl Batch {
    fn push(&mut self, job: NewJob, line: u64, bytes: usize) {
        self.bytes += bytes;
        self.jobs.push(job);
        self.lines.push(line);
    }

    /// Enqueues the batch as one transaction. If the server refuses a job of it, finds which by halving: with `Skip` the
    /// rest goes in all the same.
    async fn flush(
        &mut self,
        client: &mut Client,
        bulk: &BulkEnqueue,
        on_error: OnError,
        report: &mut StreamReport,
    ) -> Result<()> {
        let mut parts: Vec<Range<usize>> = std::iter::once(0..self.jobs.len()).collect();
        while let Some(part) = parts.pop() {
            if part.is_empty() {
                continue;
            }
            match self.enqueue(client, bulk, part.clone()).await {
                Ok(enqueued) => report.count(&self.lines[part], &enqueued),
                Err(error) if !is_of_the_data(&error) => {
                    report.resume_from = Some(self.lines[part.start]);
                    return Err(error);
                }
                Err(error) if on_error == OnError::Stop => {
                    report.bad(self.lines[part.start], format!("the batch that starts here was refused: {error}"));
                    report.resume_from = Some(self.lines[part.start]);
                    break;
                }
                Err(error) if part.len() == 1 => report.bad(self.lines[part.start], error.to_string()),
                Err(_) => {
                    let middle = part.start + part.len() / 2;
                    parts.push(middle..part.end);
                    parts.push(part.start..middle);
                }
            }
        }
        self.jobs.clear();
        self.lines.clear();
        self.bytes = 0;
        Ok(())
    }

    async fn enqueue(&self, client: &mut Client, bulk: &BulkEnqueue, part: Range<usize>) -> Result<Vec<Enqueued>> {
        let transaction = client.transaction().await?;
        let enqueued = bulk.run(&transaction, &self.jobs[part]).await?;
        transaction.commit().await?;
        Ok(enqueued)
    }
}

/// Class 22 (data) and 23 (integrity): the job is at fault, not the connection or the schema.
fn is_of_the_data(error: &EngineError) -> bool {
    match error {
        EngineError::InvalidInput { .. } => true,
        EngineError::Database(error) => error.code().is_some_and(|code| {
            code.code().starts_with("22") || code.code().starts_with("23") || code.code() == "54000"
        }),
        _ => false,
    }
}
