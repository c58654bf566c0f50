//! Sleeping and waking. A queue's dispatcher that has nothing to do registers as a sleeper: a shared advisory lock that
//! producers look for before they NOTIFY (engine.md, Traps). Polling goes on beside it, so a listener that is lost, or
//! silently eaten by a pooler, costs a poll interval and no job.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{Notify, watch};
use tokio_postgres::AsyncMessage;

use super::link::SESSION_SETTINGS;
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
    /// Asks producers to notify, and waits until they will, or for `at_most`.
    pub async fn register(&self, queue: &Arc<str>, at_most: Duration) {
        let mut registered = self.queues[queue].registered.subscribe();
        if !*registered.borrow() {
            let _ = self.commands.send(Command::Sleep(Arc::clone(queue)));
            let _ = tokio::time::timeout(at_most, registered.wait_for(|r| *r)).await;
        }
    }

    /// Whether producers would notify now.
    pub fn is_registered(&self, queue: &Arc<str>) -> bool {
        *self.queues[queue].registered.borrow()
    }

    /// Tells producers to save themselves the notification.
    pub fn unregister(&self, queue: &Arc<str>) {
        if self.is_registered(queue) {
            let _ = self.commands.send(Command::Wake(Arc::clone(queue)));
        }
    }

    /// Until somebody enqueues, or `at_most`; says whether somebody did.
    pub async fn rung(&self, queue: &Arc<str>, at_most: Duration) -> bool {
        tokio::time::timeout(at_most, self.queues[queue].rung.notified()).await.is_ok()
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
    stats: Arc<Stats>,
}

impl Listener {
    pub fn new(target: Target, queues: impl Iterator<Item = Arc<str>>, stats: Arc<Stats>) -> (Self, Bell) {
        let queues: HashMap<_, _> =
            queues.map(|q| (q, Queue { rung: Notify::new(), registered: watch::Sender::new(false) })).collect();
        let queues = Arc::new(queues);
        let (sender, commands) = unbounded_channel();
        let bell = Bell { commands: sender, queues: Arc::clone(&queues) };
        (Self { target, commands, queues, stats }, bell)
    }

    /// Listens until every [`Bell`] is gone, over as many connections as it takes.
    pub async fn run(mut self) {
        let mut asleep: Vec<Arc<str>> = Vec::new();
        let mut pause = Duration::from_millis(50);
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
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(2));
        }
    }

    async fn listen(&mut self, asleep: &mut Vec<Arc<str>>, pause: &mut Duration) -> Result<()> {
        let (sender, mut messages) = unbounded_channel();
        let session = connect_with_messages(&self.target, sender).await?;
        session.batch_execute(SESSION_SETTINGS).await?;
        let schema = &self.target.schema;
        let channel: String = session
            .query_one(
                &schema.render("SELECT 'awa_wake_' || '{schema}.runtime_instances'::regclass::oid::integer"),
                &[],
            )
            .await?
            .try_get(0)?;
        session.batch_execute(&format!("LISTEN \"{channel}\"")).await?;
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
        *pause = Duration::from_millis(50);
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
                            session.execute(&lock.release, &[&&*queue]).await?;
                        }
                    }
                },
                message = messages.recv() => match message {
                    Some(AsyncMessage::Notification(note)) => {
                        Stats::add(&self.stats.wakeups, 1);
                        if let Some(queue) = self.queues.get(note.payload()) {
                            queue.rung.notify_one();
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
        session.query(&self.take, &[&&**queue]).await?;
        Ok(())
    }
}
