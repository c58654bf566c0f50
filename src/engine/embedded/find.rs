//! Finds the PostgreSQL servers of this machine.

use std::collections::HashSet;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use super::child::run;
use super::fetch;
use super::unprivileged::{Account, Kind, default_dir, run_as};
use super::{EmbeddedError, Looked, Task};

/// The oldest major version that awactl works with.
pub const OLDEST_MAJOR: u32 = 15;

/// One `*` per folder name stands for anything.
const INSTALL_FOLDERS: [&str; 7] = [
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
];

/// Where to look for a server.
#[derive(Debug, Clone)]
pub struct Search {
    /// Look nowhere else.
    pub bin_dir: Option<PathBuf>,
    /// A `PATH`, for servers and for the package clients that fetch one.
    pub path: OsString,
    /// Folders, where a `*` may stand for part of a name.
    pub install_folders: Vec<PathBuf>,
    /// Where fetched builds are kept.
    pub cache: PathBuf,
    /// Whether to fetch a build when nothing fits.
    pub fetch: bool,
}

impl Search {
    /// `AWACTL_PG_BIN`, else `PATH`, the usual install folders and the builds fetched before.
    pub fn from_env() -> Self {
        Search {
            bin_dir: std::env::var_os("AWACTL_PG_BIN").filter(|dir| !dir.is_empty()).map(PathBuf::from),
            path: std::env::var_os("PATH").unwrap_or_default(),
            install_folders: INSTALL_FOLDERS.map(PathBuf::from).to_vec(),
            cache: default_dir(Kind::Cache),
            fetch: true,
        }
    }

    fn folders(&self) -> Vec<PathBuf> {
        if let Some(dir) = &self.bin_dir {
            return vec![dir.clone()];
        }
        let mut folders: Vec<PathBuf> = std::env::split_paths(&self.path).filter(|dir| dir.is_absolute()).collect();
        for pattern in &self.install_folders {
            folders.extend(expand(pattern));
        }
        folders.extend(expand(&self.cache.join("*/bin")));
        folders
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    /// The second number; a beta or development build counts below every release.
    pub minor: Option<u32>,
    text: String,
}

impl Version {
    /// Reads what `postgres --version` says, like `postgres (PostgreSQL) 15.13 (Debian 15.13-0+deb12u1)`.
    fn parse(line: &str) -> Option<Version> {
        let text = line.strip_prefix("postgres (PostgreSQL) ")?.split_whitespace().next()?;
        let (major, rest) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
        let minor = rest.strip_prefix('.').and_then(|minor| minor.parse().ok());
        Some(Version { major: major.parse().ok()?, minor, text: text.to_owned() })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// A folder with a working `postgres` and `initdb`.
#[derive(Debug, Clone)]
pub struct Installation {
    pub bin: PathBuf,
    pub version: Version,
}

/// The newest server found, of major version `cluster` if there is a cluster already; fetched when there is none.
pub(super) fn find_or_fetch(
    search: &Search,
    cluster: Option<(u32, &Path)>,
    account: Option<&Account>,
    task: &Task,
) -> Result<Installation, EmbeddedError> {
    let fits = |found: &[Installation]| {
        let of_major = |i: &&Installation| cluster.is_none_or(|(major, _)| i.version.major == major);
        found.iter().filter(of_major).max_by(|a, b| a.version.cmp(&b.version)).cloned()
    };
    let (found, looked) = find(search, account, task)?;
    if let Some(newest) = fits(&found) {
        return Ok(newest);
    }
    let mut failures = Vec::new();
    if search.fetch && search.bin_dir.is_none() {
        for build in fetch::for_this_machine(cluster.map(|(major, _)| major)) {
            let fetched = fetch::fetch(build, search, task).and_then(|bin| probe(&bin, account, task));
            match fetched {
                Ok(Ok(installation)) => return Ok(installation),
                Ok(Err(why_not)) => failures.push(format!("{}: {why_not}", build.package)),
                // Something else than the pinned bytes was served: not a thing to try around.
                Err(error @ (EmbeddedError::Checksum { .. } | EmbeddedError::Cancelled)) => {
                    return Err(error);
                }
                Err(error) => failures.push(format!("{}: {}", build.package, fetch::explain(&error))),
            }
        }
        if failures.is_empty() {
            failures.push("no build is pinned for this machine or this version".to_owned());
        }
    }
    Err(match cluster {
        Some((cluster, data)) if !found.is_empty() => EmbeddedError::OtherMajor {
            data: data.to_path_buf(),
            cluster,
            found: found.iter().map(|i| i.version.to_string()).collect::<Vec<_>>().join(", "),
            fetch: failures,
        },
        _ => EmbeddedError::NotFound { looked, fetch: failures },
    })
}

/// Every server that is new enough, and the places that have none.
fn find(
    search: &Search,
    account: Option<&Account>,
    task: &Task,
) -> Result<(Vec<Installation>, Vec<Looked>), EmbeddedError> {
    let (mut found, mut looked) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for folder in search.folders() {
        let not_here = |why_not: String| Looked { place: folder.display().to_string(), why_not };
        // A link on the PATH leads to the folder that has initdb and the rest beside it.
        let Ok(real) = fs::canonicalize(folder.join("postgres")) else {
            looked.push(not_here("no postgres".into()));
            continue;
        };
        if !seen.insert(real.clone()) {
            continue;
        }
        let bin = real.parent().filter(|bin| bin.join("initdb").is_file()).unwrap_or(&folder);
        match probe(bin, account, task)? {
            Ok(installation) => found.push(installation),
            Err(why_not) => looked.push(not_here(why_not)),
        }
    }
    if search.bin_dir.is_none() {
        let barren = |pattern: &&PathBuf| expand(pattern).is_empty();
        let cache = [search.cache.join("*/bin")];
        let patterns = search.install_folders.iter().chain(&cache).filter(barren);
        looked.extend(patterns.map(|p| Looked { place: p.display().to_string(), why_not: "no such folder".into() }));
    }
    Ok((found, looked))
}

/// Whether the account can run a new enough server from `bin`, else why not.
fn probe(bin: &Path, account: Option<&Account>, task: &Task) -> Result<Result<Installation, String>, EmbeddedError> {
    let postgres = bin.join("postgres");
    if !bin.join("initdb").is_file() {
        return Ok(Err("no initdb beside postgres".into()));
    }
    // A wrapper's process is not the postmaster: signals and the exit status would be those of a shell.
    if is_script(&postgres) {
        return Ok(Err("postgres is a script there, not the server itself".into()));
    }
    let mut command = Command::new(&postgres);
    command.arg("--version").current_dir("/");
    run_as(&mut command, account);
    let finished = match run(command, task, || {}) {
        Ok(finished) => finished,
        Err(EmbeddedError::Io { source, .. }) => {
            let who = account.map_or(String::new(), |account| format!(" as user {}", account.name));
            return Ok(Err(format!("cannot run it{who}: {source}")));
        }
        Err(other) => return Err(other),
    };
    Ok(match Version::parse(&finished.output) {
        Some(version) if version.major < OLDEST_MAJOR => Err(format!("only version {version}")),
        Some(version) => Ok(Installation { bin: bin.to_path_buf(), version }),
        None => Err(format!("no version from it: {}", finished.output)),
    })
}

fn is_script(program: &Path) -> bool {
    let mut magic = [0; 2];
    File::open(program).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == b"#!"
}

/// The folders that match a pattern with at most one `*` in each part.
fn expand(pattern: &Path) -> Vec<PathBuf> {
    let mut matches = vec![PathBuf::new()];
    for part in pattern.components() {
        let split = match part {
            Component::Normal(name) => name.to_str().and_then(|name| name.split_once('*')),
            _ => None,
        };
        let Some((start, end)) = split else {
            matches.iter_mut().for_each(|path| path.push(part));
            continue;
        };
        let named =
            |name: &str| name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end);
        let entries = matches.iter().filter_map(|path| fs::read_dir(path).ok()).flatten().flatten();
        // A fetch in progress has a hidden folder.
        matches = entries
            .filter(|entry| entry.file_name().to_str().is_some_and(|name| !name.starts_with('.') && named(name)))
            .map(|entry| entry.path())
            .collect();
    }
    matches.retain(|path| path.is_dir());
    matches
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_ordered_with_betas_first() {
        let read = |text: &str| Version::parse(&format!("postgres (PostgreSQL) {text}")).unwrap();
        assert_eq!(read("15.13 (Debian 15.13-0+deb12u1)").to_string(), "15.13");
        assert!(read("17.9") < read("17.10"));
        assert!(read("17.10") < read("18beta1"));
        assert!(read("18beta1") < read("18.0"));
        assert_eq!(Version::parse("postgres: command not found"), None);
    }

    #[test]
    fn a_star_matches_part_of_a_folder_name() {
        let base = tempfile::tempdir().unwrap();
        for name in ["pgsql-15/bin", "pgsql-16/lib", ".pgsql-17/bin", "other/bin"] {
            fs::create_dir_all(base.path().join(name)).unwrap();
        }
        assert_eq!(expand(&base.path().join("pgsql-*/bin")), [base.path().join("pgsql-15/bin")]);
        assert!(expand(&base.path().join("none/*/bin")).is_empty());
    }
}
