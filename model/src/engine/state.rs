//! What is in the database, and what each session holds and knows. Sequences move at once and for good; a row of an open
//! transaction is in its table with its owner, and seen by nobody else.

use std::hash::{Hash, Hasher};

pub const SESSIONS: usize = 8;
pub const SEQS: usize = 6;
pub const JOBS: usize = 4;
pub const BATCHES: usize = 10;
pub const HOLES: usize = 4;
pub const SLOTS: usize = 3;
pub const GENERATIONS: usize = 6;

pub const QUEUE: usize = 0;
pub const CLAIM: usize = 1;

/// Lane_seqs (from 0), slots or generations, one bit each.
pub type Set = u8;

pub fn below(n: u8) -> Set {
    ((1u16 << n) - 1) as u8
}

pub fn bit(n: u8) -> Set {
    1 << n
}

/// One past the highest element.
pub fn upper(set: Set) -> u8 {
    8 - set.leading_zeros() as u8
}

pub fn first_missing(set: Set) -> u8 {
    set.trailing_ones() as u8
}

pub fn each(set: Set) -> impl Iterator<Item = u8> {
    (0..8).filter(move |n| set & bit(*n) != 0)
}

/// Who wrote a row: nobody did, a session that has not committed, or it is committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum By {
    #[default]
    None,
    Session(u8),
    Committed,
}

impl By {
    pub fn seen_by(self, session: usize) -> bool {
        self == By::Committed || self == By::Session(session as u8)
    }
}

/// `*_ring_cursor`: a generation and the slot it opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    pub generation: u8,
    pub slot: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Ring {
    pub cursor: Cursor,
    /// `*_ring_state`, by generation: slot + 1.
    pub opened: [u8; GENERATIONS],
    /// `*_ring_prunes`: generations.
    pub pruned: Set,
}

impl Ring {
    pub fn newest(&self) -> Cursor {
        let generation = self.opened.iter().rposition(|s| *s != 0).unwrap_or(0);
        Cursor { generation: generation as u8, slot: self.opened[generation] - 1 }
    }

    pub fn generation_of(&self, slot: u8) -> Option<u8> {
        self.opened.iter().rposition(|s| *s == slot + 1).map(|g| g as u8)
    }

    pub fn is_pruned(&self, slot: u8) -> bool {
        self.generation_of(slot).is_none_or(|g| self.pruned & bit(g) != 0)
    }

    pub fn is_sealed(&self, slot: u8) -> bool {
        self.newest().slot != slot && !self.is_pruned(slot)
    }
}

/// A place in the lane: its row in ready_entries, while it is there, and what it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Row {
    pub by: By,
    /// Not truncated.
    pub here: bool,
    pub job: u8,
    pub run_lease: u8,
    pub slot: u8,
    /// The generation the producer believed its slot to be in. Only the checks look at it.
    pub generation: u8,
}

/// `lease_claim_batches` and `ready_claim_attempt_batches`, which one transaction writes, and the closures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Batch {
    pub by: By,
    pub taken: Set,
    pub ready_slot: u8,
    pub claim: Cursor,
    pub in_queue_ring: bool,
    pub in_claim_ring: bool,
    /// Without a claim slot: withdrawn, not handed to an attempt.
    pub is_tombstone: bool,
    pub closed: Set,
}

/// `ready_lane_holes`: a record and, later, its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Hole {
    pub by: By,
    pub ended: By,
    pub here: bool,
    pub ranges: Set,
    pub holders: Set,
    pub slot: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Job {
    pub enqueued: bool,
    /// `deferred_jobs`: the last lease + 1.
    pub deferred: u8,
    pub terminal: u8,
}

/// Something the invariants forbid, seen the moment it happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Broken {
    EmittedTwice,
    TwoWinners,
    StaleLeaseWon,
    BodyGone,
    TruncatedReadyRow,
    TruncatedOpenAttempt,
    TruncatedOpenHole,
    TruncatedBelowCursor,
    WroteIntoPrunedSlot,
}

/// Where a session is: before which statement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum At {
    #[default]
    Idle,
    Pin,
    Insert,
    LockLane,
    PinClaim,
    LateOpen,
    LateRows,
    LateEnd,
    List,
    Emitted,
    Rows,
    Quiet,
    Known,
    Holders,
    Aside,
    PinHole,
    InsertHole,
    ProveAttempt,
    OpenSlot,
    SetCursor,
    LockSlot,
    LockPartitions,
    ProveAgain,
    Commit,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    #[default]
    Claim,
    Probe,
    /// advance_idle_cursors.
    Idle,
}

/// The variables of a claim.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Claim {
    pub mode: Mode,
    pub second_call: bool,
    pub allocated: u8,
    pub left: u8,
    pub claim: Cursor,
    pub spent: u8,
    pub emitted: Set,
    pub seen: Set,
    pub listed: [Option<Cursor>; SLOTS],
    pub next: u8,
    /// By generation, the upper end of what its slot is known to hold.
    pub highs: [u8; GENERATIONS],
    pub holes: Set,
    pub holders: Set,
    pub pin: Cursor,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Local {
    #[default]
    None,
    Produce {
        pin: Cursor,
        promoted: Option<u8>,
        calls: u8,
    },
    Claim(Claim),
    Attempt {
        batch: u8,
        seq: u8,
        run_lease: u8,
        completes: bool,
    },
    Withdraw {
        seq: u8,
    },
    Rotate {
        ring: u8,
        opens: Cursor,
        inserted: bool,
    },
    Prune {
        ring: u8,
        slot: u8,
        generation: u8,
    },
}

/// Locks are held until the transaction ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Locks {
    pub lane: bool,
    /// Shared.
    pub producer: bool,
    pub ring: Option<u8>,
    /// Shared, by ring: slots.
    pub pins: [Set; 2],
    pub pin: Option<(u8, u8)>,
    pub slot_row: Option<(u8, u8)>,
    /// ACCESS SHARE or ROW EXCLUSIVE on a partition of the slot.
    pub partitions: [Set; 2],
    /// ACCESS EXCLUSIVE on all of them.
    pub exclusive: Option<(u8, u8)>,
    pub batch: Option<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Session {
    pub at: At,
    /// Of producers: transactions begun, which makes their names in pg_locks.
    pub begun: u8,
    pub locks: Locks,
    pub local: Local,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The lane's sequences.
    pub allocated: u8,
    pub spent: u8,
    pub hint: u8,
    pub next_batch: u8,
    pub next_hole: u8,
    pub next_job: u8,
    pub rings: [Ring; 2],
    pub rows: [Row; SEQS],
    pub batches: [Batch; BATCHES],
    pub holes: [Hole; HOLES],
    pub jobs: [Job; JOBS],
    pub sessions: [Session; SESSIONS],
    pub broken: Option<Broken>,
}

/// Only what can differ: most of the arrays is not in use yet, and an idle session holds and knows nothing.
impl Hash for State {
    fn hash<H: Hasher>(&self, hasher: &mut H) {
        (self.allocated, self.spent, self.hint, self.next_batch, self.next_hole, self.next_job).hash(hasher);
        self.rings.hash(hasher);
        self.rows[..self.allocated as usize].hash(hasher);
        self.batches[..self.next_batch as usize].hash(hasher);
        self.holes[..self.next_hole as usize].hash(hasher);
        self.jobs[..self.next_job as usize].hash(hasher);
        for session in &self.sessions {
            (session.at, session.begun).hash(hasher);
            if session.at != At::Idle {
                (session.locks, session.local).hash(hasher);
            }
        }
        self.broken.hash(hasher);
    }
}

impl State {
    pub fn others(&self, me: usize) -> impl Iterator<Item = &Session> {
        self.sessions.iter().enumerate().filter(move |(n, _)| *n != me).map(|(_, s)| s)
    }

    pub fn breaks(&mut self, broken: Broken) {
        self.broken = self.broken.or(Some(broken));
    }

    /// Rows of the lane that `me` sees, where `f` says so.
    pub fn rows_seen(&self, me: usize, f: impl Fn(&Row) -> bool) -> Set {
        let seen = |r: &Row| r.here && r.by.seen_by(me) && f(r);
        self.rows.iter().enumerate().filter(|(_, r)| seen(r)).fold(0, |set, (n, _)| set | bit(n as u8))
    }

    pub fn batches_seen(&self, me: usize) -> impl Iterator<Item = &Batch> {
        self.batches.iter().filter(move |b| b.in_queue_ring && b.by.seen_by(me))
    }

    pub fn holes_seen(&self, me: usize) -> impl Iterator<Item = &Hole> {
        self.holes.iter().filter(move |h| h.here && h.by.seen_by(me))
    }

    /// pg_locks: the transactions that hold the producers' lock, by session and transaction.
    pub fn producers(&self, me: usize) -> Set {
        let names = |n: usize, s: &Session| bit((n as u8 * 2 + (s.begun & 1)) & 7);
        self.sessions
            .iter()
            .enumerate()
            .filter(|(n, s)| *n != me && s.locks.producer)
            .fold(0, |set, (n, s)| set | names(n, s))
    }

    /// ACCESS SHARE or ROW EXCLUSIVE on partitions of these slots; false while somebody has one of them exclusively.
    pub fn lock_partitions(&mut self, me: usize, ring: usize, slots: Set) -> bool {
        let taken = |s: &Session| s.locks.exclusive.is_some_and(|(r, n)| r as usize == ring && slots & bit(n) != 0);
        if self.others(me).any(taken) {
            return false;
        }
        self.sessions[me].locks.partitions[ring] |= slots;
        true
    }

    /// The pin of a slot, shared; false while a prune has it.
    pub fn pin(&mut self, me: usize, ring: usize, slot: u8) -> bool {
        if self.others(me).any(|s| s.locks.pin == Some((ring as u8, slot))) {
            return false;
        }
        self.sessions[me].locks.pins[ring] |= bit(slot);
        true
    }

    pub fn commits(&mut self, me: usize) {
        self.sessions[me] = Session { begun: self.sessions[me].begun, ..Session::default() };
    }

    /// The session's transaction is undone and its locks drop; sequences stay where they are.
    pub fn rolls_back(&mut self, me: usize) {
        let mine = By::Session(me as u8);
        for row in self.rows.iter_mut().filter(|r| r.by == mine) {
            *row = Row::default();
        }
        for batch in self.batches.iter_mut().filter(|b| b.by == mine) {
            *batch = Batch::default();
        }
        for hole in &mut self.holes {
            if hole.by == mine {
                *hole = Hole::default();
            } else if hole.ended == mine {
                hole.ended = By::None;
            }
        }
        self.commits(me);
    }
}
