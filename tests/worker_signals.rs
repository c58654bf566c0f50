//! How the commands end: on signals, on bad input, with the database gone.

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use awactl::engine::embedded::{Embedded, Options};
use common::server::server;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PATIENCE: Duration = Duration::from_secs(60);

fn awactl(url: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_awactl"));
    command.args(["--database-url", url]).args(args).env_remove("DATABASE_URL");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn done(output: Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A database of its own with the schema installed, as an address.
fn database(name: &str) -> String {
    let url = server().url_of(name);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (client, connection) = server().config().connect(tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        client.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
    });
    done(awactl(&url, &["migrate"]).output().unwrap());
    url
}

fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn ended(child: &mut Child) -> ExitStatus {
    until("it ends", || child.try_wait().unwrap())
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

/// Gone, or dead and not reaped by whoever inherited it.
fn is_gone(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .map_or(true, |stat| stat.rsplit(')').next().unwrap().trim_start().starts_with('Z'))
}

/// A fleet whose jobs write their process's id to `dir/pid` and then do not end; on SIGTERM they go on.
fn stubborn_worker(url: &str, dir: &Path, args: &[&str]) -> (Child, i32) {
    let pid = dir.join("pid");
    let script = format!("trap '' TERM; echo $$ > {0}.new; mv {0}.new {0}; while :; do sleep 1; done", pid.display());
    let config = dir.join("workers.yaml");
    let text = format!("queues: {{default: {{workers: 2}}}}\nhandlers: {{stay: {{exec: [sh, -c, \"{script}\"]}}}}\n");
    std::fs::write(&config, text).unwrap();
    done(awactl(url, &["enqueue", "stay"]).output().unwrap());
    let child = awactl(url, &[&["run-workers", "--config", config.to_str().unwrap()], args].concat()).spawn().unwrap();
    let pid = until("the job starts", || std::fs::read_to_string(&pid).ok());
    (child, pid.trim().parse().unwrap())
}

/// The lines of stderr, read on a thread of its own.
fn stderr_of(child: &mut Child) -> std::sync::mpsc::Receiver<String> {
    let (sender, lines) = std::sync::mpsc::channel();
    let stderr = child.stderr.take().unwrap();
    std::thread::spawn(move || BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|l| sender.send(l)));
    lines
}

#[test]
fn a_second_signal_ends_the_programs_too() {
    let url = database("signal_twice");
    for (caught, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        let dir = tempfile::tempdir().unwrap();
        let (mut child, program) = stubborn_worker(&url, dir.path(), &[]);
        let stderr = stderr_of(&mut child);
        signal(&child, caught);
        until("it drains", || stderr.try_recv().ok().filter(|line| line.contains("draining")));
        assert!(!is_gone(program));
        signal(&child, caught);
        assert_eq!(ended(&mut child).code(), Some(code));
        until("the program is gone", || is_gone(program).then_some(()));
    }
}

#[test]
fn a_drain_without_a_database_ends_with_exit_code_1() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let own = runtime.block_on(Embedded::start(Options::ephemeral().setting("fsync", "off"))).unwrap();
    done(awactl(&own.url(), &["migrate"]).output().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (mut child, program) = stubborn_worker(&own.url(), dir.path(), &["--shutdown-timeout", "100ms"]);
    let stderr = stderr_of(&mut child);
    runtime.block_on(own.stop_immediate()).unwrap();
    signal(&child, Signal::SIGTERM);
    assert_eq!(ended(&mut child).code(), Some(1));
    assert!(is_gone(program));
    let told: Vec<String> = stderr.iter().collect();
    assert!(told.iter().any(|line| line.contains("1 result could not be written")), "{told:#?}");
    runtime.block_on(own.stop()).unwrap();
}

#[test]
fn a_bad_line_ends_the_command_although_more_could_come() {
    let url = database("stdin_open");
    let mut child = awactl(&url, &["enqueue", "--file", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"{\"kind\":\"a\"}\n[\"k\"]\n").unwrap();
    assert_eq!(ended(&mut child).code(), Some(1));
    drop(stdin);
    let told = String::from_utf8(child.wait_with_output().unwrap().stderr).unwrap();
    assert!(told.contains("line 2: it is not a JSON object"), "{told}");
}

#[test]
fn long_lines_go_in_batches_of_bounded_size() {
    let url = database("long_lines");
    // 40 MiB in one batch of lines, more than the bound in bytes.
    let line = format!("{{\"kind\":\"a\",\"args\":\"{}\"}}\n", "x".repeat(4 << 20));
    let mut child = awactl(&url, &["-o", "json", "enqueue", "--file", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    for _ in 0..10 {
        stdin.write_all(line.as_bytes()).unwrap();
    }
    // The last one is bad: what was in earlier batches stays.
    stdin.write_all(b"nonsense\n").unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    let enqueued = report["enqueued"].as_u64().unwrap();
    assert!((1..10).contains(&enqueued) && report["resume_from"] == enqueued + 1, "{report}");
}

#[test]
fn a_cancelled_attempt_is_no_loss_and_one_that_a_drain_stops_is_handed_back() {
    let url = database("cancel_and_drain");
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("workers.yaml");
    std::fs::write(&config, "queues: {default: {workers: 2}}\nhandlers: {nap: {builtin: sleep, duration: 1h}}\n")
        .unwrap();
    let config = config.to_str().unwrap();
    done(awactl(&url, &["enqueue", "nap", "--count", "2"]).output().unwrap());
    let args = ["-v", "-o", "json", "run-workers", "--config", config, "--shutdown-timeout", "10ms"];
    let mut child = awactl(&url, &args).spawn().unwrap();
    let stderr = stderr_of(&mut child);
    let running = || {
        let output = awactl(&url, &["-o", "json", "job", "list", "--state", "running"]).output().unwrap();
        let jobs: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        jobs.as_array().unwrap().iter().map(|job| job["id"].to_string()).collect::<Vec<_>>()
    };
    let jobs = until("both run", || Some(running()).filter(|jobs| jobs.len() == 2));
    done(awactl(&url, &["job", "cancel", &jobs[0]]).output().unwrap());
    let told = until("its result is not kept", || {
        stderr.try_recv().ok().filter(|line| line.contains("job_id") && line.contains(&jobs[0]))
    });
    assert!(told.contains("INFO") && told.contains("an operator cancelled the job"), "{told}");
    signal(&child, Signal::SIGTERM);
    let output = child.wait_with_output().unwrap();
    let stats: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&stats["handed_back"], &stats["snoozed"]), (&1.into(), &0.into()), "{stats}");
    let left: Vec<String> = stderr.iter().collect();
    assert!(!left.iter().any(|line| line.contains("WARN")), "{left:#?}");
}
