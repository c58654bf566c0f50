//! A child process with its whole group: fed, read and, whatever happens, gone at the end.

use std::collections::BTreeSet;
use std::io;
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError, RwLock};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};
use tokio::time::Instant;

/// How often a dying group is looked at.
const GROUP_POLL: Duration = Duration::from_millis(20);

/// How long killed orphans are waited for; only a worker that is process 1 has any.
const ORPHAN_PATIENCE: Duration = Duration::from_secs(1);

/// How long a pipe may stay silent once the program is gone. What the program wrote is in the pipe
/// by then; only a process that left the group can still hold it open.
const DRAIN_IDLE: Duration = Duration::from_millis(250);

/// How long such a process may keep the reading going by writing on.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// The groups of this process, and who may start one.
static RUNNING: Mutex<BTreeSet<Pid>> = Mutex::new(BTreeSet::new());
static STARTING: RwLock<()> = RwLock::new(());

/// Kills every program that runs, with its group. For a process that ends at once: it starts no program after this.
pub fn kill_programs() {
    // Kept for good: a program that is being started is in the set before this goes on, and no other follows.
    std::mem::forget(STARTING.write().unwrap_or_else(PoisonError::into_inner));
    for group in &*RUNNING.lock().unwrap_or_else(PoisonError::into_inner) {
        let _ = killpg(*group, Signal::SIGKILL);
    }
}

/// The last bytes of a stream.
pub(super) struct Tail {
    buf: Vec<u8>,
    limit: usize,
    truncated: bool,
}

impl Tail {
    pub fn new(limit: usize) -> Self {
        Self { buf: Vec::new(), limit, truncated: false }
    }

    /// At most the limit.
    pub fn bytes(&self) -> &[u8] {
        &self.buf[self.buf.len().saturating_sub(self.limit)..]
    }

    /// Whether the stream was longer than what is kept.
    pub fn is_truncated(&self) -> bool {
        self.truncated || self.buf.len() > self.limit
    }

    /// Reads once; 0 at the end. Cancel safe.
    async fn read_from(&mut self, pipe: &mut (impl AsyncRead + Unpin)) -> io::Result<usize> {
        // Cut rarely, so that moving the tail to the front costs little per byte read.
        if self.buf.len() >= 2 * self.limit {
            let spare = self.buf.len() - self.limit;
            self.buf.drain(..spare);
            self.truncated = true;
        }
        self.buf.reserve(4096);
        pipe.read_buf(&mut self.buf).await
    }

    async fn read_all(&mut self, pipe: &mut (impl AsyncRead + Unpin)) {
        while !matches!(self.read_from(pipe).await, Ok(0) | Err(_)) {}
    }

    /// Reads what is left of a stream whose writer is gone.
    async fn drain(&mut self, pipe: &mut (impl AsyncRead + Unpin)) {
        let end = Instant::now() + DRAIN_TIME;
        while Instant::now() < end {
            match tokio::time::timeout(DRAIN_IDLE, self.read_from(pipe)).await {
                Ok(Ok(read)) if read > 0 => {}
                _ => return,
            }
        }
    }
}

/// A started program, leader of its own process group. Dropping it kills the group and has the
/// program reaped in the background.
pub(super) struct Process {
    group: Group,
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    stderr: ChildStderr,
    pub stdout_tail: Tail,
    pub stderr_tail: Tail,
}

impl Process {
    /// Starts `command` with pipes on all three streams; the tails keep that many bytes.
    pub fn spawn(mut command: Command, stdout_limit: usize, stderr_limit: usize) -> io::Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0).kill_on_drop(true);
        let (pipes, group) = {
            let _open = STARTING.read().unwrap_or_else(PoisonError::into_inner);
            let mut child = command.spawn()?;
            ((child.stdin.take(), child.stdout.take(), child.stderr.take()), Group::new(child)?)
        };
        let (stdin, Some(stdout), Some(stderr)) = pipes else {
            return Err(io::Error::other("a pipe to the program is missing"));
        };
        Ok(Self {
            group,
            stdin,
            stdout,
            stderr,
            stdout_tail: Tail::new(stdout_limit),
            stderr_tail: Tail::new(stderr_limit),
        })
    }

    /// Feeds `input` while reading both outputs until the program exits. Cancel safe, but a second
    /// call feeds nothing.
    pub async fn run(&mut self, input: &[u8]) -> io::Result<ExitStatus> {
        let stdin = self.stdin.take();
        let feed = async {
            if let Some(mut stdin) = stdin {
                // The program need not read its input, so a closed pipe is no error.
                let _ = stdin.write_all(input).await;
            }
        };
        let io = async {
            tokio::join!(
                feed,
                self.stdout_tail.read_all(&mut self.stdout),
                self.stderr_tail.read_all(&mut self.stderr),
            );
            // Closed outputs are not the end: the program decides when it is done.
            std::future::pending::<()>().await;
        };
        tokio::select! {
            biased;
            status = self.group.wait() => status,
            () = io => unreachable!("the pipes are pumped until the program exits"),
        }
    }

    /// Kills what is left of the group and reads the rest of the output.
    pub async fn finish(&mut self) {
        self.group.clear().await;
        tokio::join!(self.stdout_tail.drain(&mut self.stdout), self.stderr_tail.drain(&mut self.stderr),);
    }

    /// Ends a running group: SIGTERM, up to `grace` to obey, SIGKILL.
    pub async fn stop(&mut self, grace: Duration) {
        let end = Instant::now() + grace;
        self.group.signal(Signal::SIGTERM);
        // Reading on, or a program that writes its last words into a full pipe never ends.
        let obeyed = tokio::time::timeout_at(end, self.run(&[])).await.is_ok();
        if obeyed {
            let _ = tokio::time::timeout_at(end, self.group.emptied()).await;
        } else {
            self.group.signal(Signal::SIGKILL);
            let _ = self.run(&[]).await;
        }
        self.finish().await;
    }
}

/// The process group a child leads.
struct Group {
    child: Option<Child>,
    id: Pid,
    reaped: bool,
}

impl Group {
    fn new(child: Child) -> io::Result<Self> {
        let id = child
            .id()
            .and_then(|id| i32::try_from(id).ok())
            .ok_or_else(|| io::Error::other("the program has no process id"))?;
        let id = Pid::from_raw(id);
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).insert(id);
        Ok(Self { child: Some(child), id, reaped: false })
    }

    async fn wait(&mut self) -> io::Result<ExitStatus> {
        let Some(child) = &mut self.child else {
            return Err(io::Error::other("the program was given up"));
        };
        let status = child.wait().await?;
        self.reaped = true;
        RUNNING.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        Ok(status)
    }

    fn signal(&self, signal: Signal) {
        // ESRCH: nobody is left, which is what the signal was for.
        let _ = killpg(self.id, signal);
    }

    /// Kills whoever is left after the leader. The group's id stays taken while it has members, and
    /// process ids are handed out in a cycle, so this right after the wait hits nobody else.
    async fn clear(&self) {
        self.signal(Signal::SIGKILL);
        let _ = tokio::time::timeout(ORPHAN_PATIENCE, self.orphans_reaped()).await;
    }

    async fn emptied(&self) {
        loop {
            self.reap_orphans();
            if killpg(self.id, None) == Err(Errno::ESRCH) {
                return;
            }
            tokio::time::sleep(GROUP_POLL).await;
        }
    }

    async fn orphans_reaped(&self) {
        while self.reap_orphans() {
            tokio::time::sleep(GROUP_POLL).await;
        }
    }

    /// Whether this process still has children in the group. It inherits them when it is process 1
    /// of a container, where nobody else would reap them. Only for after the leader was reaped,
    /// whose status belongs to tokio.
    fn reap_orphans(&self) -> bool {
        loop {
            match waitpid(Pid::from_raw(-self.id.as_raw()), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::StillAlive) => return true,
                Ok(_) | Err(Errno::EINTR) => {}
                Err(_) => return false,
            }
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.reaped {
            return;
        }
        self.signal(Signal::SIGKILL);
        // Without a runtime around, tokio still kills the child and reaps it when it next can.
        let (Some(child), Ok(runtime)) = (self.child.take(), tokio::runtime::Handle::try_current()) else {
            return;
        };
        let mut rest = Group {
            child: Some(child),
            id: self.id,
            reaped: true, // so that its own drop does not spawn again
        };
        runtime.spawn(async move {
            if rest.wait().await.is_ok() {
                rest.clear().await;
            }
        });
    }
}
