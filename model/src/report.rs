//! Running a checker and telling how it went.

use stateright::{Checker, HasDiscoveries, Model, Path};
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::Hash;
use std::time::Instant;

/// What a counterexample shows of its steps.
pub trait Describe: Model {
    fn describe(&self, state: &Self::State, action: &Self::Action) -> String;
}

/// A property that does not hold, and how to get there.
type Found<M> = (&'static str, Path<<M as Model>::State, <M as Model>::Action>);

pub struct Explored {
    pub states: usize,
    pub depth: usize,
}

/// Explores everything there is. Panics with a way to whatever breaks a property.
pub fn explore<M>(name: &str, model: M) -> Explored
where
    M: Describe + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Eq + Hash + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let begun = Instant::now();
    let checker = model.clone().checker().threads(2).spawn_bfs().join();
    let explored = Explored { states: checker.unique_state_count(), depth: checker.max_depth() };
    println!("{name}: {} states, depth {}, {:.1} s", explored.states, explored.depth, begun.elapsed().as_secs_f32());
    if let Some((property, path)) = shortest(checker.discoveries()) {
        panic!("{name} breaks\n  {property}\n{}", steps(&model, path));
    }
    explored
}

/// A shortest way to a state that breaks one of the properties: which one, and in how many steps. Panics when there is none.
pub fn counterexample<M>(name: &str, model: M) -> (&'static str, usize)
where
    M: Describe + Clone + Send + Sync + 'static,
    M::State: Clone + Debug + Eq + Hash + Send + Sync + 'static,
    M::Action: Clone + Debug + PartialEq + Send + Sync,
{
    let begun = Instant::now();
    let mut states = 0;
    let mut best: Option<Found<M>> = None;
    loop {
        // The checker goes on for a while after the first discovery and keeps the last: look again for a shorter one.
        let shorter = best.as_ref().map_or(usize::MAX, |(_, path)| length(path) + 1);
        let checker =
            model.clone().checker().target_max_depth(shorter).finish_when(HasDiscoveries::Any).spawn_bfs().join();
        states += checker.unique_state_count();
        match shortest(checker.discoveries()) {
            Some(found) => best = Some(found),
            None => break,
        }
    }
    let (property, path) = best.unwrap_or_else(|| panic!("{name}: nothing breaks in any of {states} states"));
    let length = length(&path);
    println!(
        "{name}: {length} steps ({:.1} s, {states} states) break\n  {property}\n{}",
        begun.elapsed().as_secs_f32(),
        steps(&model, path)
    );
    (property, length)
}

fn length<S, A>(path: &Path<S, A>) -> usize
where
    Path<S, A>: Clone,
{
    path.clone().into_vec().len() - 1
}

fn shortest<S, A>(found: HashMap<&'static str, Path<S, A>>) -> Option<(&'static str, Path<S, A>)>
where
    Path<S, A>: Clone,
{
    found.into_iter().min_by_key(|(property, path)| (length(path), *property))
}

fn steps<M: Describe>(model: &M, path: Path<M::State, M::Action>) -> String {
    let steps = path.into_vec();
    let actions = steps.iter().filter_map(|(state, action)| action.as_ref().map(|a| model.describe(state, a)));
    actions.enumerate().map(|(n, step)| format!("  {:>2}. {step}\n", n + 1)).collect()
}
