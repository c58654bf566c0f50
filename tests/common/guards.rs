//! Guards that a test run can take out of the loaded schema, to see that the tests notice: AWA_WITHOUT=<name>, see
//! docs/guards.md. Each is a piece of the migrations' text and what stands there without the guard.

const GUARDS: &[(&str, &str, &str)] = &[
    (
        "lane_lock",
        "IF NOT pg_try_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, v_lane.lane_id) THEN\n            v_busy",
        "IF false THEN\n            v_busy",
    ),
    ("ledger_read", "v_known := {schema}.emitted_ranges_in(v_slot.slot, v_lane.lane_id, v_spent);", "v_known := NULL;"),
    (
        "claim_isolation",
        "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE EXCEPTION 'claim needs",
        "    IF false THEN\n        RAISE EXCEPTION 'claim needs",
    ),
    (
        "may_advance",
        "c_may_advance constant boolean := pg_current_xact_id_if_assigned() IS NULL;\n    c_now",
        "c_may_advance constant boolean := true;\n    c_now",
    ),
    (
        "idle_may_advance",
        "c_may_advance constant boolean := pg_current_xact_id_if_assigned() IS NULL;\n    v_lane",
        "c_may_advance constant boolean := true;\n    v_lane",
    ),
    (
        "pin_recheck",
        "v_seen := pg_sequence_last_value('{schema}.queue_ring_cursor'::regclass);\n        EXIT WHEN v_seen = v_cursor;",
        "EXIT;",
    ),
    ("pin", "IF NOT pg_try_advisory_xact_lock(v_class::integer, p_slot) THEN", "IF false THEN"),
    (
        "carry_own_partition",
        "IN EXECUTE format('SELECT l.* FROM %I.%I AS l', {schema_literal}, 'leases_' || p_slot) LOOP",
        "IN SELECT l.* FROM {schema}.leases AS l WHERE l.lease_slot = p_slot LOOP",
    ),
    (
        "prune_patience",
        "        v_locked := true;\n",
        "        v_locked := true;\n        PERFORM set_config('lock_timeout', '0', true);\n",
    ),
    ("second_proof", "IF v_state IS DISTINCT FROM 'sealed' OR v_blocker.reason IS NOT NULL THEN", "IF false THEN"),
    ("job_predicate", "b.job_ids[(i.receipt_id & 1023) + 1] = i.job_id", "true"),
    ("lease_predicate", "coalesce(b.run_lease, b.run_leases[(i.receipt_id & 1023) + 1]) = i.run_lease", "true"),
    ("closure_predicate", "c.batch_id = i.receipt_id >> 10 AND c.receipt_ranges @> i.receipt_id)", "false)"),
    ("run_job_predicate", "b.job_ids[r.index + 1 : r.index + r.length] = p_job_ids[r.start + 1 : r.stop]", "true"),
    ("run_lease_predicate", "AND b.run_lease = r.run_lease", ""),
    (
        "run_closure_predicate",
        "AND c.receipt_ranges && int8range(r.first_receipt, r.first_receipt + r.length))",
        "AND false)",
    ),
    ("runs_disjoint", "v_disjoint AND p_first_receipts[n] > v_last", "true"),
    (
        "close_predicate",
        "WHERE c.batch_id = b.batch_id AND c.receipt_ranges @> p_receipt_id);\n    RETURN v_attempt;",
        "WHERE false);\n    RETURN v_attempt;",
    ),
    (
        "batch_lock",
        "PERFORM pg_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, k.key)",
        "PERFORM k.key",
    ),
    (
        "batch_lock",
        "pg_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, ((p_receipt_ids[1] >> 10) & 2147483647)::integer) IS NULL",
        "NULL",
    ),
    (
        "batch_lock_order",
        "unnest(p_receipt_ids) AS r ORDER BY 1) AS k",
        "unnest(p_receipt_ids) AS r) AS k ORDER BY random()",
    ),
    (
        "complete_isolation",
        "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE EXCEPTION 'closing",
        "    IF false THEN\n        RAISE EXCEPTION 'closing",
    ),
    (
        "producer_lock",
        "PERFORM pg_advisory_xact_lock_shared('{schema}.ready_entries'::regclass::oid::integer, v_lane.lane_id);",
        "",
    ),
    ("quiet", "IF {schema}.lane_is_quiet(p_lane.lane_id) THEN", "IF true THEN"),
    ("hole_holders", "AND NOT h.holders && v_producers", ""),
    ("hole_left_over", "OR (v_left > 0 AND NOT h.holders", "OR (NOT h.holders"),
    ("known_rows", "v_known.emitted - (v_holes - v_known.rows)) - 1", "v_known.emitted - v_holes) - 1"),
    (
        "open_holes",
        "WHERE h.holders IS NOT NULL AND NOT EXISTS (SELECT FROM %1$I.%2$I AS o",
        "WHERE false AND NOT EXISTS (SELECT FROM %1$I.%2$I AS o",
    ),
    ("lane_cursor", "IF v_cursor_detail IS NOT NULL THEN", "IF false THEN"),
    ("ready_rows", "IF v_rows <> v_emitted THEN", "IF false THEN"),
    ("ready_rows", "IF NOT v_last.is_emitted THEN", "IF false THEN"),
    ("ready_rows_counted", "IF v_rows <> v_emitted THEN", "IF false THEN"),
    (
        "settle_lock",
        "CONTINUE WHEN NOT pg_try_advisory_xact_lock('{schema}.queue_backlog_segments'::regclass::oid::integer, v_lane.lane_id);",
        "",
    ),
    (
        "settle_isolation",
        "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE EXCEPTION 'settle",
        "    IF false THEN\n        RAISE EXCEPTION 'settle",
    ),
    ("count_lock", "LOCK TABLE {schema}.ready_entries IN ACCESS SHARE MODE;", ""),
    (
        "count_cursors",
        "SELECT n.lane_id, coalesce(s.spent, 0) AS spent, pg_sequence_last_value(n.seq) AS allocated",
        "SELECT n.lane_id, pg_sequence_last_value(n.spent) AS spent, pg_sequence_last_value(n.seq) AS allocated",
    ),
    (
        "count_snapshot",
        "LANGUAGE plpgsql SET jit = off AS $function$\nDECLARE\n    v_lane_ids",
        "LANGUAGE plpgsql STABLE AS $function$\nDECLARE\n    v_lane_ids",
    ),
    ("count_snapshot", "LOCK TABLE {schema}.ready_entries IN ACCESS SHARE MODE;", ""),
    ("count_late_rows", "+ coalesce(h.ranges, '{}') AS ranges", "AS ranges"),
    ("open_claims", "IF v_open > 0 THEN", "IF false THEN"),
    (
        "probe_all_slots",
        "CASE WHEN p_probe THEN 0 ELSE pg_sequence_last_value(v_lane.generation) END",
        "pg_sequence_last_value(v_lane.generation)",
    ),
    (
        "promised_slot",
        "WHERE NOT EXISTS (\n            SELECT FROM {schema}.queue_ring_state AS s\n            WHERE s.generation = v_cursor >> 8\n",
        "WHERE false AND NOT EXISTS (\n            SELECT FROM {schema}.queue_ring_state AS s\n            WHERE s.generation = v_cursor >> 8\n",
    ),
    (
        "promise_in_use",
        "               OR (s.slot = (v_cursor & 255)::smallint",
        "               OR (false AND s.slot = (v_cursor & 255)::smallint",
    ),
    ("promise_free", "        IF v_free THEN\n", "        IF true THEN\n"),
    (
        "promised_prune",
        "p_ring || '_ring_cursor')::regclass) & 255 = p_slot THEN",
        "p_ring || '_ring_cursor')::regclass) & 255 = -1 THEN",
    ),
    ("fit_cursors", "    RETURN (SELECT h.home FROM", "    RETURN false AND (SELECT h.home FROM"),
    ("promise", "IF v_promised >> 8 > v_current.generation THEN", "IF false THEN"),
    (
        "rotator_lock",
        "IF NOT pg_try_advisory_xact_lock(format('%I.%I', {schema_literal}, p_ring || '_ring_state')::regclass::oid::integer, 0) THEN",
        "IF false THEN",
    ),
    ("prepared_holder", "AND NOT EXISTS (SELECT FROM unnest(v_producers) AS p WHERE p LIKE '-1/%')", ""),
    ("cron_revision", "IF v_job.revision <> p_revision THEN", "IF false THEN"),
    ("cron_paused", "ELSIF v_job.paused THEN", "ELSIF false THEN"),
    ("cron_clock", "ELSIF p_through > clock_timestamp() THEN", "ELSIF false THEN"),
    ("cron_row_lock", "WHERE c.name = p_name FOR UPDATE SKIP LOCKED;", "WHERE c.name = p_name;"),
    ("cron_no_wait", "WHERE c.name = p_name FOR UPDATE SKIP LOCKED;", "WHERE c.name = p_name FOR UPDATE;"),
    (
        "cron_refused",
        "WHEN integrity_constraint_violation OR data_exception OR program_limit_exceeded THEN",
        "WHEN division_by_zero THEN",
    ),
    ("cron_new_schedule", "(NEW.cron_expr, NEW.timezone) IS DISTINCT FROM (OLD.cron_expr, OLD.timezone) OR", ""),
    ("cron_resume", "OR (OLD.paused AND NOT NEW.paused) THEN", "THEN"),
    ("cron_0_5", "greatest(c.cursor_at, c.last_enqueued_at), clock_timestamp()", "c.cursor_at, clock_timestamp()"),
    ("key_order", "ORDER BY j.unique_key, j.ord", "ORDER BY random()"),
    (
        "claim_release",
        "        PERFORM {schema}.release_unique_keys(p_batch.job_ids, 'running');",
        "        PERFORM 1;",
    ),
    ("key_expiry", "ELSIF v_held_until <= clock_timestamp() THEN", "ELSIF false THEN"),
    (
        "key_retention",
        "SET held_until = t.finalized_at + coalesce(m.unique_retention, interval '24 hours')",
        "SET held_until = NULL",
    ),
    (
        "superseded",
        "IF v_holder IS NOT NULL AND v_state IN ('retryable', 'scheduled') THEN",
        "IF v_holder IS NOT NULL AND v_holder = 0 THEN",
    ),
    (
        "superseded_promotion",
        "IF v_holder IS NOT NULL THEN\n            v_superseded",
        "IF false THEN\n            v_superseded",
    ),
    (
        "superseded_lease",
        "IF v_holder IS NULL THEN\n        RETURN false;\n    END IF;\n    PERFORM {schema}.finish_job",
        "IF true THEN\n        RETURN false;\n    END IF;\n    PERFORM {schema}.finish_job",
    ),
    (
        "superseded_restart",
        "IF v_holder IS NOT NULL THEN\n            p_job.errors := {schema}.with_error(p_job.errors, 0",
        "IF false THEN\n            p_job.errors := {schema}.with_error(p_job.errors, 0",
    ),
    ("key_mask", "IF NOT {schema}.holds_key(p_unique_states, p_state) THEN", "IF false THEN"),
    ("key_of_deleted", "WHERE c.unique_key = v_job.unique_key AND c.job_id = v_job.job_id;", "WHERE false;"),
    (
        "rescue_try_lock",
        "pg_try_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, (k.batch_id & 2147483647)::integer) AS ours",
        "true AS ours",
    ),
    (
        "stale_cursor",
        "coalesce((SELECT min(c.batch_id) - 1 FROM candidates AS c), (SELECT max(v.batch_id) FROM visited AS v))",
        "(SELECT max(v.batch_id) FROM visited AS v)",
    ),
    (
        "deadline_cursor",
        "WHERE NOT EXISTS (SELECT FROM first AS f WHERE (f.deadline_at, f.batch_id) <= (v.deadline_at, v.batch_id))",
        "",
    ),
    ("deadline_ties", "(b.deadline_at, b.batch_id) > (v_after, p_after)", "b.deadline_at > v_after"),
    ("stale_heartbeat", "v.run_leases[j.n]) AND s.heartbeat_at > p_cutoff)", "v.run_leases[j.n]) AND false)"),
    ("rescue_bound", "EXIT WHEN cardinality(v_found.receipt_ids) >= p_limit;", ""),
    ("silent_since", "s.run_lease = i.run_lease AND s.heartbeat_at > p_silent_since);", "false);"),
    ("lease_silent_since", "WHERE p_sweep <> 'stale' OR NOT EXISTS (", "WHERE true OR NOT EXISTS ("),
    ("stale_cutoff", "WHERE b.batch_id > p_after AND b.claimed_at <= p_cutoff", "WHERE b.batch_id > p_after"),
    ("rescue_wrap", "                PERFORM setval(v_cursor, 0);", "                NULL;"),
    (
        "lease_skip_locked",
        "LIMIT p_limit\n        FOR UPDATE SKIP LOCKED\n    )\n    SELECT array_agg(l.receipt_id",
        "LIMIT p_limit\n        FOR UPDATE\n    )\n    SELECT array_agg(l.receipt_id",
    ),
    (
        "finish_poison",
        "EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception OR program_limit_exceeded THEN\n        -- Finishing",
        "EXCEPTION WHEN SQLSTATE '02000' THEN\n        -- Finishing",
    ),
    (
        "close_keys_last",
        "ELSIF v_job.unique_key IS NOT NULL THEN\n            v_keyed",
        "ELSIF false THEN\n            v_keyed",
    ),
    ("close_key_order", "ORDER BY k.unique_key, k.nth LOOP\n        v_n", "ORDER BY k.nth LOOP\n        v_n"),
    (
        "complete_key_order",
        "ORDER BY k.unique_key, k.nth LOOP\n        PERFORM",
        "ORDER BY k.nth LOOP\n        PERFORM",
    ),
    (
        "complete_keys_last",
        "            v_jobs := v_jobs || v_job;\n            v_keys := v_keys || v_job.unique_key;",
        "            PERFORM {schema}.finish_job(v_job, 'completed', p_now, NULL, NULL, NULL);",
    ),
    (
        "release_last",
        "        v_unique_jobs := v_unique_jobs || v_done.unique_jobs;\n    END LOOP;\n\n    IF v_lost",
        "        PERFORM {schema}.release_unique_keys(v_done.unique_jobs, 'completed');\n    END LOOP;\n\n    IF v_lost",
    ),
    (
        "promote_key_order",
        "WHERE d.unique_key IS NOT NULL ORDER BY d.unique_key, d.job_id LOOP",
        "WHERE d.unique_key IS NOT NULL LOOP",
    ),
    (
        "drain_key_order",
        "WHERE j.unique_key IS NOT NULL ORDER BY j.unique_key, j.job_id LOOP",
        "WHERE j.unique_key IS NOT NULL LOOP",
    ),
    (
        "close_poison",
        "EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception OR program_limit_exceeded THEN\n        -- One of them",
        "EXCEPTION WHEN SQLSTATE '02000' THEN\n        -- One of them",
    ),
    ("superseded", "IF v_holder IS NOT NULL AND v_state IN ('retryable', 'scheduled') THEN", "IF false THEN"),
    ("last_attempt", "IF p_outcome = 'retryable' AND p_job.attempt >= p_job.max_attempts THEN", "IF false THEN"),
    ("callback_lock", "WHERE l.callback_id = p_callback_id FOR UPDATE;", "WHERE l.callback_id = p_callback_id;"),
    (
        "lease_fence",
        "WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id\n    RETURNING",
        "WHERE l.job_id = p_job_id AND l.receipt_id = p_receipt_id\n    RETURNING",
    ),
    (
        "lease_receipt",
        "WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id\n    RETURNING",
        "WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease\n    RETURNING",
    ),
    (
        "materialise_lock",
        "PERFORM {schema}.lock_claim_batches(ARRAY[p_receipt_id]);\n    -- Lock: the lease row",
        "-- Lock: the lease row",
    ),
    ("deadline_waits", "deadline_at = NULL  -- a deadline", "deadline_at = l.deadline_at  -- a deadline"),
    (
        "heartbeat_lock",
        "PERFORM {schema}.lock_claim_batches(p_receipt_ids);\n    FOR v_slot IN\n        SELECT DISTINCT s.slot\n        FROM",
        "FOR v_slot IN\n        SELECT DISTINCT s.slot\n        FROM",
    ),
    (
        "heartbeat_fence",
        "      AND coalesce(b.run_lease, b.run_leases[(i.receipt_id & 1023) + 1]) = i.run_lease\n      AND NOT EXISTS (",
        "      AND NOT EXISTS (",
    ),
    (
        "heartbeat_closure",
        "WHERE c.batch_id = i.receipt_id >> 10 AND c.receipt_ranges @> i.receipt_id);\n    RETURN v_places",
        "WHERE false);\n    RETURN v_places",
    ),
    ("heartbeat_progress", "CASE WHEN s.run_lease = excluded.run_lease THEN s.progress END)", "s.progress)"),
    (
        "heartbeat_lease",
        "ON l.job_id = i.job_id AND l.run_lease = i.run_lease AND l.receipt_id = i.receipt_id",
        "ON l.job_id = i.job_id",
    ),
    ("drop_state_fence", "ON d.job_id = i.job_id AND d.run_lease <= i.run_lease", "ON d.job_id = i.job_id"),
    ("carry_leases", "WHEN 'lease' THEN PERFORM {schema}.carry_leases(p_slot);", "WHEN 'lease' THEN NULL;"),
    (
        "lease_pin",
        "PERFORM pg_advisory_xact_lock_shared('{schema}.lease_ring_slots'::regclass::oid::integer, (v_cursor & 255)::integer);",
        "",
    ),
    ("carry_limit", "IF v_live > c_carry THEN", "IF false THEN"),
    ("lease_worth", "IF v_live * 2 > v_size THEN", "IF false THEN"),
    (
        "old_snapshot",
        "    IF current_setting('transaction_isolation') <> 'read committed' THEN\n        RAISE EXCEPTION '% needs",
        "    IF false THEN\n        RAISE EXCEPTION '% needs",
    ),
    (
        "withdraw_tombstone",
        "        FROM unnest(v_jobs) AS j;\n        RETURN QUERY",
        "        FROM unnest(v_jobs) AS j HAVING false;\n        RETURN QUERY",
    ),
    ("withdraw_lock", "PERFORM pg_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, p_lane_id);", ""),
    (
        "withdraw_unclaimed",
        "AND r.lane_seq = ANY (p_lane_seqs)\n          AND NOT EXISTS (\n              SELECT FROM",
        "AND r.lane_seq = ANY (p_lane_seqs)\n          AND EXISTS (\n              SELECT 1 UNION ALL SELECT 1 FROM",
    ),
    (
        "history_lock",
        "PERFORM pg_advisory_xact_lock('{schema}.terminal_tombstones'::regclass::oid::integer, (p_job_id & 2147483647)::integer);",
        "",
    ),
    (
        "history_tombstone",
        "VALUES (p_job_id, p_place.run_lease, p_place.ready_slot, p_place.state, v_job.queue);",
        "SELECT p_job_id, p_place.run_lease, p_place.ready_slot, p_place.state, v_job.queue WHERE false;",
    ),
    ("retry_lease", "v_job.run_lease := v_job.run_lease + 1;\n                IF", "IF"),
    (
        "look_again",
        "v_result.reason := 'no such job';\n            CONTINUE;",
        "v_result.reason := 'no such job';\n            RETURN v_result;",
    ),
    ("fold_failed", "IF v_failed THEN", "IF false THEN"),
    ("purge_skip_locked", "FOR UPDATE OF q SKIP LOCKED", "FOR UPDATE OF q"),
    ("pause", "WHERE m.queue = p_queue AND m.paused) THEN", "WHERE false) THEN"),
    ("promote_fair", "greatest(p_limit / cardinality(v_queues), 1)", "greatest(p_limit - v_moved, 0)"),
    (
        "promote_order",
        "ROW(g.*)::{schema}.deferred_jobs ORDER BY g.run_at, g.job_id)",
        "ROW(g.*)::{schema}.deferred_jobs ORDER BY g.job_id)",
    ),
    (
        "promote_skip_locked",
        "LIMIT p_limit\n        FOR UPDATE SKIP LOCKED\n    ),",
        "LIMIT p_limit\n        FOR UPDATE\n    ),",
    ),
    ("aging", "greatest(o.priority - coalesce(floor(", "greatest(o.priority - 0 * coalesce(floor("),
    ("shard_by_session", "v_shard := pg_backend_pid() % v_shards;", "v_shard := floor(random() * v_shards);"),
];

pub fn take_out(text: String) -> String {
    let Ok(name) = std::env::var("AWA_WITHOUT") else { return text };
    let parts: Vec<_> = GUARDS.iter().filter(|g| g.0 == name).collect();
    assert!(!parts.is_empty(), "no guard is named {name}");
    parts.iter().fold(text, |text, (_, with, without)| {
        assert!(text.contains(with), "guard {name} is not in the migrations as written here");
        text.replace(with, without)
    })
}
