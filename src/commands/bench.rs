//! `awactl bench`: scenarios, and what the server could do at best.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use indicatif::ProgressBar;
use serde::Serialize;

use super::exit::{CommandError, ExitCode};
use super::output::{Table, human_duration, thousands};
use super::progress::{embedded_progress, phase_bar};
use super::values::whole;
use super::{Access, Context};
use crate::engine::bench::{self, Ceiling, Progress, SHIPPED, Scenario, Shipped, Summary};
use crate::engine::embedded::{Embedded, Options};
use crate::engine::migrations::MIGRATIONS;
use crate::engine::worker::open;
use crate::engine::{Schema, Target, migrate};

/// Measure the queue on this machine
///
/// Without --database-url or --context, on a private PostgreSQL with shared_buffers=256MB and max_connections=300 that is made
/// for the run and removed after it; with --embedded=DIR on one with the same settings that stays in DIR.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Args)]
struct Where {
    /// Name of the database, for one that holds somebody's tables or jobs
    #[arg(long, value_name = "NAME")]
    allow_target: Option<String>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a scenario and judge it by its checks
    Run {
        /// One that is built in, see `bench list`, or a file
        #[arg(value_name = "NAME|FILE")]
        scenario: String,
        /// Multiply every duration, count and depth
        #[arg(long, default_value_t = 1.0, value_parser = scale)]
        time_scale: f64,
        /// Folder for summary.json
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        #[command(flatten)]
        on: Where,
    },
    /// What the server does at best with the same rows and no queue
    Ceiling {
        /// How long
        #[arg(long, default_value_t = 5, value_parser = whole::<u64>(1, 600))]
        seconds: u64,
        /// Size of the arguments
        #[arg(long, default_value_t = 256, value_parser = whole::<usize>(0, 1_000_000))]
        payload_bytes: usize,
        #[command(flatten)]
        on: Where,
    },
    /// The scenarios that are built in, and those of a folder
    List {
        /// A folder of scenario files
        dir: Option<PathBuf>,
    },
    /// Print a scenario that is built in, to make another of
    Show {
        /// See `bench list`
        name: String,
    },
}

fn scale(text: &str) -> Result<f64, String> {
    let scale = text.parse().ok().filter(|scale| *scale > 0.0 && *scale <= 100.0);
    scale.ok_or_else(|| "it must be a number above 0 and at most 100; 0.1 is a tenth".into())
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.command {
        Command::List { dir } => list(dir.as_deref(), context),
        Command::Show { name } => {
            context.output.raw(shipped(&name)?.text.as_bytes())?;
            Ok(ExitCode::Done)
        }
        Command::Ceiling { seconds, payload_bytes, on } => {
            let bench = Bench::start(context, on.allow_target.as_deref()).await?;
            let outcome = bench::ceiling(&bench.target, payload_bytes, Duration::from_secs(seconds)).await;
            bench.end().await?;
            context.output.print(&outcome?, |c: &Ceiling| {
                Table::facts([
                    ("jobs/s", thousands(c.jobs_per_s.round() as i64)),
                    ("WAL bytes a job", format!("{:.0}", c.wal_bytes_per_job)),
                ])
            })?;
            Ok(ExitCode::Done)
        }
        Command::Run { scenario, time_scale, out, on } => {
            let scenario = scenario_of(&scenario)?.scaled(time_scale);
            let bench = Bench::start(context, on.allow_target.as_deref()).await?;
            let phases = Phases::new(context);
            let outcome = bench::run(&bench.target, &scenario, &|progress| phases.show(progress)).await;
            phases.end();
            bench.end().await?;
            let summary = outcome?;
            if let Some(dir) = out {
                std::fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
                let text = serde_json::to_string_pretty(&summary)?;
                std::fs::write(dir.join("summary.json"), text).context("writing summary.json")?;
            }
            context.output.print(&summary, summary_table)?;
            Ok(if summary.passed { ExitCode::Done } else { ExitCode::Failed })
        }
    }
}

fn read(file: &Path) -> anyhow::Result<Scenario> {
    Ok(Scenario::load(file).map_err(|e| {
        CommandError::usage(
            "the scenario is not usable",
            e.to_string(),
            "`awactl bench show NAME` shows what one may hold",
        )
    })?)
}

fn shipped(name: &str) -> anyhow::Result<&'static Shipped> {
    Ok(SHIPPED.iter().find(|shipped| shipped.name == name).ok_or_else(|| {
        let names: Vec<&str> = SHIPPED.iter().map(|shipped| shipped.name).collect();
        CommandError::usage(
            format!("there is no scenario {name}"),
            format!("built in are {}", names.join(", ")),
            "name one of them, or for `bench run` a file",
        )
    })?)
}

/// A name without a folder and an ending is one that is built in.
fn scenario_of(named: &str) -> anyhow::Result<Scenario> {
    let path = Path::new(named);
    if path.extension().is_some() || path.components().count() != 1 {
        return read(path);
    }
    let shipped = shipped(named)?;
    Ok(Scenario::parse(shipped.text, shipped.name)?)
}

/// What every figure in docs/benchmarks.md was made with.
fn settings() -> Vec<(String, String)> {
    [("shared_buffers", "256MB"), ("max_connections", "300")].map(|(name, value)| (name.into(), value.into())).to_vec()
}

/// The server a bench runs on.
struct Bench {
    target: Target,
    server: Option<Embedded>,
}

impl Bench {
    async fn start(context: &Context, allowed: Option<&str>) -> anyhow::Result<Self> {
        context.embed_with(settings());
        let (target, server) = if context.names_a_target() || context.is_embedded() {
            (context.target(Access::Change).await?.target.clone(), None)
        } else {
            let mut options = Options::ephemeral();
            options.settings = settings();
            options.progress = Some(embedded_progress(context.shows_progress()));
            let server = Embedded::start(options).await?;
            (Target::parse(&server.url(), Schema::default(), "bench", &|_| None)?, Some(server))
        };
        let mut session = open(&target).await?;
        // Before anything is installed: a refused database is left as it was.
        let allowed = bench::allow(&session, &target, allowed == Some(target.dbname())).await?;
        migrate::run(&mut session, &target.schema, MIGRATIONS, &|_| {}).await?;
        allowed.mark(&session, &target).await?;
        Ok(Self { target, server })
    }

    async fn end(self) -> anyhow::Result<()> {
        match self.server {
            Some(server) => Ok(server.stop().await?),
            None => Ok(()),
        }
    }
}

/// A bar a phase on a terminal, a line a phase elsewhere.
struct Phases<'a> {
    context: &'a Context,
    bar: Mutex<Option<ProgressBar>>,
}

impl<'a> Phases<'a> {
    fn new(context: &'a Context) -> Self {
        Self { context, bar: Mutex::new(None) }
    }

    fn show(&self, progress: Progress) {
        let mut bar = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        match progress {
            Progress::Phase { name, .. } if !self.context.shows_progress() => self.context.note(&name),
            Progress::Phase { name, steps } => {
                let next = phase_bar(&name, steps);
                if let Some(last) = bar.replace(next) {
                    last.finish();
                }
            }
            Progress::Tick { step, jobs_per_s, depth, pickup_p99 } => {
                if let Some(bar) = bar.as_ref() {
                    let p99 = pickup_p99.map(|p| format!(", p99 {}", human_duration(p))).unwrap_or_default();
                    let (rate, depth) = (thousands(jobs_per_s as i64), thousands(depth as i64));
                    bar.set_position(step);
                    bar.set_message(format!("{rate} jobs/s, depth {depth}{p99}"));
                }
            }
        }
    }

    fn end(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish();
        }
    }
}

fn summary_table(summary: &Summary) -> Table {
    let mut table = Table::new(&["metric", "value"]).numbers(&[1]);
    for (metric, value) in &summary.metrics {
        table.row([metric.clone(), number(*value)]);
    }
    let mut checks = Table::new(&["check", "expected", "actual", ""]).numbers(&[2]);
    for check in &summary.checks {
        checks.row([
            check.metric.clone(),
            check.expected.clone(),
            check.actual.map_or_else(|| "not measured".to_owned(), number),
            if check.passed { "ok" } else { "FAILED" }.to_owned(),
        ]);
    }
    let settings: Vec<String> = summary.server.iter().map(|(name, value)| format!("{name}={value}")).collect();
    Table::facts([("scenario", summary.scenario.clone()), ("server", settings.join(" "))]).then(table).then(checks)
}

fn number(value: f64) -> String {
    if value.abs() >= 1000.0 { thousands(value as i64) } else { format!("{value:.2}") }
}

#[derive(Serialize)]
struct Listed {
    name: String,
    description: String,
    built_in: bool,
    /// Where it is, if it is not built in.
    file: Option<String>,
}

fn list(dir: Option<&Path>, context: &Context) -> anyhow::Result<ExitCode> {
    let mut listed = Vec::new();
    for shipped in SHIPPED {
        let Scenario { name, description, .. } = Scenario::parse(shipped.text, shipped.name)?;
        listed.push(Listed { name, description, built_in: true, file: None });
    }
    for file in dir.map(files_of).transpose()?.unwrap_or_default() {
        let Scenario { name, description, .. } = read(&file)?;
        listed.push(Listed { name, description, built_in: false, file: Some(file.display().to_string()) });
    }
    context.output.print(&listed, |listed| {
        let mut table = Table::new(&["scenario", "from", "what"]);
        for l in listed {
            let (scenario, from) = match &l.file {
                Some(file) => (file, "a file"),
                None => (&l.name, "built in"),
            };
            table.row([scenario.clone(), from.to_owned(), l.description.clone()]);
        }
        table
    })?;
    Ok(ExitCode::Done)
}

/// The scenario files of a folder.
fn files_of(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).map_err(|e| {
        CommandError::usage(
            format!("{} cannot be read", dir.display()),
            e.to_string(),
            "name a folder of scenario files",
        )
    })?;
    let mut files: Vec<PathBuf> = entries.filter_map(|e| Some(e.ok()?.path())).collect();
    files.retain(|f| f.extension().is_some_and(|e| e == "yaml"));
    files.sort();
    Ok(files)
}
