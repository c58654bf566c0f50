//! A primary that dies and a standby that takes its place (issue 3, point 14).

use std::collections::HashSet;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use awactl::engine::embedded::{Embedded, Options};
use awactl::engine::maintenance::{Lead, Maintenance, MaintenanceOptions, NotLeading, leader};
use awactl::engine::worker::{Fleet, FleetOptions, JobContext, Outcome, open};
use awactl::engine::{Schema, Session as EngineSession, Target, connect};
use tokio::sync::watch;

use crate::support::{Gate, OwnServer, one, queue, target, until, within};

/// A streaming copy of a server.
struct Standby {
    server: Embedded,
    _dir: tempfile::TempDir,
}

impl Standby {
    async fn of(primary: &Embedded) -> Self {
        let dir = tempfile::Builder::new().prefix("awactl-standby-").tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o711)).unwrap();
        let data = dir.path().join("data");
        std::fs::create_dir(&data).unwrap();
        std::fs::set_permissions(&data, std::fs::Permissions::from_mode(0o700)).unwrap();
        // Not every server comes with a pg_basebackup: what it does, by hand.
        let session = open(&target(&primary.url())).await.unwrap();
        session.batch_execute("SELECT pg_backup_start('standby', true)").await.unwrap();
        copy_files(primary.data_dir(), &data);
        let sql = "SELECT labelfile FROM pg_backup_stop(false)";
        let label: String = session.query_one(sql, &[]).await.unwrap().get(0);
        std::fs::write(data.join("backup_label"), label).unwrap();
        std::fs::write(data.join("standby.signal"), "").unwrap();
        let primary_url = primary.url().replace('\'', "''");
        let mut settings = std::fs::OpenOptions::new().append(true).open(data.join("postgresql.auto.conf")).unwrap();
        writeln!(settings, "primary_conninfo = '{primary_url}'").unwrap();
        // The server does not run as root, even if this test does.
        let owner = std::fs::metadata(primary.data_dir()).unwrap();
        own(&data, owner.uid(), owner.gid());
        std::fs::copy(primary.data_dir().with_file_name("password"), dir.path().join("password")).unwrap();
        let options = Options::in_dir(dir.path()).setting("shared_buffers", "32MB").setting("fsync", "off");
        Self { server: Embedded::start(options).await.unwrap(), _dir: dir }
    }
}

/// A data directory while its server runs; files may go and change meanwhile.
fn copy_files(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o700)).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        let (path, copy) = (entry.path(), to.join(entry.file_name()));
        if ["postmaster.pid", "postmaster.opts"].iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => copy_files(&path, &copy),
            Ok(_) => match std::fs::copy(&path, &copy) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                copied => drop(copied.unwrap()),
            },
            Err(_) => {}
        }
    }
}

fn own(path: &Path, uid: u32, gid: u32) {
    chown(path, Some(uid), Some(gid)).unwrap();
    if path.is_dir() {
        for entry in std::fs::read_dir(path).unwrap() {
            own(&entry.unwrap().path(), uid, gid);
        }
    }
}

/// Both servers in one address.
fn target_of(servers: [&Embedded; 2], more: &str) -> Target {
    let [hosts, ports] =
        [servers.map(|s| s.socket_dir().to_str().unwrap().to_owned()), servers.map(|s| s.tcp_port().to_string())];
    target(&format!("host={} port={} user=postgres dbname=postgres {more}", hosts.join(","), ports.join(",")))
}

async fn is(session: &EngineSession, condition: &str) -> bool {
    session.query_one(condition, &[]).await.unwrap().get(0)
}

async fn until_true(session: &EngineSession, condition: &str) {
    within(async {
        while !is(session, condition).await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
}

/// Jobs whose commit was acknowledged, and those of which nobody knows.
#[derive(Default)]
struct Enqueued {
    acknowledged: HashSet<i64>,
    maybe: HashSet<i64>,
}

impl Enqueued {
    fn note(&mut self, id: i64, committed: bool) {
        let known = if committed { &mut self.acknowledged } else { &mut self.maybe };
        known.insert(id);
    }
}

/// One job after the other, over as many connections as it takes.
async fn produce(target: Target, enqueued: Arc<Mutex<Enqueued>>, stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        let Ok(mut session) = open(&target).await else {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        };
        while !*stop.borrow() {
            let Ok(transaction) = session.transaction().await else { break };
            let Ok(row) = transaction.query_one("SELECT job_id FROM awa.enqueue('k', 'q')", &[]).await else { break };
            let id = row.get(0);
            let committed = transaction.commit().await.is_ok();
            enqueued.lock().unwrap().note(id, committed);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fleets_go_on_at_the_promoted_standby_and_lose_nothing() {
    let primary = OwnServer::start().await;
    let standby = Standby::of(&primary.server).await;
    let session = primary.session().await;
    session.batch_execute("ALTER SYSTEM SET synchronous_standby_names = '*'").await.unwrap();
    session.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until_true(&session, "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')").await;

    // The second finds a standby first, and does not say what it needs.
    let targets = [
        target_of([&primary.server, &standby.server], "target_session_attrs=read-write"),
        target_of([&standby.server, &primary.server], ""),
    ];
    let gate = Gate::new();
    let ran: Arc<Mutex<Vec<i64>>> = Arc::default();
    let fleets = targets.each_ref().map(|target| {
        let (gate, ran) = (gate.clone(), Arc::clone(&ran));
        let registry = one(move |ctx: JobContext| {
            let (gate, ran) = (gate.clone(), Arc::clone(&ran));
            async move {
                ran.lock().unwrap().push(ctx.job().id);
                gate.pass().await;
                Outcome::Complete
            }
        });
        let mut options = FleetOptions::new(vec![queue("q", 4)]);
        // Full hands claim nothing: when the primary dies, no claim is on its way whose answer would be lost with it.
        options.queues[0].prefetch = Some(0);
        options.poll_interval = Duration::from_millis(50);
        // All history is kept, to be counted in the end.
        options.maintenance = Some(MaintenanceOptions {
            lead_every: Duration::from_millis(100),
            rotate_every: Duration::from_millis(500),
            keep_sealed: 16,
            ..MaintenanceOptions::default()
        });
        Fleet::start(target, registry, options)
    });
    let enqueued: Arc<Mutex<Enqueued>> = Arc::default();
    let acknowledged = || enqueued.lock().unwrap().acknowledged.len();
    let (stop, stopped) = watch::channel(false);
    let producer = tokio::spawn(produce(targets[0].clone(), Arc::clone(&enqueued), stopped));
    until("every worker has a job, and more wait", || gate.waiting() == 8 && acknowledged() >= 20).await;
    let schema = Schema::default();
    until_true(&session, "SELECT max(generation) > 0 FROM awa.queue_ring_state").await;
    assert!(leader(&session, &schema).await.unwrap().is_some());

    // Nobody leads on a standby, whatever the address says.
    let on_standby = target(&standby.server.url());
    let candidate = Maintenance::start(
        &on_standby,
        MaintenanceOptions { lead_every: Duration::from_millis(10), ..MaintenanceOptions::default() },
    );
    let refused = || candidate.report().skipped.get("lead: the server is a standby").copied().unwrap_or(0);
    until("a candidate on the standby is refused over and over", || refused() >= 3).await;
    let (lead, _) = Lead::take(connect(&on_standby).await.unwrap(), &schema, Duration::from_secs(15)).await;
    assert!(matches!(lead, Err(NotLeading::Refused("the server is a standby"))));
    assert!(!candidate.stop().await.leading);

    primary.server.stop_immediate().await.unwrap();
    // What these return is computed while nobody can take it.
    let flushes = fleets.each_ref().map(|fleet| fleet.stats().flushes);
    gate.open(8);
    until("both fail to write", || fleets.iter().zip(flushes).all(|(f, before)| f.stats().flushes > before)).await;
    let session = connect(&on_standby).await.unwrap();
    assert!(leader(&session, &schema).await.unwrap().is_none());
    let turns: i64 = session.query_one("SELECT max(generation) FROM awa.queue_ring_state", &[]).await.unwrap().get(0);
    assert!(is(&session, "SELECT pg_promote()").await, "not promoted");
    gate.open(1_000_000);
    let before = acknowledged();
    until("what was computed is written, and more is enqueued and done", || {
        fleets.iter().all(|fleet| fleet.stats().completed > 8) && acknowledged() > before + 20
    })
    .await;
    until_true(&session, &format!("SELECT max(generation) > {turns} FROM awa.queue_ring_state")).await;
    assert!(leader(&session, &schema).await.unwrap().is_some());
    stop.send_replace(true);
    producer.await.unwrap();
    let Enqueued { acknowledged, maybe } = std::mem::take(&mut *enqueued.lock().unwrap());
    let ids: HashSet<i64> = within(async {
        loop {
            let rows = session.query("SELECT id FROM awa.terminal_jobs WHERE state = 'completed'", &[]).await.unwrap();
            let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
            let unique: HashSet<i64> = ids.iter().copied().collect();
            assert_eq!(unique.len(), ids.len(), "a job that ended twice");
            if unique.is_superset(&acknowledged) {
                return unique;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let gap = "SELECT max(batch_id) > 1000000 AND max(batch_id) < 2000000 FROM awa.lease_claim_batches";
    assert!(is(&session, gap).await, "no number of the old timeline is used again");
    assert!(ids.iter().all(|id| acknowledged.contains(id) || maybe.contains(id)), "a job that nobody enqueued");
    for fleet in fleets {
        let stats = within(fleet.shut_down()).await;
        assert_eq!((stats.lost, stats.unwritten), (0, 0));
    }
    // Each ran once: no result had to be computed again.
    let ran = std::mem::take(&mut *ran.lock().unwrap());
    assert_eq!(ran.len(), ran.iter().collect::<HashSet<_>>().len(), "a job that ran twice");
    session.close().await;
    standby.server.stop().await.unwrap();
    primary.server.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_result_from_before_a_failover_that_lost_its_claim_ends_no_other_attempt() {
    let primary = OwnServer::start().await;
    let before = primary.session().await;
    // Below what a sequence logs ahead, so that both go on at the same number.
    let claim_one =
        "SELECT claim_slot, batch_id * 1024, job_ids[1], run_leases[1] FROM awa.claim('q', 1, NULL, 'before')";
    let enqueue = "SELECT awa.enqueue('k', 'q')";
    for _ in 0..5 {
        before.query_one(enqueue, &[]).await.unwrap();
        before.query_one(claim_one, &[]).await.unwrap();
    }
    let standby = Standby::of(&primary.server).await;
    let there = connect(&target(&standby.server.url())).await.unwrap();
    until_true(&there, "SELECT count(*) = 5 FROM awa.lease_claim_batches").await;
    there.batch_execute("ALTER SYSTEM SET primary_conninfo = ''").await.unwrap();
    there.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    until_true(&there, "SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)").await;
    // What the standby never hears of.
    let mut lost = vec![];
    for _ in 0..100 {
        before.query_one(enqueue, &[]).await.unwrap();
        let row = before.query_one(claim_one, &[]).await.unwrap();
        lost.push((row.get::<_, i16>(0), row.get::<_, i64>(1), row.get::<_, i64>(2), row.get::<_, i64>(3)));
    }
    primary.server.stop_immediate().await.unwrap();
    assert!(is(&there, "SELECT pg_promote()").await, "not promoted");

    // As every worker does before it claims.
    for first in [true, false] {
        assert_eq!(is(&there, "SELECT awa.enter_timeline()").await, first);
    }
    for _ in 0..100 {
        there.query_one(enqueue, &[]).await.unwrap();
        there.query_one(claim_one, &[]).await.unwrap();
    }
    for (slot, receipt, job, lease) in lost {
        let complete = "SELECT count(*) = 1 FROM awa.complete(ARRAY[$1::smallint], ARRAY[$2::bigint], ARRAY[$3::bigint], ARRAY[$4::bigint])";
        let loses: bool = there.query_one(complete, &[&slot, &receipt, &job, &lease]).await.unwrap().get(0);
        assert!(loses, "the attempt of another job {job} was ended by receipt {receipt}");
    }
    assert!(is(&there, "SELECT NOT EXISTS (SELECT FROM awa.receipt_completion_batches)").await);
    there.close().await;
    standby.server.stop().await.unwrap();
    primary.server.stop().await.unwrap();
}
