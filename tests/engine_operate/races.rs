//! Against whoever wants a job at the same moment: another operator, a claim, a promotion, a prune, and all of them.

use super::*;

/// Two operators want the same of one job, in each place where it may lie.
#[tokio::test]
async fn of_two_operators_at_once_one_does_it_and_the_other_is_told() {
    for (made, operation) in [
        ("available", "cancel"),
        ("available", "delete"),
        ("available", "move"),
        ("running", "cancel"),
        ("waiting_external", "cancel"),
        ("scheduled", "retry"),
        ("retryable", "delete"),
        ("failed", "retry"),
        ("failed", "delete"),
        ("cancelled", "retry"),
        ("completed", "delete"),
        ("dlq", "retry"),
        ("dlq", "delete"),
        ("retained", "retry"),
    ] {
        for commits in [true, false] {
            let case = format!("{operation} of {made}, commits {commits}");
            let db = Db::new().await;
            let (s, a, b) = (db.session().await, db.session().await, db.session().await);
            if made == "dlq" {
                s.exec("SELECT @set_queue('q', p_dlq => true)").await;
            }
            let (job, _) = make(&s, if ["dlq", "retained"].contains(&made) { "failed" } else { made }).await;
            if made == "retained" {
                seal(&s).await;
                assert_eq!(s.prune_all("queue").await.1, []);
            }
            let pid = b.pid().await;
            a.exec("BEGIN").await;
            assert!(operate(&a, job, operation).await.done, "{case}");
            let second = b.spawn(&call(job, operation));
            db.until_waiting(pid).await;
            a.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
            let said = read(&second.await.unwrap().unwrap()[0]);
            // A job that was moved can be moved again.
            assert_eq!(said.done, !commits || operation == "move", "{case}: {said:?}");
            let after = match operation {
                "cancel" => "cancelled",
                "delete" => "none",
                _ => "available",
            };
            assert_eq!(state(&s, job).await, after, "{case}");
            if after == "available" {
                assert_eq!(s.drain("q").await, [job], "{case}");
            }
        }
    }
}

#[tokio::test]
async fn a_cancel_and_a_claim_at_once_leave_the_job_to_one_of_them() {
    for (operation, commits) in [("cancel", true), ("cancel", false), ("move", true), ("move", false), ("delete", true)]
    {
        let case = format!("{operation}, commits {commits}");
        let db = Db::new().await;
        let (claimer, operator) = (db.session().await, db.session().await);
        // The claim has the lane: the operator waits, and meets what became of the job.
        let job = claimer.enqueue("q", 1).await[0];
        let pid = operator.pid().await;
        claimer.exec("BEGIN").await;
        let a = attempts(&claimer.claim("q", 1).await);
        let waits = operator.spawn(&call(job, operation));
        db.until_waiting(pid).await;
        claimer.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        let said = read(&waits.await.unwrap().unwrap()[0]);
        if commits {
            assert_eq!(said.state.as_deref(), Some("running"), "{case}: {said:?}");
            assert_eq!(said.done, operation == "cancel", "{case}: {said:?}");
            assert_eq!(claimer.complete(&a).await.is_empty(), operation != "cancel", "{case}");
        } else {
            assert_eq!((said.done, said.state.as_deref()), (true, Some("available")), "{case}: {said:?}");
        }
        assert_eq!(jobs(&claimer.claim("q", 10).await).contains(&job), operation == "move" && !commits, "{case}");

        // The operator has the lane: the claim is told that it is busy, and then gets its neighbours alone.
        let ids = claimer.enqueue("p", 3).await;
        operator.exec("BEGIN").await;
        assert!(operate(&operator, ids[0], operation).await.done, "{case}");
        assert!(claimer.try_claim("p", 10, false).await.unwrap().is_none(), "{case}: busy");
        operator.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        let got = common::sorted(jobs(&claimer.claim("p", 10).await));
        let expected = if operation == "move" || !commits { &ids[..] } else { &ids[1..] };
        assert_eq!(got, expected, "{case}");
    }
}

#[tokio::test]
async fn a_promotion_and_a_cancel_at_once_leave_the_job_to_one_of_them() {
    let db = Db::new().await;
    let (s, operator) = (db.session().await, db.session().await);
    s.exec("SET lock_timeout = '10s'").await;
    for commits in [true, false] {
        // The promotion has the row.
        let (job, _) = make(&s, "scheduled").await;
        s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'").await;
        let pid = operator.pid().await;
        s.exec("BEGIN").await;
        assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1);
        let waits = operator.spawn(&call(job, "cancel"));
        db.until_waiting(pid).await;
        s.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        let said = read(&waits.await.unwrap().unwrap()[0]);
        assert_eq!((said.done, said.state.as_deref()), (true, Some(if commits { "available" } else { "scheduled" })));
        assert_eq!(state(&s, job).await, "cancelled");
        assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 0);
        assert_eq!(s.drain("q").await, [] as [i64; 0]);

        // The operator has it.
        let (job, _) = make(&s, "scheduled").await;
        let other =
            s.one::<i64>("SELECT job_id FROM @enqueue('k', 'q', run_at => clock_timestamp() + interval '1 day')").await;
        s.exec("UPDATE @deferred_jobs SET run_at = '2020-01-01'").await;
        operator.exec("BEGIN").await;
        assert!(operate(&operator, job, "cancel").await.done);
        assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1, "its neighbour does not wait");
        operator.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        assert_eq!(s.one::<i32>("SELECT @promote(10)").await, i32::from(!commits));
        assert_eq!(common::sorted(s.drain("q").await), if commits { vec![other] } else { vec![job, other] });
    }
}

#[tokio::test]
async fn a_job_that_a_prune_carries_off_is_found_where_it_went() {
    for operation in ["retry", "delete"] {
        let db = Db::new().await;
        let (s, pruner) = (db.session().await, db.session().await);
        let (job, _) = make(&s, "failed").await;
        let slot: i32 = s.one::<i16>("SELECT ready_slot FROM @done_entries").await.into();
        seal(&s).await;
        let pid = s.pid().await;
        pruner.exec("BEGIN").await;
        assert!(pruner.prune("queue", slot).await.0);
        let waits = s.spawn(&call(job, operation));
        db.until_waiting(pid).await;
        pruner.exec("COMMIT").await;
        let said = read(&waits.await.unwrap().unwrap()[0]);
        assert!(said.done, "{operation}: {said:?}");
        assert_eq!(state(&s, job).await, if operation == "retry" { "available" } else { "none" });
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @dlq_entries").await, 0, "nothing is kept of it");
    }
}

#[tokio::test]
async fn a_prune_that_meets_an_operator_in_its_slot_waits_for_the_next_pass() {
    for commits in [true, false] {
        let db = Db::new().await;
        let (s, operator) = (db.session().await, db.session().await);
        let (job, _) = make(&s, "failed").await;
        let slot: i32 = s.one::<i16>("SELECT ready_slot FROM @done_entries").await.into();
        seal(&s).await;
        operator.exec("BEGIN").await;
        assert!(operate(&operator, job, "retry").await.done);
        assert_eq!(s.prune("queue", slot).await.1, "reader");
        operator.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        assert!(s.prune("queue", slot).await.0);
        assert_eq!(state(&s, job).await, if commits { "available" } else { "failed" });
        assert_eq!(s.one::<i64>("SELECT count(*) FROM @dlq_entries").await, i64::from(!commits));
    }
}

/// oban#168: maintenance loops deadlocked with each other and with operators.
#[tokio::test]
async fn maintenance_loops_workers_and_operators_at_once_never_deadlock() {
    everybody_at_once(40).await;
}

#[tokio::test]
#[ignore = "minutes; the long twin of the test before"]
async fn maintenance_loops_workers_and_operators_at_once_never_deadlock_for_long() {
    everybody_at_once(1500).await;
}

/// A deadlock is an error of one of those in it, and any error ends the test.
async fn everybody_at_once(rounds: usize) {
    let db = Db::new().await;
    let s = db.session().await;
    let mut tasks = vec![];
    for n in 0..8usize {
        let m = db.session().await;
        tasks.push(tokio::spawn(async move {
            for round in 0..rounds {
                match (round + n) % 5 {
                    0 => m.exec("SELECT @rescue('0 seconds', 3)").await,
                    1 => m.exec("SELECT @promote(20)").await,
                    2 => m.exec("SELECT @purge_expired(5), @trim_attempt_state(), @advance_idle_cursors(), @settle_backlog_segments()").await,
                    _ => {
                        let ring = ["queue", "claim", "lease"][round % 3];
                        m.rotate(ring).await;
                        m.prune_all(ring).await;
                    }
                }
            }
        }));
    }
    for n in 0..3usize {
        let w = db.session().await;
        tasks.push(tokio::spawn(async move {
            for round in 0..rounds {
                w.exec(&format!(
                    "SELECT @enqueue_many(array_agg(ROW('k', 'q' || n % 2, NULL, 1 + n % 4, 3, clock_timestamp() + (n % 3 - 1) * interval '1 millisecond',
                         NULL, NULL, convert_to((n % 7)::text, 'UTF8'), B'11111000')::@new_job)) FROM generate_series({round}, {round} + 8) AS n"
                ))
                .await;
                for queue in ["q0", "q1"] {
                    let Some(batches) = w.try_claim(queue, 6, round % 2 == 0).await.unwrap() else { continue };
                    let mine = attempts(&batches);
                    match (round + n) % 4 {
                        0 => drop(w.complete(&mine).await),
                        1 => drop(w.close(&mine, "retryable", Some("no"), "0").await),
                        2 => {
                            for Attempt { slot, receipt, job, lease } in mine {
                                w.exec(&format!("SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 microsecond')")).await;
                            }
                        }
                        _ => {} // lost
                    }
                }
            }
        }));
        let o = db.session().await;
        tasks.push(tokio::spawn(async move {
            for round in 0..rounds {
                let ids: Vec<i64> = o.all("SELECT id FROM @list_jobs() ORDER BY random() LIMIT 8").await;
                for (k, id) in ids.into_iter().enumerate() {
                    operate(&o, id, ["cancel", "retry", "move", "delete"][(round + k) % 4]).await;
                }
                if round % 10 == n {
                    o.exec("SELECT @drain_queue('q0', 'x', 7), @drain_queue('q1', 'x', 7)").await;
                }
            }
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    // And every job is in one place.
    let doubled: Vec<i64> = s.all("SELECT id FROM @list_jobs() GROUP BY id HAVING count(*) > 1").await;
    assert_eq!(doubled, [] as [i64; 0]);
    assert!(s.one::<bool>("SELECT NOT EXISTS (SELECT FROM @queue_counts() WHERE job_count < 0)").await);
}

#[tokio::test]
async fn a_job_that_moved_on_since_it_was_seen_is_dealt_with_where_it_is() {
    let db = Db::new().await;
    let s = db.session().await;
    for now in ["available", "running", "completed", "failed", "retryable", "available again"] {
        for operation in ["cancel", "retry", "delete", "move"] {
            let job = s.enqueue("q", 1).await[0];
            let seen: String =
                s.one(&format!("SELECT p::text FROM @last_ready_places(ARRAY[{job}::bigint]) AS p")).await;
            if now != "available" {
                let a = attempts(&s.claim("q", 1).await);
                assert_eq!(a[0].job, job);
                match now {
                    "running" => {}
                    "completed" => assert_eq!(s.complete(&a).await, []),
                    "available again" => {
                        assert_eq!(s.close(&a, "failed", Some("no"), "1 day").await, []);
                        assert!(operate(&s, job, "retry").await.done);
                    }
                    other => assert_eq!(s.close(&a, other, Some("no"), "1 day").await, []),
                }
            }
            let sees = format!(", p_seen => '{}'::@ready_place)", seen.replace('\'', "''"));
            let with = call(job, operation).replace(')', &sees);
            let would: Option<String> =
                s.one(&format!("SELECT @why_not('{operation}', f.state, f.place) FROM @find_job({job}) AS f")).await;
            let said = read(&s.rows(&with, &[]).await.unwrap_or_else(|e| panic!("{with}: {e:?}"))[0]);
            assert_eq!(said.done, would.is_none(), "{now} {operation}: {said:?}");
            assert_eq!(said.reason, would, "{now} {operation}");
            assert_eq!(said.state.as_deref(), Some(now.split(' ').next().unwrap()), "{operation}");
            // Nothing is left to be claimed for the next.
            s.drain("q").await;
        }
    }
}
