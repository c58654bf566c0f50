//! Progress bars, on stderr and only where a person looks at it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::output::thousands;
use crate::engine::embedded::{Progress, ProgressFn};

/// A bar of `total` steps with rate and time left; hidden unless `shown`.
pub fn bar(shown: bool, label: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if !shown {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    let style =
        ProgressStyle::with_template("{prefix:>10} {bar:30} {human_pos:>9}/{human_len} {rate:>12} {eta:>4} {msg}");
    if let Ok(style) = style {
        bar.set_style(style.with_key("rate", |state: &ProgressState, out: &mut dyn fmt::Write| {
            // The bar's own {per_sec} has a dozen decimals.
            let _ = write!(out, "{}/s", thousands(state.per_sec() as i64));
        }));
    }
    bar.set_prefix(label.to_owned());
    bar
}

/// A bar of one phase of a longer run, with a message for what is measured meanwhile.
pub fn phase_bar(name: &str, steps: u64) -> ProgressBar {
    let bar = ProgressBar::new(steps);
    if let Ok(style) = ProgressStyle::with_template("{prefix:>24} {bar:20} {percent:>3}% {elapsed:>4} {msg}") {
        bar.set_style(style);
    }
    bar.set_prefix(name.to_owned());
    // Also where nothing ticks, as while the ceiling is measured.
    bar.enable_steady_tick(Duration::from_millis(250));
    bar
}

/// What the start of a private server is busy with: a spinner on a terminal, a line for each step elsewhere.
pub fn embedded_progress(on_terminal: bool) -> ProgressFn {
    if !on_terminal {
        return Arc::new(|step| {
            // A download would be a line per block.
            if !matches!(step, Progress::Fetching { bytes, total, .. } if bytes != 0 && bytes != total) {
                eprintln!("{step}");
            }
        });
    }
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(100));
    Arc::new(move |step| spinner.set_message(step.to_string()))
}
