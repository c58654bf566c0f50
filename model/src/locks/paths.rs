//! The paths, in the order of their SQL. Two of everything: lanes, batches, jobs and keys 1 and 2; slot A is sealed, and what
//! is claimed lies there, B is open. Tables that are always locked together are one.

use Lock::*;
use Table::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slot {
    A,
    B,
}
use Slot::{A, B};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring {
    Queue,
    Claim,
    Lease,
}
use Ring::{Claim, Lease, Queue};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Table {
    /// ready_entries.
    Rows,
    /// ready_claim_attempt_batches, ready_lane_holes.
    Ledger,
    /// receipt_completion_batches, done_entries, terminal_tombstones.
    Ends,
    Claims,
    Closures,
    Leases,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// (queue_lanes, lane): one claimer.
    Lane(u8),
    /// (ready_entries, lane): the producers. Tried exclusively and let go at once, which is no step here.
    Producers(u8),
    /// (*_ring_state, 0).
    Rotation(Ring),
    SlotRow(Ring, Slot),
    Pin(Ring, Slot),
    /// (lease_claim_batches, batch).
    Batch(u8),
    Deferred(u8),
    LeaseRow(u8),
    Dlq(u8),
    /// (terminal_tombstones, job).
    Hidden(u8),
    AttemptState(u8),
    Key(u8),
    Partition(Table, Slot),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Wait,
    /// Waits for lock_timeout, then the call ends.
    Timeout,
    /// Busy ends the call.
    Try,
    /// Busy goes on without it and without so many steps after it: SKIP LOCKED, and a lane that another claim has.
    Pass(u8),
}

#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub lock: Lock,
    pub exclusive: bool,
    pub how: How,
}

#[derive(Clone, Debug)]
pub struct Path {
    pub name: &'static str,
    pub steps: Vec<Step>,
}

fn path(name: &'static str, parts: &[&[Step]]) -> Path {
    let steps = parts.concat();
    assert!(steps.len() <= 32, "{name} has more steps than bits");
    Path { name, steps }
}

fn wait(lock: Lock) -> Step {
    Step { lock, exclusive: true, how: How::Wait }
}

fn share(lock: Lock) -> Step {
    Step { lock, exclusive: false, how: How::Wait }
}

fn with(how: How, lock: Lock) -> Step {
    Step { lock, exclusive: true, how }
}

/// A key given up: its row is the job's own, so whoever has the key busy has it of another row, and there is none to delete.
fn release(key: u8) -> Step {
    with(How::Pass(0), Key(key))
}

/// pin_*_slot, by a session that saw the cursor before it moved.
fn pin(ring: Ring) -> [Step; 2] {
    [share(Pin(ring, A)), share(Pin(ring, B))]
}

/// Rows appended to a lane.
fn append(lane: u8) -> Vec<Step> {
    [&[share(Producers(lane))], &pin(Queue)[..], &[share(Partition(Rows, B))]].concat()
}

/// A scan of a parent.
fn scan(table: Table) -> [Step; 2] {
    [share(Partition(table, A)), share(Partition(table, B))]
}

/// complete_in and open_attempt_in.
fn prove_attempts() -> [Step; 2] {
    [share(Partition(Claims, A)), share(Partition(Closures, A))]
}

fn claim_lane(lane: u8, how: fn(u8) -> How) -> Vec<Step> {
    let rest = [
        &pin(Claim)[..],
        &scan(Ledger),
        &scan(Rows),
        &[share(Partition(Claims, B))],
        // settle_holes.
        &pin(Queue),
    ]
    .concat();
    [vec![with(how(rest.len() as u8), Lane(lane))], rest].concat()
}

fn prune_queue(how: How) -> Path {
    let proof = |table, slot| Step { lock: Partition(table, slot), exclusive: false, how };
    path(
        "prune queue",
        &[
            &[proof(Ledger, A), proof(Closures, A), proof(Closures, B), proof(Rows, A)],
            &[with(How::Try, SlotRow(Queue, A)), with(How::Try, Pin(Queue, A))],
            &[with(how, Partition(Rows, A)), with(how, Partition(Ledger, A)), with(how, Partition(Ends, A))],
            // fold_pruned_slot.
            &[release(1), release(2)],
        ],
    )
}

/// Everything the engine does, in its order.
pub fn engine() -> Vec<Path> {
    let prove = prove_attempts();
    let skip = How::Pass(0);
    vec![
        path("enqueue", &[&[wait(Key(1))], &append(1)]),
        enqueue_many(),
        path("enqueue_reserve", &[&[share(Producers(1))], &pin(Queue), &append(2)]),
        path("claim", &[&claim_lane(1, How::Pass), &claim_lane(2, How::Pass)]),
        path(
            "advance_idle_cursors",
            &[&[with(How::Pass(6), Lane(1))], &scan(Ledger), &scan(Rows), &pin(Queue), &[with(skip, Lane(2))]],
        ),
        complete(),
        close(),
        path(
            "cancel a running job",
            &[
                &scan(Ledger),
                &[wait(Batch(1))],
                &prove,
                &[share(Partition(Rows, A)), wait(AttemptState(1)), wait(Key(1)), share(Partition(Ends, A))],
            ],
        ),
        rescue(),
        path(
            "materialise",
            &[
                &[wait(Batch(1))],
                &scan(Leases),
                &[wait(LeaseRow(1))],
                &prove,
                &pin(Lease),
                &[share(Partition(Leases, B))],
            ],
        ),
        heartbeat(),
        path("drop_attempt_state", &[&[wait(AttemptState(1)), wait(AttemptState(2))]]),
        path("wait_for_callback", &[&scan(Leases), &[wait(LeaseRow(1)), wait(Key(1))]]),
        path(
            "claim without receipts",
            &[
                &claim_lane(1, How::Pass),
                // materialise, of the batch it just wrote.
                &[wait(Batch(3))],
                &scan(Leases),
                &pin(Lease),
            ],
        ),
        path(
            "complete leases",
            &[
                &[wait(Batch(1)), wait(Batch(2))],
                &prove,
                &scan(Leases),
                &[
                    wait(LeaseRow(1)),
                    wait(LeaseRow(2)),
                    wait(AttemptState(1)),
                    wait(AttemptState(2)),
                    wait(Key(1)),
                    wait(Key(2)),
                ],
                &[share(Pin(Queue, B)), share(Partition(Ends, B))],
            ],
        ),
        path(
            "complete, one by receipt and one lease",
            &[
                &[wait(Batch(1)), wait(Batch(2))],
                &prove,
                &[share(Partition(Ends, A))],
                &scan(Leases),
                &[wait(LeaseRow(2)), wait(AttemptState(2)), wait(Key(2))],
                &pin(Queue),
                &[share(Partition(Ends, B)), release(1)],
            ],
        ),
        path(
            "resolve_callback, retry",
            &[&scan(Leases), &[wait(LeaseRow(1)), wait(AttemptState(1)), wait(Key(1))], &append(1)],
        ),
        path(
            "resolve_callback",
            &[
                &scan(Leases),
                &[wait(LeaseRow(1)), wait(AttemptState(1)), wait(Key(1))],
                &pin(Queue),
                &[share(Partition(Ends, B))],
            ],
        ),
        // Of the leases that nobody else has: both, or one.
        path(
            "rescue leases",
            &[
                &scan(Leases),
                &[with(How::Try, LeaseRow(1)), with(How::Try, LeaseRow(2))],
                &[wait(AttemptState(1)), wait(AttemptState(2)), wait(Key(1)), wait(Key(2))],
            ],
        ),
        path("rescue a lease", &[&scan(Leases), &[with(How::Try, LeaseRow(2)), wait(AttemptState(2)), wait(Key(1))]]),
        path("promote one", &[&[with(How::Try, Deferred(2)), wait(Key(2))], &append(1)]),
        path("rescue one claim", &[&prove, &[with(How::Try, Batch(2)), wait(AttemptState(2)), wait(Key(2))]]),
        promote(),
        path("rotate queue", &[&[with(How::Try, Rotation(Queue))]]),
        prune_queue(How::Timeout),
        path(
            "prune claims",
            &[
                &[Step { lock: Partition(Claims, A), exclusive: false, how: How::Timeout }],
                &[with(How::Try, SlotRow(Claim, A)), with(How::Try, Pin(Claim, A))],
                &[with(How::Timeout, Partition(Claims, A)), with(How::Timeout, Partition(Closures, A))],
            ],
        ),
        path(
            "prune leases",
            &[
                &[Step { lock: Partition(Leases, A), exclusive: false, how: How::Timeout }],
                &[with(How::Try, SlotRow(Lease, A)), with(How::Try, Pin(Lease, A))],
                &[with(How::Timeout, Partition(Leases, A))],
                // carry_leases.
                &[share(Pin(Lease, B)), share(Partition(Leases, B))],
            ],
        ),
        path(
            "cancel a ready job",
            &[&scan(Ledger), &[wait(Lane(1))], &scan(Rows), &[wait(Key(1)), share(Partition(Ends, A))]],
        ),
        path(
            "drain_queue",
            &[
                &[wait(Lane(1))],
                &scan(Ledger),
                &scan(Rows),
                &[wait(Lane(2))],
                &[with(skip, Deferred(1)), with(skip, Deferred(2)), wait(Key(1)), wait(Key(2))],
                &[share(Partition(Ends, A)), share(Pin(Queue, B)), share(Partition(Ends, B))],
            ],
        ),
        path("retry a deferred job", &[&[wait(Deferred(1)), wait(Key(1))], &append(1)]),
        path(
            "retry a finished job",
            &[&scan(Ends), &[wait(Hidden(1)), share(Partition(Rows, A)), wait(Key(1))], &append(1)],
        ),
        path("retry from the DLQ", &[&[wait(Dlq(1)), wait(Key(1))], &append(1)]),
        path("purge_expired", &[&[with(skip, Dlq(1)), with(skip, Dlq(2)), release(2), release(1)]]),
    ]
}

pub fn enqueue_many() -> Path {
    path("enqueue_many", &[&[wait(Key(1)), wait(Key(2)), share(Producers(2))], &append(1)])
}

pub fn complete() -> Path {
    path(
        "complete",
        &[&[wait(Batch(1)), wait(Batch(2))], &prove_attempts(), &[share(Partition(Ends, A)), release(1), release(2)]],
    )
}

pub fn close() -> Path {
    path(
        "close_attempts",
        &[
            &[wait(Batch(1)), wait(Batch(2))],
            &prove_attempts(),
            &[share(Partition(Rows, A)), wait(AttemptState(1)), wait(AttemptState(2)), wait(Key(1)), wait(Key(2))],
            &[share(Partition(Ends, A))],
        ],
    )
}

pub fn rescue() -> Path {
    path(
        "rescue",
        &[
            &prove_attempts(),
            &[with(How::Try, Batch(2)), with(How::Try, Batch(1))],
            &scan(Leases),
            &[with(How::Pass(0), LeaseRow(2))],
            &[share(Partition(Rows, A)), wait(AttemptState(1)), wait(AttemptState(2)), wait(Key(1)), wait(Key(2))],
        ],
    )
}

pub fn heartbeat() -> Path {
    path(
        "heartbeat",
        &[
            &[wait(Batch(1)), wait(Batch(2))],
            &prove_attempts(),
            &scan(Leases),
            &[wait(LeaseRow(1)), wait(LeaseRow(2)), wait(AttemptState(1)), wait(AttemptState(2))],
        ],
    )
}

pub fn promote() -> Path {
    path(
        "promote",
        &[&[with(How::Try, Deferred(1)), with(How::Try, Deferred(2)), wait(Key(1)), wait(Key(2))], &append(1)],
    )
}

/// Orders that nobody may take: each with the paths it meets, the first of them wrong.
pub fn reversed() -> Vec<(&'static str, Vec<Path>)> {
    let prove = prove_attempts();
    let key_order = [wait(Key(2)), wait(Key(1))];
    vec![
        ("batches not ascending", vec![path("complete", &[&[wait(Batch(2)), wait(Batch(1))], &prove]), complete()]),
        (
            "rescue waits for its batches, slot by slot",
            vec![path("rescue claims", &[&[wait(Batch(2))], &prove, &[wait(Batch(1))]]), complete()],
        ),
        (
            "the lease row before the batch",
            vec![path("close_attempts", &[&scan(Leases), &[wait(LeaseRow(1)), wait(Batch(1))]]), heartbeat()],
        ),
        (
            "lease rows not by job",
            vec![
                path("heartbeat", &[&scan(Leases), &[wait(LeaseRow(2)), wait(LeaseRow(1))]]),
                path("heartbeat", &[&scan(Leases), &[wait(LeaseRow(1)), wait(LeaseRow(2))]]),
            ],
        ),
        (
            "claims wait for lanes",
            vec![
                path("claim", &[&claim_lane(2, |_| How::Wait), &claim_lane(1, |_| How::Wait)]),
                path("claim", &[&claim_lane(1, |_| How::Wait), &claim_lane(2, |_| How::Wait)]),
            ],
        ),
        ("prune without lock_timeout", vec![prune_queue(How::Wait), path("claim", &[&claim_lane(1, How::Pass)])]),
        (
            "prune takes the partitions before the pin, and waits for it",
            vec![
                path("prune queue", &[&[wait(Partition(Rows, A)), wait(Pin(Queue, A))]]),
                path("enqueue", &[&[share(Producers(1)), share(Pin(Queue, A)), share(Partition(Rows, A))]]),
            ],
        ),
        (
            "enqueue_many takes its keys as they come",
            vec![path("enqueue_many", &[&key_order, &append(1)]), enqueue_many()],
        ),
        (
            "close takes the keys in the order of its receipts",
            vec![
                path(
                    "close_attempts",
                    &[
                        &[wait(Batch(1))],
                        &prove,
                        &[wait(AttemptState(2)), release(2), wait(AttemptState(1)), wait(Key(1))],
                    ],
                ),
                enqueue_many(),
            ],
        ),
        (
            "complete takes a lease after the key of the one before",
            vec![
                path(
                    "complete leases",
                    &[
                        &[wait(Batch(1))],
                        &scan(Leases),
                        &[wait(LeaseRow(1)), wait(AttemptState(1)), wait(Key(1)), wait(LeaseRow(2))],
                    ],
                ),
                path(
                    "rescue a lease",
                    &[&scan(Leases), &[with(How::Try, LeaseRow(2)), wait(AttemptState(2)), wait(Key(1))]],
                ),
            ],
        ),
        (
            "promote goes through several queues in one transaction",
            vec![
                path(
                    "promote",
                    &[
                        &[with(How::Pass(0), Deferred(2)), wait(Key(2))],
                        &append(2),
                        &[with(How::Pass(0), Deferred(1)), wait(Key(1))],
                        &append(1),
                    ],
                ),
                enqueue_many(),
            ],
        ),
    ]
}
