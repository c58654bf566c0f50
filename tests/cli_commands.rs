//! The commands through the real binary: enqueue, run-workers, maintenance, inspect, demo and short benches.

mod common;

use std::io::Write as _;
use std::process::{Child, ChildStdin, Command, Output, Stdio};

use common::server::server;
use serde_json::Value;

fn awactl(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_awactl"));
    command.args(args).env_remove("DATABASE_URL");
    command
}

fn sql_on(config: &tokio_postgres::Config, sql: &str) -> String {
    std::thread::scope(|scope| {
        let run = async {
            let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
            let connection = tokio::spawn(connection);
            let messages = client.simple_query(sql).await.unwrap();
            drop(client);
            let _ = connection.await;
            let values = messages.iter().filter_map(|m| match m {
                tokio_postgres::SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            });
            values.last().unwrap_or_default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        scope.spawn(move || runtime.block_on(run)).join().unwrap()
    })
}

/// A database of its own with the schema installed, as an address.
fn database(name: &str) -> String {
    let server = server();
    sql_on(&server.config(), &format!("CREATE DATABASE {name}"));
    let url = server.url_of(name);
    done(&run(&url, &["migrate"]));
    url
}

fn run(url: &str, args: &[&str]) -> Output {
    awactl(&[&["--database-url", url], args].concat()).output().unwrap()
}

fn done(output: &Output) -> Value {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

fn enqueue_lines(url: &str, lines: &str, args: &[&str]) -> Output {
    let mut child = awactl(&[&["--database-url", url, "-o", "json", "enqueue", "--file", "-"], args].concat())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn queue(url: &str, name: &str) -> Value {
    let report = done(&run(url, &["inspect", "queues", "-o", "json"]));
    report["queues"].as_array().unwrap().iter().find(|q| q["queue"] == name).cloned().unwrap_or(Value::Null)
}

#[test]
fn a_bad_line_keeps_its_batch_out_and_says_where_to_resume() {
    let url = database("cli_stop");
    let lines = "{\"kind\":\"a\"}\n{\"kind\":\"b\"}\n{\"kind\":\"c\"}\n{\"kind\":\"d\",\"priority\":9}\n";
    let output = enqueue_lines(&url, lines, &["--batch", "2"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["enqueued"], &report["resume_from"]), (&2.into(), &3.into()));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("line 4: priority"), "{told}");
    assert_eq!(queue(&url, "default")["available"], 2);
}

/// An `enqueue --file -` of which the first batch, two of three lines, is in.
fn in_mid_file(url: &str, config: &tokio_postgres::Config) -> (Child, ChildStdin) {
    let mut child = awactl(&["--database-url", url, "enqueue", "--file", "-", "--batch", "2"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    // The third line is what makes it write the first two.
    stdin.write_all(b"{\"kind\":\"a\"}\n{\"kind\":\"a\"}\n{\"kind\":\"a\"}\n").unwrap();
    for _ in 0..2400 {
        if sql_on(config, "SELECT count(*) FROM awa.ready_entries") == "2" {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    (child, stdin)
}

#[test]
fn a_server_lost_in_mid_file_leaves_whole_batches_and_the_line_to_look_at() {
    let url = database("cli_lost");
    let config: tokio_postgres::Config = url.parse().unwrap();
    let (child, mut stdin) = in_mid_file(&url, &config);
    sql_on(
        &config,
        "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
         WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
    );
    stdin.write_all(b"{\"kind\":\"a\"}\n{\"kind\":\"a\"}\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(told.contains("2 jobs are enqueued; whether those of line 3 and up to 1 more"), "{told}");
    assert_eq!(queue(&url, "default")["available"], 2);
}

#[test]
fn a_signal_in_mid_file_ends_it_after_a_batch_and_says_the_line_to_resume_from() {
    let url = database("cli_told");
    let config: tokio_postgres::Config = url.parse().unwrap();
    let (child, stdin) = in_mid_file(&url, &config);
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGTERM).unwrap();
    // Its standard input stays open: it does not wait for more of it.
    let output = child.wait_with_output().unwrap();
    drop(stdin);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(143), "{told}");
    assert!(told.contains("SIGTERM: 2 jobs are enqueued; resume from line 3"), "{told}");
    assert_eq!(queue(&url, "default")["available"], 2);
}

#[test]
fn commands_work_whatever_isolation_the_role_has_by_default() {
    let url = database("cli_isolation");
    let config: tokio_postgres::Config = url.parse().unwrap();
    sql_on(&config, "ALTER DATABASE cli_isolation SET default_transaction_isolation = 'serializable'");
    done(&run(&url, &["enqueue", "ping", "--count", "3"]));
    done(&run(&url, &["maintenance", "once"]));
    let id = done(&run(&url, &["-o", "json", "job", "list"]))[0]["id"].to_string();
    for args in [&["job", "cancel", &id][..], &["--yes", "queue", "drain", "default"]] {
        done(&run(&url, args));
    }
    assert_eq!(queue(&url, "default")["cancelled"], 3);
}

#[test]
fn a_role_that_may_only_read_sees_all_and_changes_nothing() {
    let url = database("cli_reader");
    let config: tokio_postgres::Config = url.parse().unwrap();
    done(&run(&url, &["enqueue", "ping", "--count", "3"]));
    sql_on(
        &config,
        "CREATE ROLE reader LOGIN; GRANT USAGE ON SCHEMA awa TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA awa TO reader",
    );
    // A lane, and so sequences, that came after the GRANT.
    done(&run(&url, &["enqueue", "ping", "--queue", "later"]));
    let reader_url = format!("{url}{}options=-c%20role%3Dreader", if url.contains('?') { '&' } else { '?' });
    let reader = |args: &[&str]| run(&reader_url, args);
    let counts = done(&reader(&["-o", "json", "queue", "list"]));
    assert_eq!(counts["queues"][1]["available"], 1, "{counts}");
    for command in [
        "inspect rings",
        "inspect claims",
        "inspect job 1",
        "inspect dead-tuples",
        "job list",
        "dlq list",
        "cron list",
        "migrate status",
        "maintenance status",
    ] {
        done(&reader(&command.split(' ').collect::<Vec<_>>()));
    }
    for command in
        ["enqueue ping", "job cancel 1", "queue pause default", "--yes queue drain later", "maintenance once"]
    {
        let output = reader(&command.split(' ').collect::<Vec<_>>());
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{command}: {told}");
        assert!(told.contains("permission denied for") && told.contains("grant the role"), "{command}: {told}");
    }
}

#[test]
fn roles_with_the_rights_of_the_readme_enqueue_and_work() {
    let url = database("cli_roles");
    let config: tokio_postgres::Config = url.parse().unwrap();
    let readme = include_str!("../README.md");
    let grants = readme.split("```sql").nth(1).unwrap().split("```").next().unwrap();
    done(&run(&url, &["enqueue", "ping", "--queue", "before"]));
    sql_on(&config, &format!("CREATE ROLE app; CREATE ROLE worker; {grants}"));
    let url_of = |role: &str| format!("{url}{}options=-c%20role%3D{role}", if url.contains('?') { '&' } else { '?' });
    let app = url_of("app");
    for options in
        [&["--queue", "before"][..], &["--queue", "new"], &["--in", "1h"], &["--unique", "kind"], &["--unique", "kind"]]
    {
        done(&run(&app, &[&["enqueue", "ping"], options].concat()));
    }
    done(&enqueue_lines(&app, "{\"kind\":\"ping\",\"queue\":\"newer\"}\n{\"kind\":\"ping\",\"unique\":{}}\n", &[]));
    // Keys that nobody is kept out by any more are taken over.
    sql_on(&config, "UPDATE awa.job_unique_claims SET held_until = '2020-01-01'");
    assert_eq!(done(&run(&app, &["-o", "json", "enqueue", "ping", "--unique", "kind"]))["enqueued"], 1);
    let refused = run(&app, &["queue", "pause", "new"]);
    assert_eq!(refused.status.code(), Some(1));

    let worker = url_of("worker");
    let child = awactl(&[
        "--database-url",
        &worker,
        "run-workers",
        "--config",
        "examples/workers.yaml",
        "--queue",
        "before",
        "--queue",
        "new",
        "--queue",
        "newer",
    ])
    .stdout(Stdio::null())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut left = Value::Null;
    for _ in 0..1200 {
        left = done(&run(&worker, &["-o", "json", "queue", "list"]));
        if left["queues"].as_array().unwrap().iter().all(|q| q["available"] == 0 && q["running"] == 0) {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    for ring in ["queue", "claim"] {
        done(&run(&worker, &["maintenance", "rotate", "--ring", ring, "--force"]));
    }
    done(&run(&worker, &["maintenance", "once"]));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGTERM).unwrap();
    let output = child.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!told.contains("permission denied"), "{left}: {told}");
    assert!(left["queues"].as_array().unwrap().iter().all(|q| q["available"] == 0), "{left}");
}

#[test]
fn skipped_lines_are_reported_and_their_neighbours_enqueued() {
    let url = database("cli_skip");
    let lines = "{\"kind\":\"a\",\"tags\":[\"x\"],\"run_at\":\"2020-01-01T00:00:00Z\"}\n\n{\"kind\":\"a\",\"args\":{\"k\":\"\\u0000\"}}\n\
                 nonsense\r\n{\"kind\":\"a\",\"args\":{\"n\":1e400}}\n{\"kind\":\"a\",\"run_at\":\"2999-01-01T00:00:00Z\"}\n";
    let output = enqueue_lines(&url, lines, &["--on-error", "skip"]);
    let report = done(&output);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    for line in ["line 3: args: $.k", "line 4: "] {
        assert!(told.contains(line), "{told}");
    }
    let counts = queue(&url, "default");
    assert_eq!(report["enqueued"].as_i64(), Some(counts["available"].as_i64().unwrap() + 1));
    assert_eq!(counts["scheduled"], 1);
}

#[test]
fn a_unique_job_is_enqueued_once_and_the_duplicates_name_it() {
    let url = database("cli_unique");
    let enqueue = |args: &[&str]| run(&url, &[&["-o", "json", "enqueue", "mail"], args].concat());
    let report = done(&enqueue(&["{\"to\": 1}", "--unique", "kind,args", "--count", "3"]));
    let id = &report["job_ids"][0];
    assert_eq!(
        (&report["enqueued"], &report["duplicates_of"]),
        (&1.into(), &Value::from(vec![id.clone(), id.clone()]))
    );
    assert_eq!(done(&enqueue(&["{\"to\":1.0}", "--unique", "kind,args"]))["enqueued"], 1, "other arguments");
    assert_eq!(done(&enqueue(&["{\"to\": 1}", "--unique", "args,period=1000d"]))["enqueued"], 1, "another key");
    let table = run(&url, &["enqueue", "mail", "{\"to\": 1}", "--unique", "args,period=1000d"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("duplicates"));

    let lines = "{\"kind\":\"mail\",\"args\":{\"to\":2},\"unique\":{}}\n{\"kind\":\"mail\"}\n\
                 {\"kind\":\"mail\",\"args\":{\"to\" : 2},\"unique\":{\"by_args\":true}}\n";
    let output = enqueue_lines(&url, lines, &[]);
    let report = done(&output);
    assert_eq!((&report["enqueued"], &report["duplicates"]), (&2.into(), &1.into()));
    assert_eq!(report["duplicate_lines"][0]["line"], 3);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        told.contains(&format!("line 3: a duplicate of job {}", report["duplicate_lines"][0]["duplicate_of"])),
        "{told}"
    );
}

#[test]
fn what_is_wrong_about_uniqueness_is_named() {
    let url = database("cli_unique_bad");
    for (parts, named) in [("kind,arg", "did you mean args"), ("period=1500ms", "`1500ms`"), ("states=done", "`done`")]
    {
        let output = run(&url, &["enqueue", "mail", "--unique", parts]);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && told.contains(named), "{told}");
    }
    let output = enqueue_lines(&url, "{\"kind\":\"a\",\"unique\":{\"states\":[\"avaliable\"]}}\n", &[]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.code() == Some(1) && told.contains("line 1: ") && told.contains("did you mean available"),
        "{told}"
    );
}

#[test]
fn workers_run_what_was_enqueued_and_drain_on_sigterm() {
    let url = database("cli_work");
    done(&run(&url, &["enqueue", "ping", "--count", "300", "--priority", "1"]));
    done(&run(&url, &["enqueue", "count_bytes", "[1, 2]", "--count", "3"]));
    done(&run(&url, &["enqueue", "broken", r#"{"terminal": true}"#]));
    let child = awactl(&["--database-url", &url, "-o", "json", "run-workers", "--config", "examples/workers.yaml"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut counts = Value::Null;
    for _ in 0..600 {
        counts = queue(&url, "default");
        if counts["completed"] == 303 && counts["failed"] == 1 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert_eq!((&counts["completed"], &counts["failed"]), (&303.into(), &1.into()), "{counts}");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGTERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(done(&output)["completed"], 303);
    assert_eq!(queue(&url, "default")["running"], 0);
}

#[test]
fn rings_say_what_blocks_each_slot() {
    let url = database("cli_rings");
    done(&run(&url, &["enqueue", "ping", "--count", "5"]));
    done(&run(&url, &["maintenance", "rotate"]));
    let report = done(&run(&url, &["inspect", "rings", "-o", "json"]));
    let ring = &report["rings"][0];
    assert_eq!((&ring["ring"], &ring["slot_count"], &ring["current_slot"]), (&"queue".into(), &16.into(), &1.into()));
    let slot = &ring["slots"][0];
    assert_eq!((&slot["state"], &slot["rows"], &slot["open"]), (&"sealed".into(), &5.into(), &5.into()));
    assert_eq!(slot["blockers"][0]["reason"], "ready_rows");
    let dead = done(&run(&url, &["inspect", "dead-tuples", "-o", "json"]));
    assert!(dead["tables"].as_array().unwrap().iter().any(|t| t["family"] == "ready_entries"), "{dead}");
    let output = run(&url, &["inspect", "dead-tuples", "--exact"]);
    assert_eq!(output.status.code(), Some(4), "without pgstattuple it says so");
}

#[test]
fn a_ring_can_be_looked_at_alone_and_says_what_a_rotation_would_do() {
    let url = database("cli_ring");
    let look = || done(&run(&url, &["inspect", "rings", "--ring", "claim", "-o", "json"]));
    let report = look();
    assert_eq!(report["rings"].as_array().unwrap().len(), 1);
    assert_eq!(report["rings"][0]["ring"], "claim");
    assert_eq!(report["rings"][0]["rotation"]["skipped"], "idle: the open slot is empty");
    done(&run(&url, &["maintenance", "rotate", "--force"]));
    let table = String::from_utf8(run(&url, &["inspect", "rings", "--ring", "claim"]).stdout).unwrap();
    let words = table.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(!words.contains("queue") && words.contains("would not be rotated"), "{table}");
}

#[test]
fn a_watch_ends_quietly_when_its_reader_has_left() {
    let url = database("cli_watch");
    for format in ["table", "json", "yaml"] {
        let mut child = awactl(&["--database-url", &url, "-o", format, "inspect", "queues", "--watch=10ms"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut first = [0];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut first).unwrap();
        drop(child.stdout.take());
        let mut status = None;
        for _ in 0..1000 {
            status = child.try_wait().unwrap();
            if status.is_some() {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let _ = child.kill();
        let output = child.wait_with_output().unwrap();
        assert_eq!(status.expect("it ends by itself").code(), Some(0), "{format}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!told.contains("error") && !told.contains("panick"), "{format}: {told}");
    }
}

#[test]
fn the_demo_does_its_jobs_and_stops_its_server() {
    let report = done(&awactl(&["demo", "--jobs", "2000", "-o", "json"]).output().unwrap());
    assert_eq!((&report["stats"]["completed"], &report["stats"]["failed"]), (&1998.into(), &2.into()));
    assert_eq!(awactl(&["--database-url", "x", "demo"]).output().unwrap().status.code(), Some(2));
}

#[test]
fn a_demo_in_a_kept_folder_can_be_run_again() {
    let reachable = std::os::unix::fs::PermissionsExt::from_mode(0o711);
    let dir = tempfile::Builder::new().prefix("awactl-test-").permissions(reachable).tempdir_in("/tmp").unwrap();
    let embedded = format!("--embedded={}", dir.path().display());
    for _ in 0..2 {
        let report = done(&awactl(&["demo", "--jobs", "1000", "-o", "json", &embedded]).output().unwrap());
        assert_eq!((&report["stats"]["completed"], &report["stats"]["failed"]), (&999.into(), &1.into()));
    }
}

#[test]
fn a_short_run_of_every_scenario_loses_nothing() {
    for entry in std::fs::read_dir("scenarios").unwrap() {
        let file = entry.unwrap().path();
        let output =
            awactl(&["bench", "run", file.to_str().unwrap(), "--time-scale", "0.02", "-o", "json"]).output().unwrap();
        // Speed is not a test's business, so a missed check of it (exit 1) is none either.
        assert!(matches!(output.status.code(), Some(0 | 1)), "{file:?}: {}", String::from_utf8_lossy(&output.stderr));
        let summary: Value = serde_json::from_slice(&output.stdout).unwrap();
        for metric in ["lost", "executed_twice", "invented", "results_lost"] {
            let value = summary["metrics"].get(metric).and_then(Value::as_f64).unwrap_or(0.0);
            assert_eq!(value, 0.0, "{metric} in {file:?}: {summary}");
        }
    }
}

#[test]
fn a_bench_refuses_what_a_killed_one_left() {
    let url = database("cli_bench_killed");
    let config: tokio_postgres::Config = url.parse().unwrap();
    sql_on(&config, "COMMENT ON SCHEMA awa IS 'made by awactl bench'");
    done(&run(&url, &["enqueue", "bench", "--queue", "bench", "--count", "3"]));
    let output = run(&url, &["bench", "run", "scenarios/pickup-latency.yaml"]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{told}");
    assert!(told.contains("3 jobs of it are not finished") && told.contains("DROP SCHEMA \"awa\""), "{told}");
}

#[test]
fn a_scenario_with_an_unknown_field_or_a_used_database_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("odd.yaml");
    std::fs::write(&file, "name: x\ndescription: y\nworkers: 1\nload: { one_at_a_time: 1 }\nfaults: []\nchecks: []\n")
        .unwrap();
    let output = awactl(&["bench", "run", file.to_str().unwrap()]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("faults"));

    let url = database("cli_bench_target");
    done(&run(&url, &["enqueue", "ping"]));
    let output = run(&url, &["bench", "run", "scenarios/pickup-latency.yaml", "--time-scale", "0.005"]);
    assert_eq!(output.status.code(), Some(4));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--allow-target cli_bench_target"));
}

#[test]
fn a_schema_may_have_any_name_that_postgresql_allows() {
    let url = database("cli_odd_schemas");
    for name in [
        "quo\"te'd",
        "100% %s %1$I %L",
        "ünï ✓ 名",
        "back\\slash \\+000041",
        "UPPER Case",
        "$function$ $$ $template$",
        "{schema} {schema_literal}",
        "do.tt-ed",
        "semi; -- colon",
        "new\nline\ttab",
        "@at U&\"x\"",
    ] {
        let run = |args: &[&str]| {
            let output =
                awactl(&[&["--database-url", &url, "--schema", name, "-o", "json"], args].concat()).output().unwrap();
            assert!(output.status.success(), "{name:?} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
            serde_json::from_slice::<Value>(&output.stdout).unwrap_or(Value::Null)
        };
        run(&["migrate"]);
        assert_eq!(run(&["migrate", "status"])["state"], "active", "{name:?}");
        run(&["enqueue", "ping", "--count", "40"]);
        run(&["enqueue", "ping", "--in", "100ms"]);
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("jobs.ndjson");
        std::fs::write(&file, "{\"kind\":\"ping\"}\n{\"kind\":\"broken\",\"args\":{\"terminal\":true}}\n").unwrap();
        run(&["enqueue", "--file", file.to_str().unwrap()]);
        let mut workers =
            awactl(&["--database-url", &url, "--schema", name, "run-workers", "--config", "examples/workers.yaml"])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
        let counts = |name: &str| {
            let report = run(&["inspect", "queues"]);
            report["queues"][0][name].as_i64().unwrap_or(0)
        };
        let ended = (0..400).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(50));
            counts("completed") == 42 && counts("failed") == 1
        });
        let rings = run(&["inspect", "rings"]);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(workers.id() as i32), nix::sys::signal::SIGTERM).unwrap();
        workers.wait().unwrap();
        assert!(ended, "{name:?}: {}", run(&["inspect", "queues"]));
        assert_eq!(rings["schema"], name);
        assert_eq!(rings["rings"][0]["slots"].as_array().unwrap().len(), 16);
        let dead = run(&["inspect", "dead-tuples"]);
        assert!(dead["tables"].as_array().unwrap().len() > 100, "{name:?}: {dead}");
        run(&["maintenance", "rotate"]);
        run(&["maintenance", "once"]);
        run(&["maintenance", "prune"]);
        run(&["maintenance", "status"]);
        assert_eq!(counts("completed"), 42, "{name:?}");
    }
}

#[test]
fn a_database_with_somebodys_tables_is_no_bench_target_unless_it_is_named() {
    let server = server();
    let url = database("cli_bench_foreign");
    let mut config = server.config();
    config.dbname("cli_bench_foreign");
    let sql = |sql: &str| sql_on(&config, sql);
    let bench = |more: &[&str]| {
        let args = ["bench", "run", "scenarios/pickup-latency.yaml", "--time-scale", "0.005"];
        run(&url, &[&args[..], more].concat())
    };
    sql("DROP SCHEMA awa CASCADE; CREATE TABLE public.accounts (id int)");
    for wrong in [&[][..], &["--allow-target", "another"]] {
        let output = bench(wrong);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{told}");
        assert!(told.contains("public.accounts") && told.contains("--allow-target cli_bench_foreign"), "{told}");
        assert_eq!(sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'awa'"), "0", "nothing was installed");
    }
    assert!(matches!(bench(&["--allow-target", "cli_bench_foreign"]).status.code(), Some(0 | 1)));
    assert_eq!(bench(&[]).status.code(), Some(4), "naming it once is no leave for ever");
    sql("DROP TABLE public.accounts");
    assert!(matches!(bench(&[]).status.code(), Some(0 | 1)), "what is left is a bench's own");

    // Jobs that were there before stay somebody's, also when a bench has been let in.
    sql("DROP SCHEMA awa CASCADE");
    done(&run(&url, &["migrate"]));
    done(&run(&url, &["enqueue", "ping"]));
    assert!(matches!(bench(&["--allow-target", "cli_bench_foreign"]).status.code(), Some(0 | 1)));
    assert_eq!(bench(&[]).status.code(), Some(4));
}

#[test]
fn a_fixed_rate_is_sent_whole_however_slow_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("flood.yaml");
    std::fs::write(
        &file,
        "name: flood\ndescription: more than can be sent in time\nworkers: 256\nload: { rate: 400000 }\npayload_bytes: 10\n\
         phases: [{ kind: clean, duration: 200ms }]\nchecks: []\n",
    )
    .unwrap();
    let output = awactl(&["bench", "run", file.to_str().unwrap(), "-o", "json"]).output().unwrap();
    let summary = done(&output);
    assert!(summary["metrics"]["committed"].as_f64().unwrap() >= 80_000.0, "{summary}");
    assert_eq!(summary["metrics"]["lost"], 0.0, "{summary}");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(told.contains("clean for 200ms") && !told.contains(['\u{1b}', '\r']), "lines off a terminal: {told:?}");
}

#[test]
fn a_bench_on_a_terminal_shows_rate_depth_and_p99_of_each_phase() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("short.yaml");
    std::fs::write(
        &file,
        "name: short\ndescription: x\nworkers: 8\nload: { rate: 500 }\nphases: [{ kind: warmup, duration: 1s }, { kind: clean, duration: 1s }]\nchecks: []\n",
    )
    .unwrap();
    let command = format!("{} bench run {}", env!("CARGO_BIN_EXE_awactl"), file.display());
    let output = Command::new("script")
        .args(["-qec", &command, "/dev/null"])
        .env_remove("DATABASE_URL")
        .env("TERM", "xterm")
        .stdin(Stdio::null())
        .output()
        .expect("script(1), for a terminal");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for phase in ["warmup for 1s", "clean for 1s"] {
        let shown = text.split(['\r', '\n']).any(|line| {
            line.contains(phase) && line.contains(" jobs/s, depth ") && line.contains(", p99 ") && line.contains('%')
        });
        assert!(shown, "{phase}: {text}");
    }
}
