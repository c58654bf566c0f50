//! How an attempt ended.

use std::time::Duration;

use super::context::CancelReason;

/// The longest error text kept, in bytes; longer ones lose their middle.
pub const MAX_ERROR_BYTES: usize = 8 * 1024;

/// What a handler says about its attempt. Progress travels separately, through
/// [`super::JobContext::set_progress`].
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub enum Outcome {
    /// Done.
    Complete,
    /// Failed for good, whatever attempts are left.
    Fail { error: String },
    /// Failed; tried again while attempts are left, `after` a time of the handler's choosing or,
    /// without one, the queue's backoff.
    Retry { error: String, after: Option<Duration> },
    /// Not now: comes back after this long, and the attempt does not count.
    Snooze(Duration),
    /// The job is cancelled.
    Cancel { reason: String },
    /// The attempt goes on waiting for the answer to this token of [`super::JobContext::register_callback`], without its
    /// handler. The answer must be complete, fail or retry: nobody is there to be resumed, so that would be a retry.
    WaitForCallback(String),
    /// This worker has no handler for the kind: handed back, the attempt does not count.
    Unhandled,
}

impl Outcome {
    /// Fails for good.
    pub fn fail(error: impl Into<String>) -> Self {
        Self::Fail { error: error.into() }
    }

    /// Retries with the queue's backoff.
    pub fn retry(error: impl Into<String>) -> Self {
        Self::Retry { error: error.into(), after: None }
    }

    /// What a handler stopped by `reason` answers when it has no better word.
    pub fn stopped(reason: CancelReason) -> Self {
        match reason {
            CancelReason::Requested => Self::Cancel { reason: "cancelled while running".into() },
            CancelReason::Deadline => Self::retry(super::guard::DEADLINE_EXCEEDED),
            // Handed back at once for another worker; stopping this one is not the job's failure.
            CancelReason::Shutdown => Self::Snooze(Duration::ZERO),
            // Somebody else owns the job by now, so this write loses, as it should.
            CancelReason::LeaseLost => Self::retry("the lease was lost"),
        }
    }

    /// Makes the texts storable: no U+0000, at most [`MAX_ERROR_BYTES`].
    pub(super) fn sanitized(mut self) -> Self {
        match &mut self {
            Self::Fail { error: text } | Self::Retry { error: text, .. } | Self::Cancel { reason: text } => {
                sanitize(text)
            }
            Self::Complete | Self::Snooze(_) | Self::WaitForCallback(_) | Self::Unhandled => {}
        }
        self
    }
}

fn sanitize(text: &mut String) {
    text.retain(|c| c != '\0');
    if text.len() > MAX_ERROR_BYTES {
        // The start says what failed, the end how; a dump in between is what can go.
        const GAP: &str = "\n[…]\n";
        let keep = (MAX_ERROR_BYTES - GAP.len()) / 2;
        let (mut head, mut tail) = (keep, text.len() - keep);
        while !text.is_char_boundary(head) {
            head -= 1;
        }
        while !text.is_char_boundary(tail) {
            tail += 1;
        }
        text.replace_range(head..tail, GAP);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_become_storable() {
        let long = format!("start{}\0{}end", "é".repeat(9_000), "ü".repeat(9_000));
        let Outcome::Fail { error } = Outcome::fail(long).sanitized() else {
            panic!("another outcome");
        };
        assert!(error.len() <= MAX_ERROR_BYTES, "{}", error.len());
        assert!(error.starts_with("starté") && error.ends_with("üend"));
        assert!(!error.contains('\0'));
    }
}
