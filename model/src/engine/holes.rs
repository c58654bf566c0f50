//! settle_holes and claim_late_rows (52_holes.sql).

use super::Config;
use super::claim::known_in;
use super::state::*;
use crate::guard::Guard;

impl Config {
    /// What is missing below v_top, if anything is.
    pub(super) fn look_for_holes(&self, c: &mut Claim) -> At {
        let top = if c.seen == 0 { c.allocated } else { upper(c.emitted).max(upper(c.seen)) };
        c.holes = below(top) & !below(c.spent) & !c.emitted & !c.seen;
        if c.holes == 0 || c.spent >= c.allocated { At::Commit } else { At::Quiet }
    }

    pub(super) fn settle_holes(&self, st: &mut State, me: usize, c: &mut Claim) -> Option<At> {
        match st.sessions[me].at {
            At::Quiet => {
                if !self.has(Guard::Quiet) || st.producers(me) == 0 {
                    return Some(At::Known);
                }
                c.holes &= below(upper(c.emitted).max(upper(c.seen)));
                Some(if c.holes == 0 { At::Commit } else { At::Holders })
            }
            At::Known => {
                let (known, rows) = self.known_ranges(st, me, c.holes)?;
                if self.may_advance(st, me, c) {
                    let dead = if self.has(Guard::KnownRows) { c.holes & !rows } else { c.holes };
                    let gap = first_missing(below(c.spent) | c.emitted | known | dead);
                    st.spent = st.spent.max(gap);
                }
                Some(At::Commit)
            }
            // Patience, which may run out now or with a later claim, is a choice: see give_up.
            At::Holders => {
                if st.next_hole >= self.holes {
                    return None;
                }
                c.holders = st.producers(me);
                Some(At::Aside)
            }
            At::Aside => {
                let (known, rows) = self.known_ranges(st, me, c.holes)?;
                if !self.has(Guard::AsideHoldersFirst) {
                    // The two statements the other way round; the next step stands between them.
                    c.holders = 0;
                }
                c.holes &= !known & !rows;
                c.pin = st.rings[QUEUE].cursor;
                Some(if c.holes == 0 { At::Commit } else { At::PinHole })
            }
            At::PinHole => match self.pin_ready_slot(st, me, c.pin)? {
                Some(cursor) => {
                    c.pin = cursor;
                    Some(At::PinHole)
                }
                None => Some(At::InsertHole),
            },
            At::InsertHole => {
                if !st.lock_partitions(me, QUEUE, bit(c.pin.slot)) {
                    return None;
                }
                if !self.has(Guard::AsideHoldersFirst) {
                    c.holders = st.producers(me);
                }
                st.holes[st.next_hole as usize] = Hole {
                    by: By::Session(me as u8),
                    ended: By::None,
                    here: true,
                    ranges: c.holes,
                    holders: c.holders,
                    slot: c.pin.slot,
                };
                st.next_hole += 1;
                Some(At::Commit)
            }
            _ => None,
        }
    }

    /// known_ranges: what is emitted or set aside, then rows, in every slot; and the hint back to the oldest of them.
    fn known_ranges(&self, st: &mut State, me: usize, holes: Set) -> Option<(Set, Set)> {
        if !st.lock_partitions(me, QUEUE, below(self.slots[QUEUE])) {
            return None;
        }
        let known = known_in(st, me, |_| true, |ranges| ranges & holes != 0);
        let rows = st.rows_seen(me, |_| true) & holes & !known;
        let generation = |n: u8| st.rings[QUEUE].generation_of(st.rows[n as usize].slot);
        let oldest = each(rows).filter_map(generation).min();
        if let Some(oldest) = oldest
            && oldest < st.hint
            && self.has(Guard::HintBack)
        {
            st.hint = oldest;
        }
        Some((known, rows))
    }

    pub(super) fn claim_late_rows(&self, st: &mut State, me: usize, c: &mut Claim) -> Option<At> {
        if !st.lock_partitions(me, QUEUE, below(self.slots[QUEUE])) {
            return None;
        }
        let is_open = |h: &Hole| !h.ended.seen_by(me);
        let open = st.holes_seen(me).filter(|h| is_open(h)).fold(0, |set, h| set | h.ranges);
        if st.sessions[me].at == At::LateOpen {
            c.holders = st.producers(me);
            return Some(if open == 0 { At::List } else { At::LateRows });
        }
        let mut emitted = st.batches_seen(me).fold(0, |set, b| set | b.taken);
        if st.sessions[me].at == At::LateRows {
            for slot in self.slots_from(st, 0).iter().flatten() {
                if c.left > 0 {
                    emitted |= self.claim_rows(st, me, c, *slot, open & !emitted)?;
                }
            }
            if !self.has(Guard::LateHoldersFirst) {
                return Some(At::LateEnd);
            }
        } else {
            c.holders = st.producers(me);
        }
        for n in 0..HOLES {
            let hole = st.holes[n];
            if !hole.here || !hole.by.seen_by(me) || !is_open(&hole) {
                continue;
            }
            let all_looked_at = c.left > 0 || !self.has(Guard::HoleLeftOver);
            let holders_gone = hole.holders & c.holders == 0 || !self.has(Guard::HoleHolders);
            if hole.ranges & !emitted == 0 || (all_looked_at && holders_gone) {
                st.holes[n].ended = By::Session(me as u8);
            }
        }
        c.holders = 0;
        Some(if c.left == 0 { At::Commit } else { At::List })
    }
}
