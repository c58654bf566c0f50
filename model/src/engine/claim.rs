//! claim (51_claim.sql) up to its holes, and advance_idle_cursors (57_prune.sql), which shares the rest with it.

use super::state::*;
use super::{Config, Role};
use crate::guard::Guard;

impl Config {
    /// The call, and its look at what was handed out, before the lane is locked.
    pub(super) fn begin_claim(&self, st: &mut State, me: usize, mode: Mode) -> bool {
        let Role::Claimer { limit, .. } = self.roles[me] else { return false };
        if (mode != Mode::Probe && st.spent >= st.allocated) || st.next_batch >= self.batches {
            return false;
        }
        let claim = Claim { mode, allocated: st.allocated, left: limit, ..Claim::default() };
        st.sessions[me].local = Local::Claim(claim);
        st.sessions[me].at = At::LockLane;
        true
    }

    pub(super) fn claim(&self, st: &mut State, me: usize) -> bool {
        let Local::Claim(mut c) = st.sessions[me].local else { return false };
        let next = match st.sessions[me].at {
            At::LockLane => {
                // A try-lock: a busy lane ends the call.
                if self.has(Guard::LaneLock) && st.others(me).any(|s| s.locks.lane) {
                    if c.second_call {
                        return false;
                    }
                    st.commits(me);
                    return true;
                }
                st.sessions[me].locks.lane = true;
                c.claim = st.rings[CLAIM].cursor;
                if c.mode == Mode::Idle { At::List } else { At::PinClaim }
            }
            At::PinClaim => {
                if !st.pin(me, CLAIM, c.claim.slot) {
                    return false;
                }
                let cursor = st.rings[CLAIM].cursor;
                if self.has(Guard::ClaimPinRecheck) && cursor != c.claim {
                    c.claim = cursor;
                    At::PinClaim
                } else if c.mode == Mode::Probe {
                    At::LateOpen
                } else {
                    At::List
                }
            }
            At::LateOpen | At::LateRows | At::LateEnd => match self.claim_late_rows(st, me, &mut c) {
                None => return false,
                Some(next) => next,
            },
            At::List => self.list(st, &mut c),
            At::Emitted => match self.read_ledger(st, me, &mut c) {
                None => return false,
                Some(next) => next,
            },
            At::Rows => match self.pick_rows(st, me, &mut c) {
                None => return false,
                Some(next) => next,
            },
            At::Quiet | At::Known | At::Holders | At::Aside | At::PinHole | At::InsertHole => {
                match self.settle_holes(st, me, &mut c) {
                    None => return false,
                    Some(next) => next,
                }
            }
            At::Commit => {
                self.commit_claim(st, me);
                return true;
            }
            _ => return false,
        };
        st.sessions[me].local = Local::Claim(c);
        st.sessions[me].at = next;
        true
    }

    /// Another call in the same transaction.
    pub(super) fn claim_again(&self, st: &mut State, me: usize, mode: Mode) -> bool {
        let Local::Claim(c) = st.sessions[me].local else { return false };
        let Role::Claimer { limit, twice: true, .. } = self.roles[me] else { return false };
        if c.second_call || (mode != Mode::Probe && st.spent >= st.allocated) || st.next_batch >= self.batches {
            return false;
        }
        let again = Claim { mode, second_call: true, allocated: st.allocated, left: limit, ..Claim::default() };
        st.sessions[me].local = Local::Claim(again);
        st.sessions[me].at = At::LockLane;
        true
    }

    /// pg_current_xact_id_if_assigned() IS NULL when the call began.
    pub(super) fn may_advance(&self, st: &State, me: usize, c: &Claim) -> bool {
        let mine = By::Session(me as u8);
        let wrote = st.batches.iter().any(|b| b.by == mine) || st.holes.iter().any(|h| h.by == mine || h.ended == mine);
        let guard = if c.mode == Mode::Idle { Guard::IdleMayAdvance } else { Guard::MayAdvance };
        !(c.second_call && wrote && self.has(guard))
    }

    /// ready_slots_from.
    pub(super) fn slots_from(&self, st: &State, from: u8) -> [Option<Cursor>; SLOTS] {
        let ring = &st.rings[QUEUE];
        let mut listed = [None; SLOTS];
        if from >= ring.cursor.generation {
            listed[0] = Some(ring.cursor);
            return listed;
        }
        let opened = (from as usize..GENERATIONS).filter(|g| ring.opened[*g] > 0 && ring.pruned & bit(*g as u8) == 0);
        let mut n = 0;
        for generation in opened {
            listed[n] = Some(Cursor { generation: generation as u8, slot: ring.opened[generation] - 1 });
            n += 1;
        }
        let promised = ring.opened[ring.cursor.generation as usize] == 0;
        if promised && self.has(Guard::PromisedSlot) {
            listed[n] = Some(ring.cursor);
        }
        listed
    }

    /// The cursor, the hint and the first list of slots.
    fn list(&self, st: &State, c: &mut Claim) -> At {
        c.spent = st.spent;
        if c.spent >= c.allocated {
            return At::Commit;
        }
        if c.mode != Mode::Idle {
            let from = if c.mode == Mode::Probe && self.has(Guard::ProbeAllSlots) { 0 } else { st.hint };
            c.listed = self.slots_from(st, from);
        }
        At::Emitted
    }

    /// emitted_ranges_in for each slot, the cursor moved over what they cover, and the second list of slots.
    fn read_ledger(&self, st: &mut State, me: usize, c: &mut Claim) -> Option<At> {
        let all = below(self.slots[QUEUE]);
        let slots = match c.mode {
            Mode::Idle => all,
            _ => c.listed.iter().flatten().fold(0, |set, s| set | bit(s.slot)),
        };
        if !st.lock_partitions(me, QUEUE, slots) {
            return None;
        }
        c.emitted = 0;
        if self.has(Guard::LedgerRead) {
            for slot in each(slots) {
                let known = known_in(st, me, |s| s == slot, |ranges| upper(ranges) > c.spent);
                c.emitted |= known;
                if let Some(s) = c.listed.iter().flatten().find(|s| s.slot == slot)
                    && known != 0
                {
                    c.highs[s.generation as usize] = c.highs[s.generation as usize].max(upper(known));
                }
            }
        }
        let gap = first_missing(below(c.spent) | c.emitted);
        if self.may_advance(st, me, c) && gap > c.spent {
            c.spent = gap;
            st.spent = gap;
            if c.spent >= c.allocated {
                return Some(At::Commit);
            }
        }
        if c.mode == Mode::Idle {
            return Some(self.look_for_holes(c));
        }
        let from = if c.mode == Mode::Probe && self.has(Guard::ProbeAllSlots) { 0 } else { st.hint };
        c.listed = self.slots_from(st, from);
        c.next = 0;
        Some(At::Rows)
    }

    /// claim_rows in the next slot; after the last one the hint.
    fn pick_rows(&self, st: &mut State, me: usize, c: &mut Claim) -> Option<At> {
        let slot = c.listed.get(c.next as usize).copied().flatten();
        if let (Some(slot), true) = (slot, c.left > 0) {
            let gaps = !below(c.spent) & !c.emitted & !c.seen;
            let taken = self.claim_rows(st, me, c, slot, gaps)?;
            c.seen |= taken;
            if taken != 0 {
                let high = &mut c.highs[slot.generation as usize];
                *high = (*high).max(upper(taken));
            }
            c.next += 1;
            if !self.has(Guard::CommittedEvidence) {
                let gap = first_missing(below(c.spent) | c.emitted | c.seen);
                c.spent = c.spent.max(gap);
                st.spent = c.spent;
            }
            return Some(At::Rows);
        }
        let oldest = c.highs.iter().position(|high| *high > c.spent);
        if let Some(oldest) = oldest {
            st.hint = oldest as u8;
        }
        let gap = first_missing(below(c.spent) | c.emitted | c.seen);
        if c.seen == 0 || gap < upper(c.emitted).max(upper(c.seen)) {
            return Some(self.look_for_holes(c));
        }
        Some(At::Commit)
    }

    /// Up to `left` rows of one slot within `gaps`; None while the partition is locked.
    pub(super) fn claim_rows(&self, st: &mut State, me: usize, c: &mut Claim, slot: Cursor, gaps: Set) -> Option<Set> {
        if !st.lock_partitions(me, QUEUE, bit(slot.slot)) {
            return None;
        }
        let rows = st.rows_seen(me, |r| r.slot == slot.slot) & gaps;
        let taken = each(rows).take(c.left as usize).fold(0, |set, n| set | bit(n));
        if taken == 0 {
            return Some(0);
        }
        let id = st.next_batch as usize;
        if id >= BATCHES || !st.lock_partitions(me, CLAIM, bit(c.claim.slot)) {
            return None;
        }
        st.next_batch += 1;
        c.left -= taken.count_ones() as u8;
        st.batches[id] = Batch {
            by: By::Session(me as u8),
            taken,
            ready_slot: slot.slot,
            claim: c.claim,
            in_queue_ring: true,
            in_claim_ring: true,
            is_tombstone: false,
            closed: 0,
        };
        Some(taken)
    }

    fn commit_claim(&self, st: &mut State, me: usize) {
        let mine = By::Session(me as u8);
        let before = st.batches.iter().filter(|b| b.by == By::Committed).fold(0, |set, b| set | b.taken);
        let mut emitted = before;
        let claims = st.rings[CLAIM];
        for n in 0..BATCHES {
            if st.batches[n].by != mine {
                continue;
            }
            if st.batches[n].taken & emitted != 0 {
                st.breaks(Broken::EmittedTwice);
            }
            if claims.pruned & bit(st.batches[n].claim.generation) != 0 {
                st.breaks(Broken::WroteIntoPrunedSlot);
            }
            emitted |= st.batches[n].taken;
            st.batches[n].by = By::Committed;
        }
        for hole in &mut st.holes {
            if hole.by == mine {
                hole.by = By::Committed;
            }
            if hole.ended == mine {
                hole.ended = By::Committed;
            }
        }
        st.commits(me);
    }
}

/// Ranges emitted and set aside, of the slots and with the property that are asked for.
pub(super) fn known_in(st: &State, me: usize, slots: impl Fn(u8) -> bool, which: impl Fn(Set) -> bool) -> Set {
    let batches = st.batches_seen(me).filter(|b| slots(b.ready_slot)).map(|b| b.taken);
    let holes = st.holes_seen(me).filter(|h| slots(h.slot)).map(|h| h.ranges);
    batches.chain(holes).filter(|r| which(*r)).fold(0, |set, r| set | r)
}
