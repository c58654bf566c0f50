//! Sleeping and waking. A queue's dispatcher that has nothing to do registers as a sleeper: a shared advisory lock that
//! producers look for before they NOTIFY (engine.md, Traps). Polling goes on beside it, so a listener that is lost, or
//! silently eaten by a pooler, costs a poll interval and no job. The same channel tells of attempts that were cancelled, ended
//! or resumed from outside; who misses that learns it from the next heartbeat.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, timeout_at};
use tokio_postgres::AsyncMessage;

use super::attempts::Attempts;
use super::link::{FIRST_PAUSE, LONGEST_PAUSE, SESSION_SETTINGS, within};
use super::stats::Stats;
use crate::engine::connect::{Session, connect_with_messages};
use crate::engine::error::Result;
use crate::engine::target::Target;

enum Command {
    Sleep(Arc<str>),
    Wake(Arc<str>),
}

/// What a dispatcher holds of the listener.
#[derive(Clone)]
pub(super) struct Bell {
    commands: UnboundedSender<Command>,
    queues: Arc<HashMap<Arc<str>, Queue>>,
}

struct Queue {
    rung: Notify,
    /// Whether producers would notify now.
    registered: watch::Sender<bool>,
}

impl Bell {
    /// Sleeps until somebody enqueues, at most `at_most`; says whether to look for late jobs too. Asks producers to notify
    /// first: when they will from now on it returns at once, for one more claim, so that a job enqueued in between is
    /// either seen by that or rings.
    pub async fn sleep(&self, queue: &Arc<str>, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut registered = self.queues[queue].registered.subscribe();
        if !*registered.borrow() {
            let _ = self.commands.send(Command::Sleep(Arc::clone(queue)));
            if let Ok(Ok(_)) = timeout_at(until, registered.wait_for(|r| *r)).await {
                return true;
            }
        }
        timeout_at(until, self.queues[queue].rung.notified()).await.is_ok()
    }

    /// Whether producers would notify now.
    fn is_registered(&self, queue: &Arc<str>) -> bool {
        *self.queues[queue].registered.borrow()
    }

    /// Tells producers to save themselves the notification.
    pub fn unregister(&self, queue: &Arc<str>) {
        if self.is_registered(queue) {
            let _ = self.commands.send(Command::Wake(Arc::clone(queue)));
        }
    }

    /// Wakes every dispatcher, for shutdown.
    pub fn ring_all(&self) {
        for queue in self.queues.values() {
            queue.rung.notify_one();
        }
    }
}

pub(super) struct Listener {
    target: Target,
    commands: UnboundedReceiver<Command>,
    queues: Arc<HashMap<Arc<str>, Queue>>,
    attempts: Arc<Attempts>,
    stats: Arc<Stats>,
}

impl Listener {
    pub fn new(
        target: Target,
        queues: impl Iterator<Item = Arc<str>>,
        attempts: Arc<Attempts>,
        stats: Arc<Stats>,
    ) -> (Self, Bell) {
        let queues: HashMap<_, _> =
            queues.map(|q| (q, Queue { rung: Notify::new(), registered: watch::Sender::new(false) })).collect();
        let queues = Arc::new(queues);
        let (sender, commands) = unbounded_channel();
        let bell = Bell { commands: sender, queues: Arc::clone(&queues) };
        (Self { target, commands, queues, attempts, stats }, bell)
    }

    /// Listens until every [`Bell`] is gone, over as many connections as it takes.
    pub async fn run(mut self) {
        let mut asleep: Vec<Arc<str>> = Vec::new();
        let mut pause = FIRST_PAUSE;
        loop {
            match self.listen(&mut asleep, &mut pause).await {
                Ok(()) => return,
                Err(error) => {
                    Stats::add(&self.stats.reconnects, 1);
                    tracing::warn!(error = %error, "lost the listening connection; polling meanwhile");
                }
            }
            for queue in self.queues.values() {
                queue.registered.send_replace(false);
                // Notifications may have been missed: look once.
                queue.rung.notify_one();
            }
            if self.meanwhile(&mut asleep, tokio::time::sleep(pause)).await.is_none() {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Does the work while no connection hears the commands, and remembers who sleeps; `None` once every [`Bell`] is gone.
    async fn meanwhile<T>(&mut self, asleep: &mut Vec<Arc<str>>, work: impl Future<Output = T>) -> Option<T> {
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Some(done),
                command = self.commands.recv() => match command? {
                    Command::Sleep(queue) if !asleep.contains(&queue) => asleep.push(queue),
                    Command::Sleep(_) => {}
                    Command::Wake(queue) => asleep.retain(|q| *q != queue),
                },
            }
        }
    }

    /// Connects, and says what to listen on.
    async fn connected(target: Target) -> Result<(Session, UnboundedReceiver<AsyncMessage>)> {
        let (sender, messages) = unbounded_channel();
        let session = within(connect_with_messages(&target, sender)).await?;
        if session.is_pooled() {
            return Ok((session, messages));
        }
        within(async {
            session.batch_execute(SESSION_SETTINGS).await?;
            let channel = "SELECT 'awa_wake_' || '{schema}.runtime_instances'::regclass::oid::integer";
            let channel: String = session.query_one(&target.schema.render(channel), &[]).await?.try_get(0)?;
            Ok(session.batch_execute(&format!("LISTEN \"{channel}\"")).await?)
        })
        .await?;
        Ok((session, messages))
    }

    async fn listen(&mut self, asleep: &mut Vec<Arc<str>>, pause: &mut Duration) -> Result<()> {
        let connected = Self::connected(self.target.clone());
        let Some(connected) = self.meanwhile(asleep, connected).await else { return Ok(()) };
        let (session, mut messages) = connected?;
        if session.is_pooled() {
            // It would listen, and hold its locks, on a connection that others use: for ever, and for nobody.
            tracing::warn!("through a transaction pooler nobody can be notified: jobs are found by polling alone");
            session.close().await;
            while self.commands.recv().await.is_some() {}
            return Ok(());
        }
        let schema = &self.target.schema;
        let lock = Lock {
            take: schema.render(
                "SELECT pg_advisory_lock_shared('{schema}.runtime_instances'::regclass::oid::integer, hashtext($1))",
            ),
            release: schema.render(
                "SELECT pg_advisory_unlock_shared('{schema}.runtime_instances'::regclass::oid::integer, hashtext($1))",
            ),
        };
        for queue in asleep.iter() {
            lock.take(&session, queue).await?;
            self.registered(queue);
        }
        *pause = FIRST_PAUSE;
        loop {
            tokio::select! {
                command = self.commands.recv() => match command {
                    None => {
                        session.close().await;
                        return Ok(());
                    }
                    Some(Command::Sleep(queue)) => {
                        // Remembered first: if the lock fails with its connection, the next one takes it.
                        if !asleep.contains(&queue) {
                            asleep.push(Arc::clone(&queue));
                            lock.take(&session, &queue).await?;
                        }
                        self.registered(&queue);
                    }
                    Some(Command::Wake(queue)) => {
                        if let Some(at) = asleep.iter().position(|q| *q == queue) {
                            asleep.swap_remove(at);
                            self.queues[&queue].registered.send_replace(false);
                            within(async { Ok(session.execute(&lock.release, &[&&*queue]).await?) }).await?;
                        }
                    }
                },
                message = messages.recv() => match message {
                    Some(AsyncMessage::Notification(note)) => {
                        Stats::add(&self.stats.wakeups, 1);
                        if let Some(queue) = self.queues.get(note.payload()) {
                            queue.rung.notify_one();
                        } else {
                            self.attempts.hear(note.payload());
                        }
                    }
                    Some(_) => {}
                    // The connection task ended; the next statement would say why.
                    None => {
                        session.batch_execute("").await?;
                    }
                },
            }
        }
    }

    fn registered(&self, queue: &Arc<str>) {
        self.queues[queue].registered.send_replace(true);
    }
}

struct Lock {
    take: String,
    release: String,
}

impl Lock {
    async fn take(&self, session: &Session, queue: &Arc<str>) -> Result<()> {
        within(async { Ok(session.query(&self.take, &[&&**queue]).await?) }).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn without_a_listener_a_sleep_lasts_one_poll_interval() {
        let queue: Arc<str> = "q".into();
        let target = Target::parse("postgres://nowhere/x", Default::default(), "test", &|_| None).unwrap();
        let (_never_run, bell) =
            Listener::new(target, [Arc::clone(&queue)].into_iter(), Arc::default(), Arc::default());
        let start = Instant::now();
        let interval = Duration::from_secs(2);
        assert!(!bell.sleep(&queue, interval).await);
        // Twice the interval is what it must not be.
        assert!(start.elapsed() < interval.mul_f64(1.8), "{:?}", start.elapsed());
    }
}
