//! The command line: one file a verb, each parsing its flags, calling the engine and rendering
//! what it returned. `context.rs` is what they share.
//!
//! To add a command: a file here with `Args` (clap) and
//! `async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode>`, a `mod` line, a
//! variant of [`Command`] and its arm in [`run`].

pub mod bench;
pub mod completions;
pub mod confirm;
pub mod context;
pub mod contexts;
pub mod cron;
pub mod demo;
pub mod dlq;
pub mod enqueue;
pub mod exit;
pub mod inspect;
pub mod job;
pub mod logging;
pub mod maintenance;
pub mod man;
pub mod migrate;
pub mod output;
pub mod progress;
pub mod queue;
pub mod report;
pub mod run_workers;
pub mod signals;
pub mod target;
pub mod values;

use clap::error::ContextKind;
use clap::{ColorChoice, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};

pub use context::Context;
pub use exit::{CommandError, ExitCode};
pub use target::Access;

/// Operate the awa job queue: install and migrate its schema, inspect it, run its workers.
#[derive(Debug, Parser)]
#[command(name = "awactl", version = version(), propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Demo(demo::Args),
    Migrate(migrate::Args),
    RunWorkers(run_workers::Args),
    Maintenance(maintenance::Args),
    Enqueue(enqueue::Args),
    Job(job::Args),
    Queue(queue::Args),
    Dlq(dlq::Args),
    Cron(cron::Args),
    Inspect(inspect::Args),
    Bench(bench::Args),
    Completions(completions::Args),
    Man(man::Args),
}

async fn run(command: Command, context: &Context) -> anyhow::Result<ExitCode> {
    match command {
        Command::Demo(args) => demo::run(args, context).await,
        Command::Migrate(args) => migrate::run(args, context).await,
        Command::RunWorkers(args) => run_workers::run(args, context).await,
        Command::Maintenance(args) => maintenance::run(args, context).await,
        Command::Enqueue(args) => enqueue::run(args, context).await,
        Command::Job(args) => job::run(args, context).await,
        Command::Queue(args) => queue::run(args, context).await,
        Command::Dlq(args) => dlq::run(args, context).await,
        Command::Cron(args) => cron::run(args, context).await,
        Command::Inspect(args) => inspect::run(args, context).await,
        Command::Bench(args) => bench::run(args, context).await,
        Command::Completions(args) => completions::run(&args, context),
        Command::Man(args) => man::run(&args, context),
    }
}

/// Options every command takes.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Database as postgres://… URL or key=value pairs [env: DATABASE_URL, or PG* variables]
    // The environment is read in target.rs: clap would print its value, password included, in
    // the help text.
    #[arg(long, global = true, value_name = "URL")]
    pub database_url: Option<String>,

    /// Schema the queue lives in [env: AWACTL_SCHEMA] [default: awa]
    #[arg(long, global = true, value_name = "NAME")]
    pub schema: Option<String>,

    /// Named target from $XDG_CONFIG_HOME/awactl/config.yaml
    #[arg(long, global = true, value_name = "NAME", conflicts_with = "database_url")]
    pub context: Option<String>,

    /// Run against a private PostgreSQL that awactl starts in DIR and stops at exit; without DIR in
    /// $XDG_DATA_HOME/awactl/postgres, or as root in /var/lib/awactl/postgres
    #[arg(
        long, global = true, value_name = "DIR", num_args = 0..=1, require_equals = true,
        conflicts_with_all = ["database_url", "context"]
    )]
    pub embedded: Option<Option<std::path::PathBuf>>,

    /// How results are written to standard output
    #[arg(short, long, global = true, value_enum, default_value_t)]
    pub output: output::Format,

    /// Colours; auto means on a terminal, unless NO_COLOR is set
    #[arg(long, global = true, value_enum, default_value_t)]
    pub color: output::Color,

    /// Say more on standard error; twice for details, and errors with their causes
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    pub verbose: u8,

    /// How messages are written to standard error
    #[arg(long, global = true, value_enum, default_value_t)]
    pub log_format: logging::LogFormat,

    /// Answer yes to every question
    #[arg(short, long, global = true)]
    pub yes: bool,
}

fn version() -> &'static str {
    // clap wants a text that lives for ever; this one is made once.
    static VERSION: std::sync::LazyLock<String> = std::sync::LazyLock::new(|| {
        format!("{} (schema version {})", env!("CARGO_PKG_VERSION"), crate::engine::migrations::LATEST)
    });
    &VERSION
}

/// A usage error repeats the argument it did not expect, and that may be a database URL given
/// without its flag. Returns the text to show instead, if there is such an argument.
fn without_secrets(text: &str, arguments: impl Iterator<Item = String>) -> Option<String> {
    let secret =
        |argument: &String| argument.contains("password=") || (argument.contains("://") && argument.contains('@'));
    let mut hidden = None;
    for argument in arguments.filter(secret) {
        let current = hidden.as_deref().unwrap_or(text);
        hidden = Some(current.replace(&argument, "(database URL)"));
    }
    hidden
}

/// What to say when an option's value was given as the next word, which is then taken for a command or an argument.
fn equals_tip(error: &clap::Error, arguments: impl Iterator<Item = String>) -> Option<String> {
    let kinds = [ContextKind::InvalidSubcommand, ContextKind::InvalidArg];
    let word = kinds.iter().find_map(|kind| error.get(*kind)).map(ToString::to_string)?;
    let arguments: Vec<String> = arguments.collect();
    let pair = arguments.windows(2).find(|pair| pair[1] == word)?;
    let value = match pair[0].as_str() {
        "--embedded" => "DIR",
        "--watch" => "INTERVAL",
        _ => return None,
    };
    Some(format!("the value of {0} stands behind a =, as in {0}={value}", pair[0]))
}

/// The whole program: parse, run, report.
pub fn main() -> std::process::ExitCode {
    let color = output::Color::from_arguments(std::env::args_os());
    let parsed = Cli::command()
        .color(match color {
            output::Color::Auto => ColorChoice::Auto,
            output::Color::Always => ColorChoice::Always,
            output::Color::Never => ColorChoice::Never,
        })
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too; a reader that left early is no failure.
            if !error.use_stderr() {
                let _ = error.print();
                return ExitCode::Done.into();
            }
            match without_secrets(&error.to_string(), std::env::args()) {
                Some(text) => eprint!("{text}"),
                None => drop(error.print()),
            }
            if let Some(tip) = equals_tip(&error, std::env::args()) {
                eprintln!("\n  tip: {tip}");
            }
            return ExitCode::Usage.into();
        }
    };
    logging::start(&cli.global);
    let context = Context::new(cli.global);
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return context.fail(&error.into()).into(),
    };
    let code = match runtime.block_on(run(cli.command, &context)) {
        Ok(code) => code,
        Err(error) => context.fail(&error),
    };
    let code = match runtime.block_on(context.close()) {
        Ok(()) => code,
        Err(error) => context.fail(&error),
    };
    // Not by dropping it, which waits for blocking threads: one may be reading a standard input that nobody closes.
    runtime.shutdown_background();
    code.into()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory as _;
        super::Cli::command().debug_assert();
    }

    #[test]
    fn a_url_in_the_wrong_place_is_not_repeated() {
        let url = "postgres://u:hunter2@h/db".to_owned();
        let text = format!("unexpected argument '{url}'");
        let shown = super::without_secrets(&text, [url].into_iter());
        assert_eq!(shown.as_deref(), Some("unexpected argument '(database URL)'"));
        assert_eq!(super::without_secrets("x", ["y".to_owned()].into_iter()), None);
    }
}
