//! withdraw_ready (65_operate.sql), by an operator who cancels a ready job: spent without an attempt.

use super::Config;
use super::state::*;
use crate::guard::Guard;

impl Config {
    /// find_job saw the row unclaimed.
    pub(super) fn begin_withdraw(&self, st: &mut State, me: usize, seq: u8) -> bool {
        let emitted = st.batches_seen(me).fold(0, |set, b| set | b.taken);
        if st.rows_seen(me, |_| true) & !emitted & bit(seq) == 0 || st.next_batch >= self.batches {
            return false;
        }
        st.sessions[me].local = Local::Withdraw { seq };
        st.sessions[me].at = At::LockLane;
        true
    }

    pub(super) fn withdraw(&self, st: &mut State, me: usize) -> bool {
        let Local::Withdraw { seq } = st.sessions[me].local else { return false };
        let mine = By::Session(me as u8);
        match st.sessions[me].at {
            At::LockLane => {
                if self.has(Guard::LaneLock) && st.others(me).any(|s| s.locks.lane) {
                    return false;
                }
                st.sessions[me].locks.lane = true;
                st.sessions[me].at = At::Rows;
            }
            // unclaimed_in, and the range without a claim slot.
            At::Rows => {
                let slots = self.slots_from(st, 0).iter().flatten().fold(0, |set, s| set | bit(s.slot));
                if !st.lock_partitions(me, QUEUE, slots) {
                    return false;
                }
                let rows = st.rows_seen(me, |r| slots & bit(r.slot) != 0);
                let ready_slot = st.rows[seq as usize].slot;
                let emitted =
                    st.batches_seen(me).filter(|b| b.ready_slot == ready_slot).fold(0, |set, b| set | b.taken);
                if rows & !emitted & bit(seq) == 0 || st.next_batch >= self.batches {
                    st.rolls_back(me);
                    return true;
                }
                st.batches[st.next_batch as usize] = Batch {
                    by: mine,
                    taken: bit(seq),
                    ready_slot,
                    in_queue_ring: true,
                    is_tombstone: true,
                    ..Batch::default()
                };
                st.next_batch += 1;
                st.sessions[me].at = At::Commit;
            }
            At::Commit => {
                let emitted = st.batches.iter().filter(|b| b.by == By::Committed).fold(0, |set, b| set | b.taken);
                if emitted & bit(seq) != 0 {
                    st.breaks(Broken::EmittedTwice);
                }
                let batch = st.batches.iter_mut().find(|b| b.by == mine).expect("what it withdrew");
                batch.by = By::Committed;
                batch.closed = batch.taken;
                st.jobs[st.rows[seq as usize].job as usize].terminal += 1;
                st.commits(me);
            }
            _ => return false,
        }
        true
    }
}
