//! The exec handler: what a program gets, what its end means, and how it is stopped.

mod worker_support;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use awactl::engine::worker::handlers::{Exec, ExecWorker};
use awactl::engine::worker::{
    CancelReason, DEADLINE_EXCEEDED, Job, JobContext, JobExtras, Outcome, RawJson, run_guarded,
};
use worker_support::{context, error_of, job, run, until, within};

fn sh(script: &str) -> Exec {
    Exec { argv: vec!["/bin/sh".into(), "-c".into(), script.into()], ..Exec::default() }
}

async fn run_exec(exec: Exec) -> Outcome {
    run(&ExecWorker::new("kind", exec), &context("{}")).await
}

// --- what goes in ---

#[tokio::test]
async fn the_program_gets_the_arguments_and_the_fields() {
    let dir = tempfile::tempdir().unwrap();
    let script = "cat > args; env | grep -E '^(AWA_JOB_|EXTRA|HOME=)' | sort > fields";
    let exec = Exec {
        cwd: Some(dir.path().to_owned()),
        env: [("EXTRA", "yes"), ("PATH", "/usr/bin:/bin")].map(|(name, value)| (name.into(), value.into())).into(),
        clear_env: true,
        ..sh(script)
    };
    let mut job = job(r#"{"a":"é"}"#);
    job.deadline_at = Some("2026-01-02T03:05:00Z".parse().unwrap());
    job.extras = Some(Box::new(JobExtras {
        tags: vec!["x".into(), "\"y\"".into()],
        metadata: RawJson::from_json(r#"{"m":1}"#).unwrap(),
        ..JobExtras::default()
    }));
    let worker = ExecWorker::new("kind", exec);
    assert_eq!(run(&worker, &JobContext::new(job)).await, Outcome::Complete);
    let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
    assert_eq!(read("args"), r#"{"a":"é"}"#);
    assert_eq!(
        read("fields").lines().collect::<Vec<_>>(),
        [
            "AWA_JOB_ATTEMPT=1",
            "AWA_JOB_CREATED_AT=2026-01-02T03:04:05.000000Z",
            "AWA_JOB_DEADLINE_AT=2026-01-02T03:05:00.000000Z",
            "AWA_JOB_ID=42",
            "AWA_JOB_KIND=kind",
            "AWA_JOB_MAX_ATTEMPTS=25",
            "AWA_JOB_METADATA={\"m\":1}",
            "AWA_JOB_PRIORITY=2",
            "AWA_JOB_QUEUE=default",
            "AWA_JOB_RUN_AT=2026-01-02T03:04:05.678901Z",
            "AWA_JOB_RUN_LEASE=7",
            "AWA_JOB_TAGS=[\"x\",\"\\\"y\\\"\"]",
            "EXTRA=yes",
        ]
    );
}

#[tokio::test]
async fn no_shell_looks_at_the_arguments() {
    let exec = Exec {
        argv: ["/bin/sh", "-c", "test \"$1\" = '$(exit 9) *'", "sh", "$(exit 9) *"].map(String::from).into(),
        ..Exec::default()
    };
    assert_eq!(run_exec(exec).await, Outcome::Complete);
}

#[tokio::test]
async fn big_arguments_and_a_big_output_do_not_wait_for_each_other() {
    let args = format!("\"{}\"", "x".repeat(1 << 20));
    // All of the output before any of the input is read, more than the pipes hold either way.
    let script = "head -c 1000000 /dev/zero | tr '\\0' y; head -c 300000 /dev/zero >&2
        test \"$(wc -c)\" -eq 1048578 && echo && echo '{\"snooze\":1}'";
    let worker = ExecWorker::new("kind", sh(script));
    assert_eq!(run(&worker, &context(&args)).await, Outcome::Snooze(Duration::from_secs(1)));
    // Nothing reads the input.
    for script in ["exit 0", "exec <&-; echo done"] {
        let worker = ExecWorker::new("kind", sh(script));
        assert_eq!(run(&worker, &context(&args)).await, Outcome::Complete);
    }
}

#[tokio::test]
async fn metadata_too_big_for_the_environment_is_left_out() {
    let mut job = job("{}");
    let metadata = format!("{{\"m\":\"{}\"}}", "x".repeat(200_000));
    job.extras = Some(Box::new(JobExtras { metadata: RawJson::from_json(&metadata).unwrap(), ..JobExtras::default() }));
    let worker = ExecWorker::new("kind", sh("test -z \"${AWA_JOB_METADATA+set}\""));
    assert_eq!(run(&worker, &JobContext::new(job)).await, Outcome::Complete);
}

// --- what comes out ---

#[tokio::test]
async fn the_exit_status_decides() {
    assert_eq!(run_exec(sh("exit 0")).await, Outcome::Complete);
    for code in [64, 69] {
        assert_eq!(
            run_exec(sh(&format!("echo why >&2; exit {code}"))).await,
            Outcome::fail(format!("exited with status {code}; stderr: why"))
        );
    }
    for code in [1, 63, 70, 75, 127, 255] {
        assert_eq!(run_exec(sh(&format!("exit {code}"))).await, Outcome::retry(format!("exited with status {code}")));
    }
    assert_eq!(
        run_exec(sh("echo last words >&2; kill -KILL $$")).await,
        Outcome::retry("killed by signal 9 (SIGKILL); stderr: last words")
    );
}

#[tokio::test]
async fn the_last_line_decides_further() {
    let s = Duration::from_secs;
    let retry = |error: &str, after| Outcome::Retry { error: error.into(), after: Some(after) };
    for (script, expected) in [
        (r#"echo '{"snooze":"30s"}'"#, Outcome::Snooze(s(30))),
        (r#"echo hi; echo '  {"snooze":"1h30m","x":[]}'; echo; echo ' '"#, Outcome::Snooze(s(5400))),
        (r#"printf '{"snooze":2}'; exit 75"#, Outcome::Snooze(s(2))),
        (r#"echo '{"retry_after":"10s"}'; exit 75"#, retry("exited with status 75", s(10))),
        (r#"echo '{"retry_after":0.5}'; exit 1"#, retry("exited with status 1", Duration::from_millis(500))),
        (r#"echo '{"retry_after":5}'"#, retry("the program asked for a retry", s(5))),
        (r#"echo '{"snooze":5}'; exit 1"#, Outcome::retry("exited with status 1")),
        (r#"echo '{"snooze":5,"retry_after":5}'; exit 65"#, Outcome::fail("exited with status 65")),
        // Ordinary output.
        (r#"echo '{"snooze":5}'; echo bye"#, Outcome::Complete),
        (r#"echo '{"snooze":'"#, Outcome::Complete),
        (r#"echo '{"snooze":null,"other":"30s"}'"#, Outcome::Complete),
        (r#"echo '["snooze"]'"#, Outcome::Complete),
        (r"printf '\377\376{'", Outcome::Complete),
    ] {
        assert_eq!(run_exec(sh(script)).await, expected, "{script}");
    }
    for value in [r#""soon""#, "-1", "1e300", "true", r#""4000d""#] {
        for code in [0, 75, 1] {
            let script = format!("echo '{{\"retry_after\":{value}}}'; exit {code}");
            let error = error_of(run_exec(sh(&script)).await);
            assert!(error.contains("its last line of output: `retry_after`: "), "{error}");
        }
    }
}

#[tokio::test]
async fn progress_is_kept_whatever_the_end() {
    for code in [0, 1, 64] {
        let ctx = context("{}");
        let script = format!("echo '{{\"progress\":{{\"done\":[1,2]}}}}'; exit {code}");
        let _ = run(&ExecWorker::new("kind", sh(&script)), &ctx).await;
        assert_eq!(ctx.take_progress().unwrap().as_str(), r#"{"done":[1,2]}"#);
    }
    // What jsonb cannot hold is no reason to fail.
    let ctx = context("{}");
    let script = r#"printf '%s' '{"progress":"\u0000"}'"#;
    let outcome = run(&ExecWorker::new("kind", sh(script)), &ctx).await;
    assert_eq!(outcome, Outcome::Complete);
    assert!(ctx.take_progress().is_none());
}

#[tokio::test]
async fn a_line_longer_than_what_is_kept_is_ordinary_output() {
    let script = r#"printf '{"snooze":"1s","x":"'; head -c 100000 /dev/zero | tr '\0' x; echo '"}'"#;
    assert_eq!(run_exec(sh(script)).await, Outcome::Complete);
}

#[tokio::test]
async fn the_error_holds_the_end_of_stderr_as_storable_text() {
    let script = r"head -c 100000 /dev/zero | tr '\0' x >&2; printf 'bad \377\0end\n' >&2; exit 1";
    let error = error_of(run_exec(sh(script)).await);
    assert!(error.starts_with("exited with status 1; stderr ends: …xxx"), "{error}");
    assert!(error.ends_with("xbad \u{fffd}end"), "{error}");
    assert!(error.len() < 4096 + 100, "{}", error.len());
}

#[tokio::test]
async fn a_program_that_cannot_be_started_retries_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("plain");
    fs::write(&plain, "").unwrap();
    let start = |program: &str| Exec { argv: vec![program.into()], ..Exec::default() };
    let missing = error_of(run_exec(start("/no/such/program")).await);
    assert!(missing.starts_with("cannot start `/no/such/program`: No such file"), "{missing}");
    let denied = error_of(run_exec(start(plain.to_str().unwrap())).await);
    assert!(denied.contains("Permission denied"), "{denied}");
    let nowhere = error_of(run_exec(Exec { cwd: Some("/no/such/directory".into()), ..sh("exit 0") }).await);
    assert!(nowhere.contains("cwd `/no/such/directory` is not a directory"), "{nowhere}");
}

// --- how it is stopped ---

/// Processes that a script reports by writing their ids into files of one folder.
struct Watched {
    dir: tempfile::TempDir,
}

impl Watched {
    fn new() -> Self {
        // Inherit orphans as process 1 of a container does, so that one left unreaped shows.
        nix::sys::prctl::set_child_subreaper(true).unwrap();
        Self { dir: tempfile::tempdir().unwrap() }
    }

    /// A program with `report NAME` to report its own id, and `report NAME ID` another's.
    fn exec(&self, script: &str) -> Exec {
        let report = "report() { echo ${2:-$$} > $1.new && mv $1.new $1; }";
        Exec { cwd: Some(self.dir.path().to_owned()), ..sh(&format!("{report}\n{script}")) }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    async fn id(&self, name: &str) -> u32 {
        until(name, || self.file(name).exists()).await;
        let text = fs::read_to_string(self.file(name)).unwrap();
        text.trim().parse().unwrap()
    }
}

/// State letter and parent of a process, from /proc.
fn stat(id: u32) -> Option<(char, u32)> {
    let stat = fs::read_to_string(Path::new("/proc").join(id.to_string()).join("stat")).ok()?;
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.next()?.parse().ok()?))
}

/// Whether a process has ended, and is no zombie of ours either: those of others are theirs.
fn is_gone(id: u32) -> bool {
    stat(id).is_none_or(|(state, parent)| state == 'Z' && parent != std::process::id())
}

/// A leader with a child that ignores SIGTERM and holds every pipe.
const STUBBORN_FAMILY: &str = "
    sh -c 'trap \"\" TERM; while :; do sleep 1; done' & report child $!
    report leader
    wait";

#[tokio::test]
async fn a_passed_deadline_kills_the_whole_group() {
    let watched = Watched::new();
    let worker = ExecWorker::new("kind", watched.exec(STUBBORN_FAMILY));
    let ctx = context("{}");
    let stop = async {
        let ids = [watched.id("leader").await, watched.id("child").await];
        ctx.cancel(CancelReason::Deadline);
        ids
    };
    let (outcome, ids) = tokio::join!(run(&worker, &ctx), stop);
    assert_eq!(outcome, Outcome::retry(DEADLINE_EXCEEDED));
    for id in ids {
        until("the process is gone", || is_gone(id)).await;
    }

    let worker = ExecWorker::new("kind", sh("exec sleep 1000"));
    let ctx = context("{}");
    let outcome = within(run_guarded(&worker, &ctx, Some(Duration::from_millis(50)))).await;
    assert_eq!(outcome, Outcome::retry(DEADLINE_EXCEEDED));
}

#[tokio::test]
async fn its_own_timeout_says_so_with_the_end_of_stderr() {
    let exec = Exec { timeout: Some(Duration::from_millis(300)), ..sh("echo stuck >&2; exec sleep 1000") };
    let error = error_of(run_exec(exec).await);
    assert!(error.starts_with("timed out after 300ms"), "{error}");
}

#[tokio::test]
async fn a_cancelled_program_may_clean_up_but_not_refuse() {
    let watched = Watched::new();
    for (name, script, obeys) in [
        ("polite", "trap 'echo > cleaned; exit 0' TERM; report polite; while :; do sleep 0.01; done", true),
        ("deaf", "trap '' TERM; report deaf; while :; do sleep 0.01; done", false),
    ] {
        let worker = ExecWorker::new("kind", watched.exec(script));
        let ctx = context("{}");
        let stop = async {
            let id = watched.id(name).await;
            ctx.cancel(CancelReason::Requested);
            id
        };
        let (outcome, id) = tokio::join!(run(&worker, &ctx), stop);
        assert_eq!(outcome, Outcome::stopped(CancelReason::Requested));
        assert!(stat(id).is_none(), "{name} is still there: {:?}", stat(id));
        assert_eq!(watched.file("cleaned").exists(), obeys || name == "deaf");
    }
}

#[tokio::test]
async fn a_worker_that_stops_hands_the_job_back() {
    let watched = Watched::new();
    let worker = ExecWorker::new("kind", watched.exec("report up; exec sleep 1000"));
    let ctx = context("{}");
    let stop = async {
        watched.id("up").await;
        ctx.cancel(CancelReason::Shutdown);
    };
    let (outcome, ()) = tokio::join!(run(&worker, &ctx), stop);
    assert_eq!(outcome, Outcome::Snooze(Duration::ZERO));
}

#[tokio::test]
async fn dropping_the_future_kills_and_reaps_the_group() {
    let watched = Watched::new();
    let worker = ExecWorker::new("kind", watched.exec(STUBBORN_FAMILY));
    let ctx = context("{}");
    let leader = tokio::select! {
        outcome = run(&worker, &ctx) => panic!("it ended: {outcome:?}"),
        id = watched.id("leader") => id,
    };
    let child = watched.id("child").await;
    until("the group is gone", || is_gone(leader) && is_gone(child)).await;
}

#[tokio::test]
async fn what_the_program_leaves_behind_does_not_hold_the_permit() {
    let watched = Watched::new();
    // In the group: killed with it.
    let script = "sleep 1000 & report child $!; echo '{\"snooze\":\"3s\"}'";
    let outcome = run_exec(watched.exec(script)).await;
    assert_eq!(outcome, Outcome::Snooze(Duration::from_secs(3)));
    let child = watched.id("child").await;
    until("the child is gone", || is_gone(child)).await;

    // Out of the group, holding the pipes, silent or not: left alone, and not waited for.
    for (name, then) in [("silent", "exec sleep 1000"), ("dripping", "while :; do echo x >&2; sleep 0.05; done")] {
        let script = format!(
            "setsid sh -c 'echo $$ > {name}.new; mv {name}.new {name}; {then}' &
            while ! test -e {name}; do sleep 0.01; done; echo '{{\"snooze\":\"4s\"}}'"
        );
        let outcome = run_exec(watched.exec(&script)).await;
        assert_eq!(outcome, Outcome::Snooze(Duration::from_secs(4)));
        let away = watched.id(name).await;
        assert!(!is_gone(away));
        let away = nix::unistd::Pid::from_raw(i32::try_from(away).unwrap());
        nix::sys::signal::kill(away, nix::sys::signal::Signal::SIGKILL).unwrap();
    }
}

#[tokio::test]
async fn many_at_a_time_leave_no_zombie() {
    let watched = Watched::new();
    let script = "report $AWA_JOB_ID; exit $((AWA_JOB_ID % 2))";
    let worker = ExecWorker::new("kind", watched.exec(script));
    let runs = (0..40).map(|id| {
        let job = Job { id, ..job("{}") };
        let worker = &worker;
        async move { run(worker, &JobContext::new(job)).await }
    });
    let outcomes = futures_util::future::join_all(runs).await;
    for (id, outcome) in outcomes.into_iter().enumerate() {
        assert_eq!(outcome == Outcome::Complete, id % 2 == 0, "{outcome:?}");
        let process = watched.id(&id.to_string()).await;
        assert!(is_gone(process), "{id}: {:?}", stat(process));
    }
}
