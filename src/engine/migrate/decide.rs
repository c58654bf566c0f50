//! From facts to a decision, without a database: what the schema is, and what may be done to it.

use serde::Serialize;

use super::super::error::Refusal;
use super::super::migrations::Migration;
use super::probe::Facts;

/// The oldest server with everything the engine uses.
const MIN_SERVER: i32 = 150_000;
/// Highest version awa 0.5.7 writes.
const PEER_05: i32 = 11;

/// What is in the schema. The names are part of the JSON of `migrate status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// No schema, or an empty one.
    Absent,
    /// Ours, in the version this build carries.
    Active,
    /// Ours, with steps to go.
    Outdated,
    /// Ours, made by a later awactl.
    Newer,
    /// Ours, but the SQL of a version was not the one this build has.
    Different,
    /// awa 0.5.7.
    Canonical,
    /// awa before 0.5.7.
    TooOld,
    /// awa 0.6 or later, by its own migrations.
    Peer,
    /// A version table without a version.
    Incomplete,
    /// Objects of somebody else.
    Foreign,
    /// The role may not look.
    Unreadable,
}

pub fn state(facts: &Facts, migrations: &[Migration]) -> State {
    if facts.schema_exists && (!facts.can_use_schema || !facts.unreadable.is_empty()) && facts.object_count > 0 {
        return State::Unreadable;
    }
    let latest = migrations.last().map_or(0, |last| last.version);
    if facts.has_version_table {
        let Some(current) = facts.applied.last() else {
            return State::Incomplete;
        };
        let changed = facts
            .applied
            .iter()
            .any(|applied| migrations.iter().any(|m| m.version == applied.version && m.checksum() != applied.checksum));
        return match current.version {
            version if version > latest => State::Newer,
            _ if changed => State::Different,
            version if version == latest => State::Active,
            _ => State::Outdated,
        };
    }
    match facts.peer_version {
        Some(PEER_05) => State::Canonical,
        Some(version) if version > PEER_05 => State::Peer,
        Some(_) => State::TooOld,
        None if facts.has_peer_version_table => State::Incomplete,
        None if facts.object_count > 0 => State::Foreign,
        None => State::Absent,
    }
}

/// The steps to take, none if up to date; or why nothing may be done.
pub fn decide<'m>(facts: &Facts, migrations: &'m [Migration]) -> Result<&'m [Migration], Refusal> {
    if facts.server_version_num < MIN_SERVER {
        return Err(refuse(
            facts,
            format!("the server is PostgreSQL {}", facts.server_version),
            "upgrade the server to PostgreSQL 15 or newer, or name another one",
        ));
    }
    if facts.encoding != "UTF8" {
        return Err(refuse(
            facts,
            format!("database {} is encoded in {}, jobs are UTF8", facts.database, facts.encoding),
            "create the database with: CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0",
        ));
    }
    let from = match state(facts, migrations) {
        State::Active => return Ok(&[]),
        State::Absent => 0,
        State::Outdated => facts.applied.last().map_or(0, |applied| applied.version),
        other => return Err(wrong_state(facts, other)),
    };
    may_write(facts)?;
    let first = migrations.iter().position(|m| m.version > from);
    Ok(first.map_or(&[], |first| &migrations[first..]))
}

fn refuse(facts: &Facts, why: impl Into<String>, todo: impl Into<String>) -> Refusal {
    Refusal::new(format!("schema {} was not changed", facts.schema), why, todo)
}

fn wrong_state(facts: &Facts, state: State) -> Refusal {
    let schema = quoted(&facts.schema);
    let version = facts.peer_version.unwrap_or(0);
    let (why, todo) = match state {
        State::Newer => {
            let (version, by) = facts.applied.last().map_or((0, "?"), |last| (last.version, last.awactl.as_str()));
            (
                format!("it has version {version}, applied by awactl {by}, newer than this awactl"),
                format!("use awactl {by} or newer"),
            )
        }
        State::Different => (
            "a version in it was applied by another build of awactl, with other SQL".into(),
            format!("use the awactl that made it, or, if it holds nothing you need: DROP SCHEMA {schema} CASCADE"),
        ),
        State::Canonical => (
            "it is an awa 0.5.7 schema; upgrading a live 0.5 database is not in this build yet".into(),
            "leave it to its 0.5.7 applications, and install into another database or --schema".into(),
        ),
        State::TooOld => (
            format!("it is an awa schema of version {version}, older than 0.5.7 (version {PEER_05})"),
            "run the migrations of awa 0.5.7 on it first, then awactl migrate".into(),
        ),
        State::Peer => (
            format!("it has version {version}, made by the migrations of awa 0.6 or newer"),
            "keep operating it with that awa; for this engine name another database or --schema".into(),
        ),
        State::Incomplete => (
            "it has a version table without a version: an installation that was never finished".into(),
            format!("look into it; if it holds nothing you need: DROP SCHEMA {schema} CASCADE"),
        ),
        State::Unreadable => (
            format!("role {} may not read it ({})", facts.role, facts.unreadable.join(", ")),
            format!(
                "GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role}",
                role = quoted(&facts.role)
            ),
        ),
        State::Foreign | State::Absent | State::Active | State::Outdated => (
            format!("it holds {} objects that are not awactl's ({}, …)", facts.object_count, facts.objects.join(", ")),
            "name an empty or new schema with --schema".into(),
        ),
    };
    refuse(facts, why, todo)
}

fn may_write(facts: &Facts) -> Result<(), Refusal> {
    let Facts { schema, database, role, .. } = facts;
    if facts.in_recovery {
        return Err(refuse(
            facts,
            "the server is a standby",
            "name the primary, or list all hosts with target_session_attrs=read-write",
        ));
    }
    if facts.read_only {
        return Err(refuse(
            facts,
            "sessions on this database are read-only (default_transaction_read_only)",
            "name the writable server, or ask whoever set it read-only",
        ));
    }
    if !facts.schema_exists && !facts.can_create_schema {
        return Err(refuse(
            facts,
            format!("role {role} may not create a schema in database {database}"),
            format!("GRANT CREATE ON DATABASE {} TO {}", quoted(database), quoted(role)),
        ));
    }
    if facts.schema_exists && !(facts.can_create_in_schema && facts.can_use_schema) {
        return Err(refuse(
            facts,
            format!("role {role} may not create objects in it"),
            format!("GRANT USAGE, CREATE ON SCHEMA {} TO {}", quoted(schema), quoted(role)),
        ));
    }
    Ok(())
}

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

#[cfg(test)]
mod tests {
    use super::super::probe::Applied;
    use super::*;
    use crate::engine::migrations::SqlFile;

    const TOY: &[Migration] = &[toy(1000), toy(1001)];

    const fn toy(version: i32) -> Migration {
        Migration { version, name: "toy", files: &[SqlFile { path: "toy.sql", sql: "SELECT 1" }] }
    }

    fn facts() -> Facts {
        Facts {
            schema: "awa".into(),
            database: "db".into(),
            role: "me".into(),
            server_version_num: 150_000,
            server_version: "15.0".into(),
            encoding: "UTF8".into(),
            in_recovery: false,
            read_only: false,
            schema_exists: false,
            can_create_schema: true,
            can_use_schema: false,
            can_create_in_schema: false,
            unreadable: Vec::new(),
            object_count: 0,
            objects: Vec::new(),
            has_version_table: false,
            has_peer_version_table: false,
            applied: Vec::new(),
            peer_version: None,
            live_05_runtimes: 0,
        }
    }

    fn ours(version: i32) -> Facts {
        Facts {
            schema_exists: true,
            can_use_schema: true,
            can_create_in_schema: true,
            object_count: 9,
            has_version_table: true,
            applied: vec![Applied { version, checksum: TOY[0].checksum(), awactl: "9.9.9".into() }],
            ..facts()
        }
    }

    fn peer(version: Option<i32>) -> Facts {
        Facts {
            has_version_table: false,
            has_peer_version_table: true,
            applied: Vec::new(),
            peer_version: version,
            ..ours(0)
        }
    }

    fn versions(facts: &Facts) -> Vec<i32> {
        let steps = decide(facts, TOY).unwrap();
        steps.iter().map(|step| step.version).collect()
    }

    #[test]
    fn what_is_missing_is_done_and_nothing_else() {
        assert_eq!(versions(&facts()), [1000, 1001]);
        assert_eq!(versions(&ours(1000)), [1001]);
        assert_eq!(versions(&ours(1001)), [0; 0]);
        let existing_but_empty = Facts { object_count: 0, has_version_table: false, applied: Vec::new(), ..ours(1000) };
        assert_eq!(versions(&existing_but_empty), [1000, 1001]);
    }

    #[test]
    fn up_to_date_needs_no_right_to_write() {
        let standby = Facts { in_recovery: true, read_only: true, can_create_in_schema: false, ..ours(1001) };
        assert_eq!(versions(&standby), [0; 0]);
    }

    #[test]
    fn what_is_unsafe_is_refused_with_the_reason_and_what_to_do() {
        let mut changed = ours(1000);
        changed.applied[0].checksum = "other".into();
        let cases = [
            (Facts { server_version_num: 140_012, server_version: "14.12".into(), ..facts() }, "14.12", "15 or newer"),
            (Facts { encoding: "LATIN1".into(), ..facts() }, "LATIN1", "UTF8"),
            (Facts { in_recovery: true, read_only: true, ..facts() }, "standby", "primary"),
            (Facts { read_only: true, ..facts() }, "default_transaction_read_only", "writable"),
            (
                Facts { can_create_schema: false, ..facts() },
                "may not create a schema",
                "GRANT CREATE ON DATABASE \"db\" TO \"me\"",
            ),
            (
                Facts { can_create_in_schema: false, ..ours(1000) },
                "may not create objects",
                "GRANT USAGE, CREATE ON SCHEMA \"awa\" TO \"me\"",
            ),
            (
                Facts { can_use_schema: false, unreadable: vec!["awactl_version".into()], ..ours(1001) },
                "may not read",
                "GRANT USAGE",
            ),
            (ours(1002), "newer than this awactl", "awactl 9.9.9"),
            (changed, "another build", "DROP SCHEMA"),
            (Facts { applied: Vec::new(), ..ours(1000) }, "never finished", "look into it"),
            (peer(None), "never finished", "look into it"),
            (peer(Some(5)), "older than 0.5.7", "0.5.7"),
            (peer(Some(11)), "0.5.7", "another database"),
            (peer(Some(12)), "awa 0.6 or newer", "another database"),
            (peer(Some(999)), "awa 0.6 or newer", "another database"),
            (Facts { has_peer_version_table: false, objects: vec!["t".into()], ..peer(None) }, "9 objects", "--schema"),
        ];
        for (facts, why, todo) in cases {
            let refusal = decide(&facts, TOY).err().unwrap();
            assert!(refusal.why.contains(why), "{why}: {refusal:?}");
            assert!(refusal.todo.contains(todo), "{todo}: {refusal:?}");
        }
    }
}
