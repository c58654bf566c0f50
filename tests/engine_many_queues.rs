//! More queues than a server's lock table has room for at once.

use awactl::engine::embedded::{Embedded, Options};
use awactl::engine::maintenance::{MaintenanceOptions, once};
use awactl::engine::migrate;
use awactl::engine::migrations::MIGRATIONS;
use awactl::engine::worker::open;
use awactl::engine::{Schema, Target};

#[tokio::test]
async fn maintenance_goes_over_many_queues_in_turns() {
    // Room for about 2,000 locks and what shared memory has to spare; a pass over 1,600 lanes takes 4,800.
    let options = Options::ephemeral().setting("max_connections", "10").setting("max_locks_per_transaction", "64");
    let server = Embedded::start(options.setting("shared_buffers", "32MB").setting("fsync", "off")).await.unwrap();
    let schema = Schema::default();
    let target = Target::parse(&server.url(), schema.clone(), "test", &|_| None).unwrap();
    let mut session = open(&target).await.unwrap();
    migrate::run(&mut session, &schema, MIGRATIONS, &|_| {}).await.unwrap();
    for n in 0..16 {
        let sql =
            format!("SELECT awa.enqueue('k', 'q' || n) FROM generate_series({n} * 100 + 1, {n} * 100 + 100) AS n");
        session.batch_execute(&sql).await.unwrap();
    }
    session.batch_execute("UPDATE awa.schema_homes SET home = 'elsewhere'").await.unwrap();
    // Claimed and nobody's turn again: only maintenance moves this cursor.
    session.batch_execute("SELECT FROM awa.claim('q1600', 1)").await.unwrap();
    once(&session, &schema, &MaintenanceOptions::default()).await.unwrap();
    let spent = "SELECT pg_sequence_last_value(l.spent) FROM awa.queue_lanes AS l WHERE l.queue = 'q1600'";
    assert_eq!(session.query_one(spent, &[]).await.unwrap().get::<_, i64>(0), 1);
    session.close().await;
    server.stop().await.unwrap();
}
