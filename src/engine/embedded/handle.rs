//! A running embedded server, as its owner holds it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use tokio::sync::Mutex;
use tokio::time::{sleep, timeout};
use tokio_postgres::NoTls;

use super::home::Home;
use super::recover::stop_stale;
use super::server::{Postmaster, Shutdown, free_port, log_since, log_size, tail};
use super::{EmbeddedError, Installation, Options, Progress, Task, Version, cluster, exit, find};

/// A private PostgreSQL server. Stopped when dropped, when the process ends, and when the process is killed.
pub struct Embedded {
    /// Before the rest, for the order in which fields are dropped: the folder goes after its server.
    state: Mutex<State>,
    /// The postmaster's, 0 while there is none.
    pid: AtomicU32,
    installation: Installation,
    endpoint: Endpoint,
    data: PathBuf,
    log: PathBuf,
    start_timeout: Duration,
}

struct State {
    postmaster: Option<Postmaster>,
    /// Given up at the end, and with it the lock.
    home: Option<Home>,
}

impl Embedded {
    /// Finds or fetches a server, makes its cluster if there is none, and waits until it answers.
    ///
    /// Holds on to nothing of the runtime it is called in, so that one server can serve many.
    pub async fn start(options: Options) -> Result<Embedded, EmbeddedError> {
        let task = Task::new(options.progress.clone());
        let _cancel = task.cancel_on_drop();
        let start_timeout = options.start_timeout;
        let prepare = {
            let task = task.clone();
            move || {
                let home = Home::open(&options, &task)?;
                let cluster = cluster::major_version(&home)?.map(|major| (major, home.data.as_path()));
                let installation = find::find_or_fetch(&options.search, cluster, home.account.as_ref(), &task)?;
                let password = cluster::prepare(&home, &installation, &options.settings, &task)?;
                Ok((home, installation, password))
            }
        };
        let (home, installation, password) = blocking(prepare).await?;
        task.report(Progress::Starting { version: installation.version.to_string() });
        let mut endpoint = Endpoint { socket_dir: home.socket_dir().to_path_buf(), port: 0, password };
        let postmaster = bring_up(&home, &installation, &mut endpoint, start_timeout).await?;
        Ok(Embedded {
            pid: AtomicU32::new(postmaster.pid()),
            data: home.data.clone(),
            log: home.log.clone(),
            state: Mutex::new(State { postmaster: Some(postmaster), home: Some(home) }),
            installation,
            endpoint,
            start_timeout,
        })
    }

    /// How to connect, over the unix socket, as the superuser `postgres` to the database `postgres`.
    pub fn config(&self) -> tokio_postgres::Config {
        self.endpoint.config()
    }

    /// The same as an address: `postgresql://postgres@%2Fpath%2Fof%2Fsocket:port/postgres`.
    pub fn url(&self) -> String {
        self.endpoint.url("postgres")
    }

    pub fn url_of(&self, database: &str) -> String {
        self.endpoint.url(database)
    }

    /// The address for programs that cannot use a unix socket. Contains the password.
    pub fn tcp_url(&self) -> String {
        let Endpoint { port, password, .. } = &self.endpoint;
        format!("postgresql://postgres:{password}@127.0.0.1:{port}/postgres")
    }

    pub fn tcp_port(&self) -> u16 {
        self.endpoint.port
    }

    pub fn socket_dir(&self) -> &Path {
        &self.endpoint.socket_dir
    }

    pub fn bin_dir(&self) -> &Path {
        &self.installation.bin
    }

    pub fn version(&self) -> &Version {
        &self.installation.version
    }

    pub fn data_dir(&self) -> &Path {
        &self.data
    }

    pub fn log_file(&self) -> &Path {
        &self.log
    }

    /// The postmaster's process, unless the server is stopped.
    pub fn pid(&self) -> Option<u32> {
        Some(self.pid.load(Ordering::Relaxed)).filter(|pid| *pid != 0)
    }

    /// Stops the server in order and gives the folder up; an ephemeral one is removed.
    pub async fn stop(self) -> Result<(), EmbeddedError> {
        blocking(move || self.shut_down()).await
    }

    /// Stops the server in order and keeps the folder; [`Self::start_again`] goes on with it.
    pub async fn halt(&self) -> Result<(), EmbeddedError> {
        self.end(Shutdown::Fast).await
    }

    /// Crashes the server: every process quits at once. The folder stays ours; see [`Self::start_again`].
    pub async fn stop_immediate(&self) -> Result<(), EmbeddedError> {
        self.end(Shutdown::Immediate).await
    }

    /// Crashes the server by SIGKILL to the postmaster; what it leaves behind is ended at the next start.
    pub async fn kill(&self) -> Result<(), EmbeddedError> {
        self.end(Shutdown::Kill).await
    }

    /// Starts a stopped or crashed server again, in the same folder and at the same addresses.
    pub async fn start_again(&self) -> Result<(), EmbeddedError> {
        let mut state = self.state.lock().await;
        if state.postmaster.as_mut().is_some_and(|postmaster| postmaster.exited().is_none()) {
            return Err(EmbeddedError::Running);
        }
        state.postmaster = None;
        let Some(home) = &state.home else {
            return Err(EmbeddedError::Cancelled);
        };
        let data = self.data.clone();
        blocking(move || stop_stale(&data, Shutdown::Fast, &Task::default())).await?;
        let mut endpoint = self.endpoint.clone();
        let postmaster = bring_up(home, &self.installation, &mut endpoint, self.start_timeout).await?;
        self.pid.store(postmaster.pid(), Ordering::Relaxed);
        state.postmaster = Some(postmaster);
        Ok(())
    }

    /// An orderly stop and start.
    pub async fn restart(&self) -> Result<(), EmbeddedError> {
        self.end(Shutdown::Fast).await?;
        self.start_again().await
    }

    /// For a server that many tests share through a static: it is stopped, and an ephemeral folder removed, when the
    /// process exits, though statics are not dropped then.
    pub fn leak_until_exit(self) -> &'static Embedded {
        let leaked = Box::leak(Box::new(self));
        exit::stop_at_exit(leaked);
        leaked
    }

    async fn end(&self, shutdown: Shutdown) -> Result<(), EmbeddedError> {
        let mut state = self.state.lock().await;
        let stopped = match state.postmaster.take() {
            Some(mut postmaster) => blocking(move || postmaster.stop(shutdown)).await,
            None => Ok(()),
        };
        self.pid.store(0, Ordering::Relaxed);
        stopped
    }

    /// Stops the server and gives its folder up. Blocks.
    pub(super) fn shut_down(&self) -> Result<(), EmbeddedError> {
        // Only held at exit, by a start or stop under way in another thread; its server ends with the process.
        let Ok(mut state) = self.state.try_lock() else {
            return Ok(());
        };
        let ephemeral = state.home.as_ref().is_some_and(|home| home.ephemeral);
        let stopped = match state.postmaster.take() {
            // Nothing of it is kept, so there is nothing to write out first.
            Some(mut postmaster) if ephemeral => postmaster.stop(Shutdown::Immediate),
            Some(mut postmaster) => postmaster.stop(Shutdown::Fast),
            None => Ok(()),
        };
        self.pid.store(0, Ordering::Relaxed);
        state.home = None;
        stopped
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        if let Err(error) = self.shut_down() {
            tracing::error!(%error, "the embedded server may still run");
        }
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded")
            .field("version", &self.installation.version.to_string())
            .field("data", &self.data)
            .field("port", &self.endpoint.port)
            .field("pid", &self.pid())
            .finish_non_exhaustive()
    }
}

#[derive(Clone)]
struct Endpoint {
    socket_dir: PathBuf,
    /// 0 until the server first runs.
    port: u16,
    password: String,
}

impl Endpoint {
    fn config(&self) -> tokio_postgres::Config {
        let mut config = tokio_postgres::Config::new();
        config.host_path(&self.socket_dir).port(self.port).user("postgres").dbname("postgres");
        config
    }

    fn url(&self, database: &str) -> String {
        let dir = encode(self.socket_dir.as_os_str().as_encoded_bytes());
        format!("postgresql://postgres@{dir}:{}/{}", self.port, encode(database.as_bytes()))
    }
}

/// Percent-encodes all but letters, digits and `-._~`.
fn encode(bytes: &[u8]) -> String {
    let encoded = |byte: &u8| match byte {
        b'-' | b'.' | b'_' | b'~' => char::from(*byte).to_string(),
        byte if byte.is_ascii_alphanumeric() => char::from(*byte).to_string(),
        byte => format!("%{byte:02X}"),
    };
    bytes.iter().map(encoded).collect()
}

/// Starts the postmaster and waits until it answers. Without a port yet, one is chosen, and another if that is lost.
async fn bring_up(
    home: &Home,
    installation: &Installation,
    endpoint: &mut Endpoint,
    patience: Duration,
) -> Result<Postmaster, EmbeddedError> {
    let deadline = Instant::now() + patience;
    let keep_port = endpoint.port != 0;
    loop {
        if !keep_port {
            endpoint.port = free_port()?;
        }
        let offset = log_size(&home.log);
        let mut postmaster = Postmaster::spawn(home, installation, endpoint.port)?;
        let reason = match until_ready(&mut postmaster, &endpoint.config(), deadline).await {
            Ok(()) => return Ok(postmaster),
            Err(reason) => reason,
        };
        let log = log_since(&home.log, offset);
        // A stolen port, or shared memory that a killed server's last process is just leaving, is worth another try.
        let passing = ["could not create any TCP/IP sockets", "pre-existing shared memory block"];
        if passing.iter().any(|text| log.contains(text)) && Instant::now() < deadline {
            sleep(Duration::from_millis(100)).await;
            continue;
        }
        // A server in recovery takes an orderly stop only when it is through.
        let _ = blocking(move || postmaster.stop(Shutdown::Immediate)).await;
        return Err(EmbeddedError::NotStarted { reason, log: home.log.clone(), tail: tail(&log) });
    }
}

/// Waits until the server accepts a session; says why not when it ended or the time is over.
async fn until_ready(
    postmaster: &mut Postmaster,
    config: &tokio_postgres::Config,
    deadline: Instant,
) -> Result<(), String> {
    let mut last = String::from("it did not answer");
    loop {
        if let Some(status) = postmaster.exited() {
            return Err(format!("it ended ({status})"));
        }
        match timeout(Duration::from_secs(5), config.connect(NoTls)).await {
            Ok(Ok(_)) => return Ok(()),
            Ok(Err(error)) => last = error.as_db_error().map_or(error.to_string(), |error| error.message().to_owned()),
            Err(_) => {}
        }
        if Instant::now() > deadline {
            return Err(format!("not ready in time: {last}"));
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Runs blocking work off the runtime's threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, EmbeddedError> + Send + 'static,
) -> Result<T, EmbeddedError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => Err(EmbeddedError::Cancelled),
    }
}
