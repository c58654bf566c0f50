//! Starts children that do not outlive this process, however it ends.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use nix::sys::signal::Signal;
use nix::unistd::{getpid, getppid, setsid};

type Job = Box<dyn FnOnce() + Send>;

/// Linux sends a child's parent-death signal when the *thread* that forked it ends, and tokio ends idle threads. So all
/// children are forked by one thread that lives as long as the process.
static KEEPER: OnceLock<Sender<Job>> = OnceLock::new();

/// Spawns `command` in a session of its own, so that the terminal's Ctrl-C reaches only us, who then stop it in order.
/// When this process dies first, even by SIGKILL, the child gets `on_death` (on Linux).
pub(super) fn spawn(mut command: Command, on_death: Signal) -> io::Result<Child> {
    let parent = getpid();
    // SAFETY: between fork and exec only async-signal-safe system calls are made, and nothing is allocated. This runs
    // after the change of user, which would clear the parent-death signal.
    unsafe {
        command.pre_exec(move || {
            setsid()?;
            #[cfg(any(target_os = "linux", target_os = "android"))]
            nix::sys::prctl::set_pdeathsig(on_death)?;
            #[cfg(not(any(target_os = "linux", target_os = "android")))]
            let _ = on_death;
            // The parent may have died before the signal was asked for.
            if getppid() != parent {
                return Err(io::Error::from_raw_os_error(nix::libc::ESRCH));
            }
            Ok(())
        });
    }
    let (reply, answer) = channel();
    let job: Job = Box::new(move || {
        // When nobody waits any more the child must not run on unowned.
        if let Err(unclaimed) = reply.send(command.spawn())
            && let Ok(mut child) = unclaimed.0
        {
            let _ = child.kill();
            let _ = child.wait();
        }
    });
    keeper().send(job).map_err(|_| gone())?;
    answer.recv().map_err(|_| gone())?
}

fn keeper() -> &'static Sender<Job> {
    KEEPER.get_or_init(|| {
        let (send, jobs) = channel::<Job>();
        let spawned = thread::Builder::new().name("postgres-keeper".into()).spawn(move || {
            for job in jobs {
                job();
            }
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start the thread that keeps the embedded server");
        }
        send
    })
}

fn gone() -> io::Error {
    io::Error::other("the thread that keeps the embedded server is gone")
}
