//! A private PostgreSQL for one test binary, and a database of its own for each test.
#![allow(dead_code, reason = "each test binary uses its own part of this")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use awactl::engine::embedded::{Embedded, Options};
use nix::unistd::{Uid, User, chown};
use tokio_postgres::SimpleQueryMessage;

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

    /// The rows as text: one a line, the columns with `|` between them.
    pub fn sql(&self, database: &str, sql: &str) -> String {
        let mut config = tokio_postgres::Config::new();
        config.host_path(&self.dir).port(self.port).user("postgres").dbname(database);
        let run = async {
            let (client, connection) = config.connect(tokio_postgres::NoTls).await.unwrap();
            let connection = tokio::spawn(connection);
            let outcome = client.simple_query(sql).await;
            // Until the server has heard it, so that nobody finds this session there.
            drop(client);
            let _ = connection.await;
            let messages = outcome.unwrap_or_else(|error| panic!("{sql}: {error:?}"));
            let line = |row: tokio_postgres::SimpleQueryRow| {
                (0..row.len()).map(|n| row.get(n).unwrap_or_default()).collect::<Vec<_>>().join("|")
            };
            let lines = messages.into_iter().filter_map(|message| match message {
                SimpleQueryMessage::Row(row) => Some(line(row)),
                _ => None,
            });
            lines.collect::<Vec<_>>().join("\n")
        };
        // On a thread of its own: the caller may be inside a runtime.
        std::thread::scope(|scope| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let ran = scope.spawn(move || runtime.block_on(run)).join();
            ran.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Everything in the database as text, to see that nothing changed. (Not every server comes with a pg_dump.)
    pub fn dump(&self, database: &str) -> String {
        let definitions = self.sql(database, DEFINITIONS);
        let rows = "SELECT format('SELECT %L, t::text FROM (SELECT * FROM %s) AS t ORDER BY 2;', c.oid::regclass, c.oid::regclass)
                    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                    WHERE c.relkind IN ('r', 'S') AND n.nspname !~ '^pg_|^information_schema$' ORDER BY 1";
        let rows = self.sql(database, &self.sql(database, rows));
        format!("{definitions}\n{rows}")
    }

    pub fn database(&self, options: &str) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        self.sql("postgres", &format!("CREATE DATABASE {name} {options}"));
        name
    }
}

const DEFINITIONS: &str = "
    WITH ours AS (SELECT n.* FROM pg_namespace AS n WHERE n.nspname !~ '^pg_|^information_schema$')
    SELECT t.line
    FROM (
        SELECT concat_ws(' ', n.nspname, n.nspowner, n.nspacl, obj_description(n.oid, 'pg_namespace')) AS line FROM ours AS n
        UNION ALL
        SELECT concat_ws(' ', c.relkind, c.oid::regclass, c.relowner, c.relacl, c.reloptions, pg_get_expr(c.relpartbound, c.oid))
        FROM pg_class AS c JOIN ours AS n ON n.oid = c.relnamespace
        UNION ALL
        SELECT concat_ws(' ', c.oid::regclass, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
                   pg_get_expr(d.adbin, d.adrelid))
        FROM pg_class AS c
        JOIN ours AS n ON n.oid = c.relnamespace
        JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0
        LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum
        UNION ALL
        SELECT pg_get_functiondef(p.oid) FROM pg_proc AS p JOIN ours AS n ON n.oid = p.pronamespace WHERE p.prokind IN ('f', 'p')
        UNION ALL
        SELECT pg_get_constraintdef(c.oid) FROM pg_constraint AS c JOIN ours AS n ON n.oid = c.connamespace
        UNION ALL
        SELECT pg_get_indexdef(c.oid) FROM pg_class AS c JOIN ours AS n ON n.oid = c.relnamespace WHERE c.relkind = 'i'
        UNION ALL
        SELECT pg_get_viewdef(c.oid) FROM pg_class AS c JOIN ours AS n ON n.oid = c.relnamespace WHERE c.relkind = 'v'
        UNION ALL
        SELECT pg_get_triggerdef(t.oid)
        FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid JOIN ours AS n ON n.oid = c.relnamespace
        WHERE NOT t.tgisinternal
    ) AS t
    ORDER BY 1";

/// Where the programs of a server are, as awactl finds them; fetched if there is none.
fn bin_dir() -> &'static Path {
    static BIN: OnceLock<PathBuf> = OnceLock::new();
    BIN.get_or_init(|| {
        let find = async {
            let server = Embedded::start(Options::ephemeral()).await.unwrap();
            let bin = server.bin_dir().to_owned();
            server.stop().await.unwrap();
            bin
        };
        std::thread::scope(|scope| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            scope.spawn(move || runtime.block_on(find)).join().unwrap()
        })
    })
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
