//! enqueue (50_enqueue.sql) and promote (55_promote.sql): a row a call.

use super::state::*;
use super::{Config, Role};
use crate::guard::Guard;

impl Config {
    /// join_lane, and the first look at the cursor in pin_ready_slot.
    pub(super) fn join(&self, st: &mut State, me: usize, promoted: Option<u8>) -> bool {
        let Role::Producer { transactions, calls, promotes } = self.roles[me] else { return false };
        let may = st.sessions[me].begun < transactions && st.allocated < self.seqs;
        let job_is_there = match promoted {
            Some(job) => promotes && st.jobs[job as usize].deferred > 0 && !is_promoted(st, job),
            None => !promotes && st.next_job < self.jobs,
        };
        if !may || !job_is_there {
            return false;
        }
        let pin = st.rings[QUEUE].cursor;
        let session = &mut st.sessions[me];
        session.begun += 1;
        session.locks.producer = self.has(Guard::ProducerLock);
        session.local = Local::Produce { pin, promoted, calls };
        session.at = At::Pin;
        true
    }

    /// The loop of pin_ready_slot.
    pub(super) fn pin_ready_slot(&self, st: &mut State, me: usize, pin: Cursor) -> Option<Option<Cursor>> {
        if !st.pin(me, QUEUE, pin.slot) {
            return None;
        }
        let cursor = st.rings[QUEUE].cursor;
        Some((self.has(Guard::PinRecheck) && cursor != pin).then_some(cursor))
    }

    pub(super) fn produce(&self, st: &mut State, me: usize) -> bool {
        let Local::Produce { pin, promoted, calls } = st.sessions[me].local else { return false };
        match st.sessions[me].at {
            At::Pin => match self.pin_ready_slot(st, me, pin) {
                None => return false,
                Some(Some(cursor)) => st.sessions[me].local = Local::Produce { pin: cursor, promoted, calls },
                Some(None) => st.sessions[me].at = At::Insert,
            },
            At::Insert => {
                if st.allocated >= self.seqs || !st.lock_partitions(me, QUEUE, bit(pin.slot)) {
                    return false;
                }
                let (job, run_lease) = match promoted {
                    Some(job) => (job, st.jobs[job as usize].deferred - 1),
                    None if st.next_job < self.jobs => (st.next_job, 0),
                    None => return false,
                };
                st.next_job += u8::from(promoted.is_none());
                let by = By::Session(me as u8);
                st.rows[st.allocated as usize] =
                    Row { by, here: true, job, run_lease, slot: pin.slot, generation: pin.generation };
                st.allocated += 1;
                let pin = if calls > 1 { st.rings[QUEUE].cursor } else { Cursor::default() };
                st.sessions[me].local = Local::Produce { pin, promoted, calls: calls - 1 };
                st.sessions[me].at = if calls > 1 { At::Pin } else { At::Commit };
            }
            At::Commit => {
                for n in 0..SEQS {
                    let row = st.rows[n];
                    if row.by != By::Session(me as u8) {
                        continue;
                    }
                    st.rows[n].by = By::Committed;
                    st.jobs[row.job as usize].enqueued = true;
                    if promoted.is_some() {
                        st.jobs[row.job as usize].deferred = 0;
                    }
                    if st.rings[QUEUE].pruned & bit(row.generation) != 0 {
                        st.breaks(Broken::WroteIntoPrunedSlot);
                    }
                }
                st.commits(me);
            }
            _ => return false,
        }
        true
    }
}

/// FOR UPDATE SKIP LOCKED: another promotion has it.
fn is_promoted(st: &State, job: u8) -> bool {
    st.sessions.iter().any(|s| matches!(s.local, Local::Produce { promoted: Some(j), .. } if j == job))
}
