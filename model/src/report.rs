//! Running a checker and telling how it went.

use stateright::{Checker, Model};
use std::time::Instant;

pub struct Explored {
    pub states: usize,
    pub depth: usize,
    pub seconds: f32,
}

/// Explores everything there is. Panics with the shortest way to whatever breaks a property.
pub fn explore<M>(name: &str, model: M) -> Explored
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + Eq + Send + Sync + 'static,
    M::Action: Clone + std::fmt::Debug + PartialEq + Send + Sync,
{
    let begun = Instant::now();
    let checker = model.checker().threads(2).spawn_bfs().join();
    let explored =
        Explored { states: checker.unique_state_count(), depth: checker.max_depth(), seconds: begun.elapsed().as_secs_f32() };
    println!("{name}: {} states, depth {}, {:.1} s", explored.states, explored.depth, explored.seconds);
    for (property, path) in checker.discoveries() {
        panic!("{name}: {property} does not hold after\n{}", steps(path));
    }
    explored
}

/// The shortest way to a state that breaks any of the properties; panics when there is none.
pub fn counterexample<M>(name: &str, model: M) -> (&'static str, usize)
where
    M: Model + Send + Sync + 'static,
    M::State: Clone + std::fmt::Debug + std::hash::Hash + Eq + Send + Sync + 'static,
    M::Action: Clone + std::fmt::Debug + PartialEq + Send + Sync,
{
    let begun = Instant::now();
    // One thread: then the first found is a shortest.
    let checker = model.checker().finish_when(stateright::HasDiscoveries::Any).spawn_bfs().join();
    let (property, path) = checker.discoveries().into_iter().min_by_key(|(_, p)| p.clone().into_actions().len()).unwrap_or_else(|| {
        panic!("{name}: nothing breaks in all of {} states", checker.unique_state_count())
    });
    let length = path.clone().into_actions().len();
    let (states, seconds) = (checker.unique_state_count(), begun.elapsed().as_secs_f32());
    println!("{name}: {length} steps to break {property} ({states} states, {seconds:.1} s)\n{}", steps(path));
    (property, length)
}

fn steps<S, A: std::fmt::Debug>(path: stateright::Path<S, A>) -> String
where
    S: Clone + std::fmt::Debug,
{
    let actions: Vec<_> = path.into_vec().into_iter().filter_map(|(_, action)| action).collect();
    actions.iter().enumerate().map(|(n, a)| format!("  {:>2}. {a:?}\n", n + 1)).collect()
}
