//! Connection strings, read the way libpq reads them: a URL or `key=value` pairs, completed
//! from the `PG*` environment variables and the password file.
//!
//! tokio-postgres has a parser too, but it knows neither `sslmode=verify-full` nor
//! `sslrootcert`, and it takes no environment. Nothing here ever repeats a value (or a keyword
//! it does not know) in an error: a wrongly quoted password would be part of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::error::{EngineError, Result};

/// How the environment is read; tests pass their own.
pub type Env<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Keyword and the variable libpq takes it from.
const KEYWORDS: &[(&str, Option<&str>)] = &[
    ("application_name", Some("PGAPPNAME")),
    ("channel_binding", Some("PGCHANNELBINDING")),
    ("connect_timeout", Some("PGCONNECT_TIMEOUT")),
    ("dbname", Some("PGDATABASE")),
    ("host", Some("PGHOST")),
    ("hostaddr", Some("PGHOSTADDR")),
    ("keepalives", None),
    ("keepalives_idle", None),
    ("keepalives_interval", None),
    ("keepalives_retries", None),
    ("load_balance_hosts", Some("PGLOADBALANCEHOSTS")),
    ("options", Some("PGOPTIONS")),
    ("passfile", Some("PGPASSFILE")),
    ("password", Some("PGPASSWORD")),
    ("port", Some("PGPORT")),
    ("sslcert", Some("PGSSLCERT")),
    ("sslkey", Some("PGSSLKEY")),
    ("sslmode", Some("PGSSLMODE")),
    ("sslnegotiation", Some("PGSSLNEGOTIATION")),
    ("sslrootcert", Some("PGSSLROOTCERT")),
    ("target_session_attrs", Some("PGTARGETSESSIONATTRS")),
    ("tcp_user_timeout", None),
    ("user", Some("PGUSER")),
];

/// libpq's spellings and settings that change nothing here (no GSSAPI, always UTF8).
const ALIASES: &[(&str, &str)] =
    &[("keepalives_count", "keepalives_retries"), ("fallback_application_name", "application_name")];
const WITHOUT_EFFECT: &[&str] = &["client_encoding", "gssencmode", "sslcompression"];

/// Any of these set means the environment names a database.
pub const TARGET_VARIABLES: &[&str] = &["PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER"];

#[derive(Clone, Default, PartialEq, Eq)]
pub struct ConnInfo {
    values: BTreeMap<&'static str, String>,
}

impl ConnInfo {
    pub fn parse(text: &str) -> Result<Self> {
        let text = text.trim();
        let mut info = Self::default();
        if let Some(rest) = text.strip_prefix("postgres://").or_else(|| text.strip_prefix("postgresql://")) {
            info.parse_url(rest)?;
        } else if text.contains("://") && !text.contains('=') {
            return Err(invalid("a URL starts with postgres:// or postgresql://; key=value pairs are allowed too"));
        } else if text.contains('=') {
            info.parse_pairs(text)?;
        } else {
            return Err(invalid(
                "expected postgres://user@host:port/dbname or key=value pairs such as host=… dbname=…",
            ));
        }
        Ok(info)
    }

    pub fn get(&self, keyword: &str) -> Option<&str> {
        self.values.get(keyword).map(String::as_str)
    }

    /// What the string does not say, the environment may; an empty variable says nothing.
    pub fn complete_from(&mut self, env: Env<'_>) {
        // A named host must not be combined with an address meant for another one.
        let names_host = self.get("host").is_some() || self.get("hostaddr").is_some();
        for (keyword, variable) in KEYWORDS {
            if names_host && matches!(*keyword, "host" | "hostaddr") {
                continue;
            }
            if let Some(value) = variable.and_then(env).filter(|value| !value.is_empty()) {
                self.values.entry(keyword).or_insert(value);
            }
        }
    }

    fn set(&mut self, keyword: &str, value: String, place: &str) -> Result<()> {
        if keyword == "ssl" && value == "true" {
            self.values.insert("sslmode", "require".into());
            return Ok(());
        }
        if WITHOUT_EFFECT.contains(&keyword) {
            return Ok(());
        }
        let keyword = ALIASES.iter().find(|(alias, _)| *alias == keyword).map_or(keyword, |(_, real)| real);
        let Some((known, _)) = KEYWORDS.iter().find(|(known, _)| *known == keyword) else {
            let known: Vec<_> = KEYWORDS.iter().map(|(known, _)| *known).collect();
            return Err(invalid(format!("{place} is not a known keyword; allowed are {}", known.join(", "))));
        };
        self.values.insert(known, value);
        Ok(())
    }

    fn parse_url(&mut self, rest: &str) -> Result<()> {
        let authority_end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, rest) = rest.split_at(authority_end);
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        if path.contains('@') {
            return Err(invalid(
                "there is an '@' after the first '/'; a user or password with special characters must be percent-encoded ('/' as %2F, '?' as %3F, '@' as %40)",
            ));
        }
        // The last '@', so that an unencoded one in the password cannot end up in the host name.
        let hosts = match authority.rsplit_once('@') {
            Some((credentials, hosts)) => {
                let (user, password) = match credentials.split_once(':') {
                    Some((user, password)) => (user, Some(password)),
                    None => (credentials, None),
                };
                if !user.is_empty() {
                    self.set("user", percent_decode(user)?, "user")?;
                }
                if let Some(password) = password {
                    self.set("password", percent_decode(password)?, "password")?;
                }
                hosts
            }
            None => authority,
        };
        if !hosts.is_empty() {
            self.parse_url_hosts(hosts)?;
        }
        let dbname = path.strip_prefix('/').unwrap_or(path);
        if !dbname.is_empty() {
            self.set("dbname", percent_decode(dbname)?, "dbname")?;
        }
        let pairs = query.into_iter().flat_map(|query| query.split('&'));
        for (index, pair) in pairs.enumerate().filter(|(_, pair)| !pair.is_empty()) {
            let place = format!("parameter {} after the '?'", index + 1);
            let Some((keyword, value)) = pair.split_once('=') else {
                return Err(invalid(format!("{place} has no '='")));
            };
            self.set(&percent_decode(keyword)?, percent_decode(value)?, &place)?;
        }
        Ok(())
    }

    fn parse_url_hosts(&mut self, text: &str) -> Result<()> {
        let (mut hosts, mut ports) = (Vec::new(), Vec::new());
        for part in text.split(',') {
            let (host, port) = if let Some(rest) = part.strip_prefix('[') {
                let (host, rest) =
                    rest.split_once(']').ok_or_else(|| invalid("an IPv6 address needs a closing ']'"))?;
                (host, rest.strip_prefix(':').unwrap_or(""))
            } else {
                part.split_once(':').unwrap_or((part, ""))
            };
            hosts.push(percent_decode(host)?);
            ports.push(percent_decode(port)?);
        }
        if hosts.iter().any(|host| !host.is_empty()) {
            self.set("host", hosts.join(","), "host")?;
        }
        if ports.iter().any(|port| !port.is_empty()) {
            self.set("port", ports.join(","), "port")?;
        }
        Ok(())
    }

    fn parse_pairs(&mut self, text: &str) -> Result<()> {
        let mut chars = text.chars().peekable();
        for number in 1.. {
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            if chars.peek().is_none() {
                break;
            }
            let place = format!("pair {number} of the key=value string");
            let mut keyword = String::new();
            while let Some(c) = chars.next_if(|c| *c != '=' && !c.is_whitespace()) {
                keyword.push(c);
            }
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            if chars.next() != Some('=') {
                return Err(invalid(format!("{place} has no '='; a value with spaces must be in single quotes")));
            }
            while chars.next_if(|c| c.is_whitespace()).is_some() {}
            let quoted = chars.next_if_eq(&'\'').is_some();
            let mut value = String::new();
            let mut closed = !quoted;
            while let Some(c) = chars.next_if(|c| quoted || !c.is_whitespace()) {
                match c {
                    '\'' if quoted => {
                        closed = true;
                        break;
                    }
                    '\\' => value.extend(chars.next()),
                    other => value.push(other),
                }
            }
            if !closed {
                return Err(invalid(format!("{place} has no closing quote")));
            }
            self.set(&keyword, value, &place)?;
        }
        Ok(())
    }
}

fn invalid(message: impl Into<String>) -> EngineError {
    EngineError::invalid("database URL", message)
}

fn percent_decode(text: &str) -> Result<String> {
    let wrong = || invalid("a '%' must be followed by two hexadecimal digits of UTF-8 text");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = rest
            .get(..2)
            .filter(|digits| digits.iter().all(u8::is_ascii_hexdigit))
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .ok_or_else(wrong)?;
        bytes.push(u8::from_str_radix(digits, 16).map_err(|_| wrong())?);
        rest = &rest[2..];
    }
    String::from_utf8(bytes).map_err(|_| wrong())
}

/// The password file's answer for one host, if the file may be trusted.
pub fn password_from_file(path: Option<PathBuf>, host: &str, port: u16, dbname: &str, user: &str) -> Option<String> {
    let path = path?;
    let text = std::fs::read_to_string(&path).ok()?;
    if readable_by_others(&path) {
        tracing::warn!(
            file = %path.display(),
            "password file ignored: it is readable by group or others, run chmod 600 on it"
        );
        return None;
    }
    let port = port.to_string();
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .map(split_passfile_line)
        .find(|fields| {
            fields.len() == 5
                && [host, &port, dbname, user].iter().zip(fields).all(|(wanted, field)| field == "*" || field == wanted)
        })
        .map(|mut fields| fields.remove(4))
}

fn readable_by_others(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::metadata(path).is_ok_and(|meta| meta.permissions().mode() & 0o077 != 0)
}

fn split_passfile_line(line: &str) -> Vec<String> {
    let mut fields = vec![String::new()];
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        let last = fields.len() - 1;
        match c {
            '\\' => fields[last].extend(chars.next()),
            // Only the first four colons separate; a password may hold more of them.
            ':' if last < 4 => fields.push(String::new()),
            other => fields[last].push(other),
        }
    }
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    fn no_env(_: &str) -> Option<String> {
        None
    }

    #[test]
    fn urls_are_read_with_all_their_parts() {
        let info = ConnInfo::parse("postgresql://u%40x:p%2Fw@a:1,[::1]:2,c/d%20b?sslmode=verify-full&host_=");
        assert!(info.is_err(), "an unknown parameter must be refused");
        let info =
            ConnInfo::parse("postgresql://u%40x:p%2Fw@a:1,[::1]:2,c/d%20b?sslmode=verify-full&options=-c%20x%3D1")
                .unwrap();
        for (keyword, value) in [
            ("user", "u@x"),
            ("password", "p/w"),
            ("host", "a,::1,c"),
            ("port", "1,2,"),
            ("dbname", "d b"),
            ("sslmode", "verify-full"),
            ("options", "-c x=1"),
        ] {
            assert_eq!(info.get(keyword), Some(value), "{keyword}");
        }
        let socket = ConnInfo::parse("postgres:///db?host=/tmp/pg&port=5499").unwrap();
        assert_eq!(socket.get("host"), Some("/tmp/pg"));
        let socket = ConnInfo::parse("postgres://%2Ftmp%2Fpg:5499/db").unwrap();
        assert_eq!(socket.get("host"), Some("/tmp/pg"));
    }

    #[test]
    fn pairs_are_read_with_quotes_and_escapes() {
        let info = ConnInfo::parse(r"host = a,b port=1 password='it\'s a \\ one' dbname=x\ y").unwrap();
        assert_eq!(info.get("password"), Some(r"it's a \ one"));
        assert_eq!(info.get("dbname"), Some("x y"));
        assert_eq!(info.get("host"), Some("a,b"));
    }

    #[test]
    fn the_environment_fills_gaps_only() {
        let mut info = ConnInfo::parse("postgres://me@there").unwrap();
        info.complete_from(&|name| match name {
            "PGUSER" => Some("other".into()),
            "PGDATABASE" => Some("db".into()),
            "PGHOSTADDR" => Some("10.0.0.1".into()),
            "PGPASSWORD" => Some(String::new()),
            _ => None,
        });
        assert_eq!(info.get("user"), Some("me"));
        assert_eq!(info.get("dbname"), Some("db"));
        assert_eq!(info.get("hostaddr"), None);
        assert_eq!(info.get("password"), None);
        info.complete_from(&no_env);
    }

    #[test]
    fn a_misquoted_password_is_never_repeated() {
        for text in [
            "postgres://u:hun/ter2@host/db",
            "postgres://u:hun?ter2@host/db",
            "postgres://u:x?hunter2=1@host/db",
            "host=h password=a hunter2",
            "host=h password=a hunter2=b",
            "password='hunter2",
            "hunter2",
            "mysql://u:hunter2@h/db",
            "postgres://u:%hunter2@h/db",
            "postgres://u:p@h:hunter2@[x/db",
        ] {
            let message = match ConnInfo::parse(text) {
                Ok(_) => panic!("{text} was accepted"),
                Err(error) => format!("{error} {error:?}"),
            };
            assert!(!message.contains("ter2"), "{message}");
        }
    }

    #[test]
    fn password_file_lines_match_like_libpq() {
        assert_eq!(split_passfile_line(r"h\:1:5432:*:me:pa:ss\\word"), ["h:1", "5432", "*", "me", r"pa:ss\word"]);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pass");
        std::fs::write(&path, "# no\nother:*:*:*:x\n*:5432:db:me:secret\n").unwrap();
        use std::os::unix::fs::PermissionsExt as _;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        let ask = |port| password_from_file(Some(path.clone()), "h", port, "db", "me");
        assert_eq!(ask(5432).as_deref(), Some("secret"));
        assert_eq!(ask(5433), None);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(ask(5432), None);
    }
}
