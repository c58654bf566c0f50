//! What must always hold (I1 to I3), and what must happen at least once, lest a property hold because nothing does.

use super::state::*;
use super::{Config, Role};
use stateright::Property;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::Relaxed};

pub const I1: &str = "I1: every committed job is in exactly one place, and can be found there";
pub const STILL: &str =
    "I1: once all is still, claims find every job, the cursor catches up and every slot can be pruned";
pub const I6: &str = "I6: probes find every committed job, whoever else is in a transaction";
pub const I2: &str = "I2: one winner an attempt, and never a stale one";
pub const I3: &str = "I3: only what is over is truncated";

pub(super) fn properties(config: &Config) -> Vec<Property<Config>> {
    let mut all = vec![
        Property::always(I1, |config: &Config, st| {
            config.seen.look(st);
            every_job_is_somewhere(st)
        }),
        Property::always(STILL, drains),
        Property::always(I6, probes_find_all),
        Property::always(I2, |_, st: &State| {
            !matches!(st.broken, Some(Broken::EmittedTwice | Broken::TwoWinners | Broken::StaleLeaseWon))
        }),
        Property::always(I3, |_, st: &State| {
            !matches!(
                st.broken,
                Some(
                    Broken::BodyGone
                        | Broken::TruncatedReadyRow
                        | Broken::TruncatedOpenAttempt
                        | Broken::TruncatedOpenHole
                        | Broken::TruncatedBelowCursor
                        | Broken::WroteIntoPrunedSlot
                )
            )
        }),
    ];
    all.retain(|p| config.only.is_none_or(|only| only == p.name));
    all
}

/// Things that a configuration should reach: asked for by the tests that explore all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Reached {
    Completed,
    Retried,
    StaleWriterLost,
    HoleSetAside,
    HoleFilledLate,
    HoleEnded,
    CursorPassedDeadHole,
    PromisedAndDied,
    SlotPruned,
    ClaimSlotPruned,
    SlotReopened,
}

const ALL: [Reached; 11] = [
    Reached::Completed,
    Reached::Retried,
    Reached::StaleWriterLost,
    Reached::HoleSetAside,
    Reached::HoleFilledLate,
    Reached::HoleEnded,
    Reached::CursorPassedDeadHole,
    Reached::PromisedAndDied,
    Reached::SlotPruned,
    Reached::ClaimSlotPruned,
    Reached::SlotReopened,
];

/// What was reached in any state. Beside the checker's own "sometimes", which stores an example anew for every such state.
#[derive(Clone, Debug, Default)]
pub struct Seen(Arc<AtomicU16>);

impl Seen {
    fn look(&self, st: &State) {
        let before = self.0.load(Relaxed);
        for reached in ALL {
            let flag = 1 << reached as u16;
            if before & flag == 0 && reached.is_in(st) {
                self.0.fetch_or(flag, Relaxed);
            }
        }
    }

    pub fn has(&self, reached: Reached) -> bool {
        self.0.load(Relaxed) & 1 << reached as u16 != 0
    }
}

impl Reached {
    pub fn is_in(self, st: &State) -> bool {
        let queue = &st.rings[QUEUE];
        match self {
            Reached::Completed => st.jobs.iter().any(|j| j.terminal > 0),
            Reached::Retried => st.rows.iter().any(|r| r.by == By::Committed && r.run_lease > 0),
            // A writer about to prove an attempt that is closed.
            Reached::StaleWriterLost => st.sessions.iter().any(|s| {
                matches!(s.local, Local::Attempt { batch, seq, .. }
                    if s.at == At::ProveAttempt && st.batches[batch as usize].closed & bit(seq) != 0)
            }),
            Reached::HoleSetAside => st.holes.iter().any(|h| h.by == By::Committed),
            Reached::HoleFilledLate => {
                let emitted = st.batches.iter().filter(|b| b.by == By::Committed).fold(0, |set, b| set | b.taken);
                st.holes.iter().any(|h| h.by == By::Committed && h.ranges & emitted != 0)
            }
            Reached::HoleEnded => st.holes.iter().any(|h| h.ended == By::Committed),
            Reached::CursorPassedDeadHole => (0..st.spent).any(|n| st.rows[n as usize].by == By::None),
            Reached::PromisedAndDied => {
                queue.cursor.generation > queue.newest().generation
                    && st.sessions.iter().all(|s| s.locks.ring != Some(QUEUE as u8))
            }
            Reached::SlotPruned => queue.pruned != 0,
            Reached::ClaimSlotPruned => st.rings[CLAIM].pruned != 0,
            Reached::SlotReopened => queue.pruned & bit(0) != 0 && queue.opened[1..].contains(&1),
        }
    }
}

fn every_job_is_somewhere(st: &State) -> bool {
    st.jobs.iter().enumerate().filter(|(_, j)| j.enqueued).all(|(n, j)| places(st, n as u8, j) == 1)
}

/// In how many places a job is where its next step finds it.
fn places(st: &State, job: u8, j: &Job) -> u8 {
    let mut places = j.terminal + u8::from(j.deferred > 0);
    let open_holes = st.holes.iter().filter(|h| h.here && h.by == By::Committed && h.ended != By::Committed);
    let open_holes = open_holes.fold(0, |set, h| set | h.ranges);
    for (n, row) in st.rows.iter().enumerate().filter(|(_, r)| r.by == By::Committed && r.job == job) {
        let mut claimed = st.batches.iter().filter(|b| b.by == By::Committed && b.taken & bit(n as u8) != 0).peekable();
        if claimed.peek().is_none() {
            // Ready: above the cursor, or in a hole that is looked into.
            places += u8::from(row.here && (n as u8 >= st.spent || open_holes & bit(n as u8) != 0));
        }
        for batch in claimed.filter(|b| b.closed & bit(n as u8) == 0) {
            places += u8::from(batch.in_claim_ring && batch.in_queue_ring && row.here);
        }
    }
    places
}

/// The first claimer, when neither it nor anybody who could hold it up is in a transaction.
fn free_claimer(config: &Config, st: &State) -> Option<usize> {
    let waits = |(role, s): (&Role, &Session)| match role {
        Role::Claimer { .. } | Role::Operator => s.at != At::Idle,
        Role::Maintenance { .. } => matches!(s.local, Local::Prune { .. }),
        _ => false,
    };
    if st.broken.is_some() || config.roles.iter().zip(&st.sessions).any(waits) {
        return None;
    }
    config.roles.iter().position(|r| matches!(r, Role::Claimer { .. }))
}

/// Calls of one claimer, undisturbed, until all that can be claimed is.
fn claims_alone(config: &Config, st: &mut State, me: usize, mode: Mode) {
    let patient = Config { batches: BATCHES as u8, ..config.clone() };
    for _ in 0..SEQS + 2 {
        if !patient.begin_claim(st, me, mode) {
            return;
        }
        while st.sessions[me].at != At::Idle {
            // Nothing is set aside for them: a hole costs, it does not hold up.
            if st.sessions[me].at == At::Holders || !patient.claim(st, me) {
                st.sessions[me].at = At::Commit;
            }
        }
    }
}

fn emitted(st: &State) -> Set {
    st.batches.iter().filter(|b| b.by == By::Committed).fold(0, |set, b| set | b.taken)
}

fn ready(st: &State) -> Set {
    st.rows_seen(SESSIONS, |_| true) & !emitted(st)
}

fn probes_find_all(config: &Config, st: &State) -> bool {
    let Some(me) = free_claimer(config, st) else { return true };
    if ready(st) == 0 {
        return true;
    }
    let mut st = st.clone();
    claims_alone(config, &mut st, me, Mode::Probe);
    ready(&st) == 0
}

/// Once nobody is in a transaction, claims take every ready job (those that lie in holes set aside by a probe), the cursor
/// catches up with what was handed out, and when the attempts are closed too every sealed slot can be pruned.
fn drains(config: &Config, st: &State) -> bool {
    let Some(me) = free_claimer(config, st) else { return true };
    if st.sessions.iter().any(|s| s.at != At::Idle) {
        return true;
    }
    let aside = st.holes.iter().filter(|h| h.here && h.ended != By::Committed).fold(0, |set, h| set | h.ranges);
    let mut st = st.clone();
    claims_alone(config, &mut st, me, Mode::Claim);
    if ready(&st) & !aside != 0 {
        return false;
    }
    claims_alone(config, &mut st, me, Mode::Probe);
    for batch in &mut st.batches {
        batch.closed = batch.taken;
    }
    let sealed = |ring: usize| (0..config.slots[ring]).filter(move |s| st.rings[ring].is_sealed(*s));
    ready(&st) == 0
        && st.spent == st.allocated
        && sealed(QUEUE).all(|slot| !config.is_blocked(&st, QUEUE, slot))
        && sealed(CLAIM).all(|slot| !config.is_blocked(&st, CLAIM, slot))
}
