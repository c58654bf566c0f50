//! Who leads.
//!
//! The lead is an advisory lock of a *transaction* that stays open on a connection of its own. A transaction pooler leaves an
//! open transaction on its server connection, so it holds through poolers, which tear a session lock from its session; and
//! it ends with the connection, at once. Once begun the transaction takes no snapshot, no xid and no other lock: it holds back
//! neither vacuum nor a concurrent index build, and is never met as an old one that pins xmin.
//!
//! It is also a lease. A leader whose machine is gone without a word would hold the lock for as long as TCP believes in it,
//! which is hours; so the server ends the transaction when it has heard nothing for [`MaintenanceOptions::lead_lease`]
//! (`idle_in_transaction_session_timeout`), and the leader speaks up well before that.
//!
//! [`MaintenanceOptions::lead_lease`]: super::MaintenanceOptions::lead_lease

use std::future::Future;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio::time::{sleep, timeout};
use tokio_postgres::Client;

use crate::engine::connect::{Canceller, Session};
use crate::engine::error::{EngineError, Result};
use crate::engine::schema::Schema;
use crate::engine::target::Target;
use crate::engine::worker::link::{self, within};

/// How often in a lease the leader says that it lives.
const BEATS: u32 = 5;

/// A pass takes seconds at worst; after this long its connection is taken for dead.
const LONGEST_PASS: Duration = Duration::from_secs(300);

/// How long an orderly goodbye may take.
const GOODBYE: Duration = Duration::from_secs(1);

/// Names a server, unlike its identifier, which a standby shares.
const SERVER: &str = "extract(epoch FROM pg_postmaster_start_time())";

/// Why there is no lead.
#[derive(Debug)]
pub enum NotLeading {
    /// Somebody else has it, or nobody can on this server.
    Refused(&'static str),
    Failed(EngineError),
}

impl From<EngineError> for NotLeading {
    fn from(error: EngineError) -> Self {
        Self::Failed(error)
    }
}

/// The lead, for as long as its transaction lives. Dropping it gives it up.
pub struct Lead {
    session: Session,
    /// The value of a setting that no other transaction has.
    mark: String,
    server: String,
    lease: Duration,
}

impl Lead {
    /// Takes it if nobody has it; else gives the session back if it is of further use.
    pub async fn take(
        session: Session,
        schema: &Schema,
        lease: Duration,
    ) -> (Result<Self, NotLeading>, Option<Session>) {
        match within(Self::begin(&session, schema, lease)).await {
            Ok(Begun::Ours { mark, server }) => (Ok(Self { session, mark, server, lease }), None),
            Ok(Begun::Refused { reason, keep }) => (Err(NotLeading::Refused(reason)), keep.then_some(session)),
            Err(error) => (Err(error.into()), None),
        }
    }

    async fn begin(session: &Session, schema: &Schema, lease: Duration) -> Result<Begun> {
        let mark = format!("{:016x}", rand::random::<u64>());
        // One message, so that nothing can come between BEGIN and the lock. From 17 on there is a limit for whole transactions.
        let sql = schema.render(&format!(
            "BEGIN ISOLATION LEVEL READ COMMITTED;
             SET LOCAL idle_in_transaction_session_timeout = {};
             SET LOCAL awactl.lead = '{mark}';
             SELECT CASE WHEN current_setting('server_version_num')::integer >= 170000
                         THEN set_config('transaction_timeout', '0', true) END;
             SELECT CASE WHEN pg_is_in_recovery() THEN 'standby'
                         WHEN current_setting('transaction_read_only') = 'on' THEN 'read-only'
                         WHEN pg_try_advisory_xact_lock('{{schema}}.queue_terminal_rollup_deltas'::regclass::oid::integer, 0) THEN 'ours'
                         ELSE 'taken' END,
                    {SERVER}",
            lease.as_millis().max(1),
        ));
        let row = session.simple_row(&sql).await?;
        let (reason, keep) = match row.get(0) {
            Some("ours") => return Ok(Begun::Ours { mark, server: row.get(1).unwrap_or_default().to_owned() }),
            // The next connection may find the primary.
            Some("standby") => ("the server is a standby", false),
            Some("read-only") => ("the server is read-only", false),
            _ => ("another process leads", true),
        };
        session.batch_execute("ROLLBACK").await?;
        Ok(Begun::Refused { reason, keep })
    }

    /// Makes sure that it is still held, and tells the server that its holder lives.
    pub async fn renew(&self) -> Result<()> {
        // SHOW, because a SELECT takes a snapshot.
        let row = timeout(self.lease, self.session.simple_row("SHOW awactl.lead")).await;
        let row = row.map_err(|_| lost(format!("no answer within {} s", self.lease.as_secs_f64())))?;
        match row {
            Ok(row) if row.get(0) == Some(&*self.mark) => Ok(()),
            // Any other transaction knows another value, or none.
            Ok(_) | Err(EngineError::Database(_)) => {
                Err(lost("its transaction was ended, or taken from its connection".into()))
            }
            Err(error) => Err(error),
        }
    }

    /// Renews it over and over; returns why it was lost, as soon as it is.
    pub async fn keep(&self) -> EngineError {
        loop {
            tokio::select! {
                biased;
                () = self.session.closed() => return lost("its connection ended".into()),
                () = sleep(self.lease / BEATS) => {}
            }
            let renewed = tokio::select! {
                biased;
                () = self.session.closed() => return lost("its connection ended".into()),
                renewed = self.renew() => renewed,
            };
            if let Err(error) = renewed {
                return error;
            }
        }
    }

    /// Lets somebody else lead.
    pub async fn give_up(self) {
        let goodbye = async {
            // In so many words: behind a pooler the server connection outlives this one.
            let _ = self.session.batch_execute("ROLLBACK").await;
            self.session.close().await;
        };
        let _ = timeout(GOODBYE, goodbye).await;
    }
}

enum Begun {
    Ours { mark: String, server: String },
    Refused { reason: &'static str, keep: bool },
}

fn lost(why: String) -> EngineError {
    EngineError::Unreachable { target: "the lead of maintenance".into(), why, source: None }
}

/// The connection that the passes run on.
pub(super) struct Passes {
    session: Session,
}

impl Passes {
    /// Opens it, on the lead's server and no other.
    pub async fn open(target: &Target, lead: &Lead) -> Result<Self> {
        let session = within(link::open(target)).await.map_err(|error| match error {
            EngineError::Unreachable { target, why, source } if lead.session.is_pooled() => {
                let why = format!("{why} (the pooler must have a second connection for whoever leads)");
                EngineError::Unreachable { target, why, source }
            }
            error => error,
        })?;
        let passes = Self { session };
        passes.check(lead).await?;
        Ok(passes)
    }

    /// That it is still on the server where the lead is, and that this can be written to.
    pub async fn check(&self, lead: &Lead) -> Result<()> {
        let sql = format!("SELECT pg_is_in_recovery(), {SERVER}");
        let row = timeout(lead.lease, self.session.simple_row(&sql)).await;
        let row = row.map_err(|_| astray("it does not answer"))??;
        match (row.get(0), row.get(1)) {
            (Some("f"), Some(server)) if server == lead.server => Ok(()),
            (Some("f"), _) => Err(astray("it is on another server than the lead")),
            _ => Err(astray("it is on a standby")),
        }
    }

    pub fn client(&self) -> &Client {
        &self.session
    }

    /// A pass; one that is dropped on the way is cancelled on the server too.
    pub async fn run<T>(&self, pass: impl Future<Output = Result<T>>) -> Result<T> {
        let mut abandoned = CancelOnDrop(Some(self.session.canceller()));
        let outcome = timeout(LONGEST_PASS, pass).await.map_err(|_| astray("a pass does not end"))?;
        abandoned.0 = None;
        outcome
    }

    pub async fn close(self) {
        let _ = timeout(GOODBYE, self.session.close()).await;
    }
}

fn astray(why: &str) -> EngineError {
    EngineError::Unreachable { target: "the server of maintenance".into(), why: why.into(), source: None }
}

struct CancelOnDrop(Option<Canceller>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let (Some(canceller), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(timeout(GOODBYE, canceller.cancel()));
        }
    }
}

/// Who leads.
#[derive(Debug, Clone, Serialize)]
pub struct LeaderInfo {
    pub pid: i32,
    pub application_name: String,
    pub client: Option<String>,
    /// When it began to lead; not told to those who may not see other roles' sessions.
    pub since: Option<DateTime<Utc>>,
}

/// Whose transaction holds the lead; `None` when nobody maintains.
pub async fn leader(client: &Client, schema: &Schema) -> Result<Option<LeaderInfo>> {
    let sql = schema.render(
        "SELECT a.pid, a.application_name, host(a.client_addr), a.xact_start
         FROM pg_locks AS l
         JOIN pg_stat_activity AS a ON a.pid = l.pid
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.objid = 0 AND a.datname = current_database()
           AND l.database = a.datid AND l.classid = '{schema}.queue_terminal_rollup_deltas'::regclass::oid",
    );
    let Some(row) = client.query_typed_opt(&sql, &[]).await? else { return Ok(None) };
    Ok(Some(LeaderInfo {
        pid: row.try_get(0)?,
        application_name: row.try_get(1)?,
        client: row.try_get(2)?,
        since: row.try_get(3)?,
    }))
}
