//! Every two that may write about one attempt, in both orders, the first committing or dying: exactly one ends the attempt,
//! each is told what it did, and the job is in one place. The table of pairs is generated; what should come out is what the
//! two would do one after the other, by the plain rules in [`Is::after`].

mod common;

use std::time::Duration;

use common::{Attempt, Db, Session, attempts};

/// Who writes about the attempt.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Actor {
    Complete,
    Fail,
    Snooze,
    Cancel,
    StaleRescue,
    DeadlineRescue,
    Materialise,
    CallbackResolve,
    CallbackTimeout,
    AdminRetry,
}

const ACTORS: [Actor; 10] = [
    Actor::Complete,
    Actor::Fail,
    Actor::Snooze,
    Actor::Cancel,
    Actor::StaleRescue,
    Actor::DeadlineRescue,
    Actor::Materialise,
    Actor::CallbackResolve,
    Actor::CallbackTimeout,
    Actor::AdminRetry,
];

/// Where the job is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Is {
    /// Claimed by receipt.
    Running,
    /// Running in a lease; with a token or not.
    Leased(bool),
    Waiting,
    Scheduled,
    Retryable,
    Failed,
    Cancelled,
    Completed,
    Available,
}

impl Is {
    fn state(self) -> &'static str {
        match self {
            Is::Running | Is::Leased(_) => "running",
            Is::Waiting => "waiting_external",
            Is::Scheduled => "scheduled",
            Is::Retryable => "retryable",
            Is::Failed => "failed",
            Is::Cancelled => "cancelled",
            Is::Completed => "completed",
            Is::Available => "available",
        }
    }

    /// The state after the actor, and whether it is told that it did something.
    fn after(self, actor: Actor) -> (Is, bool) {
        let open = matches!(self, Is::Running | Is::Leased(_) | Is::Waiting);
        let done = |to: Is, may: bool| if may { (to, true) } else { (self, false) };
        match actor {
            Actor::Complete => done(Is::Completed, open),
            Actor::Fail => done(Is::Failed, open),
            Actor::Snooze => done(Is::Scheduled, open),
            Actor::Cancel => done(Is::Cancelled, !matches!(self, Is::Failed | Is::Cancelled | Is::Completed)),
            Actor::StaleRescue | Actor::DeadlineRescue => {
                done(Is::Retryable, matches!(self, Is::Running | Is::Leased(_)))
            }
            Actor::Materialise => (if self == Is::Running { Is::Leased(false) } else { self }, open),
            Actor::CallbackResolve => done(Is::Completed, matches!(self, Is::Leased(true) | Is::Waiting)),
            Actor::CallbackTimeout => done(Is::Retryable, self == Is::Waiting),
            Actor::AdminRetry => {
                done(Is::Available, matches!(self, Is::Scheduled | Is::Retryable | Is::Failed | Is::Cancelled))
            }
        }
    }
}

/// One attempt to fight over.
#[derive(Clone, Debug)]
struct Subject {
    attempt: Attempt,
    token: String,
    is: Is,
}

const NOBODYS_TOKEN: &str = "00000000-0000-0000-0000-000000000000";

async fn subject(s: &Session, shape: Is) -> Subject {
    s.enqueue("q", 1).await;
    let rows = s
        .rows(
            "SELECT claim_slot, batch_id * 1024, job_ids[1], run_leases[1] FROM @claim('q', 1, '1 microsecond', 'w')",
            &[],
        )
        .await
        .unwrap();
    let r = &rows[0];
    let attempt = Attempt { slot: r.get(0), receipt: r.get(1), job: r.get(2), lease: r.get(3) };
    let mut token = NOBODYS_TOKEN.to_owned();
    if shape != Is::Running {
        let Attempt { slot, receipt, job, lease } = attempt;
        token = s
            .one(&format!(
                "SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 microsecond')::text"
            ))
            .await;
        if shape == Is::Waiting {
            let said: String = s.one(&format!("SELECT @wait_for_callback({receipt}, {job}, {lease}, '{token}')")).await;
            assert_eq!(said, "waiting");
        }
    }
    Subject { attempt, token, is: shape }
}

/// What the actor calls; its answer is one boolean: it did something.
fn call(actor: Actor, subject: &Subject) -> String {
    let Attempt { slot, receipt, job, lease } = subject.attempt;
    let close = |outcome: &str| {
        format!(
            "SELECT NOT EXISTS (SELECT FROM @close_attempts('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}',
             '{{{outcome}}}', '{{why}}', '{{1 hour}}', '{{NULL}}'))"
        )
    };
    let sweep = |sweep: &str| {
        format!("SELECT stale + deadline + callback_timeout > 0 FROM @rescue('0 seconds', 500, '{{{sweep}}}')")
    };
    match actor {
        Actor::Complete => format!(
            "SELECT NOT EXISTS (SELECT FROM @complete('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}'))"
        ),
        Actor::Fail => close("failed"),
        Actor::Snooze => close("scheduled"),
        Actor::Cancel => format!("SELECT done FROM @operate({job}, 'cancel')"),
        Actor::AdminRetry => format!("SELECT done FROM @operate({job}, 'retry')"),
        Actor::StaleRescue => sweep("stale"),
        Actor::DeadlineRescue => sweep("deadline"),
        Actor::Materialise => format!("SELECT @materialise({slot}::smallint, {receipt}, {job}, {lease})"),
        Actor::CallbackResolve => {
            format!("SELECT EXISTS (SELECT FROM @resolve_callback('{}', 'complete'))", subject.token)
        }
        Actor::CallbackTimeout => sweep("callback"),
    }
}

/// Sweeps pass over what somebody else is writing to; everybody else waits for it.
fn never_waits(actor: Actor) -> bool {
    matches!(actor, Actor::StaleRescue | Actor::DeadlineRescue | Actor::CallbackTimeout)
}

/// Every job of the database, in however many places it is.
const PLACES: &str = "SELECT (SELECT count(*) FROM @deferred_jobs) + (SELECT count(*) FROM @leases)
    + (SELECT count(*) FROM @dlq_entries) + (SELECT count(*) FROM @terminal_jobs)
    + (SELECT coalesce(sum(o.open_count), 0)::bigint FROM @claim_ring_slots AS s, @open_claims(s.slot) AS o)
    + (SELECT count(*) FROM @ready_entries AS r WHERE NOT EXISTS (
           SELECT FROM @ready_claim_attempt_batches AS b
           WHERE b.ready_slot = r.ready_slot AND b.lane_id = r.lane_id AND b.lane_ranges @> r.lane_seq))";

const COUNTED: &str = "SELECT sum(job_count)::bigint FROM @queue_counts()";

async fn state(s: &Session, job: i64) -> String {
    s.one(&format!("SELECT (@find_job({job})).state::text")).await
}

/// The pair on one attempt: the first acts and stays open, the second comes, the first commits or dies.
async fn race(db: &Db, s: [&Session; 2], subject: Subject, pair: [Actor; 2], commits: bool) {
    let case = format!("{pair:?} on {:?}, the first {}", subject.is, if commits { "commits" } else { "dies" });
    s[0].exec("BEGIN").await;
    let (first_is, first_did) = subject.is.after(pair[0]);
    assert_eq!(s[0].one::<bool>(&call(pair[0], &subject)).await, first_did, "{case}: the first");

    let pid = s[1].pid().await;
    let second = s[1].spawn(&call(pair[1], &subject));
    while !second.is_finished()
        && !db.one::<bool>(&format!("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = {pid} AND NOT granted)")).await
    {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    s[0].exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
    let mut second_did: bool = second.await.unwrap().unwrap_or_else(|e| panic!("{case}: {e:?}"))[0].get(0);
    if never_waits(pair[1]) && !second_did {
        // It passed over what was locked; its next pass finds it as the first left it.
        second_did = s[1].one(&call(pair[1], &subject)).await;
    }

    if pair[1] == Actor::AdminRetry && !second_did && !subject.is.after(pair[1]).1 {
        // A refusal by what it saw before the first committed; it need not wait to be told so.
        assert_eq!(
            state(s[1], subject.attempt.job).await,
            if commits { first_is } else { subject.is }.state(),
            "{case}"
        );
        return;
    }
    let is = if commits { first_is } else { subject.is };
    let (is, expected) = is.after(pair[1]);
    assert_eq!(second_did, expected, "{case}: the second");
    assert_eq!(state(s[1], subject.attempt.job).await, is.state(), "{case}");
}

/// All that can follow `first`, over every shape of attempt.
async fn races_of(first: Actor) {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    for s in [&a, &b] {
        s.exec("SET jit = off").await;
    }
    let mut made = 0;
    for shape in [Is::Running, Is::Leased(true), Is::Waiting] {
        for second in ACTORS {
            for commits in [true, false] {
                let subject = subject(&a, shape).await;
                made += 1;
                let job = subject.attempt.job;
                race(&db, [&a, &b], subject, [first, second], commits).await;
                assert_eq!(a.one::<i64>(PLACES).await, made, "{first:?} then {second:?} on {shape:?}");
                assert_eq!(a.one::<i64>(COUNTED).await, made, "{first:?} then {second:?} on {shape:?}: counts");
                // Out of the next pair's way: whatever is left is not open any more.
                a.exec(&format!("SELECT @operate({job}, 'cancel')")).await;
                assert_eq!(a.one::<i64>(PLACES).await, made);
            }
        }
    }
    // And the rings can turn: nothing that was decided keeps a slot.
    a.exec("SELECT @rotate('claim', true), @rotate('queue', true), @rotate('lease', true)").await;
    a.exec("SELECT @advance_idle_cursors()").await;
    for ring in ["claim", "lease", "queue"] {
        assert_eq!(a.prune_all(ring).await.1, [], "{ring}");
    }
    assert_eq!(a.one::<i64>(COUNTED).await, made, "counts outlive the slots");
    assert_eq!(attempts(&a.claim("q", 100).await).len(), 0);
}

macro_rules! races {
    ($($name:ident: $first:ident),+ $(,)?) => {
        $(
            #[tokio::test]
            async fn $name() {
                races_of(Actor::$first).await;
            }
        )+
    };
}

races! {
    whoever_follows_a_completion_learns_of_it: Complete,
    whoever_follows_a_failure_learns_of_it: Fail,
    whoever_follows_a_snooze_learns_of_it: Snooze,
    whoever_follows_a_cancellation_learns_of_it: Cancel,
    whoever_follows_a_stale_rescue_learns_of_it: StaleRescue,
    whoever_follows_a_deadline_rescue_learns_of_it: DeadlineRescue,
    whoever_follows_a_materialisation_finds_the_attempt: Materialise,
    whoever_follows_an_answered_callback_learns_of_it: CallbackResolve,
    whoever_follows_a_callback_timeout_learns_of_it: CallbackTimeout,
    whoever_follows_an_admin_retry_learns_of_it: AdminRetry,
}
