//! Sessions on the database.
//!
//! Hosts are tried in order by this module rather than by tokio-postgres, for three reasons:
//! unix sockets and TLS hosts may be mixed, `sslmode=allow|prefer` falls back like libpq, and
//! the error can say for each host why it was passed over.

use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::time::Duration;

use rand::seq::SliceRandom as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_postgres::config::{SslMode as WireTls, SslNegotiation};
use tokio_postgres::error::SqlState;
use tokio_postgres::{
    AsyncMessage, CancelToken, Client, Config, Connection, NoTls, SimpleQueryMessage, SimpleQueryRow,
};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::error::{EngineError, Result, chain};
use super::pooled::{self, Plain, Unnamed, UnnamedOver};
use super::target::{HostSpec, SessionAttrs, Target};
use super::tls::SslMode;

/// A client and the task that moves its bytes. Dropping it closes the connection.
pub struct Session {
    client: Client,
    task: JoinHandle<()>,
    /// Its sender lives as long as the task.
    alive: watch::Receiver<()>,
    way: Way,
    pooled: bool,
}

/// How the server was reached, for reaching it again to cancel.
#[derive(Clone)]
enum Way {
    NoTls,
    Tls(MakeRustlsConnect),
    /// Without TLS, through [`Unnamed`].
    Plain,
    Socket(PathBuf),
}

impl Session {
    /// Waits until the connection has ended, whoever ended it.
    pub async fn closed(&self) {
        let mut alive = self.alive.clone();
        while alive.changed().await.is_ok() {}
    }

    /// Whether a transaction pooler is on the way, so that what a session leaves on its connection is lost to it.
    pub fn is_pooled(&self) -> bool {
        self.pooled
    }

    /// What cancels the statement that runs on this session.
    pub fn canceller(&self) -> Canceller {
        Canceller { token: self.client.cancel_token(), way: self.way.clone() }
    }

    /// One statement without parameters that gives one row, as text. Unlike a prepared one it is a single message, which a
    /// transaction pooler cannot tear apart.
    pub async fn simple_row(&self, sql: &str) -> Result<SimpleQueryRow> {
        simple_row(&self.client, sql).await
    }

    /// Says goodbye and waits until the server has heard it.
    pub async fn close(self) {
        drop(self.client);
        // The task only ends early by panicking, which leaves nothing to close.
        let _ = self.task.await;
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for Session {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// Cancels what a session runs; outlives it.
pub struct Canceller {
    token: CancelToken,
    way: Way,
}

impl Canceller {
    /// Asks for it. Whether there was anything to cancel is never told.
    pub async fn cancel(self) {
        let sent = match self.way {
            Way::NoTls => self.token.cancel_query(NoTls).await,
            Way::Tls(tls) => self.token.cancel_query(tls).await,
            Way::Plain => self.token.cancel_query(Plain).await,
            Way::Socket(path) => match UnixStream::connect(path).await {
                Ok(stream) => self.token.cancel_query_raw(stream, NoTls).await,
                // The server is gone, and its statements with it.
                Err(_) => Ok(()),
            },
        };
        if let Err(error) = sent {
            tracing::debug!("could not cancel: {}", chain(&error));
        }
    }
}

pub(super) async fn simple_row(client: &Client, sql: &str) -> Result<SimpleQueryRow> {
    let messages = client.simple_query(sql).await?;
    let row = messages.into_iter().rev().find_map(|message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    });
    row.ok_or_else(|| EngineError::Unreachable {
        target: "the server".into(),
        why: "it answered without a row".into(),
        source: None,
    })
}

pub async fn connect(target: &Target) -> Result<Session> {
    connect_with(target, None).await
}

/// Like [`connect`], with the server's notifications and notices sent to the channel; it is
/// closed when the connection ends.
pub async fn connect_with_messages(target: &Target, messages: UnboundedSender<AsyncMessage>) -> Result<Session> {
    connect_with(target, Some(messages)).await
}

type Messages = Option<UnboundedSender<AsyncMessage>>;

async fn connect_with(target: &Target, messages: Messages) -> Result<Session> {
    let mut hosts: Vec<_> = target.hosts.iter().collect();
    if target.shuffle_hosts {
        hosts.shuffle(&mut rand::rng());
    }
    let mut reasons = Vec::new();
    let mut last = None;
    // "prefer-standby" is a wish: a second round takes whatever answers.
    let rounds: &[SessionAttrs] = match target.session_attrs {
        SessionAttrs::PreferStandby => &[SessionAttrs::Standby, SessionAttrs::Any],
        ref other => std::slice::from_ref(other),
    };
    for wanted in rounds {
        for spec in &hosts {
            let attempt = connect_host(target, spec, *wanted, &messages);
            let outcome = match target.timeout {
                Some(limit) => tokio::time::timeout(limit, attempt).await.unwrap_or_else(|_| Err(Miss::Slow(limit))),
                None => attempt.await,
            };
            match outcome {
                Ok(session) => return Ok(session),
                Err(Miss::Invalid(error)) => return Err(error),
                Err(Miss::Slow(limit)) => {
                    reasons.push(format!("{spec}: no answer within {} s", limit.as_secs()));
                }
                Err(Miss::Unanswered(error)) => reasons.push(format!("{spec}: {error}")),
                Err(Miss::Role(reason)) => reasons.push(format!("{spec}: {reason}")),
                Err(Miss::Failed(error)) => {
                    reasons.push(format!("{spec}: {}", chain(&error)));
                    last = Some(error);
                }
            }
        }
    }
    Err(EngineError::Unreachable {
        target: target.redacted(),
        why: reasons.join("; "),
        source: last.map(|error| Box::new(error) as _),
    })
}

/// Why one host gave no session.
enum Miss {
    Slow(Duration),
    Role(&'static str),
    Failed(tokio_postgres::Error),
    /// It let us in and then did not say what it is.
    Unanswered(EngineError),
    Invalid(EngineError),
}

/// One host. A session that turns out to go through a transaction pooler is replaced by one that is prepared for that.
async fn connect_host(
    target: &Target,
    spec: &HostSpec,
    wanted: SessionAttrs,
    messages: &Messages,
) -> Result<Session, Miss> {
    let session = reach(target, spec, messages, false).await?;
    let server = "SELECT pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', pg_backend_pid()";
    let server = simple_row(&session, server).await.map_err(Miss::Unanswered)?;
    check_role(server.get(0) == Some("t"), server.get(1) == Some("t"), wanted)?;
    let told = pooled::told_pid(&session).await.map_err(Miss::Unanswered)?;
    if server.get(2) == Some(&*told.to_string()) {
        return Ok(session);
    }
    let known = target.pooled.get().copied();
    let swaps = match known {
        Some(swaps) => swaps,
        // One that does not get a second session may be that short of connections because it shares them.
        None => match reach(target, spec, &None, false).await {
            Ok(other) => pooled::swaps_connections(&session, &other).await.map_err(Miss::Unanswered)?,
            Err(_) => true,
        },
    };
    if !*target.pooled.get_or_init(|| swaps) {
        return Ok(session);
    }
    session.close().await;
    reach(target, spec, messages, true).await
}

/// A session on the host, whatever the server is.
async fn reach(target: &Target, spec: &HostSpec, messages: &Messages, pooled: bool) -> Result<Session, Miss> {
    let mut config = target.config_for(spec);
    // libpq never speaks TLS over a unix socket, whatever sslmode says.
    let attempts: &[WireTls] = match target.tls.mode {
        _ if spec.is_socket() => &[WireTls::Disable],
        SslMode::Disable => &[WireTls::Disable],
        SslMode::Allow => &[WireTls::Disable, WireTls::Require],
        SslMode::Prefer if pooled => &[WireTls::Require, WireTls::Disable],
        SslMode::Prefer => &[WireTls::Prefer, WireTls::Disable],
        SslMode::Require | SslMode::VerifyCa | SslMode::VerifyFull => &[WireTls::Require],
    };
    let mut failure = None;
    for tls in attempts {
        config.ssl_mode(*tls);
        let outcome = match (tls, pooled) {
            (WireTls::Disable, false) => config.connect(NoTls).await.map(|made| session(made, messages, Way::NoTls)),
            (WireTls::Disable, true) => reach_plain(config.clone(), spec, messages).await,
            (_, pooled) => {
                let connector = target.tls.connector().map_err(Miss::Invalid)?;
                let way = Way::Tls(connector.clone());
                if pooled {
                    config.connect(UnnamedOver(connector)).await.map(|made| session(made, messages, way))
                } else {
                    config.connect(connector).await.map(|made| session(made, messages, way))
                }
            }
        };
        match outcome {
            Ok(session) => return Ok(Session { pooled, ..session }),
            // The other kind of connection can only help if it was the kind that was refused.
            Err(error) if !depends_on_tls(&error) => return Err(Miss::Failed(error)),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    Err(failure.map_or(Miss::Role("no way to connect was allowed"), Miss::Failed))
}

/// Through a pooler, without TLS.
async fn reach_plain(
    mut config: Config,
    spec: &HostSpec,
    messages: &Messages,
) -> Result<Session, tokio_postgres::Error> {
    if let Some(path) = spec.socket() {
        // The driver gives no way into a socket's stream but that of bringing one along.
        loop {
            if let Ok(stream) = UnixStream::connect(&path).await {
                let made = config.connect_raw(Unnamed::new(stream), NoTls).await?;
                return Ok(session(made, messages, Way::Socket(path)));
            }
            // Says why not, in its own words; if it can after all, then so can we.
            drop(config.connect(NoTls).await?);
        }
    }
    config.ssl_mode(WireTls::Require).ssl_negotiation(SslNegotiation::Direct);
    config.connect(UnnamedOver(Plain)).await.map(|made| session(made, messages, Way::Plain))
}

fn depends_on_tls(error: &tokio_postgres::Error) -> bool {
    match error.code() {
        Some(code) => *code == SqlState::INVALID_AUTHORIZATION_SPECIFICATION,
        None => error.to_string().contains("TLS"),
    }
}

fn check_role(standby: bool, read_only: bool, wanted: SessionAttrs) -> Result<(), Miss> {
    match wanted {
        SessionAttrs::ReadWrite if read_only => Err(Miss::Role("it is read-only")),
        SessionAttrs::ReadOnly if !read_only => Err(Miss::Role("it is not read-only")),
        SessionAttrs::Primary if standby => Err(Miss::Role("it is a standby")),
        SessionAttrs::Standby if !standby => Err(Miss::Role("it is not a standby")),
        _ => Ok(()),
    }
}

fn session<S, T>((client, connection): (Client, Connection<S, T>), messages: &Messages, way: Way) -> Session
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (living, alive) = watch::channel(());
    let messages = messages.clone();
    let task = tokio::spawn(async move {
        pump(connection, messages).await;
        drop(living);
    });
    Session { client, task, alive, way, pooled: false }
}

async fn pump<S, T>(mut connection: Connection<S, T>, messages: Messages)
where
    S: AsyncRead + AsyncWrite + Unpin,
    T: AsyncRead + AsyncWrite + Unpin,
{
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match (message, &messages) {
            // A receiver that has gone away is not interested any more.
            (Ok(message), Some(channel)) => drop(channel.send(message)),
            (Ok(AsyncMessage::Notice(notice)), None) => {
                tracing::debug!(severity = notice.severity(), "{}", notice.message());
            }
            (Ok(_), None) => {}
            (Err(error), _) => {
                tracing::debug!("connection ended: {}", chain(&error));
                break;
            }
        }
    }
}
