//! Enqueue from a stream of JSON lines, of any length in constant memory: batches, each one transaction.

use std::collections::VecDeque;
use std::ops::Range;

use serde::Serialize;
use tokio::io::{AsyncBufRead, AsyncBufReadExt};
use tokio_postgres::Client;

use super::enqueue::{BulkEnqueue, Enqueued, NewJob};
use super::error::{EngineError, Result};
use super::schema::Schema;

/// The longest line taken.
pub const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;

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

/// How far the stream came.
#[derive(Debug, Clone, Default, Serialize)]
pub struct StreamReport {
    /// Lines read, blank ones too.
    pub lines: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Jobs enqueued and committed.
    pub enqueued: u64,
    /// Lines left out; only the newest [`KEPT_BAD_LINES`] are kept below.
    pub skipped: u64,
    pub bad_lines: VecDeque<BadLine>,
    /// Lines whose job was there already; only the newest [`KEPT_BAD_LINES`] are kept below.
    pub duplicates: u64,
    pub duplicate_lines: VecDeque<DuplicateLine>,
    /// Where to go on after the bad line that stopped it, or after an error: then whether this line's batch is in is not
    /// known.
    pub resume_from: Option<u64>,
}

/// Bad lines a report keeps.
pub const KEPT_BAD_LINES: usize = 100;

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
        line.clear();
        let ended = read_line(&mut reader, &mut line, &mut report).await?;
        let full = batch.jobs.len() >= options.batch || batch.bytes + line.len() > MAX_BATCH_BYTES;
        if full || ended {
            let flushed = batch.flush(client, &bulk, options.on_error, &mut report).await;
            on_progress(&report);
            flushed?;
        }
        if ended || report.resume_from.is_some() {
            return Ok(report);
        }
        match parse(&line) {
            Ok(Some(job)) => batch.push(job, report.lines, line.len()),
            Ok(None) => {}
            Err(why) => {
                report.bad(report.lines, why);
                if options.on_error == OnError::Stop {
                    // Its whole batch stays out, so that a file can be corrected and gone on with.
                    report.resume_from = Some(batch.lines.first().copied().unwrap_or(report.lines));
                    on_progress(&report);
                    return Ok(report);
                }
            }
        }
    }
}

/// One line without its end; says whether there was none. Too long a line is cut, and refused by [`parse`].
async fn read_line(
    reader: &mut (impl AsyncBufRead + Unpin),
    line: &mut Vec<u8>,
    report: &mut StreamReport,
) -> Result<bool> {
    let unreadable = |e: std::io::Error| EngineError::invalid("file", format!("it cannot be read: {e}"));
    let mut any = false;
    loop {
        let buffer = reader.fill_buf().await.map_err(unreadable)?;
        if buffer.is_empty() {
            report.lines += u64::from(any);
            return Ok(!any);
        }
        any = true;
        let end = buffer.iter().position(|b| *b == b'\n');
        let taken = end.map_or(buffer.len(), |at| at + 1);
        let room = (MAX_LINE_BYTES + 1).saturating_sub(line.len());
        line.extend_from_slice(&buffer[..end.unwrap_or(buffer.len()).min(room)]);
        reader.consume(taken);
        report.bytes += taken as u64;
        if end.is_some() {
            report.lines += 1;
            return Ok(false);
        }
    }
}

/// The job of a line; `None` for a blank one.
fn parse(line: &[u8]) -> Result<Option<NewJob>, String> {
    if line.len() > MAX_LINE_BYTES {
        return Err(format!("it is longer than {} MiB", MAX_LINE_BYTES / (1024 * 1024)));
    }
    let text = std::str::from_utf8(line).map_err(|e| format!("it is not UTF-8 after byte {}", e.valid_up_to()))?;
    if text.trim().is_empty() {
        return Ok(None);
    }
    // An array of the fields' values would do for serde, and is more likely a mistake.
    if !text.trim_start().starts_with('{') {
        return Err("it is not a JSON object".into());
    }
    let job: NewJob = serde_json::from_str(text).map_err(|e| {
        // The line number of the error is always 1 here; the file's is said by the caller.
        e.to_string().replace(" at line 1 column ", ", at column ")
    })?;
    job.check().map_err(|e| e.to_string())?;
    Ok(Some(job))
}

impl StreamReport {
    fn bad(&mut self, line: u64, why: String) {
        self.skipped += 1;
        if self.bad_lines.len() == KEPT_BAD_LINES {
            self.bad_lines.pop_front();
        }
        self.bad_lines.push_back(BadLine { line, why });
    }

    fn count(&mut self, lines: &[u64], enqueued: &[Enqueued]) {
        for (&line, job) in lines.iter().zip(enqueued) {
            if !job.duplicate {
                self.enqueued += 1;
                continue;
            }
            self.duplicates += 1;
            if self.duplicate_lines.len() == KEPT_BAD_LINES {
                self.duplicate_lines.pop_front();
            }
            self.duplicate_lines.push_back(DuplicateLine { line, duplicate_of: job.job_id });
        }
    }
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
