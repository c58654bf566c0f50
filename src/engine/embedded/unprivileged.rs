//! The account a server runs as when we are root, since `postgres` and `initdb` refuse root.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::{Uid, User, geteuid};

use super::EmbeddedError;

#[derive(Debug, Clone)]
pub(super) struct Account {
    uid: u32,
    gid: u32,
    pub name: String,
}

impl Account {
    /// The account for the server in `root`, or `None` when we are not root and simply keep our own.
    ///
    /// A cluster stays with the user who owns it, then a folder with its owner; else it is `postgres`, else `nobody`.
    /// It must be a user that exists: initdb looks its own up.
    pub fn choose(root: &Path) -> Result<Option<Account>, EmbeddedError> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        if let Some(owner) = owner(&root.join("data")) {
            return Ok(Some(owner));
        }
        owner(root)
            .filter(|owner| User::from_uid(Uid::from_raw(owner.uid)).ok().flatten().is_some())
            .or_else(Account::of_the_system)
            .map(Some)
            .ok_or(EmbeddedError::NoAccount)
    }

    pub fn of_the_system() -> Option<Account> {
        ["postgres", "nobody"].iter().find_map(|name| User::from_name(name).ok().flatten()).map(Account::from)
    }

    /// The topmost folder on the way to `path` that this account cannot pass. Looks at plain modes, not at ACLs.
    pub fn blocked_at(&self, path: &Path) -> io::Result<Option<PathBuf>> {
        let mut way: Vec<&Path> = path.ancestors().collect();
        way.reverse();
        for folder in way {
            let meta = fs::metadata(folder)?;
            let bit = match () {
                () if meta.uid() == self.uid => 0o100,
                () if meta.gid() == self.gid => 0o010,
                () => 0o001,
            };
            if meta.mode() & bit == 0 {
                return Ok(Some(folder.to_path_buf()));
            }
        }
        Ok(None)
    }

    pub fn give(&self, path: &Path) -> Result<(), EmbeddedError> {
        chown(path, Some(self.uid), Some(self.gid)).map_err(EmbeddedError::io("give to the server's user", path))
    }
}

impl From<User> for Account {
    fn from(user: User) -> Self {
        Account { uid: user.uid.as_raw(), gid: user.gid.as_raw(), name: user.name }
    }
}

fn owner(path: &Path) -> Option<Account> {
    let meta = fs::metadata(path).ok().filter(|meta| meta.uid() != 0)?;
    let user = User::from_uid(Uid::from_raw(meta.uid())).ok().flatten();
    Some(match user {
        Some(user) => user.into(),
        None => Account { uid: meta.uid(), gid: meta.gid(), name: meta.uid().to_string() },
    })
}

/// Makes `command` run as `account`. The standard library sets groups (to none), gid and uid in this order.
pub(super) fn run_as(command: &mut Command, account: Option<&Account>) {
    if let Some(account) = account {
        command.gid(account.gid).uid(account.uid);
    }
}

/// A folder of the server's own, closed to everyone else.
pub(super) fn private_dir(path: &Path, account: Option<&Account>) -> Result<(), EmbeddedError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(EmbeddedError::io("make", path))?,
    }
    fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(EmbeddedError::io("close", path))?;
    account.map_or(Ok(()), |account| account.give(path))
}

/// Makes `path` and the missing folders above it. As root they can be passed by the server's user, whatever the umask.
pub(super) fn make_dirs(path: &Path, mode: u32) -> Result<(), EmbeddedError> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        make_dirs(parent, 0o755)?;
    }
    let failed = || EmbeddedError::io("make", path);
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        made => made.map_err(failed())?,
    }
    if geteuid().is_root() || mode != 0o755 {
        fs::set_permissions(path, Permissions::from_mode(mode)).map_err(failed())?;
    }
    Ok(())
}

/// Where awactl keeps things of `kind` (`data`, `cache`) by default. Root's home is closed to the account that the
/// server runs as, so root's are where the system's services have theirs.
pub(super) fn default_dir(kind: Kind) -> PathBuf {
    let (variable, home, system) = match kind {
        Kind::Data => ("XDG_DATA_HOME", ".local/share", "/var/lib"),
        Kind::Cache => ("XDG_CACHE_HOME", ".cache", "/var/cache"),
    };
    let absolute = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let base = absolute(variable).unwrap_or_else(|| match absolute("HOME") {
        Some(dir) if !geteuid().is_root() => dir.join(home),
        _ => PathBuf::from(system),
    });
    base.join("awactl/postgres")
}

#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Data,
    Cache,
}
