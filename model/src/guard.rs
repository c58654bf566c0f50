//! What the protocol rests on. A model is built with all of them, or without one to see what it is for; the names are
//! those of docs/guards.md where the guard is there.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guard {
    /// claim: one claimer a lane.
    LaneLock,
    /// claim: the committed ranges above the cursor are read before rows are picked.
    LedgerRead,
    /// claim: the cursor stays where it is once this transaction has emitted something.
    MayAdvance,
    /// advance_idle_cursors: the same.
    IdleMayAdvance,
    /// claim: the cursor moves over what is committed, not over what this claim takes.
    CommittedEvidence,
    /// enqueue: the lane's lock, shared, from before the first lane_seq to the end.
    ProducerLock,
    /// settle_holes: a hole is dead only when nobody holds the producers' lock.
    Quiet,
    /// settle_holes: once quiet, rows that came meanwhile are looked for.
    KnownRows,
    /// settle_holes: the holders are read before the rows, not after them.
    AsideHoldersFirst,
    /// claim_late_rows: the same.
    LateHoldersFirst,
    /// claim_late_rows: a hole lives as long as one of its holders.
    HoleHolders,
    /// claim_late_rows: … and while the limit left rows in it.
    HoleLeftOver,
    /// claim: a probe looks into every slot.
    ProbeAllSlots,
    /// settle_holes: the hint goes back to the slot of a row that came late.
    HintBack,
    /// claim: a slot promised by a rotator that did not commit is read too.
    PromisedSlot,
    /// rotate: a promised slot is opened before any other.
    Promise,
    /// rotate: one rotator at a time.
    RotatorLock,
    /// enqueue: the cursor is looked at again under the pin.
    PinRecheck,
    /// claim: the same of the claim slot.
    ClaimPinRecheck,
    /// prune: the slot's pin is taken before the locks.
    Pin,
    /// prune: the proof runs again under the locks.
    SecondProof,
    /// prune of a queue slot: no hole set aside is open.
    OpenHoles,
    /// prune: every attempt is closed.
    OpenClaims,
    /// prune of a queue slot: every row is emitted, the last one and by count.
    ReadyRows,
    /// … by count.
    ReadyRowsCounted,
    /// prune of a queue slot: every lane's cursor is past it.
    LaneCursor,
    /// complete: no closure of the receipt before.
    ClosurePredicate,
    /// close: the same.
    ClosePredicate,
    /// complete: the receipt is of the lease that is named.
    LeasePredicate,
    /// complete and close: the claim batch's lock.
    BatchLock,
}
