use model::engine::*;
use model::report::*;
use model::guard::Guard::*;
const P: Role = Role::Producer { transactions: 1, promotes: false };
const P2: Role = Role::Producer { transactions: 2, promotes: false };
const D: Role = Role::Producer { transactions: 2, promotes: true };
const C: Role = Role::Claimer { limit: 2, probes: true, idles: true, twice: false };
const C1: Role = Role::Claimer { limit: 1, probes: true, idles: false, twice: false };
const C0: Role = Role::Claimer { limit: 2, probes: false, idles: false, twice: false };
const CT: Role = Role::Claimer { limit: 1, probes: false, idles: false, twice: true };
const W: Role = Role::Completer { confused: false };
const WC: Role = Role::Completer { confused: true };
const R: Role = Role::Closer { attempts: 1 };
const RR: Role = Role::Closer { attempts: 2 };
const MQ: Role = Role::Maintenance { rotates: [true, false], prunes: [true, false] };
const RQ: Role = Role::Maintenance { rotates: [true, false], prunes: [false, false] };
const PQ: Role = Role::Maintenance { rotates: [false, false], prunes: [true, false] };
const MC: Role = Role::Maintenance { rotates: [false, true], prunes: [false, true] };
const M: Role = Role::Maintenance { rotates: [true, true], prunes: [true, true] };
#[test] fn probe_all() { counterexample("probe all", Config{jobs:3,seqs:3,crashes:false, ..Config::new(vec![P,P,P,C0_,RQ])}.without(ProbeAllSlots)); }
const C0_: Role = Role::Claimer { limit: 1, probes: false, idles: false, twice: false };
#[test] fn e1() { explore("holes P2 P C1 C", Config{jobs:3,seqs:3,..Config::new(vec![P2, P, C1, C])}); }
#[test] fn e2() { explore("ends C W R D", Config{start:Start::Enqueued,seqs:4,batches:4,..Config::new(vec![C1, WC, RR, D])}); }
#[test] fn e3() { explore("claim ring C W R MC MC", Config{start:Start::Enqueued,..Config::new(vec![C1, W, R, MC, MC])}); }
#[test] fn e4() { explore("queue ring P P C W RQ PQ", Config::new(vec![P,P,C, W, RQ,PQ])); }
#[test] fn e5() { explore("promises P C MQ MQ", Config{slots:[3,2],generations:3,start:Start::Turned,..Config::new(vec![P,P,C1, MQ,MQ])}); }
#[test] fn e6() { explore("both rings C W R M M", Config{start:Start::Enqueued,..Config::new(vec![C1, W, R, M, M])}); }
#[test] fn e7() { explore("brief nocrash", Config{jobs:2,crashes:false,..Config::new(vec![P,P, C1,C0, W, R, M])}); }
