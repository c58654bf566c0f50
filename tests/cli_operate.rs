//! job, queue, dlq, inspect claims and job, maintenance rescue, through the real binary: what they print, for people and for
//! programs, how they end, and what they refuse.

#[path = "cli_common/mod.rs"]
mod common;

use common::{Ran, awactl, server};
use serde_json::{Value, json};

/// A database with the schema installed.
struct Db {
    name: String,
    url: String,
}

impl Db {
    fn new() -> Self {
        let name = server().database("");
        let url = server().url("postgres", &name);
        let db = Self { name, url };
        db.done(&["migrate"]);
        db
    }

    fn run(&self, args: &[&str]) -> Ran {
        awactl(&[("DATABASE_URL", self.url.as_str())], args)
    }

    /// Ends with 0.
    fn done(&self, args: &[&str]) -> String {
        let ran = self.run(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        ran.stdout
    }

    fn json(&self, args: &[&str]) -> Value {
        serde_json::from_str(&self.done(&[args, &["-o", "json"]].concat())).unwrap()
    }

    /// Ends with that code and says each of these on stderr.
    fn refused(&self, args: &[&str], code: i32, says: &[&str]) -> Ran {
        let ran = self.run(args);
        assert_eq!(ran.code, code, "{args:?}: {ran:?}");
        for text in says {
            assert!(ran.stderr.contains(text), "{args:?} does not say {text:?}: {ran:?}");
        }
        ran
    }

    fn sql(&self, sql: &str) -> String {
        server().sql(&self.name, sql)
    }

    fn enqueue(&self, queue: &str) -> String {
        self.sql(&format!("SELECT job_id FROM awa.enqueue('send', '{queue}', '{{\"to\": 1}}', tags => '{{t}}')"))
    }

    /// An attempt of that job, which is the next of its queue, closed with an outcome.
    fn end(&self, queue: &str, outcome: &str) -> String {
        let job = self.enqueue(queue);
        self.sql(&format!(
            "SELECT awa.close_attempts(ARRAY[c.claim_slot], ARRAY[c.batch_id * 1024], c.job_ids, c.run_leases,
                 '{{{outcome}}}', '{{it broke}}', '{{1 day}}', '{{NULL}}')
             FROM awa.claim('{queue}', 1) AS c"
        ));
        job
    }

    fn running(&self, queue: &str) -> String {
        let job = self.enqueue(queue);
        self.sql(&format!("SELECT FROM awa.claim('{queue}', 1, '1 microsecond', 'worker-1')"));
        job
    }

    fn state(&self, job: &str) -> String {
        self.sql(&format!("SELECT state FROM awa.list_jobs(p_job_id => {job})"))
    }

    fn listed(&self, args: &[&str]) -> Vec<String> {
        let jobs = self.json(&[&["job", "list"], args].concat());
        let mut ids: Vec<i64> = jobs.as_array().unwrap().iter().map(|j| j["id"].as_i64().unwrap()).collect();
        ids.sort_unstable();
        ids.iter().map(ToString::to_string).collect()
    }
}

#[test]
fn jobs_are_listed_by_what_is_given_for_people_and_for_programs() {
    let db = Db::new();
    assert!(db.done(&["job", "list"]).contains("no job matches"));
    assert_eq!(db.json(&["job", "list"]), json!([]));
    let (a, b) = (db.enqueue("a"), db.end("b", "failed"));
    let c = db.end("b", "retryable");
    let d = db.running("b");
    for (args, expected) in [
        (&[][..], vec![&a, &b, &c, &d]),
        (&["--queue", "b"], vec![&b, &c, &d]),
        (&["--state", "failed", "--state", "running"], vec![&b, &d]),
        (&["--kind", "send", "--queue", "a"], vec![&a]),
        (&["--kind", "other"], vec![]),
        (&["--tag", "t", "--state", "available"], vec![&a]),
        (&["--tag", "x"], vec![]),
    ] {
        assert_eq!(db.listed(args).iter().collect::<Vec<_>>(), expected, "{args:?}");
    }
    assert_eq!(db.listed(&["--limit", "2"]).len(), 2);
    let table = db.done(&["job", "list", "--queue", "b"]);
    for text in ["id", "last error", "it broke", "running", "1/25"] {
        assert!(table.contains(text), "{table}");
    }
    db.refused(&["job", "list", "--state", "lost"], 2, &["--state", "waiting_external"]);
    db.refused(&["job", "list", "--limit", "0"], 2, &["--limit"]);
}

#[test]
fn one_job_is_shown_with_its_errors_and_where_it_lies_and_one_that_is_not_is_an_error() {
    let db = Db::new();
    let job = db.end("q", "retryable");
    let shown = db.json(&["job", "show", &job]);
    assert_eq!(
        (&shown["state"], &shown["attempt"], &shown["stored_in"], &shown["args"], &shown["tags"]),
        (&json!("retryable"), &json!(1), &json!("deferred"), &json!({"to": 1}), &json!(["t"]))
    );
    assert_eq!((&shown["errors"][0]["error"], &shown["errors"][0]["attempt"]), (&json!("it broke"), &json!(1)));
    let table = db.done(&["job", "show", &job]);
    for text in ["stored in", "deferred", "1 of 25", "it broke"] {
        assert!(table.contains(text), "{table}");
    }
    db.refused(&["job", "show", "999"], 1, &["there is no job 999"]);
    db.refused(&["job", "show", "x"], 2, &["x"]);
    let place = db.json(&["inspect", "job", &job]);
    assert_eq!((&place["place"], &place["state"]), (&json!("deferred"), &json!("retryable")));
    assert!(db.done(&["inspect", "job", &job]).contains("deferred"));
    db.refused(&["inspect", "job", "999"], 1, &["999"]);
}

#[test]
fn a_change_of_jobs_says_what_it_did_to_each_and_ends_with_one_when_not_to_all() {
    let db = Db::new();
    let (ready, done) = (db.enqueue("q"), db.end("q", "failed"));
    // `end` claims the head of the queue, so the first is the failed one.
    let (failed, ready) = (ready, done);
    let report = db.json(&["job", "cancel", &ready, "--reason", "a mistake"]);
    assert_eq!(
        (&report["operation"], &report["done"], &report["dry_run"]),
        (&json!("cancel"), &json!(1), &json!(false))
    );
    assert_eq!(report["jobs"][0]["state"], json!("available"));
    assert_eq!(db.state(&ready), "cancelled");
    assert_eq!(db.json(&["job", "show", &ready])["errors"][0]["error"], json!("a mistake"));

    let ran = db.run(&["job", "cancel", &ready, "999", "-o", "json"]);
    assert_eq!((ran.code, &ran.json()["done"]), (1, &json!(0)));
    assert_eq!(ran.json()["jobs"][0]["reason"], json!("it is cancelled already"));
    assert_eq!(ran.json()["jobs"][1]["reason"], json!("no such job"));
    let ran = db.run(&["job", "cancel", &ready]);
    assert!(ran.code == 1 && ran.stdout.contains("it is cancelled already"), "{ran:?}");

    db.done(&["job", "retry", &ready, &failed, "--to-queue", "other", "--to-priority", "1"]);
    let shown = db.json(&["job", "show", &failed]);
    assert_eq!(
        (&shown["state"], &shown["queue"], &shown["priority"]),
        (&json!("available"), &json!("other"), &json!(1))
    );
    db.done(&["job", "move", &failed, "--to-queue", "third", "--to-priority", "4"]);
    let shown = db.json(&["job", "show", &failed]);
    assert_eq!((&shown["queue"], &shown["priority"]), (&json!("third"), &json!(4)));
    db.done(&["job", "delete", &failed, "--yes"]);
    db.refused(&["job", "show", &failed], 1, &["there is no job"]);

    let running = db.running("r");
    let ran = db.run(&["job", "delete", &running, "--yes"]);
    assert!(ran.code == 1 && ran.stdout.contains("cancel it first"), "{ran:?}");
    db.done(&["job", "cancel", &running]);
    assert_eq!(db.state(&running), "cancelled");
}

#[test]
fn what_cannot_be_undone_needs_yes_off_a_terminal_and_a_dry_run_changes_nothing() {
    let db = Db::new();
    let jobs = [db.enqueue("q"), db.enqueue("q"), db.enqueue("other")];
    let refusals: [&[&str]; 4] = [
        &["job", "delete", &jobs[0]],
        &["job", "cancel", "--queue", "q"],
        &["queue", "drain", "q"],
        &["job", "delete", "--state", "available"],
    ];
    for args in refusals {
        db.refused(args, 4, &["cannot be undone", "--yes"]);
    }
    db.refused(refusals[0], 4, &["did not delete 1 job\n"]);
    let previews: [(&[&str], usize); 5] = [
        (&["job", "cancel", "--queue", "q", "--dry-run"], 2),
        (&["job", "delete", "--dry-run", &jobs[0]], 1),
        (&["job", "move", "--kind", "send", "--to-priority", "1", "--dry-run"], 3),
        (&["job", "retry", "--queue", "q", "--dry-run"], 0),
        (&["job", "cancel", "--kind", "send", "--limit", "1", "--dry-run"], 1),
    ];
    for (args, n) in previews {
        let report = db.json(args);
        assert_eq!((&report["dry_run"], report["jobs"].as_array().unwrap().len()), (&json!(true), n), "{args:?}");
    }
    let drained = db.json(&["queue", "drain", "q", "--dry-run"]);
    assert_eq!((&drained["dry_run"], &drained["cancelled"]), (&json!(true), &json!(2)));
    assert_eq!(db.listed(&["--state", "available"]), jobs);
    assert_eq!(db.json(&["job", "cancel", "--queue", "q", "--yes"])["done"], json!(2));
    assert_eq!(db.listed(&["--state", "available"]), [jobs[2].clone()]);
    // Ids and a filter: what matches both.
    assert_eq!(db.json(&["job", "retry", &jobs[0], "--state", "cancelled"])["done"], json!(1));
    assert_eq!(db.state(&jobs[1]), "cancelled");
    // Those that a filter matched first do not hide the id that was asked for.
    assert_eq!(db.json(&["job", "cancel", &jobs[2], "--kind", "send", "--limit", "1", "--yes"])["done"], json!(1));
}

#[test]
fn wrong_input_is_refused_by_its_name() {
    let db = Db::new();
    let job = db.enqueue("q");
    for operation in ["cancel", "retry", "delete"] {
        db.refused(&["job", operation], 2, &["which jobs", "--queue"]);
    }
    db.refused(&["job", "move", &job], 2, &["--to-queue", "--to-priority"]);
    db.refused(&["job", "move", &job, "--to-priority", "5"], 2, &["--to-priority"]);
    db.refused(&["job", "cancel", "abc"], 2, &["abc"]);
    db.refused(&["queue", "set", "q"], 2, &["--enqueue-shards"]);
    db.refused(&["queue", "set", "q", "--enqueue-shards", "65"], 2, &["--enqueue-shards"]);
    db.refused(&["queue", "set", "q", "--dlq", "maybe"], 2, &["--dlq"]);
    db.refused(&["queue", "set", "q", "--dlq-retention", "soon"], 2, &["--dlq-retention"]);
    db.refused(&["queue", "set", "q", "--failed-retention", "-1s"], 2, &["--failed-retention"]);
    db.refused(&["dlq", "retry"], 2, &["--all"]);
    db.refused(&["dlq", "purge", "--all", "--queue", "q"], 2, &["--all"]);
    db.refused(&["maintenance", "rescue", "--stale-after", "x"], 2, &["--stale-after"]);
    db.refused(&["maintenance", "rescue", "--limit", "0"], 2, &["--limit"]);
    // What only the database knows to be wrong.
    let long = "x".repeat(201);
    let ran = db.run(&["job", "move", &job, "--to-queue", &long]);
    assert!(ran.code == 1 && ran.stdout.contains("queue must have 1 to 200 characters"), "{ran:?}");
    for args in [&["queue", "pause", &long][..], &["queue", "pause", ""], &["queue", "set", "", "--dlq", "on"]] {
        db.refused(args, 2, &["queue is not valid", "it must have 1 to 200 characters"]);
    }
    db.refused(&["queue", "set", "q", "--dlq-retention", "0s"], 2, &["dlq_retention is not valid"]);
    let nowhere = awactl(&[("DATABASE_URL", "postgres://nobody@127.0.0.1:1/none")], &["job", "list"]);
    assert_eq!(nowhere.code, 3, "{nowhere:?}");
}

#[test]
fn a_queue_is_paused_resumed_set_listed_and_drained() {
    let db = Db::new();
    let outcome = |changed: bool, paused: bool, had_jobs: bool| json!({"queue": "q", "changed": changed, "paused": paused, "had_jobs": had_jobs});
    assert_eq!(db.json(&["queue", "pause", "q"]), outcome(true, true, false));
    db.enqueue("q");
    assert_eq!(db.json(&["queue", "pause", "q"]), outcome(false, true, true));
    assert_eq!(db.sql("SELECT count(*) FROM awa.claim('q', 1)"), "0");
    let listed = db.json(&["queue", "list"]);
    assert_eq!(
        (&listed["queues"][0]["queue"], &listed["queues"][0]["available"], &listed["queues"][0]["paused"]),
        (&json!("q"), &json!(1), &json!(true))
    );
    assert!(db.done(&["queue", "pause", "q"]).contains("as before"));
    assert_eq!(db.json(&["queue", "resume", "q"]), outcome(true, false, true));
    assert_eq!(db.json(&["queue", "resume", "q"]), outcome(false, false, true));

    let set = db.json(&["queue", "set", "q", "--enqueue-shards", "3", "--dlq", "on", "--dlq-retention", "2h"]);
    let settings = |set: &Value| (set["enqueue_shards"].clone(), set["dlq"].clone(), set["dlq_retention_s"].clone());
    assert_eq!(settings(&set), (json!(3), json!(true), json!(7200.0)));
    let set = db.json(&["queue", "set", "q", "--dlq", "off", "--failed-retention", "0s"]);
    assert_eq!(settings(&set), (json!(3), json!(false), json!(7200.0)));
    assert_eq!(set["failed_retention_s"], json!(0.0));
    let table = db.done(&["queue", "list"]);
    for text in ["avail", "shards", "2 h"] {
        assert!(table.contains(text), "{table}");
    }

    // One is there already; a claim takes one of the five.
    db.running("q");
    for _ in 0..3 {
        db.enqueue("q");
    }
    let drained = db.json(&["queue", "drain", "q", "--reason", "over", "--yes"]);
    assert_eq!(drained["cancelled"], json!(4));
    assert_eq!(db.listed(&["--state", "running"]).len(), 1);
    assert_eq!(db.json(&["queue", "drain", "q", "--yes"])["cancelled"], json!(0));
}

#[test]
fn the_dlq_is_listed_counted_retried_and_purged() {
    let db = Db::new();
    // Failures that are only kept for a while, older than those that are held.
    let retained: Vec<String> = (0..3).map(|_| db.end("q", "failed")).collect();
    for ring in ["queue", "claim"] {
        db.sql(&format!("SELECT awa.rotate('{ring}', true)"));
    }
    db.sql("SELECT awa.advance_idle_cursors()");
    for ring in ["claim", "queue"] {
        db.done(&["maintenance", "prune", "--ring", ring]);
    }
    assert_eq!(db.sql("SELECT count(*) FROM awa.dlq_entries WHERE held = 'retained'"), "3");
    assert_eq!(db.json(&["dlq", "depth"]), json!([]));
    assert!(db.done(&["dlq", "list"]).contains("no job matches"));

    db.done(&["queue", "set", "q", "--dlq", "on"]);
    let held: Vec<String> = (0..4).map(|_| db.end("q", "failed")).collect();
    db.done(&["queue", "set", "p", "--dlq", "on"]);
    let other = db.end("p", "failed");
    let ids = |args: &[&str]| -> Vec<String> {
        let jobs = db.json(&[&["dlq", "list"], args].concat());
        jobs.as_array().unwrap().iter().map(|j| j["id"].to_string()).collect()
    };
    assert_eq!(ids(&["--queue", "q"]), held);
    assert_eq!(ids(&["--limit", "2"]), held[..2], "what is only retained takes nobody's place");
    assert_eq!(ids(&["--kind", "none"]), [] as [String; 0]);
    assert!(db.done(&["dlq", "list"]).contains("it broke"));
    assert_eq!(db.json(&["dlq", "depth"]), json!([{"queue": "p", "held": 1}, {"queue": "q", "held": 4}]));
    assert!(db.done(&["dlq", "depth"]).contains('4'));

    assert_eq!(db.json(&["dlq", "retry", "--queue", "q", "--dry-run"])["jobs"].as_array().unwrap().len(), 4);
    assert_eq!(db.json(&["dlq", "purge", "--all", "--dry-run"])["jobs"].as_array().unwrap().len(), 5);
    db.refused(&["dlq", "retry", &held[0], &retained[0]], 1, &[&format!("does not hold job {}", retained[0])]);
    assert_eq!(ids(&[]).len(), 5, "and nothing was done");
    assert_eq!(db.json(&["dlq", "retry", &held[0], "--to-queue", "again", "--to-priority", "1"])["done"], json!(1));
    let shown = db.json(&["job", "show", &held[0]]);
    assert_eq!(
        (&shown["state"], &shown["queue"], &shown["attempt"]),
        (&json!("available"), &json!("again"), &json!(0))
    );
    assert_eq!(db.json(&["dlq", "retry", "--queue", "q", "--limit", "1"])["done"], json!(1));
    assert_eq!(db.state(&held[1]), "available");
    db.refused(&["dlq", "purge", "--queue", "q"], 4, &["--yes"]);
    assert_eq!(db.json(&["dlq", "purge", "--queue", "q", "--yes"])["done"], json!(2));
    assert_eq!(ids(&[]), [other]);
    assert_eq!(db.json(&["dlq", "purge", "--all", "--yes"])["done"], json!(1));
    assert_eq!(db.sql("SELECT count(*) FROM awa.dlq_entries"), "3", "what is retained is no part of it");
}

#[test]
fn open_attempts_are_shown_and_rescued() {
    let db = Db::new();
    let job = db.running("q");
    let leased = db.enqueue("q");
    db.sql(
        "SELECT awa.wait_for_callback(c.batch_id * 1024, c.job_ids[1], c.run_leases[1],
             awa.register_callback(c.claim_slot, c.batch_id * 1024, c.job_ids[1], c.run_leases[1], '1 hour'))
         FROM awa.claim('q', 1, NULL, 'worker-2') AS c",
    );
    let report = db.json(&["inspect", "claims"]);
    let claim = &report["claims"][0];
    assert_eq!(
        (&claim["queue"], &claim["open"], claim["first_open_job"].to_string(), &claim["claimed_by"]),
        (&json!("q"), &json!(1), job.clone(), &json!("worker-1"))
    );
    let lease = &report["leases"][0];
    assert_eq!(
        (lease["job_id"].to_string(), &lease["state"], &lease["claimed_by"]),
        (leased.clone(), &json!("waiting_external"), &json!("worker-2"))
    );
    let table = db.done(&["inspect", "claims"]);
    for text in ["worker-1", "worker-2", "waiting"] {
        assert!(table.contains(text), "{table}");
    }
    db.sql("UPDATE awa.leases SET callback_timeout_at = '2020-01-01'");
    assert_eq!(db.json(&["maintenance", "rescue"]), json!({"stale": 0, "deadline": 1, "callback_timeout": 1}));
    assert_eq!((db.state(&job), db.state(&leased)), ("retryable".into(), "retryable".into()));
    assert_eq!(db.json(&["inspect", "claims"]), json!({"claims": [], "leases": []}));
    let silent = db.enqueue("q");
    db.sql("SELECT FROM awa.claim('q', 1)");
    assert!(db.done(&["maintenance", "rescue"]).contains("stale"));
    assert_eq!(db.state(&silent), "running");
    assert_eq!(db.json(&["maintenance", "rescue", "--stale-after", "0s"])["stale"], json!(1));
    assert_eq!(db.state(&silent), "retryable");
}

#[test]
fn a_dry_run_says_which_jobs_are_not_there_or_do_not_suit() {
    let db = Db::new();
    let (waiting, done) = (db.enqueue("q"), db.end("p", "completed"));
    let ran = db.run(&["job", "cancel", "--dry-run", &waiting, &done, "999999", "-o", "json"]);
    let report = ran.json();
    assert_eq!((ran.code, &report["would"], &report["done"]), (1, &json!(1), &json!(0)), "{ran:?}");
    let reasons: Vec<_> = report["jobs"].as_array().unwrap().iter().map(|job| job["reason"].clone()).collect();
    assert_eq!(reasons, [Value::Null, json!("it is completed already"), json!("no such job")]);
    let table = db.run(&["job", "delete", "--dry-run", "999999"]);
    assert!(table.code == 1 && table.stdout.contains("no such job"), "{table:?}");
    assert_eq!(db.json(&["job", "cancel", "--dry-run", &waiting])["would"], json!(1));
    let table = db.run(&["job", "cancel", "--dry-run", &waiting, &done]);
    assert!(table.stdout.contains(&format!("job ids  {waiting}\n")), "{table:?}");
    assert_eq!(db.sql(&format!("SELECT state FROM awa.find_job({waiting})")), "available");
}

#[test]
fn a_queue_that_never_had_a_job_is_said_to_be_one() {
    let db = Db::new();
    for args in [
        &["queue", "pause", "mial"][..],
        &["queue", "resume", "mial"],
        &["queue", "drain", "mial", "--yes"],
        &["queue", "drain", "mial", "--dry-run"],
        &["queue", "set", "mial", "--dlq", "on"],
    ] {
        db.refused(args, 0, &["no job was ever enqueued to queue mial"]);
    }
    // One that is scheduled has no lane yet.
    db.done(&["enqueue", "send", "--queue", "mail", "--in", "1h"]);
    let ran = db.run(&["queue", "pause", "mail"]);
    assert!(ran.code == 0 && !ran.stderr.contains("no job"), "{ran:?}");
}

#[test]
fn a_slot_that_is_named_and_not_pruned_is_a_failure() {
    let db = Db::new();
    db.enqueue("q");
    db.done(&["maintenance", "rotate"]);
    db.refused(&["maintenance", "prune", "--ring", "queue", "--slot", "99"], 1, &["no slot 99", "it has 16"]);
    let ran = db.run(&["maintenance", "prune", "--ring", "queue", "--slot", "0"]);
    assert!(ran.code == 1 && ran.stdout.contains("ready_rows"), "{ran:?}");
    db.done(&["maintenance", "prune"]);
}

#[test]
fn tables_fit_80_columns_and_break_no_name_into_letters() {
    let db = Db::new();
    let (queue, kind) = ("notifications_transactional", "send_email_with_a_long_name");
    db.done(&["enqueue", kind, "--queue", queue, "--count", "1000"]);
    db.end(queue, "failed");
    db.running(queue);
    for args in [
        &["queue", "list"][..],
        &["inspect", "rings"],
        &["inspect", "claims"],
        &["inspect", "dead-tuples"],
        &["job", "list", "--limit", "3"],
        &["job", "list", "--state", "failed"],
    ] {
        let table = db.done(args);
        assert!(table.lines().all(|line| line.chars().count() <= 80), "{args:?}\n{table}");
        // A column of one letter a line makes lines with nothing else; one alone is a long name's end.
        let letters: Vec<bool> = table.lines().map(|line| line.trim().chars().count() == 1).collect();
        assert!(!letters.windows(2).any(|two| two == [true, true]), "{args:?}\n{table}");
    }
    assert!(db.done(&["queue", "list"]).contains(queue), "in one piece");
}

#[test]
fn arguments_beyond_what_a_program_can_hold_are_shown_as_text() {
    let db = Db::new();
    let job = db.sql("SELECT job_id FROM awa.enqueue('k', 'q', args => '{\"n\": 1e400}')");
    let args = db.json(&["job", "show", &job])["args"].as_str().unwrap().to_owned();
    assert!(args.starts_with("{\"n\": 1000000") && args.len() > 400, "{args}");
}
