//! What every command is given: where the database is, how to print, how to ask.

use std::io::{self, IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::sync::OnceLock;

use tokio::sync::OnceCell;

use super::GlobalArgs;
use super::confirm::Confirm;
use super::exit::ExitCode;
use super::logging::LogFormat;
use super::output::Output;
use super::progress::embedded_progress;
use super::report::Report;
use super::target::{Access, Resolved, resolve};
use crate::engine::conninfo::Env;
use crate::engine::embedded::{Embedded, Options};
use crate::engine::migrate::require_current;
use crate::engine::{Schema, Session, Target, connect};

pub struct Context {
    pub output: Output,
    global: GlobalArgs,
    color: bool,
    target: OnceCell<Resolved>,
    /// The private server of `--embedded`, for as long as the command runs.
    embedded: OnceCell<Embedded>,
    embedded_settings: OnceLock<Vec<(String, String)>>,
}

impl Context {
    pub fn new(global: GlobalArgs) -> Self {
        Self {
            output: Output::new(global.output, global.color),
            color: global.color.enabled(io::stderr().is_terminal()),
            global,
            target: OnceCell::new(),
            embedded: OnceCell::new(),
            embedded_settings: OnceLock::new(),
        }
    }

    /// The database this command works on. Says once, on stderr, which one it is.
    pub async fn target(&self, access: Access) -> anyhow::Result<&Resolved> {
        self.target
            .get_or_try_init(async || {
                let env = |name: &str| std::env::var(name).ok();
                let resolved = match &self.global.embedded {
                    Some(dir) => self.start_embedded(dir.clone()).await?,
                    None => resolve(&self.global, access, &env)?,
                };
                self.note(&format!("target: {}", resolved.target.redacted()));
                Ok(resolved)
            })
            .await
    }

    async fn start_embedded(&self, dir: Option<PathBuf>) -> anyhow::Result<Resolved> {
        let options = Options {
            dir,
            settings: self.embedded_settings.get().cloned().unwrap_or_default(),
            progress: Some(embedded_progress(self.shows_progress())),
            ..Options::default()
        };
        let server = self.embedded.get_or_try_init(|| Embedded::start(options)).await?;
        let env = |name: &str| std::env::var(name).ok();
        let target = Target::parse(&server.url(), self.schema(&env)?, "--embedded", &|_| None)?;
        Ok(Resolved { target, production: None })
    }

    /// Settings for the server of `--embedded`; to be said before it is first asked for.
    pub fn embed_with(&self, settings: Vec<(String, String)>) {
        // Said again, the first ones count, as the server has them.
        let _ = self.embedded_settings.set(settings);
    }

    fn schema(&self, env: Env<'_>) -> anyhow::Result<Schema> {
        let given = self.global.schema.clone().or_else(|| env("AWACTL_SCHEMA").filter(|name| !name.is_empty()));
        Ok(given.map_or_else(|| Ok(Schema::default()), Schema::new)?)
    }

    /// Whether a database was named on the command line.
    pub fn names_a_target(&self) -> bool {
        self.global.database_url.is_some() || self.global.context.is_some()
    }

    pub fn is_embedded(&self) -> bool {
        self.global.embedded.is_some()
    }

    /// The folder of `--embedded=DIR`, if one was given.
    pub fn embedded_dir(&self) -> Option<&PathBuf> {
        self.global.embedded.as_ref()?.as_ref()
    }

    /// Ends what the command started: the private server, if there is one.
    pub async fn close(&self) -> anyhow::Result<()> {
        // Stopped here and not by dropping it, so that a failure is told.
        match self.embedded.get() {
            Some(server) => Ok(server.halt().await?),
            None => Ok(()),
        }
    }

    pub async fn connect(&self, access: Access) -> anyhow::Result<(Session, &Resolved)> {
        let resolved = self.target(access).await?;
        let session = connect(&resolved.target).await?;
        // What a command reads after it waited for a lock must be what others committed, whatever the role's default.
        // Not through a transaction pooler, where the setting would stay on a connection that others use.
        if !session.is_pooled() {
            session.batch_execute("SET default_transaction_isolation = 'read committed'").await?;
        }
        Ok((session, resolved))
    }

    /// Like [`Self::connect`], for everything but `migrate`: the schema must be ours and current.
    pub async fn connect_installed(&self, access: Access) -> anyhow::Result<(Session, &Resolved)> {
        let (session, resolved) = self.connect(access).await?;
        require_current(&session, &resolved.target.schema).await?;
        Ok((session, resolved))
    }

    /// Before a change that can be taken back: asks only for a production target.
    pub async fn confirm_change(&self, what: &str) -> anyhow::Result<()> {
        match &self.target(Access::Change).await?.production {
            Some(name) => {
                let why = format!("{name} is a production context");
                Confirm::new(self.global.yes).ask(what, &why)
            }
            None => Ok(()),
        }
    }

    /// Before a change that cannot be taken back: always asks.
    pub async fn confirm_irreversible(&self, what: &str) -> anyhow::Result<()> {
        let why = match &self.target(Access::Change).await?.production {
            Some(name) => format!("it cannot be undone, and {name} is a production context"),
            None => "it cannot be undone".to_owned(),
        };
        Confirm::new(self.global.yes).ask(what, &why)
    }

    /// Whether progress bars make sense.
    pub fn shows_progress(&self) -> bool {
        self.global.log_format == LogFormat::Text && io::stderr().is_terminal()
    }

    /// One line for people on stderr; a JSON line when a collector reads it.
    pub fn note(&self, message: &str) {
        match self.global.log_format {
            LogFormat::Text => self.stderr(&format!("{message}\n")),
            LogFormat::Json => {
                let line = serde_json::json!({
                    "timestamp": chrono::Utc::now(), "level": "INFO",
                    "fields": { "message": message },
                });
                self.stderr(&format!("{line}\n"));
            }
        }
    }

    /// Says what went wrong and returns the exit code for it.
    pub fn fail(&self, error: &anyhow::Error) -> ExitCode {
        let report = Report::of(error, self.global.verbose > 0);
        match self.global.log_format {
            LogFormat::Text => self.stderr(
                &report.text(|word| if self.color { format!("\u{1b}[1;31m{word}\u{1b}[0m") } else { word.to_owned() }),
            ),
            LogFormat::Json => {
                let line = serde_json::json!({
                    "timestamp": chrono::Utc::now(), "level": "ERROR",
                    "fields": { "message": report.what, "error": report },
                });
                self.stderr(&format!("{line}\n"));
            }
        }
        ExitCode::of(error)
    }

    fn stderr(&self, text: &str) {
        // Nobody is left to be told that stderr is closed.
        let _ = io::stderr().write_all(text.as_bytes());
    }
}
