//! The lease ring: what lives in a slot moves on before the slot is truncated, whoever wants it meanwhile.

mod common;

use common::{Attempt, Db, Session, attempts};

async fn waiting(s: &Session) -> (Attempt, String) {
    s.exec(r#"SELECT @enqueue('k', 'q', '{"x": 1}', 3, 7, NULL, '{t}', '{"m": 2}', 'key')"#).await;
    let a = attempts(&s.claim("q", 1).await)[0];
    let Attempt { slot, receipt, job, lease } = a;
    let token: String =
        s.one(&format!("SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 hour')::text")).await;
    let said: String = s.one(&format!("SELECT @wait_for_callback({receipt}, {job}, {lease}, '{token}')")).await;
    assert_eq!(said, "waiting");
    (a, token)
}

async fn slot_of(s: &Session, a: &Attempt) -> i32 {
    s.one::<i16>(&format!("SELECT lease_slot FROM @leases WHERE job_id = {}", a.job)).await.into()
}

#[tokio::test]
async fn a_waiting_attempt_outlives_any_number_of_turns_of_the_ring() {
    let db = Db::new().await;
    let s = db.session().await;
    let (a, token) = waiting(&s).await;
    let all = "SELECT to_jsonb(l)::text FROM (SELECT j.* FROM @leases AS j) AS l";
    let lease = |s: Session| async move {
        let text: String = s.one(all).await;
        let start = text.find("\"lease_slot\"").unwrap();
        let end = start + text[start..].find(',').unwrap();
        format!("{}{}", &text[..start], &text[end..])
    };
    let before = lease(s.clone()).await;
    let mut slots = std::collections::BTreeSet::new();
    for _ in 0..40 {
        slots.insert(slot_of(&s, &a).await);
        assert!(s.rotate("lease").await.0);
        assert_eq!(s.prune_all("lease").await.1, []);
    }
    assert_eq!(slots.len(), 8, "it was in every slot");
    assert_eq!(lease(s.clone()).await, before);
    assert_eq!(
        s.one::<String>(&format!("SELECT state::text FROM @resolve_callback('{token}', 'complete')")).await,
        "completed"
    );
    s.rotate("lease").await;
    s.prune_all("lease").await;
    let empty: i64 = s
        .one("SELECT sum(pg_relation_size(('@leases_' || n)::regclass))::bigint FROM generate_series(0, 7) AS n")
        .await;
    assert_eq!(empty, 0, "and leaves nothing behind");
}

#[tokio::test]
async fn whoever_wants_a_lease_while_it_is_carried_gets_it_afterwards() {
    for plans in ["force_generic_plan", "force_custom_plan"] {
        for actor in
            ["resume", "complete", "extend", "cancel", "worker", "timeout", "heartbeat", "materialise", "result"]
        {
            let db = Db::new().await;
            let (s, pruner, other) = (db.session().await, db.session().await, db.session().await);
            other.exec(&format!("SET plan_cache_mode = {plans}")).await;
            let (a, token) = waiting(&s).await;
            let Attempt { slot, receipt, job, lease } = a;
            if actor == "timeout" {
                s.exec("UPDATE @leases SET callback_timeout_at = '2020-01-01'").await;
            }
            let call = match actor {
                "resume" | "complete" => format!("SELECT EXISTS (SELECT FROM @resolve_callback('{token}', '{actor}'))"),
                "extend" => format!("SELECT @extend_callback('{token}', '2 hours')"),
                "cancel" => format!("SELECT done FROM @operate({job}, 'cancel')"),
                "worker" => format!(
                    "SELECT NOT EXISTS (SELECT FROM @complete('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}'))"
                ),
                "timeout" => "SELECT callback_timeout = 1 FROM @rescue()".to_owned(),
                "heartbeat" => format!(
                    "SELECT NOT EXISTS (SELECT FROM @heartbeat('{{{slot}}}', '{{{receipt}}}', '{{{job}}}', '{{{lease}}}', '{{NULL}}'))"
                ),
                "materialise" => format!("SELECT @materialise({slot}::smallint, {receipt}, {job}, {lease})"),
                _ => format!("SELECT NOT is_over FROM @callback_result({receipt}, {job}, {lease})"),
            };
            let from = slot_of(&s, &a).await;
            // Its plans are there already.
            other.exec(&format!("BEGIN; {call}; ROLLBACK")).await;
            assert!(s.rotate("lease").await.0);
            pruner.exec("BEGIN").await;
            assert_eq!(pruner.prune("lease", from).await, (true, String::new(), String::new()), "{actor}");
            let pid = other.pid().await;
            let waits = other.spawn(&call);
            db.until_waiting(pid).await;
            pruner.exec("COMMIT").await;
            assert!(waits.await.unwrap().unwrap()[0].get::<_, bool>(0), "{actor}, {plans}");
        }
    }
}

#[tokio::test]
async fn a_prune_waits_for_nobody_who_holds_a_lease_and_takes_the_slot_later() {
    for commits in [true, false] {
        let db = Db::new().await;
        let (s, other) = (db.session().await, db.session().await);
        let (a, token) = waiting(&s).await;
        let from = slot_of(&s, &a).await;
        s.rotate("lease").await;
        other.exec("BEGIN").await;
        other.exec(&format!("SELECT @resolve_callback('{token}', 'resume', '1')")).await;
        let (pruned, reason, detail) = s.prune("lease", from).await;
        assert_eq!((pruned, reason.as_str()), (false, "reader"));
        assert!(detail.contains(&other.pid().await.to_string()), "{detail}");
        other.exec(if commits { "COMMIT" } else { "ROLLBACK" }).await;
        assert!(s.prune("lease", from).await.0);
        let state: String = s.one("SELECT state || ' ' || coalesce(callback_payload::text, '-') FROM @leases").await;
        assert_eq!(state, if commits { "running 1" } else { "waiting_external -" });
        assert_eq!(s.complete(&[a]).await, []);
    }
}

#[tokio::test]
async fn an_answer_that_commits_while_a_prune_waits_for_the_partition_is_what_is_carried() {
    let db = Db::new().await;
    let (s, pruner, other) = (db.session().await, db.session().await, db.session().await);
    let (a, token) = waiting(&s).await;
    let from = slot_of(&s, &a).await;
    s.rotate("lease").await;
    other.exec("BEGIN").await;
    other.exec(&format!("SELECT @resolve_callback('{token}', 'resume', '1')")).await;
    let pid = pruner.pid().await;
    let prune = pruner.spawn(&format!("SELECT pruned FROM @prune('lease', {from}::smallint, '1 minute')"));
    db.until_waiting(pid).await;
    other.exec("COMMIT").await;
    assert!(prune.await.unwrap().unwrap()[0].get::<_, bool>(0));
    let state: String = s.one("SELECT state || ' ' || callback_payload::text FROM @leases").await;
    assert_eq!(state, "running 1");
    assert_eq!(s.complete(&[a]).await, []);
}

#[tokio::test]
async fn a_prune_that_rolls_back_leaves_the_lease_where_it_was() {
    let db = Db::new().await;
    let s = db.session().await;
    let (a, _) = waiting(&s).await;
    let from = slot_of(&s, &a).await;
    s.rotate("lease").await;
    s.exec("BEGIN").await;
    assert!(s.prune("lease", from).await.0);
    assert_ne!(slot_of(&s, &a).await, from);
    s.exec("ROLLBACK").await;
    assert_eq!((slot_of(&s, &a).await, s.one::<i64>("SELECT count(*) FROM @leases").await), (from, 1));
    assert!(s.prune("lease", from).await.0);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 1);
}

#[tokio::test]
async fn an_attempt_that_materialises_into_a_slot_keeps_it_from_being_pruned() {
    let db = Db::new().await;
    let (s, other) = (db.session().await, db.session().await);
    s.enqueue("q", 1).await;
    let a = attempts(&s.claim("q", 1).await)[0];
    other.exec("BEGIN").await;
    other.exec(&format!("SELECT @materialise({}::smallint, {}, {}, {})", a.slot, a.receipt, a.job, a.lease)).await;
    let from = slot_of(&other, &a).await;
    s.rotate("lease").await;
    assert_eq!(s.prune("lease", from).await.1, "pinned");
    other.exec("COMMIT").await;
    assert!(s.prune("lease", from).await.0);
    assert_eq!(s.complete(&[a]).await, []);
}

#[tokio::test]
async fn a_slot_where_many_live_is_passed_over_with_the_reason() {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 10_001).await;
    for _ in 0..10 {
        s.exec("SELECT count(*) FROM @claim('q', 1024, NULL, 'w', p_receipts => false)").await;
    }
    let from: i16 = s.one("SELECT DISTINCT lease_slot FROM @leases").await;
    s.rotate("lease").await;
    let (pruned, reason, detail) = s.prune("lease", from.into()).await;
    assert_eq!((pruned, reason.as_str()), (false, "live_leases"));
    assert!(detail.starts_with("10001 attempts live in the slot"), "{detail}");
    assert!(s.rotate("lease").await.0, "the ring turns without it");
    let one: i64 = s.one("SELECT min(job_id) FROM @leases").await;
    assert!(s.one::<bool>(&format!("SELECT done FROM @operate({one}, 'cancel')")).await);
    assert!(s.prune("lease", from.into()).await.0);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 10_000);
}

#[tokio::test]
async fn the_ring_turns_only_when_that_reclaims_something() {
    let db = Db::new().await;
    let s = db.session().await;
    let rotate = "SELECT rotated || ' ' || coalesce(split_part(reason, ':', 1), '') FROM @rotate('lease')";
    assert_eq!(s.one::<String>(rotate).await, "false idle");
    waiting(&s).await;
    assert_eq!(s.one::<String>(rotate).await, "false small");
    s.enqueue("q", 4000).await;
    let mut claims = vec![];
    for _ in 0..4 {
        let rows = s
            .rows("SELECT batch_id, job_ids, run_leases FROM @claim('q', 1000, NULL, 'w', p_receipts => false)", &[])
            .await
            .unwrap();
        let (batch, ids, leases) =
            (rows[0].get::<_, i64>(0), rows[0].get::<_, Vec<i64>>(1), rows[0].get::<_, Vec<i64>>(2));
        claims.extend((0..ids.len()).map(|n| Attempt {
            slot: -1,
            receipt: batch * 1024 + n as i64,
            job: ids[n],
            lease: leases[n],
        }));
    }
    assert_eq!(s.one::<String>(rotate).await, "false live");
    assert_eq!(s.complete(&claims[..3500]).await, []);
    assert_eq!(s.one::<String>(rotate).await, "true ");
    assert_eq!(s.prune_all("lease").await.1, []);
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @leases").await, 501);
    assert_eq!(s.complete(&claims[3500..]).await, []);
}

#[tokio::test]
async fn no_answer_is_lost_while_the_ring_turns_as_fast_as_it_can() {
    answers_against_the_ring(30).await;
}

#[tokio::test]
#[ignore = "minutes; the long twin of the test before"]
async fn no_answer_is_lost_while_the_ring_turns_as_fast_as_it_can_for_long() {
    answers_against_the_ring(2000).await;
}

async fn answers_against_the_ring(rounds: usize) {
    let db = Db::new().await;
    let s = db.session().await;
    s.enqueue("q", 6).await;
    let mine = attempts(&s.claim("q", 6).await);
    let going = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let mut pruners = vec![];
    for _ in 0..2 {
        let (p, going) = (db.session().await, going.clone());
        pruners.push(tokio::spawn(async move {
            let mut pruned = 0;
            while going.load(std::sync::atomic::Ordering::Relaxed) {
                p.rotate("lease").await;
                pruned += p.prune_all("lease").await.0.len();
            }
            pruned
        }));
    }
    let mut answerers = vec![];
    for Attempt { slot, receipt, job, lease } in mine.clone() {
        let (w, a) = (db.session().await, db.session().await);
        answerers.push(tokio::spawn(async move {
            for round in 0..rounds {
                let token: Option<String> = w
                    .one(&format!(
                        "SELECT @register_callback({slot}::smallint, {receipt}, {job}, {lease}, '1 hour')::text"
                    ))
                    .await;
                let token = token.unwrap_or_else(|| panic!("round {round}: the attempt is over"));
                let said: String =
                    w.one(&format!("SELECT @wait_for_callback({receipt}, {job}, {lease}, '{token}')")).await;
                assert_eq!(said, "waiting", "round {round}");
                assert!(
                    a.one::<bool>(&format!("SELECT @extend_callback('{token}', '2 hours')")).await,
                    "round {round}"
                );
                let n: i64 =
                    a.one(&format!("SELECT count(*) FROM @resolve_callback('{token}', 'resume', '{round}')")).await;
                assert_eq!(n, 1, "round {round}: the answer was lost");
                let got: Option<String> =
                    w.one(&format!("SELECT payload::text FROM @callback_result({receipt}, {job}, {lease})")).await;
                assert_eq!(got, Some(round.to_string()));
            }
        }));
    }
    for task in answerers {
        task.await.unwrap();
    }
    going.store(false, std::sync::atomic::Ordering::Relaxed);
    for task in pruners {
        assert!(task.await.unwrap() > 0, "something was pruned");
    }
    assert_eq!(s.complete(&mine).await, []);
}

#[tokio::test]
async fn a_prune_waits_for_no_other_slot() {
    let db = Db::new().await;
    let (s, other) = (db.session().await, db.session().await);
    let (a, _) = waiting(&s).await;
    let slot = slot_of(&s, &a).await;
    assert!(s.rotate("lease").await.0);
    let open = s.one::<i16>("SELECT slot FROM @ring_slots('lease') WHERE state = 'open'").await;
    for n in (0..8).filter(|n| *n != slot && *n != i32::from(open)) {
        other.exec(&format!("BEGIN; LOCK TABLE @leases_{n} IN ACCESS EXCLUSIVE MODE")).await;
    }
    // As the engine's sessions do.
    s.exec("SET plan_cache_mode = force_generic_plan").await;
    let (pruned, reason, detail) = s.prune("lease", slot).await;
    assert!(pruned, "{reason}: {detail}");
    assert_eq!(slot_of_open(&s, &a, open).await, 1);
}

/// Asked of the partition alone.
async fn slot_of_open(s: &Session, a: &Attempt, slot: i16) -> i64 {
    s.one(&format!("SELECT count(*) FROM @leases_{slot} WHERE job_id = {}", a.job)).await
}

#[tokio::test]
async fn a_prune_that_needs_what_somebody_holds_skips_and_lets_the_slot_go() {
    let db = Db::new().await;
    let (s, other) = (db.session().await, db.session().await);
    s.enqueue("q", 1).await;
    let a = attempts(&s.claim("q", 1).await);
    assert_eq!(s.close(&a, "failed", Some("no"), "0").await, []);
    for ring in ["claim", "queue"] {
        assert!(s.rotate(ring).await.0);
    }
    s.exec("SELECT @advance_idle_cursors()").await;
    s.prune_all("claim").await;
    other.exec("BEGIN; LOCK TABLE @dlq_entries IN EXCLUSIVE MODE").await;
    s.exec("BEGIN; SET LOCAL lock_timeout = '77 s'").await;
    let (pruned, reason, detail) = s.prune("queue", 0).await;
    assert_eq!((pruned, reason.as_str()), (false, "locked"), "{detail}");
    assert_eq!(s.one::<String>("SHOW lock_timeout").await, "77s");
    // Not even this transaction keeps anybody from the slot.
    other.exec("SELECT count(*) FROM @done_entries_0; COMMIT").await;
    assert!(s.prune("queue", 0).await.0);
    s.exec("COMMIT").await;
    assert_eq!(s.one::<i64>("SELECT count(*) FROM @dlq_entries").await, 1);
}
