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
        "AND NOT EXISTS (SELECT FROM %1$I.%3$I AS c WHERE c.batch_id = b.batch_id AND c.receipt_ranges @> $1)",
        "",
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
        "WHERE NOT EXISTS (SELECT FROM {schema}.queue_ring_state AS s WHERE s.generation = v_cursor >> 8)",
        "WHERE false",
    ),
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
