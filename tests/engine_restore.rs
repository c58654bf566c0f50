//! Going on in a database that pg_restore filled: sequences in a dump are ahead of the tables beside them.

mod common;

use awactl::engine::Schema;
use awactl::engine::maintenance::{MaintenanceOptions, once};
use common::{Db, attempts, jobs, sorted};

async fn maintain(db: &Db) {
    let options = MaintenanceOptions { keep_sealed: 0, ..MaintenanceOptions::default() };
    once(&db.session().await.client, &Schema::new("awa").unwrap(), &options).await.unwrap();
}

#[tokio::test]
async fn jobs_that_nobody_had_claimed_when_the_dump_began_are_claimed_after_the_restore() {
    let db = Db::new().await;
    let s = db.session().await;
    let all = s.enqueue("q", 6).await;
    let taken = s.claim("q", 2).await;
    // The dump has the tables as they are now, and the cursor as it is after everything was claimed.
    db.exec("SELECT setval(l.spent, 6), setval(l.generation, 3) FROM @queue_lanes AS l").await;
    db.exec("UPDATE @schema_homes SET home = 'the database that was dumped'").await;
    assert_eq!(s.probe("q", 10).await.len(), 0);

    maintain(&db).await;
    let rest = s.claim("q", 10).await;
    assert_eq!(jobs(&rest), all[2..]);
    for batches in [taken, rest] {
        assert_eq!(s.complete(&attempts(&batches)).await, []);
    }
    assert_eq!(s.probe("q", 10).await.len(), 0);
}

#[tokio::test]
async fn cursors_are_left_alone_where_the_schema_was_made() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 3).await;
    // Not by itself a reason to look: that would read every job at each start.
    db.exec("UPDATE @schema_homes SET home = @current_home()").await;
    db.exec("SELECT setval(l.spent, 3) FROM @queue_lanes AS l").await;
    maintain(&db).await;
    assert_eq!(s.one::<i64>("SELECT pg_sequence_last_value(l.spent) FROM @queue_lanes AS l").await, 3);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @schema_homes").await, 1);
}

#[tokio::test]
async fn ring_cursors_that_name_slots_in_use_lose_and_double_nothing() {
    let db = Db::new().await;
    let s = db.session().await;
    let mut all = s.enqueue("q", 3).await;
    let mut taken = s.claim("q", 1).await;
    for ring in ["queue", "claim"] {
        s.rotate(ring).await;
    }
    all.extend(s.enqueue("q", 3).await);
    // Generations 1 to 4 were opened while the dump was made, and the fifth time it was slot 0 again.
    db.exec("SELECT setval('@queue_ring_cursor', 5 << 8), setval('@claim_ring_cursor', 5 << 8)").await;
    all.extend(s.enqueue("q", 3).await);
    taken.extend(s.probe("q", 100).await);
    assert_eq!(sorted(jobs(&taken)), all);
    for ring in ["queue", "claim"] {
        let (rotated, slot, reason) = s.rotate(ring).await;
        assert!(rotated && slot == 2, "{ring}: slot {slot}, {reason}");
        let newest = format!("SELECT max(generation) FROM @{ring}_ring_state");
        assert_eq!(s.one::<i64>(&newest).await, 6, "a generation is given once");
    }
    all.extend(s.enqueue("q", 3).await);
    taken.extend(s.probe("q", 100).await);
    assert_eq!(sorted(jobs(&taken)), all);

    // Open attempts keep their slots, whatever generation they were claimed in.
    for ring in ["queue", "claim"] {
        assert!(!s.prune(ring, 0).await.0, "{ring}");
    }
    assert_eq!(s.complete(&attempts(&taken)).await, []);
    assert_eq!(s.probe("q", 10).await.len(), 0);
    maintain(&db).await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @ring_slots('claim') WHERE state = 'sealed'").await, 0);
    assert_eq!(s.one::<i64>("SELECT job_count FROM @queue_counts() WHERE state = 'completed'").await, 12);
}

#[tokio::test]
async fn a_lease_in_a_slot_that_the_cursor_names_is_not_truncated() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 1).await;
    let a = attempts(&s.claim("q", 1).await)[0];
    s.exec(&format!("SELECT @materialise({}::smallint, {}, {}, {})", a.slot, a.receipt, a.job, a.lease)).await;
    s.rotate("lease").await;
    db.exec("SELECT setval('@lease_ring_cursor', 5 << 8)").await;
    assert_eq!(s.prune("lease", 0).await.1, "promised");
    s.rotate("lease").await;
    assert!(s.prune("lease", 0).await.0);
    assert_eq!(s.one::<i64>("SELECT job_id FROM @leases").await, a.job);
}
