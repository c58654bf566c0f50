//! A throw-away PostgreSQL for the tests of one binary, started on first use. `engine::embedded` is to replace this.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

static SERVER: OnceLock<Server> = OnceLock::new();

pub struct Server {
    pub socket_dir: String,
    /// Its stdin is the server's life line: when this process ends, however it ends, the shell stops the server.
    _shell: Child,
}

/// The server of this test binary.
pub fn server() -> &'static Server {
    SERVER.get_or_init(start)
}

fn newest_bin_dir() -> PathBuf {
    let mut found: Vec<(u32, PathBuf)> = std::fs::read_dir("/usr/lib/postgresql")
        .expect("PostgreSQL is installed under /usr/lib/postgresql")
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let major = path.file_name()?.to_str()?.parse().ok()?;
            path.join("bin/postgres").exists().then(|| (major, path.join("bin")))
        })
        .collect();
    found.sort();
    found.pop().expect("a PostgreSQL server with bin/postgres").1
}

fn run(dir: &Path, script: &str) -> Command {
    let mut command = if nix::unistd::geteuid().is_root() {
        let mut c = Command::new("su");
        c.args(["postgres", "-s", "/bin/sh", "-c", script]);
        c
    } else {
        let mut c = Command::new("sh");
        c.args(["-c", script]);
        c
    };
    command.current_dir(dir);
    command
}

fn start() -> Server {
    let dir = std::env::temp_dir().join(format!("awa-test-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    if nix::unistd::geteuid().is_root() {
        let user = nix::unistd::User::from_name("postgres").unwrap().expect("a user named postgres");
        nix::unistd::chown(&dir, Some(user.uid), Some(user.gid)).unwrap();
    }
    let bin = newest_bin_dir();
    let (bin, home) = (bin.display(), dir.display());
    let initdb = run(
        &dir,
        &format!("{bin}/initdb -D data -U postgres -A trust -N --no-instructions -E UTF8 --locale=C >initdb.log 2>&1"),
    );
    assert!({ initdb }.status().unwrap().success(), "initdb failed, see {home}/initdb.log");
    std::fs::File::options()
        .append(true)
        .open(dir.join("data/postgresql.conf"))
        .unwrap()
        .write_all(
            b"fsync = off\nfull_page_writes = off\nmax_connections = 400\nmax_prepared_transactions = 20\n\
            max_locks_per_transaction = 256\nlisten_addresses = ''\nautovacuum = off\nshared_buffers = 64MB\n",
        )
        .unwrap();
    let mut shell = run(&dir, &format!(
        "{bin}/postgres -D data -k {home} >server.log 2>&1 & pid=$!; read _; kill -QUIT $pid; wait $pid; cd /; rm -rf {home}"))
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let ready = (0..1200).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        run(&dir, &format!("{bin}/pg_isready -q -h {home}")).status().unwrap().success()
    });
    if !ready {
        let _ = shell.kill();
        panic!("PostgreSQL did not start, see {home}/server.log");
    }
    Server { socket_dir: home.to_string(), _shell: shell }
}
