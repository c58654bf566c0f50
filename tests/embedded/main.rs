//! The embedded server, against real PostgreSQL servers, each in a folder of its own.

mod finding;

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use awactl::engine::embedded::{Embedded, EmbeddedError, Options, Progress};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;
use tokio_postgres::{Client, NoTls};

/// A folder that the server's user can pass, also when the tests run as root.
fn folder() -> TempDir {
    let mode = Permissions::from_mode(0o711);
    tempfile::Builder::new().prefix("awactl-test-").permissions(mode).tempdir_in("/tmp").unwrap()
}

async fn connect(config: &tokio_postgres::Config) -> Client {
    let (client, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

async fn one(client: &Client, sql: &str) -> String {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

fn is_alive(pid: u32) -> bool {
    // A zombie is not alive: where nobody waits for orphans, it stays listed.
    let state = fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next()));
    match state {
        Some(state) => state != 'Z',
        None if Path::new("/proc/self").exists() => false,
        None => kill(Pid::from_raw(pid as i32), None).is_ok(),
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < deadline, "never came about: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Another process that owns a server: this test binary, running one of the ignored tests below.
struct Owner {
    process: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Owner {
    fn run(test: &str, dir: &Path) -> Owner {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env("AWACTL_TEST_DIR", dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap());
        Owner { process, lines }
    }

    /// What it printed after `key`.
    fn said(&mut self, key: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "the owner ended without saying {key}");
            if let Some((_, value)) = line.split_once(&format!("{key}=")) {
                return value.trim().to_owned();
            }
        }
    }

    fn server_pid(&mut self) -> u32 {
        self.said("postmaster").parse().unwrap()
    }

    fn sigkill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

fn owners_dir() -> Option<PathBuf> {
    std::env::var_os("AWACTL_TEST_DIR").map(PathBuf::from)
}

/// Blocks until the test that started this process closes our input.
fn wait_for_parent() {
    let _ = std::io::stdin().read_line(&mut String::new());
}

#[tokio::test]
#[ignore = "the other process of sigkill_of_the_owner_* and of two_owners_*"]
async fn owner_of_a_kept_server() {
    let Some(dir) = owners_dir() else { return };
    let server = Embedded::start(Options::in_dir(dir)).await.unwrap();
    let client = connect(&server.config()).await;
    client.batch_execute("create table kept as select 'committed' as what").await.unwrap();
    println!("postmaster={}", server.pid().unwrap());
    wait_for_parent();
    server.stop().await.unwrap();
}

#[tokio::test]
#[ignore = "the other process of a_leaked_server_* and of the_folder_of_a_killed_*"]
async fn owner_of_a_leaked_server() {
    let Some(dir) = owners_dir() else { return };
    let options = Options { dir: Some(dir), ..Options::ephemeral() };
    let server = Embedded::start(options).await.unwrap().leak_until_exit();
    println!("postmaster={}", server.pid().unwrap());
    println!("data={}", server.data_dir().display());
    wait_for_parent();
}

#[tokio::test]
async fn an_ephemeral_server_answers_and_leaves_nothing() {
    let base = folder();
    let options = Options { dir: Some(base.path().to_owned()), ..Options::ephemeral() }
        .setting("shared_buffers", "20MB")
        .setting("log_line_prefix", "it's \\ ");
    let server = Embedded::start(options).await.unwrap();
    let client = connect(&server.config()).await;
    let version = one(&client, "select version()").await;
    assert!(version.starts_with(&format!("PostgreSQL {}", server.version())), "{version}");
    assert_eq!(one(&client, "show shared_buffers").await, "20MB");
    assert_eq!(one(&client, "show log_line_prefix").await, "it's \\ ");
    assert_eq!(one(&client, "show server_encoding").await, "UTF8");
    assert_eq!(one(&client, "show fsync").await, "on");
    assert!(server.bin_dir().join("initdb").is_file());
    let pid = server.pid().unwrap();
    server.stop().await.unwrap();
    assert!(!is_alive(pid));
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn the_socket_needs_no_password_and_the_port_does() {
    let base = folder();
    let server = Embedded::start(Options { dir: Some(base.path().to_owned()), ..Options::ephemeral() }).await.unwrap();
    let by_url: tokio_postgres::Config = server.url().parse().unwrap();
    assert_eq!(one(&connect(&by_url).await, "select current_user::text").await, "postgres");
    let by_port: tokio_postgres::Config = server.tcp_url().parse().unwrap();
    assert_eq!(one(&connect(&by_port).await, "select host(inet_server_addr())").await, "127.0.0.1");
    let mut guessed = tokio_postgres::Config::new();
    guessed.host("127.0.0.1").port(server.tcp_port()).user("postgres").password("postgres");
    let refused = guessed.connect(NoTls).await.err().expect("a wrong password is refused");
    assert_eq!(refused.code().unwrap().code(), "28P01");
    let mode = fs::metadata(server.socket_dir()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[tokio::test]
async fn a_kept_server_keeps_its_data_in_a_folder_with_a_long_path() {
    let base = folder();
    let dir = base.path().join("a folder, \"long\" and 'odd'".repeat(3)).join("x".repeat(50));
    let server = Embedded::start(Options::in_dir(&dir)).await.unwrap();
    let client = connect(&server.config()).await;
    client.batch_execute("create table kept (a int); insert into kept values (42)").await.unwrap();
    drop(client);
    let sockets = server.socket_dir().to_owned();
    server.stop().await.unwrap();
    assert!(!sockets.exists());
    let server = Embedded::start(Options::in_dir(&dir)).await.unwrap();
    assert_eq!(one(&connect(&server.config()).await, "select a::text from kept").await, "42");
    server.stop().await.unwrap();
}

#[tokio::test]
async fn sigkill_of_the_owner_stops_the_server_and_keeps_what_was_committed() {
    let base = folder();
    let mut owner = Owner::run("owner_of_a_kept_server", base.path());
    let pid = owner.server_pid();
    owner.sigkill();
    // Without waiting for the orphan: a start that comes at once has to do that.
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    assert!(!is_alive(pid));
    assert_eq!(one(&connect(&server.config()).await, "select what from kept").await, "committed");
    server.stop().await.unwrap();
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn sigkill_of_the_owner_alone_stops_the_server() {
    let base = folder();
    let mut owner = Owner::run("owner_of_a_kept_server", base.path());
    let pid = owner.server_pid();
    owner.sigkill();
    wait_until("the orphaned postmaster stops", || !is_alive(pid));
}

/// A server that ignores its owner's death, as where there is no parent-death signal.
#[tokio::test]
async fn a_stale_server_is_stopped_before_the_next_start() {
    let base = folder();
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    let (bin, data) = (server.bin_dir().to_owned(), server.data_dir().to_owned());
    server.stop().await.unwrap();
    // initdb made the folder, so its owner is whom the server runs as.
    let meta = fs::metadata(&data).unwrap();
    let mut command = Command::new(bin.join("postgres"));
    let sockets = format!("unix_socket_directories={}", base.path().join("run").display());
    command.arg("-D").arg(&data).args(["-c", "listen_addresses=", "-c", &sockets]);
    if nix::unistd::geteuid().is_root() {
        use std::os::unix::{fs::MetadataExt, process::CommandExt};
        command.gid(meta.gid()).uid(meta.uid());
    }
    let mut stale = command.current_dir(&data).stderr(Stdio::null()).spawn().unwrap();
    let pid_file = data.join("postmaster.pid");
    let is_ready = || {
        let text = fs::read_to_string(&pid_file).unwrap_or_default();
        text.lines().any(|line| line.trim() == "ready")
    };
    wait_until("the stale server is up", is_ready);

    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    assert!(stale.wait().unwrap().success(), "it was stopped in order");
    one(&connect(&server.config()).await, "select version()").await;
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_stale_pid_file_that_names_another_program_is_ignored() {
    let base = folder();
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    let data = server.data_dir().to_owned();
    server.kill().await.unwrap();
    drop(server);
    let pid_file = data.join("postmaster.pid");
    let text = fs::read_to_string(&pid_file).unwrap();
    let (_, rest) = text.split_once('\n').unwrap();
    fs::write(&pid_file, format!("{}\n{rest}", std::process::id())).unwrap();
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_panic_stops_the_server() {
    let base = folder();
    let options = Options { dir: Some(base.path().to_owned()), ..Options::ephemeral() };
    let (tell, told) = tokio::sync::oneshot::channel();
    let task = tokio::spawn(async move {
        let server = Embedded::start(options).await.unwrap();
        tell.send(server.pid().unwrap()).unwrap();
        panic!("on purpose");
    });
    let pid = told.await.unwrap();
    assert!(task.await.unwrap_err().is_panic());
    assert!(!is_alive(pid));
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_start_given_up_leaves_nothing() {
    let base = folder();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    let progress = move |progress: Progress| {
        let _ = tell.send(progress);
    };
    let options = Options {
        dir: Some(base.path().to_owned()),
        progress: Some(std::sync::Arc::new(progress)),
        ..Options::ephemeral()
    };
    let start = tokio::spawn(Embedded::start(options));
    while !matches!(told.recv().await.unwrap(), Progress::Initialising { .. }) {}
    start.abort();
    let _ = start.await;
    wait_until("the folder is gone", || fs::read_dir(base.path()).unwrap().count() == 0);
}

#[tokio::test]
async fn two_owners_of_one_folder_are_one_too_many() {
    let base = folder();
    let mut owner = Owner::run("owner_of_a_kept_server", base.path());
    let server = owner.server_pid();
    let refused = Embedded::start(Options::in_dir(base.path())).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::InUse { pid, .. } if pid == Some(owner.process.id())), "{refused}");
    assert!(refused.to_string().contains(&format!("process {}", owner.process.id())));
    assert!(is_alive(server));
    owner.process.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(owner.process.wait().unwrap().success());
    assert!(!is_alive(server));
}

#[tokio::test]
async fn a_half_made_cluster_is_made_again() {
    let base = folder();
    let half = base.path().join("init-killed");
    fs::create_dir_all(half.join("base")).unwrap();
    fs::write(half.join("PG_VERSION"), "15\n").unwrap();
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    one(&connect(&server.config()).await, "select version()").await;
    server.stop().await.unwrap();
    assert!(!half.exists());
}

#[tokio::test]
async fn what_is_not_our_cluster_is_left_alone() {
    let base = folder();
    fs::create_dir(base.path().join("data")).unwrap();
    fs::write(base.path().join("data/precious"), "mine").unwrap();
    let refused = Embedded::start(Options::in_dir(base.path())).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::NotACluster { .. }), "{refused}");
    assert!(base.path().join("data/precious").exists());

    let foreign = folder();
    fs::write(foreign.path().join("PG_VERSION"), "15\n").unwrap();
    let refused = Embedded::start(Options::in_dir(foreign.path())).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::ForeignCluster { .. }), "{refused}");
}

#[tokio::test]
async fn crashes_are_recovered_from_at_the_same_address() {
    let base = folder();
    let server = Embedded::start(Options::in_dir(base.path())).await.unwrap();
    let client = connect(&server.config()).await;
    client.batch_execute("create table kept (a int)").await.unwrap();
    let (port, mut pid) = (server.tcp_port(), server.pid().unwrap());
    for crash in 1..=3 {
        let client = connect(&server.config()).await;
        client.execute("insert into kept values (1)", &[]).await.unwrap();
        let busy = connect(&server.config()).await;
        // Computes on after its postmaster's death, holding the shared memory.
        let busy =
            tokio::spawn(
                async move { busy.batch_execute("select count(*) from generate_series(1, 100000000000)").await },
            );
        match crash {
            1 => server.stop_immediate().await.unwrap(),
            2 => server.kill().await.unwrap(),
            _ => kill(Pid::from_raw(pid as i32), Signal::SIGKILL).unwrap(),
        }
        if crash < 3 {
            assert_eq!(server.pid(), None);
        } else {
            wait_until("the postmaster is gone", || !is_alive(pid));
        }
        server.start_again().await.unwrap();
        assert!(busy.await.unwrap().is_err());
        assert_ne!(server.pid(), Some(pid));
        pid = server.pid().unwrap();
        assert_eq!(server.tcp_port(), port);
        let client = connect(&server.config()).await;
        assert_eq!(one(&client, "select count(*)::text from kept").await, crash.to_string());
    }
    server.restart().await.unwrap();
    let client = connect(&server.config()).await;
    assert_eq!(one(&client, "select count(*)::text from kept").await, "3");
    assert!(matches!(server.start_again().await, Err(EmbeddedError::Running)));
    server.stop().await.unwrap();
}

#[tokio::test]
async fn a_server_that_cannot_start_says_why() {
    let base = folder();
    let options = Options::in_dir(base.path()).setting("shared_buffers", "a lot");
    let failed = Embedded::start(options).await.unwrap_err();
    assert!(matches!(failed, EmbeddedError::NotStarted { .. }), "{failed}");
    assert!(failed.to_string().contains("invalid value for parameter \"shared_buffers\""), "{failed}");
    // And does not keep others from trying.
    Embedded::start(Options::in_dir(base.path())).await.unwrap().stop().await.unwrap();
}

#[tokio::test]
async fn a_leaked_server_is_gone_when_its_process_exits() {
    let base = folder();
    let mut owner = Owner::run("owner_of_a_leaked_server", base.path());
    let (pid, data) = (owner.server_pid(), PathBuf::from(owner.said("data")));
    assert!(is_alive(pid) && data.exists());
    owner.process.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert!(owner.process.wait().unwrap().success());
    assert!(!is_alive(pid));
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn the_folder_of_a_killed_ephemeral_server_is_removed_by_the_next() {
    let base = folder();
    let mut owner = Owner::run("owner_of_a_leaked_server", base.path());
    let (pid, data) = (owner.server_pid(), PathBuf::from(owner.said("data")));
    owner.sigkill();
    assert!(data.exists());
    let options = Options { dir: Some(base.path().to_owned()), ..Options::ephemeral() };
    Embedded::start(options).await.unwrap().stop().await.unwrap();
    assert!(!is_alive(pid));
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 0);
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn as_root_a_folder_that_the_servers_user_cannot_reach_is_refused() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let closed = tempfile::tempdir().unwrap();
    fs::set_permissions(closed.path(), Permissions::from_mode(0o700)).unwrap();
    let refused = Embedded::start(Options::in_dir(closed.path().join("server"))).await.unwrap_err();
    assert!(matches!(&refused, EmbeddedError::Unreachable { blocked, .. } if *blocked == closed.path()), "{refused}");
}
