//! Stops what a killed owner left running in a data directory. Only called by the holder of the folder's lock.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::server::Shutdown;
use super::{EmbeddedError, Progress, Task};

/// Stops a postmaster that still runs in `data` and waits until it is gone, with all its backends.
pub(super) fn stop_stale(data: &Path, shutdown: Shutdown, task: &Task) -> Result<(), EmbeddedError> {
    let pid_file = data.join("postmaster.pid");
    if let Some(pid) = pid_in(&pid_file) {
        if is_postmaster(pid, data) {
            task.report(Progress::StoppingStale { pid });
            stop(pid, data, shutdown, task)?;
        } else if kill(Pid::from_raw(pid as i32), None) != Err(nix::errno::Errno::ESRCH) {
            // The number belongs to another program by now, as happens after a reboot or in a container. A starting
            // server would take that program for its predecessor and refuse.
            let _ = fs::remove_file(&pid_file);
        }
    }
    end_orphans(data)
}

fn pid_in(pid_file: &Path) -> Option<u32> {
    let text = fs::read_to_string(pid_file).ok()?;
    text.lines().next()?.trim().parse().ok().filter(|pid| i32::try_from(*pid).is_ok_and(|pid| pid > 1))
}

fn stop(pid: u32, data: &Path, shutdown: Shutdown, task: &Task) -> Result<(), EmbeddedError> {
    for (signal, patience) in shutdown.steps() {
        let _ = kill(Pid::from_raw(pid as i32), signal);
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if !is_postmaster(pid, data) {
                return Ok(());
            }
            task.check()?;
            sleep(Duration::from_millis(10));
        }
    }
    Err(EmbeddedError::NotStopped { pid })
}

/// Whether `pid` is the postmaster of `data`, by its command line: it is `postgres -D <data> ...`, where its children
/// have titles. A process that ended but was not waited for has none.
fn is_postmaster(pid: u32, data: &Path) -> bool {
    let Some(args) = command_line(pid) else {
        return false;
    };
    let program = args.first().and_then(|arg| Path::new(arg).file_name().map(|name| name == "postgres"));
    program == Some(true) && args.windows(2).any(|pair| pair[0] == "-D" && pair[1] == data.as_os_str())
}

#[cfg(target_os = "linux")]
fn command_line(pid: u32) -> Option<Vec<OsString>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    Some(bytes.split(|byte| *byte == 0).map(|arg| OsString::from_vec(arg.to_vec())).collect())
}

/// Without /proc there is only one string, which a space in a path makes ambiguous: it is split around `-D` alone.
#[cfg(not(target_os = "linux"))]
fn command_line(pid: u32) -> Option<Vec<OsString>> {
    let output =
        std::process::Command::new("ps").args(["-ww", "-o", "command=", "-p", &pid.to_string()]).output().ok()?;
    let line = String::from_utf8(output.stdout).ok()?;
    let (program, rest) = line.split_once(" -D ")?;
    let data = rest.split_once(" -c ").map_or(rest, |(data, _)| data).trim_end();
    Some([program, "-D", data].map(OsString::from).to_vec())
}

/// Ends the backends of a postmaster that was killed. They notice by themselves when they next wait for something, but
/// one that computes keeps the shared memory, and with it the data directory, for as long as that takes.
fn end_orphans(data: &Path) -> Result<(), EmbeddedError> {
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let orphans = orphans(data);
        let Some(&pid) = orphans.first() else {
            return Ok(());
        };
        if Instant::now() > deadline {
            return Err(EmbeddedError::NotStopped { pid });
        }
        for pid in orphans {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGKILL);
        }
        sleep(Duration::from_millis(5));
    }
}

/// The server processes whose working directory is `data`; every one of PostgreSQL's has its own there.
fn orphans(data: &Path) -> Vec<u32> {
    let Ok(processes) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    processes
        .flatten()
        .filter(|process| process.file_name().as_bytes().first().is_some_and(u8::is_ascii_digit))
        .filter(|process| fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd == data))
        .filter(|process| fs::read(process.path().join("comm")).is_ok_and(|name| name == b"postgres\n"))
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .collect()
}
