//! Where the database is: a parsed connection string, its TLS settings, the schema in it.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio_postgres::Config;
use tokio_postgres::config::SslNegotiation;

use super::conninfo::{ConnInfo, Env, password_from_file};
use super::error::{EngineError, Result};
use super::schema::Schema;
use super::tls::{SslMode, TlsOptions};

/// Per host, for the whole of name lookup, TCP, TLS and authentication.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const SOCKET_DIRS: &[&str] = &["/var/run/postgresql", "/tmp"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HostSpec {
    /// A name, an address, or the directory of a unix socket (starts with `/`).
    pub(super) host: String,
    pub(super) addr: Option<IpAddr>,
    port: u16,
}

impl HostSpec {
    pub(super) fn is_socket(&self) -> bool {
        self.addr.is_none() && self.host.starts_with('/')
    }

    /// The unix socket, if it is one.
    pub(super) fn socket(&self) -> Option<PathBuf> {
        self.is_socket().then(|| Path::new(&self.host).join(format!(".s.PGSQL.{}", self.port)))
    }
}

impl fmt::Display for HostSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionAttrs {
    Any,
    ReadWrite,
    ReadOnly,
    Primary,
    Standby,
    PreferStandby,
}

/// A database, a schema in it, and how to get there.
#[derive(Clone)]
pub struct Target {
    pub(super) hosts: Vec<HostSpec>,
    /// Everything but hosts, password and application name, to be copied for each host.
    base: Config,
    user: String,
    dbname: String,
    password: Option<String>,
    passfile: Option<PathBuf>,
    pub(super) session_attrs: SessionAttrs,
    pub(super) shuffle_hosts: bool,
    pub(super) timeout: Option<Duration>,
    pub(super) tls: TlsOptions,
    origin: String,
    /// Whether it leads through a transaction pooler, once that is known; shared by all who connect to it.
    pub(super) pooled: Arc<OnceLock<bool>>,
    pub schema: Schema,
}

impl Target {
    /// `origin` says where the text came from, for people ("--database-url", "context prod").
    pub fn parse(text: &str, schema: Schema, origin: &str, env: Env<'_>) -> Result<Self> {
        Self::build(ConnInfo::parse(text)?, schema, origin, env)
    }

    /// From the `PG*` variables alone.
    pub fn from_env(schema: Schema, env: Env<'_>) -> Result<Self> {
        Self::build(ConnInfo::default(), schema, "PG* variables", env)
    }

    fn build(mut info: ConnInfo, schema: Schema, origin: &str, env: Env<'_>) -> Result<Self> {
        info.complete_from(env);
        let home = env("HOME").map(PathBuf::from);
        let user = match info.get("user") {
            Some(user) => user.to_owned(),
            None => os_user()?,
        };
        let dbname = info.get("dbname").unwrap_or(&user).to_owned();
        let timeout = match info.get("connect_timeout") {
            None => Some(DEFAULT_CONNECT_TIMEOUT),
            Some(text) => {
                let seconds: u64 = number("connect_timeout", "whole seconds, 0 for none", text)?;
                (seconds > 0).then(|| Duration::from_secs(seconds))
            }
        };
        let mut base = Config::new();
        base.user(&user).dbname(&dbname);
        base.application_name(info.get("application_name").unwrap_or("awactl"));
        if let Some(options) = info.get("options") {
            base.options(options);
        }
        tcp_settings(&mut base, &info)?;
        let root_cert = info.get("sslrootcert").map(str::to_owned);
        let mode = match info.get("sslmode") {
            Some(text) => text.parse()?,
            // libpq's rule: everybody has a certificate from a public CA, so check the name too.
            None if root_cert.as_deref() == Some("system") => SslMode::VerifyFull,
            None => SslMode::Prefer,
        };
        if root_cert.as_deref() == Some("system") && mode != SslMode::VerifyFull {
            return Err(EngineError::invalid("sslmode", "only verify-full is allowed with sslrootcert=system"));
        }
        let client_cert = match (info.get("sslcert"), info.get("sslkey")) {
            (Some(cert), Some(key)) => Some((cert.into(), key.into())),
            (None, None) => None,
            _ => {
                return Err(EngineError::invalid("sslcert", "sslcert and sslkey must be given together"));
            }
        };
        Ok(Self {
            hosts: hosts(&info)?,
            base,
            user,
            dbname,
            password: info.get("password").map(str::to_owned),
            passfile: match info.get("passfile") {
                Some(path) => Some(path.into()),
                None => home.as_ref().map(|home| home.join(".pgpass")),
            },
            session_attrs: session_attrs(info.get("target_session_attrs"))?,
            shuffle_hosts: one_of(
                "load_balance_hosts",
                info.get("load_balance_hosts").unwrap_or("disable"),
                &[("disable", false), ("random", true)],
            )?,
            timeout,
            tls: TlsOptions {
                mode,
                root_cert,
                client_cert,
                default_root_cert: home.map(|home| home.join(".postgresql/root.crt")),
            },
            origin: origin.to_owned(),
            pooled: Arc::default(),
            schema,
        })
    }

    pub fn with_application_name(mut self, name: &str) -> Self {
        self.base.application_name(name);
        self
    }

    /// For whoever only ever writes, as workers and maintenance do: of several hosts the one that can be written to, unless
    /// something narrower was asked for. A single host is taken as it is.
    pub fn for_writing(mut self) -> Self {
        if self.hosts.len() > 1 && matches!(self.session_attrs, SessionAttrs::Any | SessionAttrs::PreferStandby) {
            self.session_attrs = SessionAttrs::ReadWrite;
        }
        self
    }

    pub fn dbname(&self) -> &str {
        &self.dbname
    }

    /// For people and logs: who, where, which schema, from where; no password, no options.
    pub fn redacted(&self) -> String {
        let hosts: Vec<_> = self.hosts.iter().map(HostSpec::to_string).collect();
        format!(
            "{}@{}/{}, schema {}, sslmode {} (from {})",
            self.user,
            hosts.join(","),
            self.dbname,
            self.schema,
            self.tls.mode,
            self.origin
        )
    }

    pub(super) fn config_for(&self, spec: &HostSpec) -> Config {
        let mut config = self.base.clone();
        config.host(&spec.host).port(spec.port);
        if let Some(addr) = spec.addr {
            config.hostaddr(addr);
        }
        let file_host = match &spec.host {
            socket if SOCKET_DIRS.contains(&socket.as_str()) => "localhost",
            host => host,
        };
        let password = self.password.clone().or_else(|| {
            let path = self.passfile.clone();
            password_from_file(path, file_host, spec.port, &self.dbname, &self.user)
        });
        if let Some(password) = password {
            config.password(password);
        }
        config
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Target({})", self.redacted())
    }
}

fn hosts(info: &ConnInfo) -> Result<Vec<HostSpec>> {
    let list = |keyword| -> Vec<&str> { info.get(keyword).map(|text| text.split(',').collect()).unwrap_or_default() };
    let (names, addrs, ports) = (list("host"), list("hostaddr"), list("port"));
    let count = names.len().max(addrs.len()).max(1);
    if !names.is_empty() && !addrs.is_empty() && names.len() != addrs.len() {
        return Err(EngineError::invalid("hostaddr", "as many addresses as hosts are needed"));
    }
    if ports.len() > 1 && ports.len() != count {
        return Err(EngineError::invalid("port", "one port, or as many as hosts, are needed"));
    }
    (0..count)
        .map(|index| {
            let port = match ports.get(index).or(ports.first()).copied() {
                None | Some("") => 5432,
                Some(text) => match number("port", "a number from 1 to 65535", text)? {
                    0 => return Err(EngineError::invalid("port", "a number from 1 to 65535")),
                    port => port,
                },
            };
            let addr = match addrs.get(index).copied().filter(|addr| !addr.is_empty()) {
                None => None,
                Some(text) => Some(number::<IpAddr>("hostaddr", "an IP address", text)?),
            };
            let host = match (names.get(index).copied().filter(|n| !n.is_empty()), addr) {
                (Some(name), _) => name.to_owned(),
                // TLS needs some name to ask for.
                (None, Some(addr)) => addr.to_string(),
                (None, None) => default_host(port),
            };
            Ok(HostSpec { host, addr, port })
        })
        .collect()
}

fn default_host(port: u16) -> String {
    SOCKET_DIRS
        .iter()
        .find(|dir| Path::new(dir).join(format!(".s.PGSQL.{port}")).exists())
        .map_or("localhost", |dir| dir)
        .to_owned()
}

fn tcp_settings(config: &mut Config, info: &ConnInfo) -> Result<()> {
    let seconds = |keyword| -> Result<Option<Duration>> {
        info.get(keyword).map(|text| number(keyword, "whole seconds", text).map(Duration::from_secs)).transpose()
    };
    if let Some(text) = info.get("keepalives") {
        config.keepalives(one_of("keepalives", text, &[("0", false), ("1", true)])?);
    }
    if let Some(idle) = seconds("keepalives_idle")? {
        config.keepalives_idle(idle);
    }
    if let Some(interval) = seconds("keepalives_interval")? {
        config.keepalives_interval(interval);
    }
    if let Some(text) = info.get("keepalives_retries") {
        config.keepalives_retries(number("keepalives_retries", "a whole number", text)?);
    }
    if let Some(text) = info.get("tcp_user_timeout") {
        let millis = number("tcp_user_timeout", "whole milliseconds", text)?;
        config.tcp_user_timeout(Duration::from_millis(millis));
    }
    if let Some(text) = info.get("channel_binding") {
        use tokio_postgres::config::ChannelBinding as Binding;
        config.channel_binding(one_of(
            "channel_binding",
            text,
            &[("disable", Binding::Disable), ("prefer", Binding::Prefer), ("require", Binding::Require)],
        )?);
    }
    if let Some(text) = info.get("sslnegotiation") {
        config.ssl_negotiation(one_of(
            "sslnegotiation",
            text,
            &[("postgres", SslNegotiation::Postgres), ("direct", SslNegotiation::Direct)],
        )?);
    }
    Ok(())
}

fn session_attrs(text: Option<&str>) -> Result<SessionAttrs> {
    one_of(
        "target_session_attrs",
        text.unwrap_or("any"),
        &[
            ("any", SessionAttrs::Any),
            ("read-write", SessionAttrs::ReadWrite),
            ("read-only", SessionAttrs::ReadOnly),
            ("primary", SessionAttrs::Primary),
            ("standby", SessionAttrs::Standby),
            ("prefer-standby", SessionAttrs::PreferStandby),
        ],
    )
}

fn one_of<T: Copy>(field: &str, text: &str, allowed: &[(&str, T)]) -> Result<T> {
    allowed.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<_> = allowed.iter().map(|(name, _)| *name).collect();
        EngineError::invalid(field, format!("allowed are {}", names.join(", ")))
    })
}

fn number<T: std::str::FromStr>(field: &str, allowed: &str, text: &str) -> Result<T> {
    text.trim().parse().map_err(|_| EngineError::invalid(field, format!("{allowed} is allowed")))
}

fn os_user() -> Result<String> {
    nix::unistd::User::from_uid(nix::unistd::geteuid())
        .ok()
        .flatten()
        .map(|user| user.name)
        .ok_or_else(|| EngineError::invalid("user", "name one; this account has no name"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_env(_: &str) -> Option<String> {
        None
    }

    fn parse(text: &str) -> Result<Target> {
        Target::parse(text, Schema::default(), "test", &no_env)
    }

    #[test]
    fn the_password_is_in_no_text_wherever_it_came_from() {
        let env = |name: &str| (name == "PGPASSWORD").then(|| "hunter2".to_owned());
        let targets = [
            parse("postgres://me:hunter2@h1,h2:1/db"),
            parse("postgres://me@h/db?password=hunter2"),
            parse("host=h user=me password=hunter2"),
            Target::parse("postgres://me@h/db", Schema::default(), "test", &env),
        ];
        for target in targets {
            let target = target.unwrap();
            assert_eq!(target.password.as_deref(), Some("hunter2"));
            let text = format!("{target:?} {}", target.redacted());
            assert!(!text.contains("hunter2"), "{text}");
            assert!(text.contains("me@h"), "{text}");
        }
    }

    #[test]
    fn every_sslmode_of_libpq_is_taken() {
        for mode in ["disable", "allow", "prefer", "require", "verify-ca", "verify-full"] {
            let target = parse(&format!("host=h user=u sslmode={mode}")).unwrap();
            assert_eq!(target.tls.mode.to_string(), mode);
        }
        let system = parse("host=h user=u sslrootcert=system").unwrap();
        assert_eq!(system.tls.mode, SslMode::VerifyFull);
        assert!(parse("host=h user=u sslrootcert=system sslmode=require").is_err());
    }

    #[test]
    fn bad_settings_name_the_field_and_what_is_allowed() {
        for (text, field) in [
            ("host=h user=u port=0", "port"),
            ("host=h user=u port=x", "port"),
            ("host=a,b,c user=u port=1,2", "port"),
            ("host=a,b hostaddr=1.1.1.1 user=u", "hostaddr"),
            ("host=h user=u sslmode=on", "sslmode"),
            ("host=h user=u target_session_attrs=rw", "target_session_attrs"),
            ("host=h user=u connect_timeout=soon", "connect_timeout"),
            ("host=h user=u sslcert=x", "sslcert"),
        ] {
            let message = parse(text).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{field} is not valid: ")), "{message}");
        }
    }

    #[test]
    fn hosts_and_ports_pair_up() {
        let target = parse("postgres://u@a:1,[::1],c:3/db").unwrap();
        let hosts: Vec<_> = target.hosts.iter().map(HostSpec::to_string).collect();
        assert_eq!(hosts, ["a:1", "[::1]:5432", "c:3"]);
        let target = parse("host=a,/tmp/pg user=u port=7").unwrap();
        assert!(target.hosts[1].is_socket());
        assert_eq!(target.hosts[1].port, 7);
    }
}
