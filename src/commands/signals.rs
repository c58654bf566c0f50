//! SIGTERM and SIGINT for commands that run until told to stop.

use std::fmt;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Context;
use crate::engine::worker::handlers::kill_programs;

pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on these signals are waited for instead of ending the process.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next one.
    pub async fn next(&mut self) -> Caught {
        tokio::select! {
            _ = self.terminate.recv() => Caught::Terminate,
            _ = self.interrupt.recv() => Caught::Interrupt,
        }
    }
}

/// A signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Caught {
    Terminate,
    Interrupt,
}

impl Caught {
    /// As a shell shows a process that this signal ended.
    pub fn exit_code(self) -> i32 {
        match self {
            Self::Terminate => 143,
            Self::Interrupt => 130,
        }
    }
}

impl fmt::Display for Caught {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Terminate => "SIGTERM",
            Self::Interrupt => "SIGINT",
        })
    }
}

/// For the second signal: ends the process with the signal's exit code, waiting for nothing. The programs it runs, and a
/// private server, end with it.
pub fn exit_now(context: &Context, signal: Caught) -> ! {
    context.note(&format!("{signal} again: exiting at once"));
    kill_programs();
    std::process::exit(signal.exit_code())
}
