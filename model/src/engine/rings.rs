//! rotate (56_rotate.sql) and prune (57_prune.sql), of both rings.

use super::Config;
use super::state::*;
use crate::guard::Guard;

impl Config {
    /// The ring's lock and the reads.
    pub(super) fn rotate(&self, st: &mut State, me: usize, ring: u8) -> bool {
        if self.has(Guard::RotatorLock) {
            if st.others(me).any(|s| s.locks.ring == Some(ring)) {
                return false;
            }
            st.sessions[me].locks.ring = Some(ring);
        }
        let r = st.rings[ring as usize];
        let current = r.newest();
        let opens = if self.has(Guard::Promise) && r.cursor.generation > current.generation {
            r.cursor
        } else {
            let slots = self.slots[ring as usize];
            let next = (1..slots).map(|n| (current.slot + n) % slots).find(|s| r.is_pruned(*s));
            let Some(slot) = next else { return false };
            Cursor { generation: current.generation + 1, slot }
        };
        if opens.generation > self.generations {
            return false;
        }
        st.sessions[me].local = Local::Rotate { ring, opens, inserted: false };
        st.sessions[me].at = At::OpenSlot;
        true
    }

    pub(super) fn opens(&self, st: &mut State, me: usize) -> bool {
        let Local::Rotate { ring, opens, .. } = st.sessions[me].local else { return false };
        let generation = opens.generation;
        let r = &mut st.rings[ring as usize];
        match st.sessions[me].at {
            // The INSERT, whose key another rotator may hold, or have committed.
            At::OpenSlot => {
                if r.opened[generation as usize] != 0 {
                    st.rolls_back(me);
                    return true;
                }
                let keeps_promise = r.cursor == opens;
                let same_key = |s: &Session| {
                    matches!(s.local, Local::Rotate { ring: n, opens: o, inserted: true }
                        if n == ring && o.generation == generation)
                };
                if st.others(me).any(same_key) {
                    return false;
                }
                st.sessions[me].local = Local::Rotate { ring, opens, inserted: true };
                st.sessions[me].at = if keeps_promise { At::Commit } else { At::SetCursor };
            }
            At::SetCursor => {
                r.cursor = opens;
                st.sessions[me].at = At::Commit;
            }
            At::Commit => {
                r.opened[generation as usize] = opens.slot + 1;
                st.commits(me);
            }
            _ => return false,
        }
        true
    }

    /// The state of the slot and the first proof.
    pub(super) fn begin_prune(&self, st: &mut State, me: usize, ring: u8, slot: u8) -> bool {
        let r = st.rings[ring as usize];
        if !r.is_sealed(slot) || self.is_blocked(st, ring as usize, slot) {
            return false;
        }
        if !st.lock_partitions(me, ring as usize, bit(slot)) {
            return false;
        }
        if ring as usize == QUEUE {
            // The closures that the proof counts.
            let counted = |b: &&Batch| b.in_queue_ring && b.by == By::Committed && b.ready_slot == slot;
            let slots = st.batches.iter().filter(counted).fold(0, |set, b| set | bit(b.claim.slot));
            if !st.lock_partitions(me, CLAIM, slots) {
                st.rolls_back(me);
                return false;
            }
        }
        let generation = r.generation_of(slot).expect("a sealed slot has a generation");
        st.sessions[me].local = Local::Prune { ring, slot, generation };
        st.sessions[me].at = At::LockSlot;
        true
    }

    /// False: nothing to do but wait, or give up.
    pub(super) fn prune(&self, st: &mut State, me: usize) -> bool {
        let Local::Prune { ring, slot, generation } = st.sessions[me].local else { return false };
        let place = Some((ring, slot));
        match st.sessions[me].at {
            // SKIP LOCKED and a try-lock: losing either ends the call.
            At::LockSlot => {
                let pinned =
                    st.others(me).any(|s| s.locks.pins[ring as usize] & bit(slot) != 0 || s.locks.pin == place);
                if st.others(me).any(|s| s.locks.slot_row == place) || (pinned && self.has(Guard::Pin)) {
                    st.rolls_back(me);
                    return true;
                }
                st.sessions[me].locks.slot_row = place;
                if self.has(Guard::Pin) {
                    st.sessions[me].locks.pin = place;
                }
                st.sessions[me].at = At::LockPartitions;
            }
            At::LockPartitions => {
                let in_use =
                    |s: &Session| s.locks.partitions[ring as usize] & bit(slot) != 0 || s.locks.exclusive == place;
                if st.others(me).any(in_use) {
                    return false;
                }
                st.sessions[me].locks.exclusive = place;
                st.sessions[me].at = At::ProveAgain;
            }
            At::ProveAgain => {
                let r = &st.rings[ring as usize];
                let sealed = r.is_sealed(slot) && r.generation_of(slot) == Some(generation);
                if self.has(Guard::SecondProof) && (!sealed || self.is_blocked(st, ring as usize, slot)) {
                    st.rolls_back(me);
                    return true;
                }
                st.sessions[me].at = At::Commit;
            }
            At::Commit => {
                self.truncate(st, ring as usize, slot);
                st.rings[ring as usize].pruned |= bit(generation);
                st.commits(me);
            }
            _ => return false,
        }
        true
    }

    /// queue_slot_blocker, claim_slot_blocker: as the SQL counts it, from what is committed.
    pub(super) fn is_blocked(&self, st: &State, ring: usize, slot: u8) -> bool {
        let committed = |b: &&Batch| b.by == By::Committed;
        if ring == CLAIM {
            let mut here = st.batches.iter().filter(committed).filter(|b| b.in_claim_ring && b.claim.slot == slot);
            return self.has(Guard::OpenClaims) && here.any(|b| b.closed.count_ones() < b.taken.count_ones());
        }
        let open = |h: &Hole| h.here && h.by == By::Committed && h.slot == slot && h.ended != By::Committed;
        if self.has(Guard::OpenHoles) && st.holes.iter().any(open) {
            return true;
        }
        let here = || st.batches.iter().filter(committed).filter(|b| b.in_queue_ring && b.ready_slot == slot);
        let rows = st.rows_seen(SESSIONS, |r| r.slot == slot);
        let emitted = here().fold(0, |set, b| set | b.taken);
        // The lane's last row here, where the cursor is not past it.
        let behind = st.spent < upper(rows);
        if self.has(Guard::ReadyRows) && behind && emitted & bit(upper(rows) - 1) == 0 {
            return true;
        }
        let claims = &st.rings[CLAIM];
        let generation_is_pruned = |c: Cursor| {
            claims.pruned & bit(c.generation) != 0 || claims.generation_of(c.slot).is_some_and(|g| g > c.generation)
        };
        let closures = |b: &Batch| if b.in_claim_ring { b.closed.count_ones() } else { 0 };
        let is_open =
            |b: &Batch| !b.is_tombstone && !generation_is_pruned(b.claim) && closures(b) < b.taken.count_ones();
        if self.has(Guard::OpenClaims) && here().any(is_open) {
            return true;
        }
        if self.has(Guard::LaneCursor) && behind {
            return true;
        }
        let emitted: u32 = here().map(|b| b.taken.count_ones()).sum();
        self.has(Guard::ReadyRows) && self.has(Guard::ReadyRowsCounted) && rows.count_ones() != emitted
    }

    /// TRUNCATE, with a look at what goes: I3 as the contract words it, not as the proof counts it.
    fn truncate(&self, st: &mut State, ring: usize, slot: u8) {
        let open = |b: &Batch| b.by != By::None && (b.by != By::Committed || b.closed != b.taken);
        if ring == CLAIM {
            if st.batches.iter().any(|b| b.in_claim_ring && b.claim.slot == slot && open(b)) {
                st.breaks(Broken::TruncatedOpenAttempt);
            }
            for batch in st.batches.iter_mut().filter(|b| b.claim.slot == slot) {
                batch.in_claim_ring = false;
            }
            return;
        }
        let goes = |b: &Batch| b.in_queue_ring && b.ready_slot == slot;
        let emitted = st.batches.iter().filter(|b| b.by == By::Committed).fold(0, |set, b| set | b.taken);
        let rows = st.rows.iter().enumerate().filter(|(_, r)| r.here && r.slot == slot);
        if rows.fold(0, |set, (n, _)| set | bit(n as u8)) & !emitted != 0 {
            st.breaks(Broken::TruncatedReadyRow);
        }
        if st.batches.iter().any(|b| goes(b) && open(b)) {
            st.breaks(Broken::TruncatedOpenAttempt);
        }
        if st.batches.iter().any(|b| goes(b) && st.spent < upper(b.taken)) {
            st.breaks(Broken::TruncatedBelowCursor);
        }
        if st.holes.iter().any(|h| h.here && h.slot == slot && h.ended != By::Committed) {
            st.breaks(Broken::TruncatedOpenHole);
        }
        for row in st.rows.iter_mut().filter(|r| r.slot == slot) {
            row.here = false;
        }
        for batch in st.batches.iter_mut().filter(|b| b.ready_slot == slot) {
            batch.in_queue_ring = false;
        }
        for hole in st.holes.iter_mut().filter(|h| h.slot == slot) {
            hole.here = false;
        }
    }
}
