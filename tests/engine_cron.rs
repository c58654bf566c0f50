//! Cron: one fire per due time however many leaders race, the latest only of what was missed, and nothing lost between two
//! leaders (pg-boss#914).
mod common;

use std::time::Duration;

use awactl::engine::cron::{self, Definition, Passed, Put};
use awactl::engine::maintenance::{Maintenance, MaintenanceOptions};
use awactl::engine::worker::RawJson;
use awactl::engine::{EngineError, Schema, Target};
use common::*;

const YEARLY: &str = "0 0 1 1 *";
const NEW_YEAR: &str = "date_trunc('year', clock_timestamp(), 'UTC')";

fn schema() -> Schema {
    Schema::default()
}

async fn put(s: &Session, name: &str, expression: &str) -> Put {
    let mut job = Definition::new(expression, "k");
    job.queue = "q".into();
    cron::put(&s.client, &schema(), name, &job, true).await.unwrap()
}

/// Never waits for a lock, or the leader's other tasks would.
async fn pass(s: &Session) -> Passed {
    let schema = schema();
    let pass = cron::pass(&s.client, &schema);
    tokio::time::timeout(Duration::from_secs(20), pass).await.expect("a pass waits for nobody").unwrap()
}

async fn listed(s: &Session, name: &str) -> cron::CronJob {
    cron::list(&s.client, &schema()).await.unwrap().into_iter().find(|j| j.name == name).unwrap()
}

/// As if it had been dealt with last at that time.
async fn rewind(s: &Session, name: &str, to: &str) {
    s.exec(&format!(
        "UPDATE @cron_jobs SET cursor_at = {to}, last_enqueued_at = NULL, next_due_at = NULL WHERE name = '{name}'"
    ))
    .await;
}

/// A yearly one whose latest occurrence is due. (Yearly, so that no other comes due while a test runs.)
async fn due_once(s: &Session, name: &str) -> i64 {
    put(s, name, YEARLY).await;
    rewind(s, name, &format!("{NEW_YEAR} - interval '1 second'")).await;
    s.one(&format!("SELECT revision FROM @cron_jobs WHERE name = '{name}'")).await
}

fn fire(name: &str, revision: i64) -> String {
    format!("SELECT outcome FROM @fire_cron('{name}', {revision}, {NEW_YEAR}, true, 0, {NEW_YEAR} + interval '1 year')")
}

async fn jobs_made(s: &Session) -> i64 {
    s.one("SELECT count(*) FROM @ready_entries").await
}

fn skipped(reason: &str) -> Passed {
    Passed { skipped: [(reason.to_owned(), 1)].into(), ..Passed::default() }
}

fn fired(n: u64) -> Passed {
    Passed { fired: n, ..Passed::default() }
}

#[tokio::test]
async fn of_two_leaders_at_one_due_time_the_second_is_told_that_it_lost() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    let revision = due_once(&a, "c").await;
    a.exec("BEGIN").await;
    assert_eq!(a.one::<String>(&fire("c", revision)).await, "fired");
    // Not waited for: the other tasks of b's maintenance go on.
    assert_eq!(pass(&b).await, skipped("busy"));
    a.exec("COMMIT").await;
    assert_eq!(b.one::<String>(&fire("c", revision)).await, "lost");
    assert_eq!(pass(&b).await, Passed::default());
    assert_eq!(jobs_made(&a).await, 1);
}

#[tokio::test]
async fn however_many_leaders_race_each_due_time_is_fired_once() {
    let db = Db::new().await;
    let s = db.session().await;
    for n in 0..20 {
        due_once(&s, &format!("c{n}")).await;
    }
    let mut leaders = vec![];
    for _ in 0..8 {
        let leader = db.session().await;
        leaders.push(tokio::spawn(async move {
            let mut fired = 0;
            for _ in 0..3 {
                fired += pass(&leader).await.fired;
            }
            fired
        }));
    }
    let mut total = 0;
    for leader in leaders {
        total += leader.await.unwrap();
    }
    assert_eq!((total, jobs_made(&s).await), (20, 20));
    assert_eq!(s.one::<i64>("SELECT count(DISTINCT metadata->>'cron_name') FROM @ready_entries").await, 20);
}

#[tokio::test]
async fn a_leader_that_dies_before_its_commit_has_fired_nothing_and_the_next_one_does() {
    let db = Db::new().await;
    let (dying, next) = (db.session().await, db.session().await);
    let revision = due_once(&dying, "c").await;
    dying.exec("BEGIN").await;
    assert_eq!(dying.one::<String>(&fire("c", revision)).await, "fired");
    let pid = dying.pid().await;
    db.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    db.until_gone(pid).await;
    assert_eq!(jobs_made(&next).await, 0);
    assert_eq!(pass(&next).await, fired(1));
    assert_eq!((jobs_made(&next).await, listed(&next, "c").await.missed_count), (1, 0));
}

#[tokio::test]
async fn nothing_is_fired_after_pausing_has_returned() {
    let db = Db::new().await;
    let (leader, operator) = (db.session().await, db.session().await);
    let revision = due_once(&leader, "c").await;
    leader.exec("BEGIN").await;
    assert_eq!(leader.one::<String>(&fire("c", revision)).await, "fired");
    let pid = operator.pid().await;
    let pausing = operator.spawn("SELECT @pause_cron('c', true)");
    db.until_waiting(pid).await;
    leader.exec("COMMIT").await;
    assert!(pausing.await.unwrap().unwrap()[0].get::<_, bool>(0));
    assert_eq!(jobs_made(&leader).await, 1);

    rewind(&leader, "c", "clock_timestamp() - interval '5 years'").await;
    assert_eq!(pass(&leader).await, Passed::default(), "a paused one is not due");
    let revision: i64 = leader.one("SELECT revision FROM @cron_jobs").await;
    assert_eq!(leader.one::<String>(&fire("c", revision)).await, "paused");
    assert_eq!(jobs_made(&leader).await, 1);
}

#[tokio::test]
async fn a_leader_that_saw_it_running_does_not_fire_it_once_it_is_paused() {
    let db = Db::new().await;
    let (leader, operator) = (db.session().await, db.session().await);
    let revision = due_once(&leader, "c").await;
    operator.exec("BEGIN; SELECT @pause_cron('c', true)").await;
    assert_eq!(pass(&leader).await, skipped("busy"));
    operator.exec("COMMIT").await;
    assert_eq!(leader.one::<String>(&fire("c", revision)).await, "lost");
    assert_eq!(jobs_made(&leader).await, 0);
}

#[tokio::test]
async fn a_leader_that_saw_the_old_expression_does_not_fire_it() {
    let db = Db::new().await;
    let (leader, editor) = (db.session().await, db.session().await);
    let seen = due_once(&leader, "c").await;
    editor.exec("BEGIN; UPDATE @cron_jobs SET cron_expr = '*/30 * * * *' WHERE name = 'c'").await;
    assert_eq!(pass(&leader).await, skipped("busy"));
    editor.exec("COMMIT").await;
    assert_eq!(leader.one::<String>(&fire("c", seen)).await, "lost");
    // The new schedule begins when it was changed.
    assert_eq!(pass(&leader).await, Passed::default());
    assert_eq!(jobs_made(&leader).await, 0);
    let next = listed(&leader, "c").await.next_due_at.unwrap();
    let until: bool =
        leader.rows("SELECT $1::timestamptz - clock_timestamp() BETWEEN '0' AND '30 minutes'", &[&next]).await.unwrap()
            [0]
        .get(0);
    assert!(until, "{next}");
}

#[tokio::test]
async fn of_what_was_missed_only_the_latest_is_fired_and_the_rest_is_counted() {
    let db = Db::new().await;
    let s = db.session().await;
    put(&s, "c", YEARLY).await;
    rewind(&s, "c", &format!("{NEW_YEAR} - interval '10 years'")).await;
    assert_eq!(pass(&s).await, Passed { fired: 1, missed: 9, ..Passed::default() });
    let job = listed(&s, "c").await;
    assert_eq!(job.missed_count, 9);
    assert!(s.one::<bool>(&format!("SELECT last_enqueued_at = {NEW_YEAR} AND last_fired_at > clock_timestamp() - interval '1 hour' FROM @cron_jobs")).await);
    assert!(
        s.one::<bool>(
            "SELECT r.job_id = c.last_job_id AND r.metadata->>'cron_name' = 'c'
                AND (r.metadata->>'cron_fire_time')::timestamptz = c.last_enqueued_at
             FROM @ready_entries AS r, @cron_jobs AS c"
        )
        .await
    );
    assert_eq!(pass(&s).await, Passed::default());
}

#[tokio::test]
async fn more_missed_than_a_pass_counts_are_counted_by_the_next_ones() {
    let db = Db::new().await;
    let s = db.session().await;
    put(&s, "c", "* * * * * *").await;
    s.exec("UPDATE @cron_jobs SET cursor_at = date_trunc('second', clock_timestamp()) - interval '12000 seconds', next_due_at = NULL").await;
    let start: i64 = s.one("SELECT extract(epoch FROM cursor_at)::bigint FROM @cron_jobs").await;
    for moved in [5000, 5000] {
        assert_eq!(pass(&s).await, Passed { missed: moved, ..Passed::default() });
    }
    assert_eq!(jobs_made(&s).await, 0);
    assert_eq!(pass(&s).await.fired, 1);
    let end: i64 = s.one("SELECT extract(epoch FROM cursor_at)::bigint FROM @cron_jobs").await;
    assert_eq!(listed(&s, "c").await.missed_count + 1, end - start);
}

// https://github.com/timgit/pg-boss/issues/914
#[tokio::test]
async fn whenever_a_leader_leaves_each_occurrence_is_fired_or_counted() {
    let db = Db::new().await;
    let s = db.session().await;
    // A leader that leaves at every offset of the interval, and the next one that comes a while later.
    for offset in (0..=60).step_by(4) {
        for away in [1, 59, 60, 61, 150] {
            put(&s, "c", "* * * * *").await;
            s.exec("UPDATE @cron_jobs SET missed_count = 0").await;
            let left = format!("date_trunc('minute', clock_timestamp()) - interval '{} seconds'", offset + away);
            rewind(&s, "c", &left).await;
            let expected: i64 = s
                .one("SELECT floor(extract(epoch FROM clock_timestamp()) / 60)::bigint - floor(extract(epoch FROM cursor_at) / 60)::bigint FROM @cron_jobs")
                .await;
            let passed = pass(&s).await;
            // The minute may have ended in between.
            let done = passed.fired as i64 + passed.missed;
            assert!((expected..=expected + 1).contains(&done), "{offset} {away}: {passed:?}, expected {expected}");
            assert_eq!(passed.fired, u64::from(done > 0));
        }
    }
}

#[tokio::test]
async fn leaders_that_are_killed_over_and_over_lose_no_occurrence_and_fire_none_twice() {
    let db = Db::new().await;
    let s = db.session().await;
    put(&s, "c", "* * * * * *").await;
    rewind(&s, "c", "date_trunc('second', clock_timestamp())").await;
    let start: i64 = s.one("SELECT extract(epoch FROM cursor_at)::bigint FROM @cron_jobs").await;
    let url = server::server().url_of(db.config().get_dbname().unwrap());
    let target = Target::parse(&url, schema(), "test", &|_| None).unwrap();
    let options = MaintenanceOptions {
        lead_every: Duration::from_millis(20),
        cron_every: Duration::from_millis(70),
        ..MaintenanceOptions::default()
    };
    let leaders: Vec<_> = (0..3).map(|_| Maintenance::start(&target, options.clone())).collect();
    for n in 1..=8 {
        // After an occurrence and at other times between two.
        db.until(&format!("SELECT extract(epoch FROM cursor_at) >= {start} + {n} * 0.7 FROM @cron_jobs")).await;
        db.exec("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name IN ('awactl leader', 'awactl maintenance') AND datname = current_database()").await;
    }
    let fired: i64 = s.one("SELECT count(*) FROM @ready_entries").await;
    db.until(&format!("SELECT (SELECT count(*) FROM @ready_entries) > {fired}")).await;
    for leader in leaders {
        leader.stop().await;
    }
    let count = "SELECT count(*) FROM @ready_entries WHERE metadata->>'cron_name' = 'c'";
    let twice = "SELECT count(*) - count(DISTINCT metadata->>'cron_fire_time') FROM @ready_entries";
    let end: i64 = s.one("SELECT extract(epoch FROM cursor_at)::bigint FROM @cron_jobs").await;
    assert_eq!(s.one::<i64>(twice).await, 0);
    assert_eq!(s.one::<i64>(count).await + listed(&s, "c").await.missed_count, end - start);
}

#[tokio::test]
async fn one_that_cannot_be_fired_keeps_no_other_back_and_says_why() {
    let db = Db::new().await;
    let s = db.session().await;
    for name in ["a", "b", "c", "d", "z"] {
        due_once(&s, name).await;
    }
    s.exec("UPDATE @cron_jobs SET priority = 9 WHERE name = 'a'").await;
    s.exec("UPDATE @cron_jobs SET metadata = '[]' WHERE name = 'b'").await;
    s.exec("UPDATE @cron_jobs SET cron_expr = 'nonsense' WHERE name = 'c'").await;
    s.exec("UPDATE @cron_jobs SET timezone = 'Mars/Olympus' WHERE name = 'd'").await;
    let passed = pass(&s).await;
    assert_eq!((passed.fired, passed.missed), (1, 2));
    assert_eq!(passed.failed.keys().collect::<Vec<_>>(), ["a", "b", "c", "d"]);
    for (name, why, missed) in
        [("a", "priority must be 1", 1), ("b", "metadata must be", 1), ("c", "nonsense", 0), ("d", "Mars/Olympus", 0)]
    {
        let job = listed(&s, name).await;
        assert!(job.last_error.as_deref().unwrap().contains(why), "{job:?}");
        assert!(job.last_error_at.is_some());
        assert_eq!(job.missed_count, missed, "{job:?}");
    }
    assert_eq!(listed(&s, "z").await.last_error, None);
    assert_eq!(pass(&s).await, Passed::default(), "none of them is tried without end");

    // Corrected, they go on.
    s.exec("UPDATE @cron_jobs SET priority = 1 WHERE name = 'a'").await;
    rewind(&s, "a", &format!("{NEW_YEAR} - interval '1 second'")).await;
    assert_eq!(pass(&s).await, fired(1));
    assert_eq!(listed(&s, "a").await.last_error, None);
}

#[tokio::test]
async fn what_fails_only_for_now_stays_due() {
    let db = Db::new().await;
    let (leader, blocker) = (db.session().await, db.session().await);
    due_once(&leader, "c").await;
    // As prune holds the slot.
    blocker.exec("BEGIN; SELECT pg_advisory_xact_lock('awa.queue_ring_slots'::regclass::oid::integer, n) FROM generate_series(0, 15) AS n").await;
    leader.exec("SET lock_timeout = '50ms'").await;
    let passed = pass(&leader).await;
    assert_eq!((passed.fired, passed.missed), (0, 0));
    assert!(passed.failed["c"].contains("lock timeout"), "{passed:?}");
    assert!(listed(&leader, "c").await.last_error.unwrap().contains("lock timeout"));
    blocker.exec("COMMIT").await;
    assert_eq!(pass(&leader).await, Passed::default(), "not at once again");
    leader.exec("UPDATE @cron_jobs SET next_due_at = clock_timestamp()").await;
    assert_eq!(pass(&leader).await, fired(1));
    let job = listed(&leader, "c").await;
    assert_eq!((job.missed_count, job.last_error), (0, None));
}

#[tokio::test]
async fn a_leader_whose_clock_is_ahead_fires_nothing_early() {
    let db = Db::new().await;
    let s = db.session().await;
    put(&s, "c", YEARLY).await;
    let early = "SELECT outcome FROM @fire_cron('c', 0, clock_timestamp() + interval '1 minute', true, 0, 'infinity')";
    assert_eq!(s.one::<String>(early).await, "early");
    assert_eq!(pass(&s).await, Passed::default());
    assert_eq!(jobs_made(&s).await, 0);
}

#[tokio::test]
async fn triggering_enqueues_now_and_leaves_the_schedule_alone() {
    let db = Db::new().await;
    let s = db.session().await;
    put(&s, "c", "0 * * * *").await;
    s.exec("SELECT @pause_cron('c', true)").await;
    let before: String = s.one("SELECT c::text FROM @cron_jobs AS c").await;
    let id = cron::trigger(&s.client, &schema(), "c").await.unwrap().unwrap();
    assert_eq!(s.one::<String>("SELECT c::text FROM @cron_jobs AS c").await, before);
    assert_eq!(
        s.one::<i64>(
            "SELECT job_id FROM @ready_entries WHERE metadata @> '{\"cron_name\": \"c\", \"cron_triggered\": true}'"
        )
        .await,
        id
    );
    assert_eq!(cron::trigger(&s.client, &schema(), "none").await.unwrap(), None);
}

#[tokio::test]
async fn a_definition_put_again_changes_nothing_and_of_two_at_once_one_adds() {
    let db = Db::new().await;
    let (a, b) = (db.session().await, db.session().await);
    assert_eq!(put(&a, "c", "0 * * * *").await, Put::Added);
    let before: String = a.one("SELECT c::text || c.xmin FROM @cron_jobs AS c").await;
    assert_eq!(put(&b, "c", "0 * * * *").await, Put::Unchanged);
    assert_eq!(a.one::<String>("SELECT c::text || c.xmin FROM @cron_jobs AS c").await, before, "not even written");
    assert_eq!(put(&b, "c", "1 * * * *").await, Put::Changed);
    let differs = Definition::new("2 * * * *", "k");
    assert_eq!(cron::put(&a.client, &schema(), "c", &differs, false).await.unwrap(), Put::Exists);

    let call = "SELECT @put_cron_job('d', '* * * * *', 'UTC', 'k', 'q', '{}', 2, 25, NULL, NULL, true)";
    a.exec("BEGIN").await;
    assert_eq!(a.one::<String>(call).await, "added");
    let pid = b.pid().await;
    let second = b.spawn(call);
    db.until_waiting(pid).await;
    a.exec("COMMIT").await;
    assert_eq!(second.await.unwrap().unwrap()[0].get::<_, String>(0), "unchanged");
}

#[tokio::test]
async fn another_kind_or_queue_keeps_what_is_due() {
    let db = Db::new().await;
    let s = db.session().await;
    due_once(&s, "c").await;
    let mut job = Definition::new(YEARLY, "other");
    job.queue = "q".into();
    assert_eq!(cron::put(&s.client, &schema(), "c", &job, true).await.unwrap(), Put::Changed);
    assert_eq!(pass(&s).await, fired(1));
    assert_eq!(s.one::<String>("SELECT kind FROM @ready_entries").await, "other");
}

#[tokio::test]
async fn a_definition_that_could_never_fire_is_refused_with_its_field() {
    let db = Db::new().await;
    let s = db.session().await;
    let good = Definition::new("0 * * * *", "k");
    let cases: [(Definition, &str); 7] = [
        (Definition { schedule: "nonsense".into(), ..good.clone() }, "cron expression"),
        (Definition { schedule: "0 0 30 2 *".into(), ..good.clone() }, "never comes due"),
        (Definition { timezone: "Mars/Olympus".into(), ..good.clone() }, "timezone"),
        (Definition { kind: String::new(), ..good.clone() }, "kind"),
        (Definition { priority: 70_000, ..good.clone() }, "priority"),
        (Definition { metadata: RawJson::from_json("[]").unwrap(), ..good.clone() }, "metadata"),
        (Definition { max_attempts: 0, ..good }, "max_attempts"),
    ];
    for (job, named) in cases {
        let error = cron::put(&s.client, &schema(), "c", &job, true).await.unwrap_err();
        assert!(matches!(error, EngineError::InvalidInput { .. }), "{error:?}");
        assert!(error.to_string().contains(named), "{error}");
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @cron_jobs").await, 0);
}

#[tokio::test]
async fn resuming_makes_up_for_nothing() {
    let db = Db::new().await;
    let s = db.session().await;
    due_once(&s, "c").await;
    assert_eq!(cron::pause(&s.client, &schema(), "c", true).await.unwrap(), Some(true));
    assert_eq!(cron::pause(&s.client, &schema(), "c", true).await.unwrap(), Some(false));
    assert_eq!(listed(&s, "c").await.next_due_at, None);
    assert_eq!(cron::pause(&s.client, &schema(), "c", false).await.unwrap(), Some(true));
    assert_eq!(pass(&s).await, Passed::default());
    assert!(listed(&s, "c").await.next_due_at.is_some());
    assert_eq!(cron::pause(&s.client, &schema(), "none", true).await.unwrap(), None);
}

#[tokio::test]
async fn what_a_0_5_leader_fired_on_the_same_table_is_not_fired_again() {
    let db = Db::new().await;
    let s = db.session().await;
    let seen = due_once(&s, "c").await;
    s.exec(&format!("UPDATE @cron_jobs SET last_enqueued_at = {NEW_YEAR}, updated_at = now()")).await;
    assert_eq!(s.one::<String>(&fire("c", seen)).await, "lost");
    assert_eq!(pass(&s).await, Passed::default());
    assert_eq!(jobs_made(&s).await, 0);
}

#[tokio::test]
async fn the_session_s_time_zone_does_not_matter_nor_does_the_schema_s_name() {
    let db = Db::odd().await;
    let s = db.session().await;
    s.exec("SET TimeZone = 'Asia/Kathmandu'; SET DateStyle = 'German'").await;
    let odd = Schema::new(ODD).unwrap();
    cron::put(&s.client, &odd, "c", &Definition::new(YEARLY, "k"), false).await.unwrap();
    rewind(&s, "c", &format!("{NEW_YEAR} - interval '1 second'")).await;
    assert_eq!(cron::pass(&s.client, &odd).await.unwrap(), fired(1));
    let time: String = s.one("SELECT metadata->>'cron_fire_time' FROM @ready_entries").await;
    assert!(time.starts_with("20") && time.ends_with("-01-01 00:00:00+00"), "{time}");
    assert!(cron::remove(&s.client, &odd, "c").await.unwrap());
    assert!(!cron::remove(&s.client, &odd, "c").await.unwrap());
}
