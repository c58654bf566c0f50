use model::engine::*;
use model::report::*;

const P: Role = Role::Producer { transactions: 1, promotes: false };
const C: Role = Role::Claimer { limit: 2, probes: true, idles: true, twice: false };
const W: Role = Role::Completer { confused: false };
const R: Role = Role::Closer { attempts: 1 };
const M: Role = Role::Maintenance { rotates: [true, true], prunes: [true, true] };
const MQ: Role = Role::Maintenance { rotates: [true, false], prunes: [true, false] };

#[test]
fn a1() { explore("P P C", Config::new(vec![P, P, C])); }
#[test]
fn a2() { explore("P P C C", Config::new(vec![P, P, C, C])); }
#[test]
fn a3() { explore("P C M", Config { jobs: 1, seqs: 2, ..Config::new(vec![P, C, M]) }); }
#[test]
fn a4() { explore("C W R", Config { start: state_start(), ..Config::new(vec![C, W, R]) }); }
#[test]
fn a5() { explore("P P C MQ", Config::new(vec![P, P, C, MQ])); }
#[test]
fn a6() { explore("P C W MQ MQ", Config{jobs:1,..Config::new(vec![P, C, W, MQ, MQ])}); }
fn state_start() -> Start { Start::Enqueued }
