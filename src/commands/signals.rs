//! SIGTERM and SIGINT for commands that run until told to stop.

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::Context;

pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// From now on these signals are waited for instead of ending the process.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The name of the next one.
    pub async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

/// For the second signal: ends the process with 130, waiting for nothing. A private server ends with it.
pub fn exit_now(context: &Context, signal: &str) -> ! {
    context.note(&format!("{signal} again: exiting at once"));
    std::process::exit(130)
}
