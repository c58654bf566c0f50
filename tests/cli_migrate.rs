//! Installing and updating the schema: through the real binary, and through the engine where a
//! toy migration is needed.

#[path = "cli_common/mod.rs"]
mod common;

use std::sync::Arc;

use awactl::engine::migrate::{self, Event, Outcome};
use awactl::engine::migrations::{Migration, SqlFile};
use awactl::engine::{EngineError, Schema, Target, connect};
use common::{Ran, Server, awactl, server};

const META: SqlFile = SqlFile { path: "meta.sql", sql: include_str!("../migrations/v1000/00_meta.sql") };
const fn file(path: &'static str, sql: &'static str) -> SqlFile {
    SqlFile { path, sql }
}
const fn migration(version: i32, files: &'static [SqlFile]) -> Migration {
    Migration { version, name: "toy", files }
}
static SLOW: &[Migration] = &[migration(1000, &[META, file("slow.sql", "SELECT pg_sleep(1.5)")])];

fn target(database: &str) -> Target {
    let url = server().url("postgres", database);
    Target::parse(&url, Schema::default(), "test", &|_| None).unwrap()
}

async fn run(
    database: &str,
    migrations: &'static [Migration],
    observe: impl Fn(Event) + Send + Sync,
) -> Result<Outcome, EngineError> {
    let mut session = connect(&target(database)).await?;
    migrate::run(&mut session, &Schema::default(), migrations, &observe).await
}

fn migrate_cli(database: &str, args: &[&str]) -> Ran {
    migrate_as("postgres", database, args)
}

fn migrate_as(user: &str, database: &str, args: &[&str]) -> Ran {
    let url = server().url(user, database);
    awactl(&[("DATABASE_URL", &url)], &[&["migrate"], args].concat())
}

#[track_caller]
fn assert_refused(ran: &Ran, why: &str, todo: &str) {
    assert_eq!(ran.code, 4, "{ran:?}");
    assert_eq!(ran.stdout, "", "{ran:?}");
    assert!(ran.stderr.contains(why), "{why}: {ran:?}");
    assert!(ran.stderr.contains(todo), "{todo}: {ran:?}");
}

#[tokio::test]
async fn an_empty_database_is_installed_and_the_second_run_is_up_to_date() {
    let db = server().database("");
    let status = migrate_cli(&db, &["status", "-o", "json"]).json();
    assert_eq!(status["state"], "absent");
    assert_eq!(status["stage"], "install");
    let plan = migrate_cli(&db, &["--plan", "-o", "json"]);
    assert_eq!(plan.code, 0, "{plan:?}");
    assert_eq!(plan.json()["steps"][0]["version"], 1000);
    let empty = server().dump(&db);
    assert!(!empty.contains("CREATE SCHEMA"), "a plan changes nothing");

    let first = migrate_cli(&db, &["-o", "json"]);
    assert_eq!((first.code, &first.json()["action"]), (0, &"installed".into()));
    let session = connect(&target(&db)).await.unwrap();
    migrate::require_current(&session, &Schema::default()).await.unwrap();
    session.close().await;
    let installed = server().dump(&db);
    let second = migrate_cli(&db, &["-o", "json"]);
    assert_eq!((second.code, &second.json()["action"]), (0, &"up_to_date".into()));
    assert_eq!(server().dump(&db), installed);

    let status = migrate_cli(&db, &["status", "-o", "json"]).json();
    for field in [
        "schema",
        "state",
        "stage",
        "schema_version",
        "remaining",
        "live_05_runtimes",
        "blockers",
        "next",
        "point_of_no_return_passed",
    ] {
        assert!(status.get(field).is_some(), "{field}: {status}");
    }
    assert_eq!(status["state"], "active");
    assert_eq!(status["schema_version"], awactl::engine::migrations::LATEST);
    assert_eq!(status["point_of_no_return_passed"], serde_json::Value::Null, "there is nothing to go back to");
}

#[test]
fn any_legal_schema_name_works() {
    let db = server().database("");
    for name in ["Upper Case", "quo\"te's", "100%", "a$$b$do$", "{schema}", r"back\slash", "ünï"] {
        for result in ["installed", "up_to_date"] {
            let ran = migrate_cli(&db, &["--schema", name, "-o", "json"]);
            assert_eq!(ran.code, 0, "{name}: {ran:?}");
            assert_eq!(ran.json()["action"], result);
            assert_eq!(ran.json()["schema"], name);
        }
    }
    let ran = migrate_cli(&db, &["--schema", "pg_x"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.stderr.contains("schema is not valid"), "{ran:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_at_once_one_installs_and_the_other_waits_and_finds_it_done() {
    let db = server().database("");
    // Under this default, a second look in the same transaction would see the old state.
    server().sql("postgres", &format!("ALTER DATABASE {db} SET default_transaction_isolation = 'repeatable read'"));
    let started = Arc::new(tokio::sync::Notify::new());
    let first = tokio::spawn({
        let (db, started) = (db.clone(), started.clone());
        async move {
            run(&db, SLOW, move |event| {
                if matches!(event, Event::Applying { file: "slow.sql", .. }) {
                    started.notify_one();
                }
            })
            .await
        }
    });
    started.notified().await;
    let waited = std::sync::Mutex::new(Vec::new());
    let second = run(&db, SLOW, |event| waited.lock().unwrap().push(event)).await.unwrap();
    assert_eq!(first.await.unwrap().unwrap().applied, [1000]);
    assert_eq!(second.applied, [0; 0]);
    let waited = waited.into_inner().unwrap();
    assert!(matches!(waited.as_slice(), [Event::Waiting { holder }] if holder.contains("awactl")), "{waited:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_step_names_its_line_and_leaves_nothing() {
    static BROKEN: &[Migration] = &[migration(1000, &[META, file("broken.sql", "SELECT 1;\nSELECT 2;\nSELECT nope;")])];
    let db = server().database("");
    let before = server().dump(&db);
    let error = run(&db, BROKEN, |_| {}).await.unwrap_err();
    assert!(matches!(&error, EngineError::Migration { file, line: 3, .. } if file == "broken.sql"), "{error:?}");
    assert_eq!(server().dump(&db), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_killed_half_way_is_unreachable_and_leaves_nothing() {
    let db = server().database("");
    let before = server().dump(&db);
    let (send, mut started) = tokio::sync::mpsc::unbounded_channel();
    let running = tokio::spawn({
        let db = db.clone();
        async move {
            run(&db, SLOW, move |event| {
                if matches!(event, Event::Applying { file: "slow.sql", .. }) {
                    send.send(()).unwrap();
                }
            })
            .await
        }
    });
    started.recv().await.unwrap();
    server().sql("postgres", &format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{db}'"));
    let error = running.await.unwrap().unwrap_err();
    assert!(matches!(error, EngineError::Unreachable { .. }), "{error:?}");
    assert_eq!(server().dump(&db), before);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_versions_are_added_to_what_is_there() {
    static ONE: &[Migration] = &[migration(1000, &[META])];
    static TWO: &[Migration] =
        &[migration(1000, &[META]), migration(1001, &[file("b.sql", "CREATE TABLE {schema}.b ()")])];
    let db = server().database("");
    assert_eq!(run(&db, ONE, |_| {}).await.unwrap().applied, [1000]);
    let outcome = run(&db, TWO, |_| {}).await.unwrap();
    assert_eq!((outcome.from_version, outcome.schema_version), (Some(1000), 1001));
    assert_eq!(outcome.applied, [1001]);

    // And now this build is the older one.
    let session = connect(&target(&db)).await.unwrap();
    let error = migrate::require_current(&session, &Schema::default()).await.unwrap_err();
    assert!(matches!(error, EngineError::WrongVersion { found: 1001, .. }), "{error:?}");
    let elsewhere = Schema::new("elsewhere").unwrap();
    let error = migrate::require_current(&session, &elsewhere).await.unwrap_err();
    assert!(matches!(error, EngineError::NotInstalled { .. }), "{error:?}");
    let before = server().dump(&db);
    for args in [&[][..], &["--plan"][..]] {
        let ran = migrate_cli(&db, &[args, &["-o", "json"]].concat());
        assert_eq!(ran.code, 4, "{ran:?}");
        assert!(ran.stderr.contains("newer than this awactl"), "{ran:?}");
    }
    assert_eq!(server().dump(&db), before);
}

#[test]
fn schemas_of_others_are_refused_and_left_byte_identical() {
    let version = |rows: &str| {
        format!(
            "CREATE SCHEMA awa; CREATE TABLE awa.schema_version (version int PRIMARY KEY, \
             description text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now()); {rows}"
        )
    };
    let row = |v: i32| version(&format!("INSERT INTO awa.schema_version VALUES ({v}, 'x')"));
    let cases = [
        (row(5), "older than 0.5.7", "run the migrations of awa 0.5.7"),
        (row(11), "not in this build yet", "another database"),
        (row(12), "awa 0.6 or newer", "another database"),
        (row(42), "has version 42", "keep operating it with that awa"),
        (version(""), "never finished", "DROP SCHEMA"),
        ("CREATE SCHEMA awa; CREATE TABLE awa.mine ()".into(), "mine", "--schema"),
        ("CREATE SCHEMA awa; CREATE TYPE awa.t AS ENUM ()".into(), "1 objects", "--schema"),
        ("CREATE SCHEMA awa; CREATE TABLE awa.schema_version (version text)".into(), "never finished", "look into it"),
    ];
    for (sql, why, todo) in cases {
        let db = server().database("");
        server().sql(&db, &sql);
        let before = server().dump(&db);
        assert_refused(&migrate_cli(&db, &[]), why, todo);
        assert_eq!(server().dump(&db), before);
        let ran = migrate_cli(&db, &["status", "-o", "json"]);
        // A 0.5 schema without its tables cannot be counted; everything else has a status.
        if !sql.contains("(11,") {
            assert_eq!((ran.code, &ran.json()["stage"]), (0, &"refused".into()), "{ran:?}");
        }
    }
}

#[test]
fn a_role_without_rights_is_told_which_to_grant_and_then_it_works() {
    let db = server().database("");
    server().sql(&db, "CREATE ROLE guest LOGIN");
    let grant = |ran: &Ran| {
        let line = ran.stderr.lines().find_map(|line| line.split_once("do:")).unwrap().1;
        server().sql(&db, line.trim());
    };
    let ran = migrate_as("guest", &db, &[]);
    assert_refused(&ran, "may not create a schema", "GRANT CREATE ON DATABASE");
    grant(&ran);
    assert_eq!(migrate_as("guest", &db, &[]).code, 0);

    server().sql(&db, "CREATE SCHEMA given");
    let ran = migrate_as("guest", &db, &["--schema", "given"]);
    assert_refused(&ran, "may not create objects", "GRANT USAGE, CREATE ON SCHEMA");
    grant(&ran);
    assert_eq!(migrate_as("guest", &db, &["--schema", "given"]).code, 0);

    // Installed by somebody else: the guest may look only when allowed to.
    assert_eq!(migrate_cli(&db, &["--schema", "other"]).code, 0);
    let ran = migrate_as("guest", &db, &["--schema", "other"]);
    assert_refused(&ran, "may not read it", "GRANT USAGE ON SCHEMA");
    grant(&ran);
    assert_eq!(migrate_as("guest", &db, &["--schema", "other"]).code, 0);
}

#[test]
fn read_only_databases_standbys_and_other_encodings_are_refused() {
    let db = server().database("");
    server().sql("postgres", &format!("ALTER DATABASE {db} SET default_transaction_read_only = on"));
    assert_refused(&migrate_cli(&db, &[]), "default_transaction_read_only", "writable server");

    let db = server().database("ENCODING 'SQL_ASCII' TEMPLATE template0");
    assert_refused(&migrate_cli(&db, &[]), "encoded in SQL_ASCII", "ENCODING 'UTF8'");

    let standby = Server::start(true);
    let url = standby.url("postgres", "postgres");
    let ran = awactl(&[("DATABASE_URL", &url)], &["migrate"]);
    assert_refused(&ran, "the server is a standby", "name the primary");
    let ran = awactl(&[("DATABASE_URL", &url)], &["migrate", "status"]);
    assert_eq!(ran.code, 0, "{ran:?}");
    // And the session attributes tell the two apart.
    let both = format!(
        "postgres://postgres@/postgres?host={},{}&port={},{}&target_session_attrs=",
        standby.dir.display(),
        server().dir.display(),
        standby.port,
        server().port
    );
    for (wanted, code) in [("read-write", 0), ("primary", 0), ("standby", 4), ("prefer-standby", 4), ("any", 4)] {
        let schema = format!("attrs_{wanted}");
        let url = format!("{both}{wanted}");
        let ran = awactl(&[("DATABASE_URL", &url)], &["migrate", "--schema", &schema]);
        assert_eq!(ran.code, code, "{wanted}: {ran:?}");
    }
    let ran = awactl(&[("DATABASE_URL", &format!("{url}&target_session_attrs=primary"))], &["migrate"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    assert!(ran.stderr.contains("it is a standby"), "{ran:?}");
}

/// What awa 0.6.0 and 0.6.9 do with the version they find here; 0.5.7 finds itself up to date
/// because its highest version is on top and queue_state_counts exists (seen with all three).
#[test]
fn the_migrations_of_others_are_stopped_by_the_guard() {
    let db = server().database("");
    assert_eq!(migrate_cli(&db, &[]).code, 0);
    assert_eq!(server().sql(&db, "SELECT max(version) FROM awa.schema_version"), "11");
    assert_eq!(server().sql(&db, "SELECT count(*) FROM awa.queue_state_counts"), "0");
    let before = server().dump(&db);
    for statement in [
        "CREATE TABLE awa.x (); INSERT INTO awa.schema_version (version, description) VALUES (12, 'theirs')",
        "DELETE FROM awa.schema_version WHERE version >= 3",
        "TRUNCATE awa.schema_version",
    ] {
        let error = std::panic::catch_unwind(|| server().sql(&db, statement)).unwrap_err();
        let text = error.downcast_ref::<String>().unwrap();
        assert!(text.contains("belongs to awactl"), "{text}");
    }
    assert_eq!(server().dump(&db), before);
}
