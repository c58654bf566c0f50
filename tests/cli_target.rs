//! Which database a command works on, how it gets there, and what it says about it.

#[path = "cli_common/mod.rs"]
mod common;

use common::{awactl, server};

const SECRET: &str = "hunter2";

#[test]
fn a_password_is_never_printed_wherever_it_comes_from() {
    let port = server().port;
    let dsn = format!("host=127.0.0.1 port={port} user=postgres dbname=postgres");
    let cases: [(String, &[(&str, &str)]); 4] = [
        (format!("postgres://postgres:{SECRET}@127.0.0.1:{port}/postgres"), &[]),
        (format!("postgres://postgres@127.0.0.1:{port}/postgres?password={SECRET}"), &[]),
        (format!("{dsn} password={SECRET}"), &[]),
        (dsn, &[("PGPASSWORD", SECRET)]),
    ];
    for (url, env) in cases {
        for extra in [&["-vvv"][..], &["--log-format", "json", "-vvv"], &["-o", "json"]] {
            let args = [&["migrate", "--database-url", &url], extra].concat();
            let ran = awactl(env, &args);
            assert_eq!(ran.code, 3, "{ran:?}");
            assert!(ran.stderr.contains("password authentication failed"), "{ran:?}");
            assert!(!format!("{ran:?}").contains(SECRET), "{ran:?}");
        }
    }
    let misplaced = awactl(&[], &["migrate", "postgres://u:hunter2@h/db"]);
    assert_eq!(misplaced.code, 2, "{misplaced:?}");
    assert!(!misplaced.stderr.contains(SECRET), "{misplaced:?}");
    let help = awactl(&[("DATABASE_URL", "postgres://u:hunter2@h/db")], &["--help"]);
    assert!(!help.stdout.contains(SECRET), "{help:?}");
}

#[test]
fn sslmodes_mean_what_libpq_says() {
    let server = server();
    server.sql("postgres", "CREATE ROLE tlsonly LOGIN; CREATE ROLE plainonly LOGIN");
    let file = |name: &str| server.dir.join(name).to_str().unwrap().to_owned();
    let (ca, other, pinned) = (file("ca.crt"), file("other.crt"), file("server.crt"));
    let cases = [
        ("plainonly", "127.0.0.1", "disable", "", true),
        ("tlsonly", "127.0.0.1", "disable", "", false),
        ("plainonly", "127.0.0.1", "allow", "", true),
        ("tlsonly", "127.0.0.1", "allow", "", true),
        ("plainonly", "127.0.0.1", "prefer", "", true),
        ("tlsonly", "127.0.0.1", "prefer", "", true),
        ("plainonly", "127.0.0.1", "require", "", false),
        ("tlsonly", "127.0.0.1", "require", "", true),
        ("tlsonly", "127.0.0.1", "require", &ca, true),
        ("tlsonly", "127.0.0.1", "require", &other, false),
        ("tlsonly", "127.0.0.1", "verify-ca", &ca, true),
        ("tlsonly", "127.0.0.1", "verify-ca", &other, false),
        ("tlsonly", "localhost", "verify-full", &ca, true),
        ("tlsonly", "localhost", "verify-full", &pinned, true),
        ("tlsonly", "127.0.0.1", "verify-full", &ca, false),
        ("tlsonly", "127.0.0.1", "verify-full", &pinned, false),
        ("tlsonly", "localhost", "verify-full", &other, false),
        ("tlsonly", "localhost", "verify-full", "", false),
    ];
    for (user, host, mode, root, works) in cases {
        let mut url = format!("host={host} port={} user={user} dbname=postgres sslmode={mode}", server.port);
        if !root.is_empty() {
            url.push_str(&format!(" sslrootcert={root}"));
        }
        let ran = awactl(&[], &["migrate", "status", "--database-url", &url]);
        // An environment without any root certificate cannot even start to verify: usage.
        let codes: &[i32] = if works {
            &[0]
        } else if root.is_empty() {
            &[2, 3]
        } else {
            &[3]
        };
        assert!(codes.contains(&ran.code), "{url}: {ran:?}");
        assert!(ran.stderr.contains(&format!("sslmode {mode}")), "{ran:?}");
    }
    let ran = awactl(&[], &["migrate", "--database-url", "host=h sslmode=verify-full user=u sslrootcert=/no"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.stderr.contains("sslrootcert is not valid"), "{ran:?}");
}

#[test]
fn hosts_are_tried_in_order_and_each_failure_is_named() {
    let server = server();
    let good = format!("{}:{}", server.dir.to_str().unwrap().replace('/', "%2F"), server.port);
    let url = format!("postgres://postgres@127.0.0.1:1,{good}/postgres?target_session_attrs=read-write");
    let ran = awactl(&[], &["migrate", "status", "--database-url", &url]);
    assert_eq!(ran.code, 0, "{ran:?}");

    let url = "postgres://postgres@127.0.0.1:1,%2Fnowhere:2/postgres";
    let ran = awactl(&[], &["migrate", "--database-url", url]);
    assert_eq!(ran.code, 3, "{ran:?}");
    for part in ["127.0.0.1:1: ", "/nowhere:2: ", "why:", "do:"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
}

#[test]
fn the_pg_variables_and_the_password_file_are_enough() {
    let server = server();
    let db = server.database("");
    server.sql("postgres", "CREATE ROLE filed LOGIN PASSWORD 'from:file'");
    let dir = tempfile::tempdir().unwrap();
    let passfile = dir.path().join("pass");
    std::fs::write(&passfile, format!("127.0.0.1:*:{db}:filed:from:file\n")).unwrap();
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(&passfile, std::fs::Permissions::from_mode(0o600)).unwrap();
    let port = server.port.to_string();
    let mut env = vec![
        ("PGHOST", "127.0.0.1"),
        ("PGPORT", port.as_str()),
        ("PGUSER", "filed"),
        ("PGDATABASE", db.as_str()),
        ("PGAPPNAME", "mine"),
        ("PGOPTIONS", "-c default_transaction_read_only=on"),
    ];
    assert_eq!(awactl(&env, &["migrate", "status"]).code, 3, "no password");
    env.push(("PGPASSFILE", passfile.to_str().unwrap()));
    let ran = awactl(&env, &["migrate"]);
    assert_eq!(ran.code, 4, "PGOPTIONS must count: {ran:?}");
    assert!(ran.stderr.contains("PG* variables"), "{ran:?}");
    env.push(("AWACTL_SCHEMA", "elsewhere"));
    let ran = awactl(&env, &["migrate", "status", "-o", "json"]);
    assert_eq!(ran.json()["schema"], "elsewhere");
}

#[test]
fn contexts_choose_the_database_and_guard_it() {
    let server = server();
    let (dev, prod) = (server.database(""), server.database(""));
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("awactl")).unwrap();
    let config = |text: &str| std::fs::write(dir.path().join("awactl/config.yaml"), text).unwrap();
    let url = server.url("postgres", &prod);
    let run = |args: &[&str]| {
        let home = dir.path().to_str().unwrap();
        awactl(&[("XDG_CONFIG_HOME", home), ("PROD_URL", &url)], args)
    };
    let no_target = run(&["migrate"]);
    assert_eq!(no_target.code, 2, "{no_target:?}");
    assert!(no_target.stderr.contains("no database was named"), "{no_target:?}");

    let one = format!("contexts:\n  dev: {{ url: '{}', schema: mine }}\n", server.url("postgres", &dev));
    config(&one);
    let ran = run(&["migrate", "-o", "json"]);
    assert_eq!((ran.code, &ran.json()["schema"]), (0, &"mine".into()), "{ran:?}");
    assert!(ran.stderr.contains("context dev"), "{ran:?}");

    config(&format!("default: dev\n{one}  prod: {{ url_env: PROD_URL, production: true }}\n"));
    let ran = run(&["migrate"]);
    assert_eq!(ran.code, 4, "{ran:?}");
    assert!(ran.stderr.contains("several contexts: dev, prod"), "{ran:?}");
    assert_eq!(run(&["migrate", "status", "-o", "json"]).json()["state"], "active");

    let ran = run(&["migrate", "--context", "prod"]);
    assert_eq!(ran.code, 4, "{ran:?}");
    assert!(ran.stderr.contains("production context") && ran.stderr.contains("--yes"), "{ran:?}");
    assert_eq!(run(&["migrate", "--context", "prod", "--yes"]).code, 0);
    // Nothing to change, nothing to ask.
    assert_eq!(run(&["migrate", "--context", "prod"]).code, 0);

    assert_eq!(run(&["migrate", "--context", "test"]).code, 2);
    assert_eq!(run(&["migrate", "--context", "dev", "--database-url", "postgres://h"]).code, 2);
    config("contexts: { a: { url_env: NOT_SET } }");
    let ran = run(&["migrate"]);
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.stderr.contains("NOT_SET"), "{ran:?}");
}

#[test]
fn wrong_usage_is_code_2_and_says_what_is_allowed() {
    for (args, text) in [
        (&["migrate", "-o", "xml"][..], "possible values: table, json, yaml"),
        (&["migrate", "--database-url", "mysql://h/d"], "postgres://"),
        (&["migrate", "--database-url", "host=h colour=red"], "allowed are"),
        (&["migrate", "--plan", "status"], "cannot be used"),
        (&["nope"], "unrecognized subcommand"),
        (&[], "Usage: awactl"),
    ] {
        let ran = awactl(&[], args);
        assert_eq!(ran.code, 2, "{ran:?}");
        assert_eq!(ran.stdout, "", "{ran:?}");
        assert!(ran.stderr.contains(text), "{text}: {ran:?}");
    }
}

#[test]
fn a_folder_that_is_somebody_elses_cluster_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("PG_VERSION"), "15\n").unwrap();
    let embedded = format!("--embedded={}", dir.path().display());
    let ran = awactl(&[], &[&embedded, "migrate"]);
    assert_eq!(ran.code, 4, "{ran:?}");
    assert!(ran.stderr.contains("why: it is itself a PostgreSQL data directory"), "{ran:?}");
    assert!(ran.stderr.contains("do:  name a folder"), "{ran:?}");
}

#[test]
fn version_completions_and_manual_need_no_database() {
    let ran = awactl(&[], &["--version"]);
    let latest = awactl::engine::migrations::LATEST;
    let expected = format!("awactl {} (schema version {latest})\n", env!("CARGO_PKG_VERSION"));
    assert_eq!((ran.code, ran.stdout), (0, expected));
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let ran = awactl(&[], &["completions", shell]);
        assert!(ran.code == 0 && ran.stdout.contains("migrate"), "{shell}: {ran:?}");
    }
    assert!(awactl(&[], &["man"]).stdout.contains(".TH awactl"));
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("pages");
    assert_eq!(awactl(&[], &["man", "--dir", pages.to_str().unwrap()]).code, 0);
    assert!(pages.join("awactl-migrate.1").exists());
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    use std::process::{Command, Stdio};
    let mut child = Command::new(env!("CARGO_BIN_EXE_awactl"))
        .args(["completions", "bash"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn messages_are_json_lines_for_collectors() {
    let ran = awactl(&[], &["migrate", "--log-format", "json", "--database-url", "host=127.0.0.1 port=1 user=u"]);
    assert_eq!(ran.code, 3, "{ran:?}");
    for line in ran.stderr.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line["level"].is_string() && line["fields"]["message"].is_string(), "{line}");
    }
    assert!(ran.stderr.contains("\"exit_code\":3"), "{ran:?}");
}
