//! Every path as the locks it takes, one after the other, and keeps until its transaction ends. All combinations of three
//! paths run against each other; none may wait in a circle.

pub mod paths;

use crate::report::Describe;
use paths::{How, Path, Step};
use stateright::{Model, Property};

pub const NO_DEADLOCK: &str = "whoever waits, waits for somebody who goes on";

#[derive(Clone, Debug)]
pub struct Locks {
    pub paths: Vec<Path>,
    /// Which paths run against each other; empty: each combination, also of a path with itself.
    pub together: Vec<usize>,
}

/// Where one of the three is, and which of the steps behind it got their lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Runner {
    pub path: u8,
    pub next: u8,
    pub held: u32,
    pub done: bool,
}

pub type State = [Runner; 3];

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Does {
    Takes,
    /// The lock is busy: a try-lock ends the call, a row is passed over.
    Misses,
    TimesOut,
    Commits,
}

impl Locks {
    pub fn all(paths: Vec<Path>) -> Locks {
        Locks { paths, together: Vec::new() }
    }

    /// A path against another, and a third one or the second again.
    pub fn between(paths: &[Path]) -> Locks {
        Locks { paths: paths.to_vec(), together: (0..3).map(|n| n.min(paths.len() - 1)).collect() }
    }

    fn step(&self, runner: &Runner) -> Option<&Step> {
        self.paths[runner.path as usize].steps.get(runner.next as usize)
    }

    /// Those who hold what this one asks for in a mode that conflicts.
    fn blockers<'a>(&'a self, st: &'a State, me: usize, step: &'a Step) -> impl Iterator<Item = usize> + 'a {
        (0..3).filter(move |n| *n != me && !st[*n].done).filter(move |n| {
            let held = self.paths[st[*n].path as usize].steps.iter().enumerate().take(st[*n].next as usize);
            held.filter(|(i, _)| st[*n].held & 1 << i != 0)
                .any(|(_, s)| s.lock == step.lock && (s.exclusive || step.exclusive))
        })
    }

    fn is_blocked(&self, st: &State, me: usize, step: &Step) -> bool {
        self.blockers(st, me, step).next().is_some()
    }

    /// Who goes on, if need be after those it waits for.
    fn everybody_goes_on(&self, st: &State) -> bool {
        let mut goes_on = [false; 3];
        for _ in 0..3 {
            for me in 0..3 {
                goes_on[me] |= match self.step(&st[me]) {
                    Some(step) if !st[me].done && step.how == How::Wait => {
                        self.blockers(st, me, step).all(|n| goes_on[n])
                    }
                    _ => true,
                };
            }
        }
        goes_on == [true; 3]
    }
}

impl Model for Locks {
    type State = State;
    type Action = (u8, Does);

    fn init_states(&self) -> Vec<State> {
        let runner = |path: usize| Runner { path: path as u8, ..Runner::default() };
        if let [a, b, c] = self.together[..] {
            return vec![[runner(a), runner(b), runner(c)]];
        }
        let n = self.paths.len();
        let triples = (0..n).flat_map(|a| (a..n).flat_map(move |b| (b..n).map(move |c| [a, b, c])));
        triples.map(|t| t.map(runner)).collect()
    }

    fn actions(&self, st: &State, actions: &mut Vec<(u8, Does)>) {
        for (me, runner) in st.iter().enumerate().filter(|(_, r)| !r.done) {
            let does = match self.step(runner) {
                None => Does::Commits,
                Some(step) if !self.is_blocked(st, me, step) => Does::Takes,
                Some(step) => match step.how {
                    How::Wait => continue,
                    How::Timeout => Does::TimesOut,
                    How::Try | How::Pass(_) => Does::Misses,
                },
            };
            actions.push((me as u8, does));
        }
    }

    fn next_state(&self, st: &State, (me, does): (u8, Does)) -> Option<State> {
        let mut next = *st;
        let runner = &mut next[me as usize];
        match (does, self.step(runner).map(|s| s.how)) {
            (Does::Takes, _) => {
                runner.held |= 1 << runner.next;
                runner.next += 1;
            }
            (Does::Misses, Some(How::Pass(steps))) => runner.next += 1 + steps,
            _ => *runner = Runner { path: runner.path, done: true, ..Runner::default() },
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![Property::always(NO_DEADLOCK, |locks: &Locks, st| locks.everybody_goes_on(st))]
    }
}

impl Describe for Locks {
    fn describe(&self, st: &State, (me, does): &(u8, Does)) -> String {
        let runner = &st[*me as usize];
        let path = self.paths[runner.path as usize].name;
        match self.step(runner) {
            Some(step) => format!("{me} {path} {does:?} {:?} {}", step.lock, if step.exclusive { "X" } else { "S" }),
            None => format!("{me} {path} {does:?}"),
        }
    }
}
