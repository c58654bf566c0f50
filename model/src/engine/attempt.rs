//! complete (53_complete.sql) and close_attempts (54_close.sql, and 63_rescue.sql, which ends in it): one attempt a call.

use super::state::*;
use super::{Config, Role};
use crate::guard::Guard;

impl Config {
    /// lock_claim_batches. Waiting for it is the same as not having begun.
    pub(super) fn lock_batch(&self, st: &mut State, me: usize, batch: u8, seq: u8, run_lease: u8) -> bool {
        let completes = matches!(self.roles[me], Role::Completer { .. });
        let claimed = st.batches[batch as usize];
        if claimed.by != By::Committed || claimed.taken & bit(seq) == 0 {
            return false;
        }
        if self.has(Guard::BatchLock) {
            if st.others(me).any(|s| s.locks.batch == Some(batch)) {
                return false;
            }
            st.sessions[me].locks.batch = Some(batch);
        }
        st.sessions[me].local = Local::Attempt { batch, seq, run_lease, completes };
        st.sessions[me].at = At::ProveAttempt;
        true
    }

    pub(super) fn end_attempt(&self, st: &mut State, me: usize) -> bool {
        let Local::Attempt { batch, seq, run_lease, completes } = st.sessions[me].local else { return false };
        let claimed = st.batches[batch as usize];
        let row = st.rows[seq as usize];
        match st.sessions[me].at {
            // complete_in, or open_attempt_in with the body and the inserts that follow it: the writes show at commit.
            At::ProveAttempt => {
                if !st.lock_partitions(me, CLAIM, bit(claimed.claim.slot)) {
                    return false;
                }
                let is_open = claimed.closed & bit(seq) == 0;
                let predicate = if completes { Guard::ClosurePredicate } else { Guard::ClosePredicate };
                let valid = claimed.in_claim_ring
                    && (is_open || !self.has(predicate))
                    && (run_lease == row.run_lease + 1 || !self.has(Guard::LeasePredicate));
                if !valid {
                    st.commits(me);
                    return true;
                }
                if !st.lock_partitions(me, QUEUE, bit(claimed.ready_slot)) {
                    return false;
                }
                if !completes && !row.here {
                    st.breaks(Broken::BodyGone);
                }
                st.sessions[me].at = At::Commit;
            }
            At::Commit => {
                if claimed.closed & bit(seq) != 0 {
                    st.breaks(Broken::TwoWinners);
                }
                if run_lease != row.run_lease + 1 {
                    st.breaks(Broken::StaleLeaseWon);
                }
                st.batches[batch as usize].closed |= bit(seq);
                let job = &mut st.jobs[row.job as usize];
                let retries = matches!(self.roles[me], Role::Closer { attempts } if run_lease < attempts);
                if retries {
                    job.deferred = run_lease + 1;
                } else {
                    job.terminal += 1;
                }
                st.commits(me);
            }
            _ => return false,
        }
        true
    }
}
