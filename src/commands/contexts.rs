//! Named targets: `$XDG_CONFIG_HOME/awactl/config.yaml`.
//!
//! ```yaml
//! default: dev             # what read-only commands use when nothing is named
//! contexts:
//!   dev:  { url: "postgres://localhost/dev" }
//!   prod: { url_env: PROD_DATABASE_URL, schema: awa, production: true }
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::exit::CommandError;
use crate::engine::conninfo::Env;

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Contexts {
    pub default: Option<String>,
    #[serde(default)]
    pub contexts: BTreeMap<String, NamedContext>,
}

// No Debug: the URL may hold a password.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamedContext {
    pub url: Option<String>,
    /// Name of the variable that holds the URL.
    pub url_env: Option<String>,
    pub schema: Option<String>,
    /// Ask before any change.
    #[serde(default)]
    pub production: bool,
}

impl std::fmt::Debug for NamedContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NamedContext")
            .field("url_env", &self.url_env)
            .field("schema", &self.schema)
            .field("production", &self.production)
            .finish_non_exhaustive()
    }
}

impl Contexts {
    pub fn path(env: Env<'_>) -> Option<PathBuf> {
        let set = |name| env(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let dir = set("XDG_CONFIG_HOME").or_else(|| Some(set("HOME")?.join(".config")))?;
        Some(dir.join("awactl/config.yaml"))
    }

    /// No file is no contexts; a file that cannot be used is an error.
    pub fn load(env: Env<'_>) -> anyhow::Result<Self> {
        let Some(path) = Self::path(env) else {
            return Ok(Self::default());
        };
        match std::fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, &path),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(unusable(&path, &error.to_string()).into()),
        }
    }

    fn parse(text: &str, path: &Path) -> anyhow::Result<Self> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let contexts: Self = serde_yaml::from_str(text).map_err(|error| {
            // The parser's own text may quote a value, and the value may be a URL.
            let place =
                error.location().map_or_else(String::new, |at| format!("line {}, column {}: ", at.line(), at.column()));
            unusable(
                path,
                &format!(
                    "{place}expected `default: NAME` and `contexts:` with url or url_env, schema, production for each"
                ),
            )
        })?;
        for (name, context) in &contexts.contexts {
            if context.url.is_some() == context.url_env.is_some() {
                let why = format!("context {name} needs exactly one of url and url_env");
                return Err(unusable(path, &why).into());
            }
        }
        if let Some(default) = &contexts.default
            && !contexts.contexts.contains_key(default)
        {
            let why = format!("default names {default}, which is not one of the contexts");
            return Err(unusable(path, &why).into());
        }
        Ok(contexts)
    }

    pub fn names(&self) -> String {
        let names: Vec<_> = self.contexts.keys().map(String::as_str).collect();
        names.join(", ")
    }
}

impl NamedContext {
    pub fn url(&self, name: &str, env: Env<'_>) -> anyhow::Result<String> {
        if let Some(url) = &self.url {
            return Ok(url.clone());
        }
        let variable = self.url_env.as_deref().unwrap_or_default();
        env(variable).filter(|url| !url.is_empty()).ok_or_else(|| {
            CommandError::usage(
                format!("context {name} cannot be used"),
                format!("its url_env names {variable}, which is not set"),
                format!("set {variable} to a postgres:// URL"),
            )
            .into()
        })
    }
}

fn unusable(path: &Path, why: &str) -> CommandError {
    CommandError::usage(format!("{} cannot be used", path.display()), why, "correct the file")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistakes_are_named_without_repeating_a_url() {
        for (text, expected) in [
            ("contexts: { a: { url: 'x://u:hunter2@h', schem: b } }", "line 1"),
            ("contexts: { a: {} }", "exactly one of url and url_env"),
            ("contexts: { a: { url: x, url_env: Y } }", "exactly one"),
            ("default: b\ncontexts: { a: { url: x } }", "default names b"),
            ("contexts: 'postgres://u:hunter2@h'", "expected"),
        ] {
            let error = Contexts::parse(text, Path::new("f")).unwrap_err();
            let message = format!("{error} {error:?}");
            assert!(message.contains(expected), "{message}");
            assert!(!message.contains("hunter2"), "{message}");
        }
        assert!(Contexts::parse("", Path::new("f")).unwrap().contexts.is_empty());
    }
}
