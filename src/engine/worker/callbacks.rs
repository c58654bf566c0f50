//! Callbacks of handlers: a token for somebody outside, and the wait for the answer (engine.md, Callback wait).

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::sync::Mutex;
use tokio_postgres::Client;

use super::context::{CancelReason, JobContext};
use super::json::RawJson;
use super::link::{Link, within};
use super::outcome::Outcome;
use crate::engine::claim::Receipt;
use crate::engine::error::{EngineError, Result as EngineResult};
use crate::engine::heartbeat::Heartbeat;
use crate::engine::leases::{self, Waiting};
use crate::engine::schema::Schema;
use crate::engine::target::Target;

/// Why there is no token, or no answer.
#[derive(Debug, thiserror::Error)]
pub enum CallbackError {
    /// The handler is to stop, or its attempt is over: answered with complete, fail or retry, timed out, cancelled.
    #[error("the attempt was stopped ({0:?})")]
    Stopped(CancelReason),
    #[error("this context belongs to no fleet")]
    NoFleet,
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<CallbackError> for Outcome {
    fn from(error: CallbackError) -> Self {
        match error {
            CallbackError::Stopped(reason) => Self::stopped(reason),
            other => Self::retry(other.to_string()),
        }
    }
}

/// The one connection of a fleet for these calls, which are rare.
pub(super) struct Callbacks {
    link: Mutex<Link<Heartbeat>>,
    schema: Schema,
    poll_interval: Duration,
}

#[derive(Clone, Copy)]
enum Ask<'a> {
    Register(Duration),
    Wait(&'a str),
    Result,
    Store(&'a RawJson),
}

enum Reply {
    Token(String),
    Stands(Waiting),
}

impl Callbacks {
    pub fn new(target: Target, poll_interval: Duration) -> Self {
        Self { schema: target.schema.clone(), link: Mutex::new(Link::new(target)), poll_interval }
    }

    /// Asks until the database answers; each question may be asked again.
    async fn ask(&self, attempt: &Receipt, ask: Ask<'_>) -> EngineResult<Reply> {
        loop {
            let pause = {
                let mut link = self.link.lock().await;
                let outcome = match link.ready().await {
                    Ok((client, heartbeat)) => within(once(client, heartbeat, &self.schema, attempt, ask)).await,
                    Err(error) => Err(error),
                };
                match link.settle(outcome) {
                    Err(error) if error.is_transient() => link.pause(),
                    settled => return settled,
                }
            };
            tokio::time::sleep(pause).await;
        }
    }
}

async fn once(
    client: &Client,
    heartbeat: &Heartbeat,
    schema: &Schema,
    attempt: &Receipt,
    ask: Ask<'_>,
) -> EngineResult<Reply> {
    Ok(match ask {
        Ask::Register(timeout) => match leases::register_callback(client, schema, attempt, timeout).await? {
            Some(token) => Reply::Token(token),
            None => Reply::Stands(Waiting::Over),
        },
        Ask::Wait(token) => Reply::Stands(leases::wait_for_callback(client, schema, attempt, token).await?),
        Ask::Result => Reply::Stands(leases::callback_result(client, schema, attempt).await?),
        Ask::Store(progress) => {
            let lost = heartbeat.beat(client, &[(*attempt, Some(progress.clone()))]).await?;
            Reply::Stands(if lost.is_empty() { Waiting::Yes } else { Waiting::Over })
        }
    })
}

impl JobContext {
    /// A token for whoever will answer, in place of an earlier one. Without an answer within `timeout` the attempt is
    /// retried.
    pub async fn register_callback(&self, timeout: Duration) -> Result<String, CallbackError> {
        match self.ask(Ask::Register(timeout)).await? {
            Reply::Token(token) => Ok(token),
            Reply::Stands(_) => Err(self.over()),
        }
    }

    /// Waits until the token's holder resumes this handler; gives what it sent along. Any other answer ends the attempt.
    /// From the wait on the attempt has no deadline. While it waits the handler keeps its permit; [`Outcome::WaitForCallback`] gives that up.
    pub async fn wait_for_callback(&self, token: &str) -> Result<Option<RawJson>, CallbackError> {
        let Some(attempt) = self.attempt() else { return Err(CallbackError::NoFleet) };
        let mut ask = Ask::Wait(token);
        loop {
            match self.ask(ask).await? {
                Reply::Stands(Waiting::Resumed(payload)) => return Ok(payload),
                Reply::Stands(Waiting::Over) => return Err(self.over()),
                Reply::Stands(Waiting::Yes) | Reply::Token(_) => attempt.waited.store(true, Ordering::Release),
            }
            // The signal may be missed with its connection, so it is asked for too.
            tokio::select! {
                () = attempt.resumed.notified() => {}
                () = tokio::time::sleep(attempt.callbacks.poll_interval) => {}
                reason = self.cancelled() => return Err(CallbackError::Stopped(reason)),
            }
            ask = Ask::Result;
        }
    }

    /// Leaves the attempt waiting, its handler having returned. What to write instead, if anything.
    pub(super) async fn leave_waiting(&self, token: &str) -> Result<(), Outcome> {
        if let Some(progress) = self.changed_progress() {
            self.ask(Ask::Store(&progress)).await?;
        }
        match self.ask(Ask::Wait(token)).await? {
            Reply::Stands(Waiting::Resumed(_)) => {
                Err(Outcome::retry("its callback resumed it, but the handler had returned"))
            }
            _ => Ok(()),
        }
    }

    async fn ask(&self, ask: Ask<'_>) -> Result<Reply, CallbackError> {
        let attempt = self.attempt().ok_or(CallbackError::NoFleet)?;
        tokio::select! {
            biased;
            reply = attempt.callbacks.ask(&attempt.receipt, ask) => Ok(reply?),
            reason = self.cancelled() => Err(CallbackError::Stopped(reason)),
        }
    }

    fn over(&self) -> CallbackError {
        self.cancel(CancelReason::LeaseLost);
        CallbackError::Stopped(self.cancel_reason().unwrap_or(CancelReason::LeaseLost))
    }
}
