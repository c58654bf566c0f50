//! The sessions that configurations are put together from.

use super::Role;

pub const PRODUCER: Role = Role::Producer { transactions: 1, calls: 1, promotes: false };
/// A second transaction after the first, or after it died.
pub const PRODUCER_TWICE: Role = Role::Producer { transactions: 2, calls: 1, promotes: false };
pub const PRODUCER_OF_TWO: Role = Role::Producer { transactions: 1, calls: 2, promotes: false };
pub const PROMOTER: Role = Role::Producer { transactions: 2, calls: 1, promotes: true };

/// Takes one job a call, and probes.
pub const CLAIMER: Role = Role::Claimer { limit: 1, probes: true, idles: false, twice: false };
pub const CLAIMER_OF_TWO: Role = Role::Claimer { limit: 2, probes: true, idles: false, twice: false };
pub const CLAIMER_AND_IDLE_CURSORS: Role = Role::Claimer { limit: 2, probes: true, idles: true, twice: false };
pub const CLAIMER_WITHOUT_PROBES: Role = Role::Claimer { limit: 1, probes: false, idles: false, twice: false };
pub const CLAIMER_OF_TWO_WITHOUT_PROBES: Role = Role::Claimer { limit: 2, probes: false, idles: false, twice: false };
/// Calls twice in one transaction.
pub const CLAIMER_TWICE: Role = Role::Claimer { limit: 1, probes: true, idles: false, twice: true };

pub const COMPLETER: Role = Role::Completer { confused: false };
/// Names the attempt of now with a lease of then.
pub const CONFUSED_COMPLETER: Role = Role::Completer { confused: true };
pub const CLOSER: Role = Role::Closer { attempts: 1 };
pub const RESCUER: Role = Role::Closer { attempts: 2 };
pub const OPERATOR: Role = Role::Operator;

pub const MAINTENANCE: Role = Role::Maintenance { rotates: [true, true], prunes: [true, true] };
pub const QUEUE_RING: Role = Role::Maintenance { rotates: [true, false], prunes: [true, false] };
pub const QUEUE_ROTATOR: Role = Role::Maintenance { rotates: [true, false], prunes: [false, false] };
pub const QUEUE_PRUNER: Role = Role::Maintenance { rotates: [false, false], prunes: [true, false] };
pub const CLAIM_RING: Role = Role::Maintenance { rotates: [false, true], prunes: [false, true] };
