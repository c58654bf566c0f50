//! The folder of an embedded server: `data` (the cluster), `run` (the socket), `server.log`, `password`, `awactl.lock`.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use fs4::fs_std::FileExt;
use nix::unistd::geteuid;
use tempfile::TempDir;

use super::recover::stop_stale;
use super::server::Shutdown;
use super::unprivileged::{Account, Kind, default_dir, make_dirs, private_dir};
use super::{EmbeddedError, Options, Task};

const LOCK: &str = "awactl.lock";
const EPHEMERAL: &str = "awactl-pg-";
const SHORT_RUN: &str = "awactl-run-";

/// The longest path of a unix socket, as of the smallest `sun_path` (macOS: 104 bytes, the last is zero).
const LONGEST_SOCKET: usize = 103;

/// The folder, locked for this process.
pub(super) struct Home {
    pub root: PathBuf,
    pub data: PathBuf,
    pub log: PathBuf,
    pub ephemeral: bool,
    pub account: Option<Account>,
    run: PathBuf,
    /// Holds the socket when `run` has too long a path.
    short_run: Option<TempDir>,
    /// Held by the lock on it. The kernel drops it with this process, even when that is killed.
    _lock: File,
}

impl Home {
    /// Takes the folder over: locked, reachable for the server's user, and with no server of a former owner in it.
    pub fn open(options: &Options, task: &Task) -> Result<Home, EmbeddedError> {
        let (root, lock) = match options.ephemeral {
            true => make_ephemeral(options.dir.as_deref())?,
            false => open_kept(options.dir.as_deref())?,
        };
        let mut home = Home {
            data: root.join("data"),
            log: root.join("server.log"),
            run: root.join("run"),
            account: None,
            ephemeral: options.ephemeral,
            short_run: None,
            root,
            _lock: lock,
        };
        home.account = Account::choose(&home.root)?;
        home.check_reachable()?;
        stop_stale(&home.data, Shutdown::Fast, task)?;
        home.make_run_dir()?;
        // The last run's log is kept: it tells how a crash came about.
        let _ = fs::rename(&home.log, home.root.join("server.log.old"));
        Ok(home)
    }

    /// The folder of the unix socket.
    pub fn socket_dir(&self) -> &Path {
        self.short_run.as_ref().map_or(&self.run, TempDir::path)
    }

    /// The server's private folder beside its data, also for secrets passed to initdb.
    pub fn run_dir(&self) -> &Path {
        &self.run
    }

    fn check_reachable(&self) -> Result<(), EmbeddedError> {
        let Some(account) = &self.account else {
            return Ok(());
        };
        let failed = || EmbeddedError::io("look at", &self.root);
        // The folder itself is ours to open, for passing through only; what is above it is not.
        let mode = fs::metadata(&self.root).map_err(failed())?.permissions().mode();
        fs::set_permissions(&self.root, Permissions::from_mode(mode | 0o111)).map_err(failed())?;
        match account.blocked_at(&self.root).map_err(failed())? {
            None => Ok(()),
            Some(blocked) => {
                Err(EmbeddedError::Unreachable { dir: self.root.clone(), blocked, user: account.name.clone() })
            }
        }
    }

    fn make_run_dir(&mut self) -> Result<(), EmbeddedError> {
        private_dir(&self.run, self.account.as_ref())?;
        // Tells where the short folder of an owner is that was killed and could not remove it.
        let link = self.root.join("short-run");
        if let Ok(left) = fs::read_link(&link)
            && left.starts_with("/tmp")
            && left.file_name().is_some_and(|name| name.to_string_lossy().starts_with(SHORT_RUN))
        {
            let _ = fs::remove_dir_all(left);
        }
        let _ = fs::remove_file(&link);
        let socket = self.run.join(".s.PGSQL.65535");
        if socket.as_os_str().len() > LONGEST_SOCKET {
            let made = tempfile::Builder::new().prefix(SHORT_RUN).tempdir_in("/tmp");
            let dir = made.map_err(EmbeddedError::io("make a folder in", Path::new("/tmp")))?;
            symlink(dir.path(), &link).map_err(EmbeddedError::io("make", &link))?;
            private_dir(dir.path(), self.account.as_ref())?;
            self.short_run = Some(dir);
        }
        Ok(())
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.ephemeral {
            remove(&self.root);
        }
    }
}

/// Removes an ephemeral folder, and first whatever may still write to it.
fn remove(root: &Path) {
    let stopped = stop_stale(&root.join("data"), Shutdown::Immediate, &Task::default());
    let removed = fs::remove_dir_all(root);
    if let Err(error) = stopped.map_err(io::Error::other).and(removed) {
        tracing::warn!(%error, dir = %root.display(), "cannot remove the embedded server's folder");
    }
}

fn open_kept(dir: Option<&Path>) -> Result<(PathBuf, File), EmbeddedError> {
    let dir = dir.map_or_else(|| default_dir(Kind::Data), Path::to_path_buf);
    let dir = std::path::absolute(&dir).map_err(EmbeddedError::io("find", &dir))?;
    make_dirs(&dir, if geteuid().is_root() { 0o711 } else { 0o700 })?;
    // The data directory's real path identifies its postmaster.
    let root = fs::canonicalize(&dir).map_err(EmbeddedError::io("find", &dir))?;
    if root.join("PG_VERSION").exists() {
        return Err(EmbeddedError::ForeignCluster { dir: root });
    }
    let lock = lock(&root)?;
    Ok((root, lock))
}

/// An ephemeral server's folder. Those whose owner was killed are removed on the way.
fn make_ephemeral(base: Option<&Path>) -> Result<(PathBuf, File), EmbeddedError> {
    let base = match base {
        Some(base) => base.to_path_buf(),
        None => temporary_base(),
    };
    let base = fs::canonicalize(&base).map_err(EmbeddedError::io("find", &base))?;
    sweep(&base);
    let mode = if geteuid().is_root() { 0o711 } else { 0o700 };
    loop {
        let made =
            tempfile::Builder::new().prefix(EPHEMERAL).permissions(Permissions::from_mode(mode)).tempdir_in(&base);
        let root = made.map_err(EmbeddedError::io("make a folder in", &base))?;
        // Another process that sweeps may find the folder before it is locked, and take it.
        match lock(root.path()) {
            Ok(lock) if is_at(&lock, &root.path().join(LOCK)) => return Ok((root.keep(), lock)),
            Ok(_) | Err(EmbeddedError::InUse { .. }) => {}
            Err(_) if !root.path().exists() => {}
            Err(error) => return Err(error),
        }
    }
}

/// The system's folder for temporary files, or /tmp where the server's user cannot reach that.
fn temporary_base() -> PathBuf {
    let base = std::env::temp_dir();
    let account = Account::of_the_system().filter(|_| geteuid().is_root());
    match account.map(|account| account.blocked_at(&base)) {
        Some(Ok(Some(_))) => PathBuf::from("/tmp"),
        _ => base,
    }
}

fn sweep(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let ours = entry.metadata().is_ok_and(|meta| meta.is_dir() && meta.uid() == geteuid().as_raw());
        if !ours || !entry.file_name().to_string_lossy().starts_with(EPHEMERAL) {
            continue;
        }
        // A folder without the file is just being made.
        let Ok(lock) = File::open(entry.path().join(LOCK)) else {
            continue;
        };
        if lock.try_lock_exclusive().unwrap_or(false) {
            remove(&entry.path());
        }
    }
}

fn lock(root: &Path) -> Result<File, EmbeddedError> {
    let path = root.join(LOCK);
    let failed = || EmbeddedError::io("lock", &path);
    let open = File::options().read(true).write(true).create(true).truncate(false).open(&path);
    let mut file = open.map_err(failed())?;
    if !file.try_lock_exclusive().map_err(failed())? {
        let mut text = String::new();
        let _ = file.read_to_string(&mut text);
        return Err(EmbeddedError::InUse { dir: root.to_path_buf(), pid: text.trim().parse().ok() });
    }
    file.set_len(0).and_then(|()| file.rewind()).map_err(failed())?;
    writeln!(file, "{}", std::process::id()).map_err(failed())?;
    Ok(file)
}

fn is_at(file: &File, path: &Path) -> bool {
    let id = |meta: fs::Metadata| (meta.dev(), meta.ino());
    matches!((file.metadata().map(id), fs::metadata(path).map(id)), (Ok(a), Ok(b)) if a == b)
}
