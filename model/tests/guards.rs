//! Each guard taken out of the protocol, one at a time: then something breaks, and the shortest way to it is told. The table
//! in docs/model.md is these tests' output.

use model::engine::check::{I1, I2, I3, I6, STILL};
use model::engine::roles::*;
use model::engine::{Config, Role, Start};
use model::guard::Guard;
use model::report::{counterexample, explore};

fn breaks(guard: Guard, property: &'static str, config: Config) {
    counterexample(&format!("without {guard:?}"), Config { only: Some(property), ..config.without(guard) });
}

fn config(start: Start, roles: &[Role]) -> Config {
    Config { start, ..Config::new(roles.to_vec()) }
}

#[test]
fn claims_need_the_lock_of_the_lane() {
    breaks(Guard::LaneLock, I2, config(Start::Enqueued, &[CLAIMER, CLAIMER]));
    breaks(Guard::LaneLock, I2, config(Start::Enqueued, &[CLAIMER, OPERATOR]));
}

#[test]
fn claims_need_a_fresh_look_at_the_ledger() {
    breaks(Guard::LedgerRead, I2, config(Start::Enqueued, &[CLAIMER]));
}

#[test]
fn the_cursor_moves_over_committed_evidence_only() {
    breaks(Guard::CommittedEvidence, I1, config(Start::Enqueued, &[CLAIMER]));
    breaks(Guard::MayAdvance, I1, config(Start::Enqueued, &[CLAIMER_TWICE]));
    breaks(Guard::IdleMayAdvance, I1, config(Start::Enqueued, &[CLAIMER_TWICE]));
}

#[test]
fn a_hole_is_dead_only_when_its_producers_are() {
    breaks(Guard::ProducerLock, I1, config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER]));
    breaks(Guard::Quiet, I1, config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER]));
    breaks(Guard::KnownRows, I1, config(Start::Empty, &[PRODUCER, CLAIMER]));
}

#[test]
fn a_hole_set_aside_lives_as_long_as_its_holders() {
    breaks(Guard::HoleHolders, I1, config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER_OF_TWO]));
    breaks(Guard::LateHoldersFirst, I1, config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER_OF_TWO]));
}

#[test]
fn a_hole_set_aside_lives_while_the_limit_leaves_rows_in_it() {
    let config = Config { jobs: 3, seqs: 3, ..config(Start::Empty, &[PRODUCER, PRODUCER, PRODUCER, CLAIMER]) };
    breaks(Guard::HoleLeftOver, I1, config);
}

/// The order that settle_holes keeps too, and need not: a probe looks for the rows again before it ends the hole.
#[test]
fn whether_the_holders_of_a_new_hole_are_read_before_its_rows_does_not_matter() {
    let config =
        Config { jobs: 3, seqs: 3, ..config(Start::Empty, &[PRODUCER_TWICE, PRODUCER, CLAIMER_AND_IDLE_CURSORS]) };
    explore("without AsideHoldersFirst", config.without(Guard::AsideHoldersFirst));
}

#[test]
fn rows_of_older_slots_are_found() {
    let three_jobs = Config {
        jobs: 3,
        seqs: 3,
        crashes: false,
        ..config(Start::Empty, &[PRODUCER, PRODUCER, PRODUCER, CLAIMER_WITHOUT_PROBES, QUEUE_ROTATOR])
    };
    breaks(Guard::ProbeAllSlots, I6, three_jobs);
    breaks(Guard::HintBack, STILL, config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER, QUEUE_ROTATOR]));
}

#[test]
fn a_promised_slot_is_read_and_the_promise_kept() {
    breaks(Guard::PromisedSlot, I6, config(Start::Empty, &[PRODUCER, CLAIMER, QUEUE_ROTATOR]));
    let three_slots = |roles: &[Role]| Config { slots: [3, 2], generations: 3, ..config(Start::Turned, roles) };
    breaks(Guard::Promise, I6, three_slots(&[PRODUCER, CLAIMER, QUEUE_RING]));
    breaks(Guard::RotatorLock, I6, three_slots(&[PRODUCER, CLAIMER, QUEUE_RING, QUEUE_RING]));
}

#[test]
fn writers_pin_their_slot_and_look_again() {
    breaks(Guard::PinRecheck, I3, config(Start::Empty, &[PRODUCER, CLAIMER, QUEUE_RING]));
    breaks(Guard::ClaimPinRecheck, I3, config(Start::Enqueued, &[CLAIMER, CLAIM_RING]));
}

#[test]
fn prune_takes_the_pin_and_proves_again_under_its_locks() {
    breaks(Guard::Pin, I3, config(Start::Empty, &[PRODUCER, CLAIMER, QUEUE_RING]));
    breaks(Guard::SecondProof, I3, config(Start::Empty, &[PRODUCER, CLAIMER, QUEUE_RING]));
    breaks(Guard::SecondProof, I3, config(Start::Enqueued, &[CLAIMER, CLAIM_RING]));
}

#[test]
fn prune_proves_every_attempt_closed() {
    breaks(Guard::OpenClaims, I3, config(Start::Claimed, &[CLAIMER, QUEUE_RING]));
    breaks(Guard::OpenClaims, I3, config(Start::Claimed, &[CLAIMER, CLAIM_RING]));
}

#[test]
fn prune_proves_every_row_emitted() {
    // Above the cursor the cursor keeps the slot; what the rows are counted for is one that came late below it.
    let late = Config {
        crashes: false,
        batches: 2,
        generations: 1,
        ..config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER_WITHOUT_PROBES, COMPLETER, QUEUE_RING])
    };
    breaks(Guard::ReadyRows, I3, late.clone());
    breaks(Guard::ReadyRowsCounted, I3, late);
}

#[test]
fn prune_proves_the_cursor_past_the_slot() {
    breaks(Guard::LaneCursor, I3, config(Start::Claimed, &[CLAIMER, COMPLETER, QUEUE_RING]));
}

#[test]
fn prune_proves_no_hole_open() {
    // Its slot is not that of the producer, whose pin would keep it.
    let config = Config {
        crashes: false,
        slots: [3, 2],
        batches: 1,
        ..config(Start::Empty, &[PRODUCER, PRODUCER, CLAIMER_WITHOUT_PROBES, QUEUE_RING])
    };
    breaks(Guard::OpenHoles, I3, config);
}

#[test]
fn an_attempt_ends_under_its_lock_and_fences() {
    breaks(Guard::ClosurePredicate, I2, config(Start::Claimed, &[COMPLETER]));
    breaks(Guard::ClosePredicate, I2, config(Start::Claimed, &[COMPLETER, CLOSER]));
    breaks(Guard::BatchLock, I2, config(Start::Claimed, &[COMPLETER, CLOSER]));
    let comes_back = Config { seqs: 3, ..config(Start::Claimed, &[CLAIMER, PROMOTER, CONFUSED_COMPLETER, RESCUER]) };
    breaks(Guard::LeasePredicate, I2, comes_back);
}
