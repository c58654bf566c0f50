//! A connection that comes back: what a worker's loops hold instead of a session.

use std::future::Future;
use std::time::Duration;

use rand::Rng;
use tokio_postgres::Client;

use crate::engine::connect::{Session, connect};
use crate::engine::error::{EngineError, Result};
use crate::engine::schema::Schema;
use crate::engine::target::Target;

/// No statement of the hot path takes this long; a connection that is silent for longer is taken for dead.
const SILENCE: Duration = Duration::from_secs(30);

pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(50);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Settings of every session the engine opens: its statements are short and prepared, so neither JIT nor planning them
/// anew pays; it relies on READ COMMITTED; and timeouts of a role or database are meant for people: a batch that never
/// fits into one would never be written, a listener is idle by nature. [`SILENCE`] bounds a statement instead.
pub const SESSION_SETTINGS: &str = "SET jit = off; SET plan_cache_mode = force_generic_plan; \
     SET default_transaction_isolation = 'read committed'; SET idle_in_transaction_session_timeout = 0; \
     SET statement_timeout = 0; SET lock_timeout = 0; SET idle_session_timeout = 0";

/// Opens a session with the engine's settings. Through a transaction pooler without them: they would stay on a connection
/// that others use.
pub async fn open(target: &Target) -> Result<Session> {
    let session = connect(target).await?;
    if !session.is_pooled() {
        session.batch_execute(SESSION_SETTINGS).await?;
    }
    Ok(session)
}

/// What a loop prepares on each new session.
pub trait Prepared: Sized + Send {
    fn prepare(client: &Client, schema: &Schema) -> impl Future<Output = Result<Self>> + Send;
}

/// A session and what was prepared on it, remade after a loss.
pub struct Link<P> {
    target: Target,
    live: Option<(Session, P)>,
    pause: Duration,
}

impl<P: Prepared> Link<P> {
    pub fn new(target: Target) -> Self {
        Self { target, live: None, pause: Duration::ZERO }
    }

    /// The session, opened and prepared first if need be.
    pub async fn ready(&mut self) -> Result<(&Client, &P)> {
        if self.live.as_ref().is_none_or(|(session, _)| session.is_closed()) {
            self.live = None;
            let opened = within(async {
                let session = open(&self.target).await?;
                let prepared = P::prepare(&session, &self.target.schema).await?;
                Ok((session, prepared))
            });
            match opened.await {
                Ok(live) => self.live = Some(live),
                Err(error) => return Err(self.lost(error)),
            }
        }
        match &self.live {
            Some((session, prepared)) => Ok((session, prepared)),
            None => unreachable!("it was opened just above"),
        }
    }

    /// To be told of every outcome: after an error the next call opens a new session, after a pause that grows while the
    /// errors go on.
    pub fn settle<T>(&mut self, outcome: Result<T>) -> Result<T> {
        match outcome {
            Ok(value) => {
                self.pause = Duration::ZERO;
                Ok(value)
            }
            Err(error) => Err(self.lost(error)),
        }
    }

    fn lost(&mut self, error: EngineError) -> EngineError {
        self.live = None;
        self.pause = (self.pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
        error
    }

    /// How long to wait before the next try; jittered, so that a fleet does not come back all at once.
    pub fn pause(&self) -> Duration {
        jittered(self.pause)
    }
}

/// Half to all of it.
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(rand::rng().random_range(0.5..1.0))
}

/// The work's outcome, or that the connection is silent.
pub async fn within<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(SILENCE, work).await.unwrap_or_else(|_| {
        Err(EngineError::Unreachable {
            target: "the server".into(),
            why: format!("no answer within {} s", SILENCE.as_secs()),
            source: None,
        })
    })
}
