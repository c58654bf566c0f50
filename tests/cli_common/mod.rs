//! A private PostgreSQL for one test binary, and a database of its own for each test.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::unistd::{Uid, User, chown};

pub struct Server {
    pub dir: PathBuf,
    pub port: u16,
}

/// What a run of awactl did.
#[derive(Debug)]
pub struct Ran {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// awactl with nothing of this environment but PATH.
pub fn awactl(env: &[(&str, &str)], args: &[&str]) -> Ran {
    let home = tempfile::tempdir().unwrap();
    let output = assert_cmd::Command::new(env!("CARGO_BIN_EXE_awactl"))
        .env_clear()
        .env("PATH", std::env::var_os("PATH").unwrap())
        .env("HOME", home.path())
        .envs(env.iter().copied())
        .args(args)
        .output()
        .unwrap();
    Ran {
        code: output.status.code().unwrap_or(-1),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The server this test binary shares.
pub fn server() -> &'static Server {
    static SERVER: OnceLock<Server> = OnceLock::new();
    SERVER.get_or_init(|| Server::start(false))
}

impl Server {
    /// Trusts its unix socket; over TCP, users `tlsonly` and `plainonly` get in one way each
    /// and everybody else needs a password.
    pub fn start(standby: bool) -> Self {
        let dir = tempfile::Builder::new().prefix("awactl-pg-").tempdir_in("/tmp").unwrap().keep();
        let owner = User::from_name("postgres").ok().flatten();
        let drop_to = owner.filter(|_| Uid::effective().is_root());
        let give = |path: &Path| {
            if let Some(user) = &drop_to {
                chown(path, Some(user.uid), Some(user.gid)).unwrap();
            }
        };
        let run = |program: PathBuf, args: &[&str]| {
            let mut command = Command::new(program);
            command.args(args).current_dir(&dir).stdout(Stdio::null());
            if let Some(user) = &drop_to {
                command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
            }
            assert!(command.status().unwrap().success(), "{args:?}");
        };
        give(&dir);
        let bin = bin_dir();
        run(
            bin.join("initdb"),
            &["-D", "data", "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"],
        );
        let data = dir.join("data");
        certificates(&data);
        for name in ["server.key", "server.crt"] {
            give(&data.join(name));
        }
        fs::write(
            data.join("pg_hba.conf"),
            "local all all trust\n\
             hostssl all tlsonly 127.0.0.1/32 trust\n\
             hostnossl all plainonly 127.0.0.1/32 trust\n\
             hostssl all plainonly 127.0.0.1/32 reject\n\
             hostnossl all tlsonly 127.0.0.1/32 reject\n\
             host all all 127.0.0.1/32 scram-sha-256\n",
        )
        .unwrap();
        if standby {
            fs::write(data.join("standby.signal"), "").unwrap();
            give(&data.join("standby.signal"));
        }
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let options = format!(
            "-c port={port} -c unix_socket_directories={} -c ssl=on -c fsync=off \
             -c listen_addresses=127.0.0.1",
            dir.display()
        );
        let pg_ctl = bin.join("pg_ctl");
        run(pg_ctl.clone(), &["start", "-w", "-D", "data", "-l", "log", "-o", &options]);
        // Statics are never dropped, but the end of this process closes the pipe, and that stops
        // the server.
        let mut watch = Command::new("sh");
        watch.current_dir(&dir).process_group(0).args([
            "-c",
            "cat; \"$1\" stop -D data -m immediate; cd /; rm -rf \"$2\"",
            "sh",
            pg_ctl.to_str().unwrap(),
            dir.to_str().unwrap(),
        ]);
        watch.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        if let Some(user) = &drop_to {
            watch.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        std::mem::forget(watch.spawn().unwrap());
        Self { dir, port }
    }

    pub fn url(&self, user: &str, database: &str) -> String {
        let dir = self.dir.to_str().unwrap();
        format!("postgres://{user}@/{database}?host={dir}&port={}", self.port)
    }

    pub fn sql(&self, database: &str, sql: &str) -> String {
        let output = Command::new(bin_dir().join("psql"))
            .args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-d", &self.url("postgres", database), "-c", sql])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
        text
    }

    /// Everything in the database as text, to see that nothing changed.
    pub fn dump(&self, database: &str) -> String {
        let output =
            Command::new(bin_dir().join("pg_dump")).args(["-d", &self.url("postgres", database)]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout).unwrap();
        // Newer pg_dump writes a random key into these lines.
        let lines = text.lines().filter(|line| !line.contains("restrict"));
        lines.collect::<Vec<_>>().join("\n")
    }

    pub fn database(&self, options: &str) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name} {options}"));
        name
    }
}

/// A folder with a server and its client programs: `AWACTL_PG_BIN`, Debian's newest, or one of `PATH`.
fn bin_dir() -> PathBuf {
    let given = std::env::var_os("AWACTL_PG_BIN").map(PathBuf::from);
    let mut installed: Vec<PathBuf> = fs::read_dir("/usr/lib/postgresql")
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path().join("bin"))).collect())
        .unwrap_or_default();
    installed.sort();
    installed.reverse();
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A link on the PATH leads to the folder that has the rest beside it.
    let on_path = std::env::split_paths(&path)
        .filter_map(|dir| Some(fs::canonicalize(dir.join("initdb")).ok()?.parent()?.to_path_buf()));
    let mut dirs = given.into_iter().chain(installed).chain(on_path);
    let complete = |bin: &PathBuf| ["initdb", "pg_ctl", "psql", "pg_dump"].iter().all(|name| bin.join(name).exists());
    dirs.find(complete).expect("these tests need PostgreSQL 15 or newer with psql and pg_dump, installed or on PATH")
}

/// A CA, and a server certificate of it for the name localhost only.
fn certificates(dir: &Path) {
    let script = "
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test-ca -keyout ca.key -out ca.crt
        openssl req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout server.key -out server.csr
        printf 'subjectAltName=DNS:localhost\\nbasicConstraints=CA:FALSE\\n' > ext
        openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out server.crt
        openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other-ca -keyout other.key -out other.crt";
    let status = Command::new("sh").args(["-e", "-c", script]).current_dir(dir).stderr(Stdio::null()).status().unwrap();
    assert!(status.success(), "the openssl command line is needed for these tests");
    fs::set_permissions(dir.join("server.key"), fs::Permissions::from_mode(0o600)).unwrap();
    // The tests' client may run as another user than the server: keep what it reads outside.
    for name in ["ca.crt", "other.crt", "server.crt"] {
        fs::copy(dir.join(name), dir.join("..").join(name)).unwrap();
    }
}
