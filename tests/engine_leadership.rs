//! Who leads maintenance: one at a time, lost at once, through poolers too, and never on a standby (issue 3, point 14).

mod common;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use awactl::engine::connect;
use awactl::engine::cron::{self, Definition};
use awactl::engine::maintenance::{Lead, Maintenance, MaintenanceOptions, NotLeading, leader};
use awactl::engine::{Schema, Session as EngineSession, Target};
use common::pooler::Pooler;
use common::{Db, Session, attempts, server};

/// Long enough for any machine: only a hang takes it.
const PATIENCE: Duration = Duration::from_secs(60);

const LEASE: Duration = Duration::from_secs(15);

fn target(url: &str) -> Target {
    Target::parse(url, Schema::default(), "test", &|_| None).unwrap()
}

fn target_of(db: &Db) -> Target {
    target(&server::server().url_of(db.config().get_dbname().unwrap()))
}

fn options() -> MaintenanceOptions {
    MaintenanceOptions { lead_every: Duration::from_millis(20), ..MaintenanceOptions::default() }
}

fn database(db: &Db) -> String {
    db.config().get_dbname().unwrap().to_owned()
}

async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// How often a candidate was told that another one leads.
fn refused(candidate: &Maintenance) -> u64 {
    candidate.report().skipped.get("lead: another process leads").copied().unwrap_or(0)
}

/// It leads, and has a connection for its passes.
async fn passing(candidate: &Maintenance) {
    until("it passes", || candidate.report().skipped.keys().any(|task| task.starts_with("rotate"))).await;
}

async fn leader_pid(session: &EngineSession) -> i32 {
    leader(session, &Schema::default()).await.unwrap().expect("somebody leads").pid
}

async fn lead(target: &Target, lease: Duration) -> Result<Lead, NotLeading> {
    Lead::take(connect(target).await.unwrap(), &Schema::default(), lease).await.0
}

/// A deferred job that is due now, however long it took to make it.
async fn defer(session: &Session) {
    session.exec("SELECT @enqueue('k', 'q', run_at => clock_timestamp() + interval '1 hour')").await;
    session.exec("UPDATE @deferred_jobs SET run_at = clock_timestamp()").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_leading_connection_is_killed_its_holder_knows_and_another_one_leads() {
    let db = Db::new().await;
    let target = target_of(&db);
    let watcher = connect(&target).await.unwrap();
    // Comes back long after the test.
    let first = Maintenance::start(&target, MaintenanceOptions { lead_every: Duration::from_secs(3600), ..options() });
    until("the first leads", || first.report().leading).await;
    let pid = leader_pid(&watcher).await;
    let second = Maintenance::start(&target, options());
    until("the second has tried over and over", || refused(&second) >= 3).await;
    assert!(!second.report().leading);
    assert_eq!(leader_pid(&watcher).await, pid);
    db.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    until("the first knows", || !first.report().leading).await;
    until("the second leads", || second.report().leading).await;
    assert_ne!(leader_pid(&watcher).await, pid);
    first.stop().await;
    second.stop().await;
    assert!(leader(&watcher, &Schema::default()).await.unwrap().is_none(), "the lead outlives its holders");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_ends_with_the_lead_wherever_it_is() {
    let db = Db::new().await;
    let target = target_of(&db);
    let (blocker, watcher) = (db.session().await, connect(&target).await.unwrap());
    let first = Maintenance::start(&target, MaintenanceOptions { lead_every: Duration::from_secs(3600), ..options() });
    until("it leads", || first.report().leading).await;
    blocker.exec("BEGIN").await;
    blocker.exec("LOCK TABLE @deferred_jobs IN ACCESS EXCLUSIVE MODE").await;
    let waits = format!(
        "EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{}' AND application_name = 'awactl maintenance'
                    AND wait_event_type = 'Lock')",
        database(&db)
    );
    db.until(&format!("SELECT {waits}")).await;
    db.exec(&format!("SELECT pg_terminate_backend({})", leader_pid(&watcher).await)).await;
    until("it knows in the middle of a pass", || !first.report().leading).await;
    // The table is still locked: nothing but a cancellation ends the statement.
    db.until(&format!("SELECT NOT {waits}")).await;
    first.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_that_may_not_maintain_leaves_the_lead_to_one_that_may() {
    let db = Db::new().await;
    let s = db.session().await;
    s.exec(
        "CREATE ROLE looker; GRANT USAGE ON SCHEMA awa TO looker; GRANT SELECT ON ALL TABLES IN SCHEMA awa TO looker",
    )
    .await;
    let url = server::server().url_of(&database(&db));
    let options_of = if url.contains('?') { '&' } else { '?' };
    let looker = target(&format!("{url}{options_of}options=-c%20role%3Dlooker"));
    // Comes back long after the test.
    let first = Maintenance::start(&looker, MaintenanceOptions { lead_every: Duration::from_secs(3600), ..options() });
    until("it gives up", || first.report().failed.get("lead").is_some_and(|e| e.contains("permission denied"))).await;
    let second = Maintenance::start(&target(&url), options());
    defer(&s).await;
    until("the other one does the work", || second.report().promoted == 1).await;
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_connection_of_its_passes_is_killed_a_leader_opens_another() {
    let db = Db::new().await;
    let target = target_of(&db);
    let watcher = connect(&target).await.unwrap();
    let maintenance = Maintenance::start(&target, options());
    passing(&maintenance).await;
    let pid = leader_pid(&watcher).await;
    let s = db.session().await;
    let passes = format!(
        "SELECT pid FROM pg_stat_activity WHERE datname = '{}' AND application_name = 'awactl maintenance'",
        database(&db)
    );
    for n in 1..=5 {
        db.until(&format!("SELECT EXISTS ({passes})")).await;
        let pass_pid: i32 = s.one(&passes).await;
        db.exec(&format!("SELECT pg_terminate_backend({pass_pid})")).await;
        db.until_gone(pass_pid).await;
        defer(&s).await;
        until("it goes on", || maintenance.report().promoted == n).await;
    }
    assert_eq!(leader_pid(&watcher).await, pid, "the lead was lost");
    assert!(maintenance.stop().await.failed.keys().all(|task| *task != "lead"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_server_takes_no_more_writes_leads_no_longer_and_comes_back() {
    let db = Db::new().await;
    let target = target_of(&db);
    let maintenance = Maintenance::start(&target, options());
    passing(&maintenance).await;
    // Holds for new sessions: the one that leads is from before.
    let database = database(&db);
    db.exec(&format!("ALTER DATABASE {database} SET default_transaction_read_only = on")).await;
    let passes = format!("datname = '{database}' AND application_name = 'awactl maintenance'");
    db.until(&format!(
        "SELECT coalesce(bool_or(pg_terminate_backend(pid)), false) FROM pg_stat_activity WHERE {passes}"
    ))
    .await;
    until("it is refused", || maintenance.report().skipped.contains_key("lead: the server is read-only")).await;
    assert!(!maintenance.report().leading);
    db.exec(&format!("ALTER DATABASE {database} RESET default_transaction_read_only")).await;
    until("it leads again", || maintenance.report().leading).await;
    maintenance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leading_holds_back_neither_vacuum_nor_anybody_who_wants_a_lock() {
    let db = Db::new().await;
    let target = target_of(&db);
    let watcher = connect(&target).await.unwrap();
    let lead = lead(&target, LEASE).await.unwrap();
    lead.renew().await.unwrap();
    let pid = leader_pid(&watcher).await;
    db.until(&format!("SELECT state = 'idle in transaction' FROM pg_stat_activity WHERE pid = {pid}")).await;
    let pins = format!("SELECT backend_xmin IS NULL AND backend_xid IS NULL FROM pg_stat_activity WHERE pid = {pid}");
    assert!(db.one::<bool>(&pins).await);
    let locks: Vec<String> =
        db.session().await.all(&format!("SELECT locktype FROM pg_locks WHERE pid = {pid} ORDER BY 1")).await;
    assert_eq!(locks, ["advisory", "virtualxid"]);
    lead.give_up().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lead_of_one_who_falls_silent_goes_to_another() {
    let db = Db::new().await;
    let target = target_of(&db);
    let silent = lead(&target, Duration::from_millis(200)).await.unwrap();
    let other = Maintenance::start(&target, options());
    until("the other one leads", || other.report().leading).await;
    assert!(silent.renew().await.is_err(), "it believes that it leads");
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_who_speaks_up_keeps_the_lead_for_longer_than_a_lease() {
    let db = Db::new().await;
    let target = target_of(&db);
    let watcher = connect(&target).await.unwrap();
    let lease = Duration::from_secs(6);
    let maintenance = Maintenance::start(&target, MaintenanceOptions { lead_lease: lease, ..options() });
    until("it leads", || maintenance.report().leading).await;
    // All passes wait behind one that waits: nothing is left but the beat.
    let blocker = db.session().await;
    blocker.exec("BEGIN").await;
    blocker.exec("LOCK TABLE @cron_jobs IN ACCESS EXCLUSIVE MODE").await;
    let pid = leader_pid(&watcher).await;
    let age = "SELECT clock_timestamp() - xact_start > interval '7 seconds' FROM pg_stat_activity";
    db.until(&format!("{age} WHERE pid = {pid}")).await;
    assert!(maintenance.report().leading);
    assert_eq!(leader_pid(&watcher).await, pid);
    blocker.exec("ROLLBACK").await;
    maintenance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn through_a_transaction_pooler_one_of_two_leads_and_maintains() {
    let db = Db::new().await;
    let pooler = Pooler::start(&database(&db), 3).await;
    let (direct, pooled) = (target_of(&db), target(&pooler.url()));
    let (s, watcher) = (db.session().await, connect(&direct).await.unwrap());
    let every_second = Definition::new("* * * * * *", "k");
    cron::put(&watcher, &Schema::default(), "c", &every_second, true).await.unwrap();
    let options = MaintenanceOptions {
        rotate_every: Duration::from_millis(20),
        prune_every: Duration::from_millis(20),
        keep_sealed: 0,
        ..options()
    };
    let candidates = [0, 1].map(|_| Maintenance::start(&pooled, options.clone()));
    let led = || [0, 1].map(|n: usize| candidates[n].report().led);
    let mut before = [0, 0];
    for round in 1..=3 {
        until("one leads", || led() != before).await;
        let leader = usize::from(led()[0] == before[0]);
        let follower = 1 - leader;
        before = led();
        let tried = refused(&candidates[follower]);
        until("the other one is refused", || refused(&candidates[follower]) > tried).await;
        let then = candidates[leader].report();
        let more = |now: &BTreeMap<&str, u64>, then: &BTreeMap<&str, u64>| {
            ["queue", "claim"].iter().all(|ring| now.get(ring) > then.get(ring))
        };
        let end = Instant::now() + PATIENCE;
        loop {
            s.enqueue("q", 5).await;
            defer(&s).await;
            // Busy now and then: maintenance looks after lanes too.
            let claimed = s.try_claim("q", 1024, true).await.unwrap().unwrap_or_default();
            assert_eq!(s.complete(&attempts(&claimed)).await, []);
            let now = candidates[leader].report();
            let went_on = more(&now.rotated, &then.rotated) && more(&now.pruned, &then.pruned);
            if went_on && now.promoted > then.promoted && now.cron_fired > then.cron_fired {
                break;
            }
            assert!(Instant::now() < end, "it leads and does not maintain: {now:?}");
        }
        assert_eq!(led(), before, "another one led in round {round}");
        let pid = leader_pid(&watcher).await;
        db.exec(&format!("SELECT pg_terminate_backend({pid})")).await;
    }
    for candidate in candidates {
        let mut report = candidate.stop().await;
        report.failed.remove("lead");
        assert!(report.failed.is_empty(), "{:?}", report.failed);
    }
    db.until("SELECT NOT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))").await;
}
