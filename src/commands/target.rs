//! From flags, environment and contexts to one database.
//!
//! The order: `--database-url` or `--context`, then `DATABASE_URL`, then the `PG*` variables,
//! then the contexts file.

use super::GlobalArgs;
use super::contexts::{Contexts, NamedContext};
use super::exit::CommandError;
use crate::engine::conninfo::{Env, TARGET_VARIABLES};
use crate::engine::{Schema, Target};

/// What a command is about to do with the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    Change,
}

#[derive(Debug, Clone)]
pub struct Resolved {
    pub target: Target,
    /// Ask before any change; the name is the context's.
    pub production: Option<String>,
}

/// Where the connection string comes from. A server that awactl starts itself would be one
/// more variant: chosen in [`choose`], started in [`resolve`], kept alive by the `Context`.
enum Source {
    Url { url: String, origin: &'static str },
    Environment,
    Named { name: String, context: NamedContext },
}

pub fn resolve(global: &GlobalArgs, access: Access, env: Env<'_>) -> anyhow::Result<Resolved> {
    let source = choose(global, access, env)?;
    let schema = |of_context: Option<&str>| {
        let given = global.schema.clone();
        let given = given.or_else(|| env("AWACTL_SCHEMA").filter(|name| !name.is_empty()));
        match given.as_deref().or(of_context) {
            Some(name) => Schema::new(name),
            None => Ok(Schema::default()),
        }
    };
    let (target, production) = match source {
        Source::Url { url, origin } => (Target::parse(&url, schema(None)?, origin, env)?, None),
        Source::Environment => (Target::from_env(schema(None)?, env)?, None),
        Source::Named { name, context } => {
            let url = context.url(&name, env)?;
            let schema = schema(context.schema.as_deref())?;
            let target = Target::parse(&url, schema, &format!("context {name}"), env)?;
            (target, context.production.then_some(name))
        }
    };
    Ok(Resolved { target, production })
}

fn choose(global: &GlobalArgs, access: Access, env: Env<'_>) -> anyhow::Result<Source> {
    if let Some(url) = global.database_url.clone() {
        let origin = "--database-url";
        return Ok(Source::Url { url, origin });
    }
    if let Some(name) = &global.context {
        return named(&Contexts::load(env)?, name);
    }
    let set = |name: &str| env(name).filter(|value| !value.is_empty());
    if let Some(url) = set("DATABASE_URL") {
        let origin = "DATABASE_URL";
        return Ok(Source::Url { url, origin });
    }
    if TARGET_VARIABLES.iter().any(|name| set(name).is_some()) {
        return Ok(Source::Environment);
    }
    let contexts = Contexts::load(env)?;
    let only = match contexts.contexts.keys().collect::<Vec<_>>().as_slice() {
        [] => {
            return Err(CommandError::usage(
                "no database was named",
                "there is no --database-url, DATABASE_URL, PG* variable or context",
                "add --database-url postgres://user@host/dbname, or set one of the others",
            )
            .into());
        }
        [only] => Some((*only).clone()),
        _ => None,
    };
    match (only, &contexts.default, access) {
        (Some(name), _, _) => named(&contexts, &name),
        (None, Some(name), Access::Read) => named(&contexts, name),
        (None, _, Access::Change) => Err(CommandError::refused(
            "no change without a named target",
            format!("there are several contexts: {}", contexts.names()),
            "say which with --context NAME or --database-url",
        )
        .into()),
        (None, None, Access::Read) => Err(CommandError::usage(
            "no database was named",
            format!("there are several contexts and no default: {}", contexts.names()),
            "say which with --context NAME, or add `default: NAME` to the contexts file",
        )
        .into()),
    }
}

fn named(contexts: &Contexts, name: &str) -> anyhow::Result<Source> {
    match contexts.contexts.get(name) {
        Some(context) => Ok(Source::Named { name: name.to_owned(), context: context.clone() }),
        None => Err(CommandError::usage(
            format!("there is no context {name}"),
            match contexts.names() {
                names if names.is_empty() => "no contexts are configured".to_owned(),
                names => format!("there are {names}"),
            },
            "name one of them, or add it to $XDG_CONFIG_HOME/awactl/config.yaml",
        )
        .into()),
    }
}
