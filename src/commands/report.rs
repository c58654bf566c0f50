//! An error as people and collectors read it: what, why, and what to do.

use serde::Serialize;
use tokio_postgres::error::SqlState;

use super::exit::{CommandError, ExitCode};
use super::output::printable;
use crate::engine::embedded::EmbeddedError;
use crate::engine::error::chain;
use crate::engine::{EngineError, Refusal};

#[derive(Debug, Serialize, PartialEq, Eq)]
pub struct Report {
    pub what: String,
    pub why: String,
    pub todo: String,
    pub exit_code: u8,
    /// The causes, outermost first; only asked for with `-v`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<String>,
}

impl Report {
    pub fn of(error: &anyhow::Error, with_chain: bool) -> Self {
        let (what, why, todo) = lines(error);
        Self {
            what: one_line(&what),
            why: one_line(&why),
            todo: one_line(&todo),
            exit_code: ExitCode::of(error) as u8,
            chain: if with_chain {
                error.chain().map(|cause| one_line(&cause.to_string())).collect()
            } else {
                Vec::new()
            },
        }
    }

    /// Three lines, and one more for each cause.
    pub fn text(&self, bold: impl Fn(&str) -> String) -> String {
        let mut text = format!("{} {}\n  why: {}\n  do:  {}\n", bold("error:"), self.what, self.why, self.todo);
        for cause in &self.chain {
            text.push_str(&format!("  caused by: {cause}\n"));
        }
        text
    }
}

fn lines(error: &anyhow::Error) -> (String, String, String) {
    if let Some(error) = error.downcast_ref::<CommandError>() {
        let (CommandError::Usage { what, why, todo }
        | CommandError::Refused { what, why, todo }
        | CommandError::Failed { what, why, todo }) = error;
        return (what.clone(), why.clone(), todo.clone());
    }
    if let Some(refused) = error.chain().find_map(|c| c.downcast_ref::<EmbeddedError>()).and_then(folder_lines) {
        return refused;
    }
    let Some(engine) = error.chain().find_map(|c| c.downcast_ref::<EngineError>()) else {
        let causes: Vec<_> = error.chain().skip(1).map(ToString::to_string).collect();
        let why = match causes.as_slice() {
            [] => "see above".to_owned(),
            causes => causes.join(": "),
        };
        return (error.to_string(), why, "run it again with -v for more".into());
    };
    match engine {
        EngineError::InvalidInput { field, message } => {
            (format!("{field} is not valid"), message.clone(), "correct it and run the command again".into())
        }
        EngineError::Unreachable { target, why, .. } => (
            format!("cannot reach {target}"),
            why.clone(),
            "check that the server runs, and host, port, user, password and sslmode".into(),
        ),
        EngineError::Refused(Refusal { what, why, todo }) => (what.clone(), why.clone(), todo.clone()),
        EngineError::NotInstalled { schema } => (
            format!("schema {schema} has no queue in it"),
            "it was never installed there, or it lives in another schema".into(),
            "run awactl migrate, or name the right schema with --schema".into(),
        ),
        EngineError::WrongVersion { schema, found, wanted } => (
            format!("schema {schema} does not fit this awactl"),
            format!("it has version {found}, this awactl works with version {wanted}"),
            if found < wanted { "run awactl migrate".into() } else { "use a newer awactl".into() },
        ),
        EngineError::Migration { file, line, message, .. } => (
            format!("the migration failed in {file}, line {line}; nothing was changed"),
            message.clone(),
            "if the cause is not on the server's side, report this as a bug".into(),
        ),
        EngineError::Database(source) => (
            "the database refused a statement".into(),
            chain(source),
            match source.code() {
                Some(&SqlState::INSUFFICIENT_PRIVILEGE) => "grant the role what is missing, or use another role",
                Some(&SqlState::READ_ONLY_SQL_TRANSACTION) => {
                    "name the writable server (target_session_attrs=read-write finds it), or ask whoever set it read-only"
                }
                Some(&SqlState::QUERY_CANCELED) => {
                    "if it was a statement_timeout, give this role or session a longer one (options=-c statement_timeout=0)"
                }
                Some(&SqlState::DISK_FULL) => "make room on the server's disk, and run it again",
                _ => "run it again with -v for the causes",
            }
            .into(),
        ),
    }
}

/// Why the folder of `--embedded` cannot be used.
fn folder_lines(error: &EmbeddedError) -> Option<(String, String, String)> {
    let (dir, why, todo) = match error {
        EmbeddedError::InUse { dir, pid } => (
            dir,
            match pid {
                Some(pid) => format!("another awactl has it, process {pid}, and a server of it runs at a time"),
                None => "another awactl has it, and a server of it runs at a time".to_owned(),
            },
            "stop that one, or name another folder",
        ),
        EmbeddedError::ForeignCluster { dir } => (
            dir,
            "it is itself a PostgreSQL data directory".to_owned(),
            "name a folder that awactl can keep its own cluster in",
        ),
        EmbeddedError::NotACluster { data } => {
            (data, "it is not a complete PostgreSQL cluster".to_owned(), "move it away, and a new one is made")
        }
        _ => return None,
    };
    Some((format!("{} cannot be used", dir.display()), why, todo.to_owned()))
}

fn one_line(text: &str) -> String {
    printable(text.split_whitespace().collect::<Vec<_>>().join(" "))
}
