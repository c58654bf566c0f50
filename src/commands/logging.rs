//! Messages on standard error, as text or as JSON lines.

use std::io::{self, IsTerminal as _};

use clap::ValueEnum;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::EnvFilter;

use super::GlobalArgs;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Called once, before anything logs. `AWACTL_LOG` takes tracing's filter syntax.
pub fn start(global: &GlobalArgs) {
    let level = match global.verbose {
        0 => LevelFilter::WARN,
        1 => LevelFilter::INFO,
        2 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let filter = match std::env::var("AWACTL_LOG") {
        Ok(text) if !text.is_empty() => EnvFilter::builder().with_default_directive(level.into()).parse_lossy(text),
        // Libraries may log what they send; only our own messages by default.
        _ => EnvFilter::new(format!("awactl={level}")),
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(global.color.enabled(io::stderr().is_terminal()))
        .with_writer(io::stderr);
    match global.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}
