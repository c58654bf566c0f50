use clap::Subcommand;
use serde::Serialize;

use super::output::{Table, thousands};
use super::{Access, Context, ExitCode};
use crate::engine::migrate::{self, Event, Outcome, Plan, Status};
use crate::engine::migrations::MIGRATIONS;
use crate::engine::{EngineError, Refusal};

/// Install the schema, or bring it to the version this awactl carries.
///
/// Everything happens in one transaction: it is done entirely or not at all. Running it again
/// finds nothing to do.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    /// Show what would be done and what stands in the way; change nothing
    #[arg(long)]
    plan: bool,

    #[command(subcommand)]
    step: Option<Step>,
}

#[derive(Debug, Subcommand)]
enum Step {
    /// Say what is in the schema, what blocks, and what is next; change nothing
    ///
    /// In JSON, point_of_no_return_passed is about an upgrade from 0.5 and says whether it can still be taken back: false
    /// on a 0.5 schema, null where there is nothing to go back to, as after a fresh install.
    Status,
}

pub async fn run(args: Args, context: &Context) -> anyhow::Result<ExitCode> {
    match args.step {
        Some(Step::Status) => status(context).await,
        None if args.plan => plan(context).await,
        None => apply(context).await,
    }
}

async fn apply(context: &Context) -> anyhow::Result<ExitCode> {
    let (mut session, resolved) = context.connect(Access::Change).await?;
    let schema = &resolved.target.schema;
    // Only a change is asked about: what is up to date or refused is said at once.
    let planned = migrate::plan(&session, schema, MIGRATIONS).await?;
    if !planned.steps.is_empty() {
        let what = format!("migrate schema {schema} to version {}", planned.to_version);
        context.confirm_change(&what).await?;
    }
    let outcome = migrate::run(&mut session, schema, MIGRATIONS, &|event| match event {
        Event::Waiting { holder } => {
            context.note(&format!("waiting for another migration ({holder})"));
        }
        Event::Applying { file, version, .. } => {
            tracing::info!(version, file, "applying");
        }
    })
    .await?;
    session.close().await;
    context.output.print(&Applied::from(outcome), Applied::table)?;
    Ok(ExitCode::Done)
}

#[derive(Serialize)]
struct Applied {
    action: &'static str,
    #[serde(flatten)]
    outcome: Outcome,
}

impl From<Outcome> for Applied {
    fn from(outcome: Outcome) -> Self {
        let action = match (outcome.applied.as_slice(), outcome.from_version) {
            ([], _) => "up_to_date",
            (_, None) => "installed",
            (_, Some(_)) => "updated",
        };
        Self { action, outcome }
    }
}

impl Applied {
    fn table(&self) -> Table {
        let Outcome { schema, schema_version, from_version, .. } = &self.outcome;
        let result = match (self.action, from_version) {
            ("up_to_date", _) => "up to date".to_owned(),
            (_, Some(from)) => format!("updated from version {from}"),
            (action, None) => action.to_owned(),
        };
        Table::facts([("schema", schema.clone()), ("version", schema_version.to_string()), ("result", result)])
    }
}

async fn status(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect(Access::Read).await?;
    let status = migrate::status(&session, &resolved.target.schema, MIGRATIONS).await?;
    context.output.print(&status, status_table)?;
    Ok(ExitCode::Done)
}

fn status_table(status: &Status) -> Table {
    let mut facts = vec![
        ("schema", status.schema.clone()),
        ("state", name_of(&status.state)),
        ("stage", status.stage.to_owned()),
        ("version", version_text(status.schema_version)),
        ("this awactl's", status.latest_version.to_string()),
    ];
    let remaining = status.remaining.iter();
    facts.extend(remaining.map(|(state, jobs)| {
        let text = format!("{} {state}", thousands(*jobs));
        ("0.5 jobs", text)
    }));
    if status.live_05_runtimes > 0 {
        facts.push(("live 0.5 workers", thousands(status.live_05_runtimes)));
    }
    facts.extend(status.blockers.iter().map(|b| ("blocked", b.why.clone())));
    facts.push(("next", status.next.clone()));
    Table::facts(facts)
}

async fn plan(context: &Context) -> anyhow::Result<ExitCode> {
    let (session, resolved) = context.connect(Access::Read).await?;
    let plan = migrate::plan(&session, &resolved.target.schema, MIGRATIONS).await?;
    context.output.print(&plan, plan_table)?;
    // A plan that cannot be carried out must stop the script that asked for it.
    match plan.blockers.into_iter().next() {
        Some(Refusal { why, todo, .. }) => {
            let what = format!("schema {} cannot be migrated now", plan.schema);
            Err(EngineError::from(Refusal::new(what, why, todo)).into())
        }
        None => Ok(ExitCode::Done),
    }
}

fn plan_table(plan: &Plan) -> Table {
    let mut facts = vec![
        ("schema", plan.schema.clone()),
        ("state", name_of(&plan.state)),
        ("from version", version_text(plan.from_version)),
        ("to version", plan.to_version.to_string()),
    ];
    facts.extend(plan.steps.iter().map(|step| {
        let text = format!("{} {} ({} files)", step.version, step.name, step.files.len());
        ("step", text)
    }));
    facts.extend(plan.blockers.iter().map(|b| ("blocked", b.why.clone())));
    facts.push(("locks", plan.locks.to_owned()));
    facts.push(("reversible", plan.reversible.to_owned()));
    Table::facts(facts)
}

fn version_text(version: Option<i32>) -> String {
    version.map_or_else(|| "none".to_owned(), |version| version.to_string())
}

/// The same word as in JSON.
fn name_of(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        _ => String::new(),
    }
}
