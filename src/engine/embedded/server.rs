//! The postmaster as a child process: started, watched, stopped.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::home::Home;
use super::unprivileged::run_as;
use super::{EmbeddedError, Installation, keeper};

/// How a server is stopped, by PostgreSQL's own names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shutdown {
    /// Sessions are ended, a checkpoint is written.
    Fast,
    /// All processes quit; the next start recovers from the WAL.
    Immediate,
    /// SIGKILL to the postmaster.
    Kill,
}

impl Shutdown {
    /// The signals to send, and how long to wait after each before the next, harsher one.
    pub fn steps(self) -> impl Iterator<Item = (Signal, Duration)> {
        let all = [(Signal::SIGINT, 60), (Signal::SIGQUIT, 15), (Signal::SIGKILL, 15)];
        let skip = match self {
            Shutdown::Fast => 0,
            Shutdown::Immediate => 1,
            Shutdown::Kill => 2,
        };
        all.into_iter().skip(skip).map(|(signal, seconds)| (signal, Duration::from_secs(seconds)))
    }
}

/// A running postmaster; stopped when dropped.
pub(super) struct Postmaster {
    child: Child,
    on_drop: Shutdown,
}

impl Postmaster {
    pub fn spawn(home: &Home, installation: &Installation, port: u16) -> Result<Postmaster, EmbeddedError> {
        let program = installation.bin.join("postgres");
        let log = File::options().create(true).append(true).open(&home.log);
        let log = log.map_err(EmbeddedError::io("open", &home.log))?;
        let err = log.try_clone().map_err(EmbeddedError::io("open", &home.log))?;
        let mut command = Command::new(&program);
        command.arg("-D").arg(&home.data);
        // These make the server reachable for us and nobody else, so nothing in the cluster may override them.
        let sockets = home.socket_dir().to_string_lossy().replace('"', "\"\"");
        for setting in [
            "listen_addresses=127.0.0.1".to_owned(),
            format!("port={port}"),
            format!("unix_socket_directories=\"{sockets}\""),
            "unix_socket_permissions=0700".to_owned(),
        ] {
            command.arg("-c").arg(setting);
        }
        clean_environment(&mut command);
        command.current_dir(&home.data).stdin(Stdio::null()).stdout(log).stderr(err);
        run_as(&mut command, home.account.as_ref());
        let on_drop = if home.ephemeral { Shutdown::Immediate } else { Shutdown::Fast };
        let on_death = if home.ephemeral { Signal::SIGQUIT } else { Signal::SIGINT };
        let child = keeper::spawn(command, on_death).map_err(EmbeddedError::io("run", &program))?;
        Ok(Postmaster { child, on_drop })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Stops the server and waits until it is gone; an ever harsher signal is used when it takes too long.
    pub fn stop(&mut self, shutdown: Shutdown) -> Result<(), EmbeddedError> {
        for (signal, patience) in shutdown.steps() {
            // Not waited for yet, so the number is still this child's.
            if self.exited().is_none() {
                let _ = kill(Pid::from_raw(self.pid() as i32), signal);
            }
            let deadline = Instant::now() + patience;
            while Instant::now() < deadline {
                if self.exited().is_some() {
                    return Ok(());
                }
                sleep(Duration::from_millis(5));
            }
            tracing::warn!(pid = self.pid(), %signal, "the embedded server did not stop in time");
        }
        Err(EmbeddedError::NotStopped { pid: self.pid() })
    }
}

impl Drop for Postmaster {
    fn drop(&mut self) {
        if let Err(error) = self.stop(self.on_drop) {
            tracing::error!(%error, "the embedded server may still run");
        }
    }
}

/// Nothing of the caller's `PG*` variables or locale may reach the server. The parts of its messages that we read
/// are English then.
pub(super) fn clean_environment(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let bytes = name.as_bytes();
        if bytes.starts_with(b"PG") || bytes.starts_with(b"LC_") || bytes.starts_with(b"LANG") {
            command.env_remove(name);
        }
    }
    command.env("LC_ALL", "C");
}

/// A loopback port that is free now. Someone else may still take it before the server does.
pub(super) fn free_port() -> Result<u16, EmbeddedError> {
    let bound = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(EmbeddedError::io("find a free port on", Path::new("127.0.0.1")))
}

/// What the server has written to its log since it had `offset` bytes.
pub(super) fn log_since(log: &Path, offset: u64) -> String {
    let read = || -> io::Result<String> {
        let mut file = File::open(log)?;
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

pub(super) fn log_size(log: &Path) -> u64 {
    fs::metadata(log).map_or(0, |meta| meta.len())
}

pub(super) fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}
