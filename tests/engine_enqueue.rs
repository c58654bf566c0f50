//! Enqueue: what is refused and how it says so; unique keys; wake-ups.
mod common;
use common::*;
use std::time::Duration;

async fn refused(s: &Session, sql: &str) -> String {
    let error = s.try_exec(sql).await.expect_err(sql);
    error.as_db_error().unwrap_or_else(|| panic!("{sql}: {error}")).message().to_owned()
}

async fn enqueue_unique(s: &Session, key: u8, states: &str) -> (i64, bool) {
    let rows = s.rows(&format!("SELECT job_id, inserted FROM @enqueue('k', 'q', unique_key => '\\x{key:02x}', unique_states => B'{states}')"), &[]).await.unwrap();
    (rows[0].get(0), rows[0].get(1))
}

const DEFAULT: &str = "11111000";

#[tokio::test]
async fn a_job_that_must_not_be_stored_is_refused_by_field_and_value() {
    let db = Db::odd().await;
    let s = db.session().await;
    for (arguments, field, value) in [
        ("kind => ''", "kind", "0"),
        ("kind => NULL", "kind", "null"),
        ("kind => repeat('x', 201)", "kind", "201"),
        ("kind => 'k', queue => ''", "queue", "0"),
        ("kind => 'k', queue => NULL", "queue", "null"),
        ("kind => 'k', queue => repeat('é', 201)", "queue", "201"),
        ("kind => 'k', args => NULL", "args", "null"),
        ("kind => 'k', priority => 0", "priority", "0"),
        ("kind => 'k', priority => 5", "priority", "5"),
        ("kind => 'k', priority => 70000", "priority", "70000"),
        ("kind => 'k', priority => -70000", "priority", "-70000"),
        ("kind => 'k', priority => NULL", "priority", "null"),
        ("kind => 'k', max_attempts => 0", "max_attempts", "0"),
        ("kind => 'k', max_attempts => 2000000000", "max_attempts", "2000000000"),
        ("kind => 'k', max_attempts => NULL", "max_attempts", "null"),
        ("kind => 'k', tags => array_fill('t'::text, ARRAY[21])", "tags", "21"),
        ("kind => 'k', tags => ARRAY['a', NULL]", "tags", "null"),
        ("kind => 'k', metadata => '[]'", "metadata", "array"),
        ("kind => 'k', metadata => '1'", "metadata", "number"),
        ("kind => 'k', unique_key => ''", "unique_key", "0"),
        ("kind => 'k', unique_key => decode(repeat('00', 65), 'hex')", "unique_key", "65"),
        ("kind => 'k', unique_key => '\\x01', unique_states => NULL", "unique_states", "null"),
    ] {
        let message = refused(&s, &format!("SELECT @enqueue({arguments})")).await;
        assert!(message.contains(field) && message.contains(value), "{arguments}: {message}");
    }
    for bad in ["{\"a\": \"\\u0000\"}", "{"] {
        assert!(s.try_exec(&format!("SELECT @enqueue('k', args => '{bad}')")).await.is_err());
    }
    assert_eq!(
        s.one::<i64>("SELECT (SELECT count(*) FROM @ready_entries) + (SELECT count(*) FROM @job_unique_claims)").await,
        0
    );
}

#[tokio::test]
async fn one_bad_job_refuses_the_whole_call_and_is_named_by_its_place() {
    let db = Db::odd().await;
    let s = db.session().await;
    let good = r#"{"kind": "k", "unique_key": "\\x07"}"#;
    for (bad, part) in [
        (r#"{"kind": "k", "priority": 9}"#, "priority"),
        (r#"{"queue": "q"}"#, "kind"),
        (r#"{"kind": "k", "metadata": []}"#, "metadata"),
        (r#"{"kind": "k", "priority": 70000}"#, "70000"),
    ] {
        let message = refused(&s, &format!("SELECT @enqueue_many('[{good}, {good}, {bad}, {good}]'::jsonb)")).await;
        assert!(message.contains("job 3") && message.contains(part), "{bad}: {message}");
    }
    for (bad, part) in [("1", "job 3"), (r#"{"kind": "k", "priority": "many"}"#, "job 3")] {
        let message = refused(&s, &format!("SELECT @enqueue_many('[{good}, {good}, {bad}]'::jsonb)")).await;
        assert!(message.contains(part), "{bad}: {message}");
    }
    assert!(refused(&s, "SELECT @enqueue_many('{}'::jsonb)").await.contains("array"));
    let message = refused(
        &s,
        "SELECT @enqueue_many(ARRAY[ROW('k', 'q', '{}', 1, 1, NULL, NULL, NULL, NULL, NULL), NULL]::@new_job[])",
    )
    .await;
    assert!(message.contains("job 2") && message.contains("kind"), "{message}");
    assert_eq!(
        s.one::<i64>("SELECT (SELECT count(*) FROM @ready_entries) + (SELECT count(*) FROM @job_unique_claims)").await,
        0
    );
    s.exec("SELECT @enqueue_many('[]'::jsonb), @enqueue_many('{}'::@new_job[])").await;
}

#[tokio::test]
async fn enqueue_many_answers_in_order_and_applies_every_default_and_field() {
    let db = Db::odd().await;
    let s = db.session().await;
    let rows = s.rows(r#"SELECT job_id, inserted, duplicate_of FROM @enqueue_many('[
        {"kind": "a"}, {"kind": "b", "queue": "q", "priority": 1, "max_attempts": 3, "tags": ["x"], "metadata": {"m": 1}, "args": {"z": 1}},
        {"kind": "c", "unique_key": "\\x01"}, {"kind": "d", "unique_key": "\\x01"}, {"kind": "e", "run_at": "2999-01-01"},
        {"kind": "f", "run_at": "2001-01-01"}]'::jsonb)"#, &[]).await.unwrap();
    let ids: Vec<i64> = rows.iter().map(|r| r.get(0)).collect();
    assert_eq!(rows.iter().map(|r| r.get(1)).collect::<Vec<bool>>(), [true, true, true, false, true, true]);
    assert_eq!(rows[3].get::<_, Option<i64>>(2), Some(ids[2]));
    assert_eq!(s.all::<String>("SELECT kind || ' ' || queue || ' ' || priority || ' ' || max_attempts FROM @ready_entries JOIN @queue_lanes USING (lane_id) ORDER BY kind").await,
        ["a default 2 25", "b q 1 3", "c default 2 25", "f default 2 25"]);
    assert_eq!(s.one::<String>("SELECT kind || state FROM @deferred_jobs").await, "escheduled");
    let b: serde_json::Value =
        s.one("SELECT jsonb_build_object('a', args[1], 'e', extras[1]) FROM @claim('q', 1)").await;
    assert_eq!((&b["a"]["z"], &b["e"]["tags"][0], &b["e"]["metadata"]["m"]), (&1.into(), &"x".into(), &1.into()));
    assert_eq!(jobs(&s.claim("default", 9).await), [ids[0], ids[2], ids[5]]);
}

#[tokio::test]
async fn a_future_job_is_deferred_until_it_is_due_and_a_past_one_is_ready() {
    let db = Db::new().await;
    let s = db.session().await;
    let past: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', run_at => now() - interval '1 day')").await;
    let future: i64 = s.one("SELECT job_id FROM @enqueue('k', 'q', run_at => now() + interval '1 day')").await;
    assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 0);
    assert_eq!(s.drain("q").await, [past]);
    s.exec("UPDATE @deferred_jobs SET run_at = now()").await;
    assert_eq!(s.one::<i32>("SELECT @promote(10)").await, 1);
    assert_eq!(s.drain("q").await, [future]);
}

#[tokio::test]
async fn a_duplicate_is_told_the_holder_and_takes_no_place_in_the_lane() {
    let db = Db::odd().await;
    let s = db.session().await;
    let (id, true) = enqueue_unique(&s, 1, DEFAULT).await else { panic!() };
    for _ in 0..3 {
        assert_eq!(enqueue_unique(&s, 1, DEFAULT).await, (id, false));
    }
    assert_eq!(s.one::<i64>("SELECT pg_sequence_last_value(seq) FROM @queue_lanes").await, 1);
}

#[tokio::test]
async fn of_two_transactions_with_one_key_the_second_waits_for_the_first_to_end() {
    for (level, first_ends) in [
        ("READ COMMITTED", "ROLLBACK"),
        ("READ COMMITTED", "COMMIT"),
        ("REPEATABLE READ", "ROLLBACK"),
        ("REPEATABLE READ", "COMMIT"),
    ] {
        let db = Db::new().await;
        let (a, b) = (db.session().await, db.session().await);
        a.exec("BEGIN").await;
        let (first, _) = enqueue_unique(&a, 1, DEFAULT).await;
        b.exec(&format!("BEGIN ISOLATION LEVEL {level}; SELECT 1")).await;
        let pid = b.pid().await;
        let second = b.spawn("SELECT job_id, inserted FROM @enqueue('k', 'q', unique_key => '\\x01')");
        db.until_waiting(pid).await;
        a.exec(first_ends).await;
        match second.await.unwrap() {
            Ok(rows) => {
                assert_eq!(rows[0].get::<_, bool>(1), first_ends == "ROLLBACK");
                assert_eq!(rows[0].get::<_, i64>(0) == first, first_ends == "COMMIT");
                b.exec("COMMIT").await;
            }
            Err(e) => {
                assert_eq!((level, first_ends, e.code().unwrap().code()), ("REPEATABLE READ", "COMMIT", "40001"));
                b.exec("ROLLBACK").await;
            }
        }
        assert_eq!(a.drain("q").await.len(), 1);
    }
}

#[tokio::test]
async fn a_key_is_released_by_completion_unless_its_mask_keeps_it_and_then_with_its_slot() {
    let db = Db::odd().await;
    let s = db.session().await;
    let (kept, _) = enqueue_unique(&s, 1, "11111000").await;
    let (given, _) = enqueue_unique(&s, 2, "11101000").await;
    let (failed, _) = enqueue_unique(&s, 3, "11101000").await;
    let (failed_kept, _) = enqueue_unique(&s, 4, "11101100").await;
    let a = attempts(&s.claim("q", 10).await);
    for key in 1..=4 {
        assert!(!enqueue_unique(&s, key, DEFAULT).await.1, "running holds");
    }
    s.complete(&a[..2]).await;
    s.close(&a[2..], "failed", None, "0").await;
    assert_eq!(enqueue_unique(&s, 1, DEFAULT).await, (kept, false));
    let (again, true) = enqueue_unique(&s, 2, DEFAULT).await else { panic!("released: {given}") };
    assert!(enqueue_unique(&s, 3, DEFAULT).await.1, "{failed}");
    assert_eq!(enqueue_unique(&s, 4, DEFAULT).await, (failed_kept, false));
    s.exec("INSERT INTO @queue_meta (queue, unique_retention) VALUES ('q', '0')").await;
    s.rotate("queue").await;
    assert!(!s.prune("queue", 0).await.0);
    let b = attempts(&s.claim("q", 10).await);
    assert_eq!(s.close(&b, "retryable", None, "0").await, []);
    s.exec("SELECT @advance_idle_cursors()").await;
    assert!(s.prune("queue", 0).await.0);
    assert!(enqueue_unique(&s, 1, DEFAULT).await.1);
    assert_eq!(
        enqueue_unique(&s, 4, DEFAULT).await,
        (failed_kept, false),
        "a failed job outlives its slot, and so does its key"
    );
    assert_eq!(enqueue_unique(&s, 2, DEFAULT).await, (again, false), "deferred holds, though its old slot is gone");
}

#[tokio::test]
async fn a_completion_rolled_back_keeps_the_key() {
    let db = Db::new().await;
    let (s, t) = (db.session().await, db.session().await);
    enqueue_unique(&s, 1, "11101000").await;
    let a = attempts(&s.claim("q", 1).await);
    s.exec("BEGIN").await;
    s.complete(&a).await;
    let pid = t.pid().await;
    let second = t.spawn("SELECT inserted FROM @enqueue('k', 'q', unique_key => '\\x01')");
    db.until_waiting(pid).await;
    s.exec("ROLLBACK").await;
    assert!(!second.await.unwrap().unwrap()[0].get::<_, bool>(0));
}

#[tokio::test]
async fn calls_with_the_same_keys_in_any_order_do_not_deadlock() {
    let db = Db::new().await;
    let tasks: Vec<_> = (0..6)
        .map(|n: usize| {
            let db = &db;
            async move {
                let s = db.session().await;
                let mut inserted = 0;
                for round in 0..15 {
                    let list: Vec<String> = (0..20)
                        .map(|i| (i * [1, 3, 7, 9, 11, 13][n] % 20, i))
                        .map(|(k, _)| {
                            format!(
                                "{{\"kind\": \"k\", \"queue\": \"q\", \"unique_key\": \"\\\\x{round:02x}{k:02x}\"}}"
                            )
                        })
                        .collect();
                    let rows = s
                        .rows(&format!("SELECT inserted FROM @enqueue_many('[{}]'::jsonb)", list.join(",")), &[])
                        .await
                        .unwrap();
                    inserted += rows.iter().filter(|r| r.get(0)).count();
                }
                inserted
            }
        })
        .collect();
    assert_eq!(futures_util::future::join_all(tasks).await.iter().sum::<usize>(), 300);
}

#[tokio::test]
async fn a_queue_is_notified_only_while_somebody_sleeps_on_it() {
    let db = Db::odd().await;
    let (s, sleeper) = (db.session().await, db.session().await);
    let class = "(SELECT t.oid::integer FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace WHERE t.relname = 'runtime_instances' AND n.nspname LIKE 'My%')";
    // A rule of its own reads the asynchronous queue's use: messages stay in it while somebody listens and has not read.
    let channel: i32 = s.one(&format!("SELECT {class}")).await;
    let (listener, mut messages) = listen(&db, &format!("awa_wake_{channel}")).await;
    s.enqueue("q", 1).await;
    sleeper.exec(&format!("SELECT pg_advisory_lock_shared({class}, hashtext('q'))")).await;
    s.enqueue("other", 1).await;
    s.enqueue("q", 1).await;
    sleeper.exec("SELECT pg_advisory_unlock_all()").await;
    s.enqueue("q", 1).await;
    s.exec("NOTIFY the_end").await;
    let mut seen = vec![];
    loop {
        let (channel, payload) =
            tokio::time::timeout(Duration::from_secs(120), messages.recv()).await.unwrap().unwrap();
        if channel == "the_end" {
            break;
        }
        seen.push(payload);
    }
    assert_eq!(seen, ["q"]);
    drop(listener);
}

async fn listen(
    db: &Db,
    channel: &str,
) -> (tokio_postgres::Client, tokio::sync::mpsc::UnboundedReceiver<(String, String)>) {
    let (client, mut connection) = db.config().connect(tokio_postgres::NoTls).await.unwrap();
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|cx| connection.poll_message(cx)).await {
            if let tokio_postgres::AsyncMessage::Notification(n) = message {
                let _ = sender.send((n.channel().to_owned(), n.payload().to_owned()));
            }
        }
    });
    client.batch_execute(&format!("LISTEN {channel}; LISTEN the_end")).await.unwrap();
    (client, receiver)
}

#[tokio::test]
async fn a_time_that_no_client_can_read_is_refused() {
    let db = Db::new().await;
    let s = db.session().await;
    for time in ["infinity", "-infinity", "10000-01-01", "0044-03-15 BC"] {
        for call in [
            format!("SELECT @enqueue('k', 'q', run_at => '{time}')"),
            format!(r#"SELECT @enqueue_many('[{{"kind": "k"}}, {{"kind": "k", "run_at": "{time}"}}]'::jsonb)"#),
        ] {
            let error = s.try_exec(&call).await.unwrap_err();
            let text = error.as_db_error().unwrap().message();
            assert!(text.contains("run_at must be in the years 1 to 9999"), "{call}: {text}");
        }
    }
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @deferred_jobs").await, 0);
}
