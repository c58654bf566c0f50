//! Runs a helper program to its end, bounded by the task that wants it.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::{EmbeddedError, Task, keeper};

pub(super) struct Finished {
    pub status: ExitStatus,
    /// Standard output and error, as they came.
    pub output: String,
}

/// Runs `command`, calling `tick` now and then; killed when the task is cancelled.
pub(super) fn run(mut command: Command, task: &Task, mut tick: impl FnMut()) -> Result<Finished, EmbeddedError> {
    let program = Path::new(command.get_program()).to_path_buf();
    let failed = || EmbeddedError::io("run", &program);
    // A file and not pipes: nothing fills up while we only look at it at the end.
    let mut output = tempfile::tempfile().map_err(failed())?;
    let stdio = |file: &File| file.try_clone().map(Stdio::from);
    command.stdin(Stdio::null()).stdout(stdio(&output).map_err(failed())?).stderr(stdio(&output).map_err(failed())?);
    let mut child = keeper::spawn(command, Signal::SIGKILL).map_err(failed())?;
    let mut pause = Duration::from_millis(1);
    let status = loop {
        if let Some(status) = child.try_wait().map_err(failed())? {
            break status;
        }
        if let Err(cancelled) = task.check() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(cancelled);
        }
        tick();
        sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(50));
    };
    let text = read_all(&mut output).map_err(failed())?;
    Ok(Finished { status, output: text })
}

fn read_all(file: &mut File) -> io::Result<String> {
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
}
