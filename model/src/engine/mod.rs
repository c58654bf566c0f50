//! The rings: producers, claimers, completers, closers and maintenance on one lane, one SQL statement a step. Any session
//! may crash before any of its statements.

mod attempt;
pub mod check;
mod claim;
mod holes;
mod produce;
mod rings;
pub mod roles;
pub mod state;
mod withdraw;

use crate::guard::Guard;
use crate::report::Describe;
use check::Seen;
use state::*;
use stateright::{Model, Property};

/// What a session does. Those without a count go on as long as there is something to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Enqueues new jobs, so many calls a transaction, or promotes a deferred one; at most two transactions.
    Producer {
        transactions: u8,
        calls: u8,
        promotes: bool,
    },
    Claimer {
        limit: u8,
        probes: bool,
        idles: bool,
        twice: bool,
    },
    /// Completes any attempt there ever was; with `confused` also under a lease the job had before.
    Completer {
        confused: bool,
    },
    /// Rescues, or fails, any attempt: a retry until the job has had `attempts`, then for good.
    Closer {
        attempts: u8,
    },
    /// Cancels ready jobs.
    Operator,
    /// Rotates and prunes, by ring.
    Maintenance {
        rotates: [bool; 2],
        prunes: [bool; 2],
    },
}

#[derive(Clone, Debug)]
pub struct Config {
    pub roles: Vec<Role>,
    pub without: Option<Guard>,
    /// One property instead of all.
    pub only: Option<&'static str>,
    pub seen: Seen,
    /// Sessions may crash.
    pub crashes: bool,
    pub jobs: u8,
    pub seqs: u8,
    pub batches: u8,
    pub holes: u8,
    /// The highest generation of a ring.
    pub generations: u8,
    pub slots: [u8; 2],
    pub start: Start,
}

/// What happened before: nothing, or enough that a counterexample is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    Empty,
    /// Jobs 0 and 1 are ready.
    Enqueued,
    /// Jobs 0 and 1 are claimed, in one batch.
    Claimed,
    /// Generation 2 is open in slot 2, slot 1 is pruned, slot 0 sealed.
    Turned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Does {
    Join,
    Promote(u8),
    Claim(Mode),
    ClaimAgain(Mode),
    End {
        batch: u8,
        seq: u8,
        run_lease: u8,
    },
    Withdraw(u8),
    Rotate(u8),
    Prune {
        ring: u8,
        slot: u8,
    },
    /// Its next statement.
    Next,
    /// Its lock_timeout passed, or its patience did not.
    GiveUp,
    Crash,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Action {
    pub session: u8,
    pub does: Does,
}

impl Config {
    pub fn new(roles: Vec<Role>) -> Config {
        assert!(roles.len() <= SESSIONS);
        Config {
            roles,
            without: None,
            only: None,
            seen: Seen::default(),
            crashes: true,
            jobs: 2,
            seqs: 2,
            batches: 3,
            holes: 1,
            generations: 2,
            slots: [2, 2],
            start: Start::Empty,
        }
    }

    pub fn without(self, guard: Guard) -> Config {
        Config { without: Some(guard), ..self }
    }

    fn has(&self, guard: Guard) -> bool {
        self.without != Some(guard)
    }

    /// The state after an action; false when it cannot be taken now.
    fn act(&self, st: &mut State, action: Action) -> bool {
        let me = action.session as usize;
        match action.does {
            Does::Join => self.join(st, me, None),
            Does::Promote(job) => self.join(st, me, Some(job)),
            Does::Claim(mode) => self.begin_claim(st, me, mode),
            Does::ClaimAgain(mode) => self.claim_again(st, me, mode),
            Does::End { batch, seq, run_lease } => self.lock_batch(st, me, batch, seq, run_lease),
            Does::Withdraw(seq) => self.begin_withdraw(st, me, seq),
            Does::Rotate(ring) => self.rotate(st, me, ring),
            Does::Prune { ring, slot } => self.begin_prune(st, me, ring, slot),
            Does::Next => self.next(st, me),
            Does::GiveUp if st.sessions[me].at == At::Holders => {
                st.sessions[me].at = At::Commit;
                true
            }
            Does::GiveUp | Does::Crash => {
                st.rolls_back(me);
                true
            }
        }
    }

    /// An action in words: who is where, and does what.
    fn in_words(&self, st: &State, action: &Action) -> String {
        let role = match self.roles[action.session as usize] {
            Role::Producer { promotes: false, .. } => "producer",
            Role::Producer { promotes: true, .. } => "promoter",
            Role::Claimer { .. } => "claimer",
            Role::Completer { .. } => "completer",
            Role::Closer { .. } => "closer",
            Role::Operator => "operator",
            Role::Maintenance { .. } => "maintenance",
        };
        match action.does {
            Does::Next => format!("{role} {}: {:?}", action.session, st.sessions[action.session as usize].at),
            does => format!("{role} {}: {does:?}", action.session),
        }
    }

    fn next(&self, st: &mut State, me: usize) -> bool {
        match self.roles[me] {
            Role::Producer { .. } => self.produce(st, me),
            Role::Claimer { .. } => self.claim(st, me),
            Role::Completer { .. } | Role::Closer { .. } => self.end_attempt(st, me),
            Role::Operator => self.withdraw(st, me),
            Role::Maintenance { .. } => match st.sessions[me].local {
                Local::Rotate { .. } => self.opens(st, me),
                _ => self.prune(st, me),
            },
        }
    }

    fn begins(&self, st: &State, me: usize, mut does: impl FnMut(Does)) {
        match self.roles[me] {
            Role::Producer { promotes: false, .. } => does(Does::Join),
            Role::Producer { promotes: true, .. } => (0..self.jobs).for_each(|job| does(Does::Promote(job))),
            Role::Claimer { probes, idles, .. } => {
                does(Does::Claim(Mode::Claim));
                if probes {
                    does(Does::Claim(Mode::Probe));
                }
                if idles {
                    does(Does::Claim(Mode::Idle));
                }
            }
            Role::Completer { .. } | Role::Closer { .. } => {
                let confused = matches!(self.roles[me], Role::Completer { confused: true });
                for (n, batch) in
                    st.batches.iter().enumerate().filter(|(_, b)| b.by == By::Committed && !b.is_tombstone)
                {
                    for seq in each(batch.taken) {
                        let lease = st.rows[seq as usize].run_lease + 1;
                        let first = if confused { 1 } else { lease };
                        (first..=lease).for_each(|run_lease| does(Does::End { batch: n as u8, seq, run_lease }));
                    }
                }
            }
            Role::Operator => (0..st.allocated).for_each(|seq| does(Does::Withdraw(seq))),
            Role::Maintenance { rotates, prunes } => {
                for ring in 0..2 {
                    if rotates[ring] {
                        does(Does::Rotate(ring as u8));
                    }
                    if prunes[ring] {
                        (0..self.slots[ring]).for_each(|slot| does(Does::Prune { ring: ring as u8, slot }));
                    }
                }
            }
        }
    }

    fn first_state(&self) -> State {
        let mut st = State::default();
        for ring in &mut st.rings {
            ring.opened[0] = 1;
        }
        let ready = matches!(self.start, Start::Enqueued | Start::Claimed);
        for n in 0..if ready { 2u8 } else { 0 } {
            st.rows[n as usize] = Row { by: By::Committed, here: true, job: n, ..Row::default() };
            st.jobs[n as usize].enqueued = true;
            st.allocated += 1;
            st.next_job += 1;
        }
        if self.start == Start::Claimed {
            st.batches[0] =
                Batch { by: By::Committed, taken: 0b11, in_queue_ring: true, in_claim_ring: true, ..Batch::default() };
            st.next_batch = 1;
        }
        if self.start == Start::Turned {
            st.rings[QUEUE].opened = [1, 2, 3, 0, 0, 0];
            st.rings[QUEUE].pruned = bit(1);
            st.rings[QUEUE].cursor = Cursor { generation: 2, slot: 2 };
        }
        st
    }
}

impl Describe for Config {
    fn describe(&self, st: &State, action: &Action) -> String {
        self.in_words(st, action)
    }
}

impl Model for Config {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![self.first_state()]
    }

    fn actions(&self, st: &State, actions: &mut Vec<Action>) {
        if st.broken.is_some() {
            return;
        }
        for me in 0..self.roles.len() {
            let session = me as u8;
            let at = st.sessions[me].at;
            if at == At::Idle {
                self.begins(st, me, |does| actions.push(Action { session, does }));
                continue;
            }
            actions.push(Action { session, does: Does::Next });
            if matches!(st.sessions[me].local, Local::Claim(Claim { second_call: false, .. })) && at == At::Commit {
                for mode in [Mode::Claim, Mode::Probe, Mode::Idle] {
                    actions.push(Action { session, does: Does::ClaimAgain(mode) });
                }
            }
            if matches!(at, At::Holders | At::LockPartitions) {
                actions.push(Action { session, does: Does::GiveUp });
            }
            if self.crashes && at != At::LockPartitions {
                actions.push(Action { session, does: Does::Crash });
            }
        }
    }

    fn next_state(&self, st: &State, action: Action) -> Option<State> {
        let mut next = st.clone();
        self.act(&mut next, action).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        check::properties(self)
    }
}
