//! No three paths of the engine deadlock, and each order that the lock order forbids does.

use model::locks::{Locks, NO_DEADLOCK, paths};
use model::report::{counterexample, explore};

#[test]
fn no_three_paths_of_the_engine_wait_in_a_circle() {
    explore("lock order", Locks::all(paths::engine()));
}

#[test]
fn every_forbidden_order_ends_in_a_deadlock() {
    for (name, paths) in paths::reversed() {
        let (property, _) = counterexample(name, Locks::between(&paths));
        assert_eq!(property, NO_DEADLOCK);
    }
}
