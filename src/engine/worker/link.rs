//! A connection that comes back: what a worker's loops hold instead of a session.

use std::future::Future;
use std::time::Duration;

use rand::Rng;
use tokio_postgres::Client;

use crate::engine::connect::{Session, connect};
use crate::engine::error::{EngineError, Result};
use crate::engine::target::Target;

/// No statement of the hot path takes this long; a connection that is silent for longer is taken for dead.
const SILENCE: Duration = Duration::from_secs(30);

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Settings of every session the engine opens: its statements are short and prepared, so neither JIT nor planning them
/// anew pays; and it relies on READ COMMITTED.
pub const SESSION_SETTINGS: &str = "SET jit = off; SET plan_cache_mode = force_generic_plan; \
     SET default_transaction_isolation = 'read committed'; SET idle_in_transaction_session_timeout = 0";

/// Opens a session with the engine's settings.
pub async fn open(target: &Target) -> Result<Session> {
    let session = connect(target).await?;
    session.batch_execute(SESSION_SETTINGS).await?;
    Ok(session)
}

/// A session and what was prepared on it, remade after a loss.
pub struct Link<P> {
    target: Target,
    live: Option<(Session, P)>,
    pause: Duration,
}

impl<P: Clone> Link<P> {
    pub fn new(target: Target) -> Self {
        Self { target, live: None, pause: Duration::ZERO }
    }

    /// Runs `call` on the session, opening it and preparing first if need be. A lost connection, a transient error or
    /// silence is an error here and a new session next time, after a pause that grows while it goes on.
    pub async fn run<T, F>(&mut self, prepare: impl AsyncFnOnce(&Client) -> Result<P>, call: impl FnOnce(&Client, P) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        let outcome = self.attempt(prepare, call).await;
        match &outcome {
            Ok(_) => self.pause = Duration::ZERO,
            Err(_) => {
                self.live = None;
                self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
            }
        }
        outcome
    }

    /// How long to wait before the next try; jittered, so that a fleet does not come back all at once.
    pub fn pause(&self) -> Duration {
        self.pause.mul_f64(rand::rng().random_range(0.5..1.0))
    }

    async fn attempt<T, F>(&mut self, prepare: impl AsyncFnOnce(&Client) -> Result<P>, call: impl FnOnce(&Client, P) -> F) -> Result<T>
    where
        F: Future<Output = Result<T>>,
    {
        if self.live.as_ref().is_none_or(|(session, _)| session.is_closed()) {
            let opened = within(async {
                let session = open(&self.target).await?;
                let prepared = prepare(&session).await?;
                Ok((session, prepared))
            });
            self.live = Some(opened.await?);
        }
        let Some((session, prepared)) = &self.live else {
            unreachable!("it was opened just above")
        };
        within(call(session, prepared.clone())).await
    }
}

async fn within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(SILENCE, work).await.unwrap_or_else(|_| {
        Err(EngineError::Unreachable {
            target: "the server".into(),
            why: format!("no answer within {} s", SILENCE.as_secs()),
            source: None,
        })
    })
}
