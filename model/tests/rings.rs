//! The protocol with all its guards: every interleaving of some sessions, every crash, and nothing of I1, I2, I3 and I6
//! breaks. Each also says what it must have come across. docs/model.md has the command for the large ones.

use model::engine::check::Reached::{self, *};
use model::engine::roles::*;
use model::engine::{Config, Role, Start};
use model::report::explore;

fn holds(name: &str, config: Config, reaches: &[Reached]) {
    explore(name, config.clone());
    for reached in reaches {
        assert!(config.seen.has(*reached), "{name} never came to {reached:?}");
    }
}

fn config(roles: &[Role]) -> Config {
    Config::new(roles.to_vec())
}

#[test]
fn late_and_dying_producers_lose_no_job_to_two_claimers() {
    let config = Config { jobs: 3, seqs: 3, ..config(&[PRODUCER_TWICE, PRODUCER, CLAIMER, CLAIMER_AND_IDLE_CURSORS]) };
    holds("holes", config, &[HoleSetAside, HoleFilledLate, HoleEnded, CursorPassedDeadHole]);
}

#[test]
fn calls_that_share_a_transaction_lose_nothing_with_it() {
    let config = Config { batches: 4, ..config(&[PRODUCER, PRODUCER, CLAIMER_TWICE, CLAIMER]) };
    holds("two calls", config, &[HoleSetAside, HoleFilledLate, HoleEnded]);
}

#[test]
fn a_producer_that_sees_the_ring_turn_writes_into_two_slots() {
    let config = config(&[PRODUCER_OF_TWO, CLAIMER_OF_TWO, COMPLETER, QUEUE_ROTATOR, QUEUE_PRUNER]);
    holds("producer in two slots", config, &[Completed, SlotPruned, SlotReopened]);
}

#[test]
fn an_attempt_ends_once_and_a_retried_job_comes_back() {
    let config = Config {
        start: Start::Enqueued,
        seqs: 4,
        batches: 4,
        ..config(&[CLAIMER, CONFUSED_COMPLETER, RESCUER, PROMOTER])
    };
    holds("ends", config, &[Completed, Retried, StaleWriterLost]);
}

#[test]
fn two_who_turn_the_claim_ring_truncate_no_open_attempt() {
    let config = Config { start: Start::Enqueued, ..config(&[CLAIMER, COMPLETER, CLOSER, CLAIM_RING, CLAIM_RING]) };
    holds("claim ring", config, &[Completed, StaleWriterLost, ClaimSlotPruned]);
}

#[test]
fn the_queue_ring_turns_under_producers_and_loses_nothing() {
    let config = config(&[PRODUCER, PRODUCER, CLAIMER_OF_TWO, COMPLETER, QUEUE_ROTATOR, QUEUE_PRUNER]);
    holds("queue ring", config, &[Completed, HoleSetAside, SlotPruned, SlotReopened, PromisedAndDied]);
}

#[test]
fn both_rings_turn_under_racing_ends() {
    let config = Config { start: Start::Enqueued, ..config(&[CLAIMER, COMPLETER, CLOSER, MAINTENANCE]) };
    holds("both rings", config, &[Completed, StaleWriterLost, SlotPruned, ClaimSlotPruned]);
}

#[test]
fn rotators_that_die_promise_a_slot_and_it_is_kept() {
    let config = Config {
        start: Start::Turned,
        slots: [3, 2],
        generations: 3,
        ..config(&[PRODUCER, CLAIMER, QUEUE_RING, QUEUE_RING])
    };
    holds("promises", config, &[PromisedAndDied, SlotPruned]);
}

#[test]
fn an_operator_and_claimers_share_out_the_ready_jobs() {
    let config = config(&[PRODUCER_TWICE, CLAIMER, OPERATOR, QUEUE_RING]);
    holds("operator", config, &[Completed, SlotPruned, SlotReopened]);
}

#[test]
fn all_of_them_at_once_with_one_job() {
    let config = Config {
        jobs: 1,
        seqs: 1,
        generations: 1,
        ..config(&[PRODUCER, CLAIMER, CLAIMER_WITHOUT_PROBES, COMPLETER, CLOSER, MAINTENANCE])
    };
    holds("all, one job", config, &[Completed, StaleWriterLost, SlotPruned, ClaimSlotPruned, PromisedAndDied]);
}

#[test]
#[ignore = "larger than a test run should be"]
fn all_of_them_at_once_with_two_jobs() {
    let config = Config {
        generations: 1,
        crashes: false,
        ..config(&[PRODUCER, PRODUCER, CLAIMER, CLAIMER_WITHOUT_PROBES, COMPLETER, CLOSER, MAINTENANCE])
    };
    holds("all, two jobs", config, &[Completed, StaleWriterLost, SlotPruned, ClaimSlotPruned, HoleSetAside]);
}

#[test]
#[ignore = "larger than a test run should be"]
fn all_of_them_at_once_with_two_jobs_and_crashes() {
    let config = Config {
        generations: 1,
        ..config(&[PRODUCER, PRODUCER, CLAIMER, CLAIMER_WITHOUT_PROBES, COMPLETER, CLOSER, MAINTENANCE])
    };
    let reaches = [Completed, StaleWriterLost, SlotPruned, ClaimSlotPruned, HoleSetAside, PromisedAndDied];
    holds("all, two jobs, crashes", config, &reaches);
}

#[test]
#[ignore = "larger than a test run should be"]
fn an_operator_and_late_producers() {
    let config = Config { batches: 4, ..config(&[PRODUCER, PRODUCER, CLAIMER, OPERATOR, QUEUE_RING]) };
    holds("operator, two producers", config, &[SlotPruned, SlotReopened, HoleSetAside]);
}

#[test]
#[ignore = "larger than a test run should be"]
fn both_rings_turn_twice_at_once_under_racing_ends() {
    let config = Config { start: Start::Enqueued, ..config(&[CLAIMER, COMPLETER, CLOSER, MAINTENANCE, MAINTENANCE]) };
    holds("both rings, twice", config, &[Completed, StaleWriterLost, SlotPruned, ClaimSlotPruned, PromisedAndDied]);
}

#[test]
#[ignore = "larger than a test run should be"]
fn two_producers_meet_promised_slots() {
    let config = Config {
        start: Start::Turned,
        slots: [3, 2],
        generations: 3,
        ..config(&[PRODUCER, PRODUCER, CLAIMER, QUEUE_RING, QUEUE_RING])
    };
    holds("promises, two producers", config, &[PromisedAndDied, SlotPruned, HoleSetAside]);
}
