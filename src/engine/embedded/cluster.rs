//! Makes the cluster in an embedded server's folder, and its configuration.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rand::Rng;
use rand::distr::Alphanumeric;

use super::child::run;
use super::home::Home;
use super::server::clean_environment;
use super::unprivileged::{private_dir, run_as};
use super::{EmbeddedError, Installation, Progress, Task};

const CONF: &str = "awactl.conf";
const UNFINISHED: &str = "init-";

/// The major version that the cluster was made with, if there is one.
pub(super) fn major_version(home: &Home) -> Result<Option<u32>, EmbeddedError> {
    // An empty folder is as good as none.
    let _ = fs::remove_dir(&home.data);
    if !home.data.exists() {
        return Ok(None);
    }
    let not_a_cluster = || EmbeddedError::NotACluster { data: home.data.clone() };
    if !home.data.join("global/pg_control").exists() {
        return Err(not_a_cluster());
    }
    let text = fs::read_to_string(home.data.join("PG_VERSION"));
    let text = text.map_err(EmbeddedError::io("read PG_VERSION in", &home.data))?;
    text.trim().parse().map(Some).map_err(|_| not_a_cluster())
}

/// Makes the cluster if there is none, and writes the settings. Returns the password of user postgres.
pub(super) fn prepare(
    home: &Home,
    installation: &Installation,
    settings: &[(String, String)],
    task: &Task,
) -> Result<String, EmbeddedError> {
    let conf = conf(settings)?;
    remove_unfinished(home)?;
    let password_file = home.root.join("password");
    if !home.data.exists() {
        task.report(Progress::Initialising { data: home.data.clone(), version: installation.version.to_string() });
        let password: String = rand::rng().sample_iter(Alphanumeric).take(32).map(char::from).collect();
        write_secret(&password_file, &password)?;
        initialise(home, installation, &password, task)?;
    }
    let path = home.data.join(CONF);
    fs::write(&path, conf).map_err(EmbeddedError::io("write", &path))?;
    if let Some(account) = &home.account {
        account.give(&path)?;
    }
    fs::read_to_string(&password_file).map_err(EmbeddedError::io("read", &password_file))
}

/// initdb works in a folder of another name, which is renamed when all is done and on disk. So `data` is complete or
/// not there, however far an earlier initdb got before it was killed.
fn initialise(home: &Home, installation: &Installation, password: &str, task: &Task) -> Result<(), EmbeddedError> {
    let account = home.account.as_ref();
    let failed = || EmbeddedError::io("make a cluster in", &home.root);
    let folder = tempfile::Builder::new().prefix(UNFINISHED).tempdir_in(&home.root).map_err(failed())?;
    private_dir(folder.path(), account)?;
    let secret = home.run_dir().join("initdb-password");
    write_secret(&secret, password)?;
    if let Some(account) = account {
        account.give(&secret)?;
    }
    let mut command = Command::new(installation.bin.join("initdb"));
    command.arg("-D").arg(folder.path()).arg("--pwfile").arg(&secret);
    // Locale C is the one that every machine and every build has, and that sorts the same everywhere.
    command.args(["--username=postgres", "--encoding=UTF8", "--locale=C"]);
    command.args(["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]);
    if home.ephemeral {
        command.arg("--no-sync");
    }
    clean_environment(&mut command);
    command.current_dir(folder.path());
    run_as(&mut command, account);
    let finished = run(command, task, || {});
    let _ = fs::remove_file(&secret);
    let finished = finished?;
    if !finished.status.success() {
        return Err(EmbeddedError::Initdb { status: finished.status.to_string(), output: finished.output });
    }
    let main_conf = folder.path().join("postgresql.conf");
    let opened = File::options().append(true).open(&main_conf);
    opened
        .and_then(|mut file| {
            writeln!(file, "\n# Written anew by awactl at each start.\ninclude_if_exists '{CONF}'")?;
            file.sync_all()
        })
        .map_err(EmbeddedError::io("write", &main_conf))?;
    fs::rename(folder.path(), &home.data).map_err(failed())?;
    // Its old name is gone, and with it what would be removed.
    let _ = folder.keep();
    if !home.ephemeral {
        File::open(&home.root).and_then(|root| root.sync_all()).map_err(failed())?;
    }
    Ok(())
}

fn remove_unfinished(home: &Home) -> Result<(), EmbeddedError> {
    let entries = fs::read_dir(&home.root).map_err(EmbeddedError::io("read", &home.root))?;
    let unfinished = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        path.is_dir() && name.is_some_and(|name| name.starts_with(UNFINISHED))
    };
    for path in entries.flatten().map(|entry| entry.path()).filter(unfinished) {
        fs::remove_dir_all(&path).map_err(EmbeddedError::io("remove", &path))?;
    }
    Ok(())
}

fn write_secret(path: &Path, secret: &str) -> Result<(), EmbeddedError> {
    let failed = || EmbeddedError::io("write", path);
    // Removed first, so that the mode is that of a new file.
    let _ = fs::remove_file(path);
    let mut file = File::options().write(true).create_new(true).mode(0o600).open(path).map_err(failed())?;
    file.write_all(secret.as_bytes()).and_then(|()| file.sync_all()).map_err(failed())
}

fn conf(settings: &[(String, String)]) -> Result<String, EmbeddedError> {
    let mut text = String::new();
    for (name, value) in settings {
        let valid = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        if name.is_empty() || !name.chars().all(valid) {
            return Err(EmbeddedError::SettingName(name.clone()));
        }
        let value = value.replace('\\', "\\\\").replace('\'', "''").replace('\n', "\\n");
        text.push_str(&format!("{name} = '{value}'\n"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_quoted_and_their_names_checked() {
        let pair = |name: &str, value: &str| [(name.to_owned(), value.to_owned())];
        assert_eq!(conf(&pair("log_line_prefix", "it's \\")).unwrap(), "log_line_prefix = 'it''s \\\\'\n");
        assert!(matches!(conf(&pair("a = 1\nb", "")), Err(EmbeddedError::SettingName(_))));
    }
}
