use model::engine::*;
use model::guard::Guard::{self, *};
use model::report::*;

const P: Role = Role::Producer { transactions: 1, promotes: false };
const P2: Role = Role::Producer { transactions: 2, promotes: false };
const D: Role = Role::Producer { transactions: 2, promotes: true };
const C: Role = Role::Claimer { limit: 2, probes: true, idles: false, twice: false };
const C1: Role = Role::Claimer { limit: 1, probes: true, idles: false, twice: false };
const CT: Role = Role::Claimer { limit: 1, probes: false, idles: false, twice: true };
const W: Role = Role::Completer { confused: false };
const WC: Role = Role::Completer { confused: true };
const R: Role = Role::Closer { attempts: 1 };
const RR: Role = Role::Closer { attempts: 2 };
const MQ: Role = Role::Maintenance { rotates: [true, false], prunes: [true, false] };
const MC: Role = Role::Maintenance { rotates: [false, true], prunes: [false, true] };

fn try_it(name: &str, c: Config, g: Guard) {
    let r = std::panic::catch_unwind(|| counterexample(name, c.without(g)));
    if let Err(e) = r { println!("NOT FOUND {name}: {:?}", e.downcast_ref::<String>()); }
}
fn c(roles: &[Role], start: Start) -> Config { Config { start, ..Config::new(roles.to_vec()) } }

#[test]
fn all() {
    std::panic::set_hook(Box::new(|_| ()));
    use Start::*;
    let t = |g: Guard, c: Config| try_it(&format!("{g:?}"), c, g);
    t(LaneLock, c(&[C, C], Enqueued));
    t(LedgerRead, c(&[C, C], Enqueued));
    t(MayAdvance, c(&[CT], Enqueued));
    t(CommittedEvidence, c(&[C], Enqueued));
    t(ProducerLock, c(&[P, P, C], Empty));
    t(Quiet, c(&[P, P, C], Empty));
    t(KnownRows, c(&[P, C], Empty));
    t(AsideHoldersFirst, c(&[P, P, C], Empty));t(LateHoldersFirst, c(&[P, P, C], Empty)); t(RotatorLock, Config { slots: [3, 2], generations: 3, ..c(&[P, C, MQ, MQ], Turned) });
    t(HoleHolders, c(&[P, P, C], Empty));
    t(HoleLeftOver, Config { jobs: 3, seqs: 3, ..c(&[P, P, P, C1], Empty) });
    t(ProbeAllSlots, c(&[P, P, C, MQ], Empty));
    t(HintBack, c(&[P, P, C, MQ], Empty));
    t(PromisedSlot, c(&[P, C, MQ], Empty));
    t(Promise, Config { slots: [3, 2], generations: 3, ..c(&[P, C, MQ], Turned) });
    t(PinRecheck, c(&[P, C, MQ, MQ], Empty));
    t(ClaimPinRecheck, c(&[C, MC, MC], Enqueued));
    t(Pin, c(&[P, C, MQ], Empty));
    t(SecondProof, c(&[P, C, MQ], Empty));
    t(OpenHoles, Config { ..c(&[P, P, C, W, MQ], Empty) });
    t(OpenClaims, c(&[C, MQ], Enqueued));
    t(OpenClaims, c(&[C, MC], Enqueued));
    t(ReadyRows, c(&[P, C, MQ], Empty));
    t(LaneCursor, c(&[C, W, MQ], Claimed));
    t(ClosurePredicate, c(&[W, W], Claimed));
    t(ClosePredicate, c(&[W, R], Claimed));
    t(MayAdvance, Config{batches:2,..c(&[CT], Enqueued)});
    t(LeasePredicate, Config { seqs: 3, ..c(&[C, D, WC, RR], Claimed) });
    t(BatchLock, c(&[W, R], Claimed));
}
