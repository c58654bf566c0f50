//! Brings a schema to the version this build carries: in one transaction, under a lock that the
//! 0.5/0.6 libraries' own migrations take too. Guarded by `tests/cli_migrate.rs`.

mod decide;
mod probe;

use std::collections::BTreeMap;

use serde::Serialize;
use tokio_postgres::error::ErrorPosition;
use tokio_postgres::{Client, IsolationLevel, Transaction};

pub use decide::{State, decide, state};
pub use probe::{Applied, Facts, probe};

use super::error::{EngineError, Refusal, Result, is_connection_loss};
use super::migrations::{Migration, SqlFile};
use super::schema::Schema;

/// "AWA_MIGR": the key awa's own migrations lock. One per database, so two schemas migrate one
/// after the other; that costs nothing worth a second key.
const LOCK: i64 = 0x4157_415f_4d49_4752;

/// What the run tells whoever watches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Somebody else is migrating; `holder` says who.
    Waiting { holder: String },
    /// Starting on one file.
    Applying { version: i32, name: &'static str, file: &'static str },
}

pub type Observer<'a> = &'a (dyn Fn(Event) + Send + Sync);

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Outcome {
    pub schema: String,
    /// Before; none if nothing was installed.
    pub from_version: Option<i32>,
    pub schema_version: i32,
    /// Versions applied by this call; empty when it was up to date.
    pub applied: Vec<i32>,
}

/// Installs, completes, or finds nothing to do. On any error nothing has changed.
pub async fn run(
    client: &mut Client,
    schema: &Schema,
    migrations: &[Migration],
    observer: Observer<'_>,
) -> Result<Outcome> {
    // Without the lock first: what is up to date or refused needs to wait for nobody.
    let facts = probe(client, schema).await?;
    if decide(&facts, migrations)?.is_empty() {
        return Ok(outcome(&facts, &[]));
    }
    // Read committed whatever the default is: after waiting for the lock, the second probe must
    // see what its last holder committed.
    let transaction = client.build_transaction().isolation_level(IsolationLevel::ReadCommitted).start().await?;
    // A role's own timeouts and search path must not decide how an installation ends; the
    // Unicode escapes of `Schema::render` need standard strings.
    transaction
        .batch_execute(
            "SET LOCAL statement_timeout = 0;
             SET LOCAL idle_in_transaction_session_timeout = 0;
             SET LOCAL search_path = pg_catalog;
             SET LOCAL standard_conforming_strings = on;
             SET LOCAL client_min_messages = warning",
        )
        .await?;
    lock(&transaction, observer).await?;
    // Again: whoever held the lock may have done the work.
    let facts = probe(&transaction, schema).await?;
    let steps = decide(&facts, migrations)?;
    for step in steps {
        for file in step.files {
            observer(Event::Applying { version: step.version, name: step.name, file: file.path });
            apply(&transaction, schema, file).await?;
        }
        record(&transaction, schema, step).await?;
    }
    transaction.commit().await?;
    Ok(outcome(&facts, steps))
}

fn outcome(facts: &Facts, steps: &[Migration]) -> Outcome {
    let from_version = facts.applied.last().map(|applied| applied.version);
    Outcome {
        schema: facts.schema.clone(),
        from_version,
        schema_version: steps.last().map(|step| step.version).or(from_version).unwrap_or(0),
        applied: steps.iter().map(|step| step.version).collect(),
    }
}

async fn lock(transaction: &Transaction<'_>, observer: Observer<'_>) -> Result<()> {
    let free: bool = transaction.query_one("SELECT pg_try_advisory_xact_lock($1)", &[&LOCK]).await?.get(0);
    if free {
        return Ok(());
    }
    let holder = transaction
        .query_opt(
            "SELECT format('process %s, %s', a.pid,
                           coalesce(nullif(a.application_name, ''), 'unnamed'))
             FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
             WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
               AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
               AND (l.classid::bigint << 32) | l.objid::bigint = $1",
            &[&LOCK],
        )
        .await?
        .map_or_else(|| "just finished".to_owned(), |row| row.get(0));
    observer(Event::Waiting { holder });
    transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&LOCK]).await?;
    Ok(())
}

async fn apply(transaction: &Transaction<'_>, schema: &Schema, file: &SqlFile) -> Result<()> {
    let sql = schema.render(file.sql);
    transaction.batch_execute(&sql).await.map_err(|source| {
        if is_connection_loss(&source) {
            return source.into();
        }
        let at = match source.as_db_error().and_then(|error| error.position()) {
            Some(ErrorPosition::Original(position)) => *position as usize,
            _ => 1,
        };
        EngineError::Migration {
            file: file.path.to_owned(),
            line: 1 + sql.chars().take(at.saturating_sub(1)).filter(|c| *c == '\n').count(),
            message: super::error::chain(&source),
            source,
        }
    })
}

async fn record(transaction: &Transaction<'_>, schema: &Schema, step: &Migration) -> Result<()> {
    let sql = format!(
        "INSERT INTO {}.awactl_version (version, description, checksum, awactl)
         VALUES ($1, $2, $3, $4)",
        schema.quoted()
    );
    let version = env!("CARGO_PKG_VERSION");
    transaction.execute(&sql, &[&step.version, &step.name, &step.checksum(), &version]).await?;
    Ok(())
}

/// For everything that works on an installed schema: is it there, in exactly our version?
pub async fn require_current(client: &Client, schema: &Schema) -> Result<()> {
    let (name, wanted) = (schema.as_str(), super::migrations::LATEST);
    let installed: bool = client
        .query_one(
            "SELECT EXISTS (SELECT FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                            WHERE n.nspname = $1 AND c.relname = 'awactl_version')",
            &[&name],
        )
        .await?
        .get(0);
    let found: Option<i32> = if installed {
        let sql = format!("SELECT max(version) FROM {}.awactl_version", schema.quoted());
        client.query_one(&sql, &[]).await?.get(0)
    } else {
        None
    };
    let schema = name.to_owned();
    match found {
        None => Err(EngineError::NotInstalled { schema }),
        Some(found) if found != wanted => Err(EngineError::WrongVersion { schema, found, wanted }),
        Some(_) => Ok(()),
    }
}

/// `migrate status`, as programs read it.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    pub schema: String,
    pub state: State,
    /// What `migrate` would be about: `install`, `update`, `done`, or `refused`.
    pub stage: &'static str,
    pub schema_version: Option<i32>,
    pub latest_version: i32,
    /// Jobs still in 0.5 tables, by state.
    pub remaining: BTreeMap<String, i64>,
    pub live_05_runtimes: i64,
    pub blockers: Vec<Refusal>,
    pub next: String,
    /// Whether an upgrade from 0.5 can no longer be taken back: false before it, null where there is nothing to go back to,
    /// as on an installation that never was 0.5.
    pub point_of_no_return_passed: Option<bool>,
}

pub async fn status(client: &Client, schema: &Schema, migrations: &[Migration]) -> Result<Status> {
    let facts = probe(client, schema).await?;
    let mut status = status_of(&facts, migrations);
    if status.state == State::Canonical {
        let schema = schema.quoted();
        let sql = format!(
            "SELECT state::text, count(*)
             FROM (SELECT state FROM {schema}.jobs_hot
                   UNION ALL SELECT state FROM {schema}.scheduled_jobs) AS jobs
             GROUP BY 1"
        );
        let rows = client.query(&sql, &[]).await?;
        status.remaining = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    }
    Ok(status)
}

pub fn status_of(facts: &Facts, migrations: &[Migration]) -> Status {
    let state = state(facts, migrations);
    let ours = facts.applied.last().map(|applied| applied.version);
    let (stage, blockers, next) = match decide(facts, migrations) {
        Ok([]) => ("done", Vec::new(), "nothing: it is up to date".to_owned()),
        Ok(_) if ours.is_none() => ("install", Vec::new(), "awactl migrate".to_owned()),
        Ok(_) => ("update", Vec::new(), "awactl migrate".to_owned()),
        Err(refusal) => {
            let next = refusal.todo.clone();
            ("refused", vec![refusal], next)
        }
    };
    Status {
        schema: facts.schema.clone(),
        state,
        stage,
        schema_version: ours.or(facts.peer_version),
        latest_version: migrations.last().map_or(0, |last| last.version),
        remaining: BTreeMap::new(),
        live_05_runtimes: if ours.is_some() { 0 } else { facts.live_05_runtimes },
        blockers,
        next,
        point_of_no_return_passed: matches!(state, State::Canonical | State::TooOld).then_some(false),
    }
}

#[derive(Debug, Clone, Serialize)]
pub struct PlannedStep {
    pub version: i32,
    pub name: &'static str,
    pub files: Vec<&'static str>,
}

/// `migrate --plan`: what would be done, and what stands in the way.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    pub schema: String,
    pub state: State,
    pub from_version: Option<i32>,
    pub to_version: i32,
    pub steps: Vec<PlannedStep>,
    pub locks: &'static str,
    pub reversible: &'static str,
    pub blockers: Vec<Refusal>,
}

pub async fn plan(client: &Client, schema: &Schema, migrations: &[Migration]) -> Result<Plan> {
    let facts = probe(client, schema).await?;
    let (steps, blockers) = match decide(&facts, migrations) {
        Ok(steps) => (steps, Vec::new()),
        Err(refusal) => (&[][..], vec![refusal]),
    };
    let status = status_of(&facts, migrations);
    Ok(Plan {
        schema: status.schema,
        state: status.state,
        from_version: status.schema_version,
        to_version: status.latest_version,
        steps: steps
            .iter()
            .map(|step| PlannedStep {
                version: step.version,
                name: step.name,
                files: step.files.iter().map(|file| file.path).collect(),
            })
            .collect(),
        locks: match steps {
            [] => "none",
            _ => "one transaction, under the database's migration lock",
        },
        reversible: match status.stage {
            "install" => "yes, by dropping the schema",
            "update" => "no, take a backup first",
            _ => "nothing would change",
        },
        blockers,
    })
}
