//! `awactl cron` and the cron jobs of workers.yaml, through the real binary.

mod common;

use std::process::{Command, Output, Stdio};

use common::server::server;
use serde_json::{Value, json};

fn awactl(url: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_awactl"));
    command.args(["--database-url", url, "-o", "json"]).args(args).env_remove("DATABASE_URL").stdin(Stdio::null());
    command
}

/// A database of its own with the schema installed, as an address.
fn database(name: &str) -> String {
    sql(&server().url_of("postgres"), &format!("CREATE DATABASE {name}"));
    let url = server().url_of(name);
    done(&run(&url, &["migrate"]));
    url
}

fn sql(url: &str, text: &str) {
    let config: tokio_postgres::Config = url.parse().unwrap();
    let run = async {
        let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute(text).await.unwrap();
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(run);
}

fn run(url: &str, args: &[&str]) -> Output {
    awactl(url, args).output().unwrap()
}

fn done(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn list(url: &str) -> Vec<Value> {
    done(&run(url, &["cron", "list"]))["cron_jobs"].as_array().unwrap().clone()
}

#[test]
fn what_is_added_is_listed_with_its_next_due_time() {
    let url = database("cron_add");
    let add = [
        "cron",
        "add",
        "nightly",
        "30 2 * * *",
        "report",
        r#"{"a": 1}"#,
        "--timezone",
        "Europe/Berlin",
        "--queue",
        "reports",
        "--priority",
        "1",
        "--max-attempts",
        "3",
        "--tag",
        "x",
        "--metadata",
        r#"{"m": 2}"#,
    ];
    let added = done(&run(&url, &add));
    assert_eq!((&added["result"], &added["dry_run"]), (&json!("added"), &json!(false)));
    let jobs = list(&url);
    let mut job = jobs[0].clone();
    let fields: Vec<_> = job.as_object().unwrap().keys().cloned().collect();
    assert_eq!(jobs.len(), 1);
    assert_eq!(job["next_due_at"], added["next"][0]["utc"]);
    for clock in ["next_due_at", "created_at", "updated_at"] {
        assert!(job[clock].is_string(), "{job}");
        job.as_object_mut().unwrap().remove(clock);
    }
    assert_eq!(
        job,
        json!({
            "name": "nightly", "cron_expr": "30 2 * * *", "timezone": "Europe/Berlin", "kind": "report", "queue": "reports",
            "args": {"a": 1}, "priority": 1, "max_attempts": 3, "tags": ["x"], "metadata": {"m": 2}, "paused": false,
            "last_due_at": null, "last_fired_at": null, "last_job_id": null, "missed_count": 0, "last_error": null,
            "last_error_at": null,
        })
    );
    assert_eq!(fields.len(), 20, "a field more is fine, but list it here");

    assert_eq!(done(&run(&url, &add))["result"], "unchanged");
    let mut other = add;
    other[3] = "0 3 * * *";
    let refused = run(&url, &other);
    assert_eq!(refused.status.code(), Some(4));
    assert!(stderr(&refused).contains("--replace"), "{}", stderr(&refused));
    assert_eq!(list(&url)[0]["cron_expr"], "30 2 * * *");
    assert_eq!(done(&run(&url, &[&other[..], &["--replace"]].concat()))["result"], "changed");
    assert_eq!(list(&url)[0]["cron_expr"], "0 3 * * *");
}

#[test]
fn a_dry_run_shows_five_times_in_the_zone_and_in_utc_and_changes_nothing() {
    let url = database("cron_dry");
    let args = ["cron", "add", "n", "30 2 * * *", "k", "--timezone", "America/New_York", "--dry-run"];
    let shown = done(&run(&url, &args));
    assert_eq!((&shown["result"], &shown["dry_run"]), (&Value::Null, &json!(true)));
    let next = shown["next"].as_array().unwrap();
    assert_eq!(next.len(), 5);
    for at in next {
        let (local, utc) = (at["local"].as_str().unwrap(), at["utc"].as_str().unwrap());
        let same = (local.contains("-05:00 EST") && utc.contains("T07:30:00Z"))
            || (local.contains("-04:00 EDT") && utc.contains("T06:30:00Z"))
            || (local.contains("03:00:00 -04:00 EDT") && utc.contains("T07:00:00Z"));
        assert!(same, "{at}");
    }
    assert!(list(&url).is_empty());
    let table = Command::new(env!("CARGO_BIN_EXE_awactl")).args(["--database-url", &url]).args(args).output().unwrap();
    assert!(String::from_utf8_lossy(&table.stdout).contains("in UTC"), "{table:?}");
}

#[test]
fn what_is_no_cron_job_is_refused_before_it_is_stored() {
    let url = database("cron_bad");
    for (args, named) in [
        (vec!["nonsense", "k"], "give minute, hour, day of month, month and day of week"),
        (vec!["61 2 * * *", "k"], "its minute is \"61\"; allowed are 0 to 59"),
        (vec!["0 0 2 * * FUN", "k"], "its day of week is \"FUN\""),
        (vec!["0 0 30 2 *", "k"], "never comes due"),
        (vec!["* * * * *", "k", "{"], "ARGS"),
        (vec!["* * * * *", "k", "--timezone", "Mars/Olympus"], "Mars/Olympus"),
        (vec!["* * * * *", "k", "--priority", "9"], "priority"),
        (vec!["* * * * *", "k", "--metadata", "[]"], "metadata"),
        (vec!["* * * * *", ""], "kind"),
    ] {
        let output = run(&url, &[&["cron", "add", "n"], &args[..]].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(named), "{}", stderr(&output));
    }
    assert!(list(&url).is_empty());
}

#[test]
fn a_trigger_enqueues_now_and_a_due_one_is_fired_by_maintenance() {
    let url = database("cron_fire");
    done(&run(&url, &["cron", "add", "n", "0 0 1 1 *", "ping"]));
    let due = list(&url)[0]["next_due_at"].clone();
    let id = done(&run(&url, &["cron", "trigger", "n"]))["job_id"].as_i64().unwrap();
    assert!(id > 0);
    assert_eq!(list(&url)[0]["next_due_at"], due);

    sql(&url, "UPDATE awa.cron_jobs SET cursor_at = clock_timestamp() - interval '3 years', next_due_at = NULL");
    let report = done(&run(&url, &["maintenance", "once"]));
    assert_eq!((&report["cron_fired"], &report["cron_missed"]), (&json!(1), &json!(2)));
    let job = &list(&url)[0];
    assert_eq!((&job["missed_count"], &job["next_due_at"]), (&json!(2), &due));
    assert!(
        job["last_job_id"].as_i64().unwrap() > id && job["last_fired_at"].is_string() && job["last_due_at"].is_string()
    );

    sql(
        &url,
        "UPDATE awa.cron_jobs SET priority = 9; UPDATE awa.cron_jobs SET cursor_at = clock_timestamp() - interval '1 year', last_enqueued_at = NULL, next_due_at = NULL",
    );
    let report = done(&run(&url, &["maintenance", "once"]));
    assert!(report["failed"]["cron"].as_str().unwrap().contains("n: priority"), "{report}");
    assert!(list(&url)[0]["last_error"].as_str().unwrap().contains("priority"));
    let trigger = run(&url, &["cron", "trigger", "n"]);
    assert_eq!(trigger.status.code(), Some(2), "{}", stderr(&trigger));
}

#[test]
fn a_paused_one_is_shown_so_and_resumes_from_now() {
    let url = database("cron_pause");
    done(&run(&url, &["cron", "add", "n", "0 0 1 1 *", "ping"]));
    assert_eq!(done(&run(&url, &["cron", "pause", "n"])), json!({"name": "n", "paused": true, "changed": true}));
    assert_eq!(done(&run(&url, &["cron", "pause", "n"]))["changed"], false);
    let job = &list(&url)[0];
    assert_eq!((&job["paused"], &job["next_due_at"]), (&json!(true), &Value::Null));
    sql(&url, "UPDATE awa.cron_jobs SET cursor_at = clock_timestamp() - interval '3 years', next_due_at = NULL");
    assert_eq!(done(&run(&url, &["maintenance", "once"]))["cron_fired"], 0);
    assert_eq!(done(&run(&url, &["cron", "resume", "n"]))["changed"], true);
    assert_eq!(done(&run(&url, &["maintenance", "once"]))["cron_fired"], 0);
}

#[test]
fn removing_needs_a_yes_and_an_unknown_name_is_said() {
    let url = database("cron_remove");
    done(&run(&url, &["cron", "add", "n", "0 0 1 1 *", "ping"]));
    assert_eq!(run(&url, &["cron", "remove", "n"]).status.code(), Some(4));
    assert_eq!(list(&url).len(), 1);
    let both = run(&url, &["cron", "remove", "n", "m", "--yes"]);
    assert_eq!(both.status.code(), Some(1), "as for a job that is not there");
    assert!(stderr(&both).contains("no cron job m"), "{}", stderr(&both));
    assert_eq!(list(&url).len(), 1, "all or none");
    assert_eq!(done(&run(&url, &["cron", "remove", "n", "--yes"])), json!({"removed": ["n"]}));
    for command in ["trigger", "pause", "resume"] {
        assert_eq!(run(&url, &["cron", command, "n"]).status.code(), Some(1));
    }
}

#[test]
fn workers_put_their_config_s_cron_jobs_in_place_and_run_what_comes_due() {
    let url = database("cron_workers");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("workers.yaml");
    let config = |schedule: &str| {
        let text = format!(
            "queues: {{ default: }}\nhandlers: {{ ping: {{ builtin: noop }} }}\ncron:\n  tick: {{ schedule: \"{schedule}\", kind: ping, args: {{ n: [1, two] }} }}\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    let work = |until: &dyn Fn() -> bool| -> (Value, String) {
        let args = ["run-workers", "--config", file.to_str().unwrap()];
        let mut child = awactl(&url, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        for _ in 0..6000 {
            if until() {
                break;
            }
            assert!(child.try_wait().unwrap().is_none(), "it ended early");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(child.id() as i32), nix::sys::signal::SIGTERM).unwrap();
        let output = child.wait_with_output().unwrap();
        (done(&output), stderr(&output))
    };
    config("* * * * * *");
    let fired = || list(&url).first().is_some_and(|job| job["last_job_id"].is_i64());
    let (stats, said) = work(&fired);
    assert!(stats["completed"].as_i64().unwrap() >= 1, "{stats}");
    assert!(said.contains("cron job tick: added"), "{said}");
    assert_eq!(list(&url)[0]["args"], json!({"n": [1, "two"]}));

    config("0 0 1 1 *");
    let (_, said) = work(&|| list(&url)[0]["cron_expr"] == "0 0 1 1 *");
    assert!(said.contains("cron job tick: changed"), "{said}");

    std::fs::write(
        &file,
        "handlers: { ping: { builtin: noop } }\ncron:\n  tick: { schedule: \"* * * *\", kind: ping }\n",
    )
    .unwrap();
    let output = run(&url, &["run-workers", "--queue", "default", "--config", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("* * * *") && stderr(&output).contains("line 3"), "{}", stderr(&output));
}
