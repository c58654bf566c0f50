-- Counts: exact per queue and state, and never by scanning a backlog (engine.md, Counts).

-- Counts stretches of deep backlogs once and keeps the numbers: of lanes with over p_stretch numbers beyond what is
-- counted, as far as nothing can change any more. Returns how many stretches it added.
CREATE FUNCTION {schema}.settle_backlog_segments(p_stretch bigint DEFAULT 100000) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_lane {schema}.queue_lanes;
    v_allocated bigint;
    v_lo bigint;
    v_producers text[];
    v_tries integer;
    v_added integer := 0;
BEGIN
    FOR v_lane IN SELECT l.* FROM {schema}.queue_lanes AS l ORDER BY l.lane_id LOOP
        v_allocated := pg_sequence_last_value(v_lane.seq);
        v_lo := greatest(
            pg_sequence_last_value(v_lane.spent),
            (SELECT max(s.lane_hi) FROM {schema}.queue_backlog_segments AS s WHERE s.lane_id = v_lane.lane_id));
        CONTINUE WHEN v_allocated - v_lo <= p_stretch;

        -- Proof: v_allocated was read before the producers; once none of those is left, no number up to it can still
        -- be committed. Waited for briefly; a producer that stays leaves the lane for the next pass.
        v_producers := {schema}.lane_producers(v_lane.lane_id);
        v_tries := 0;
        WHILE v_tries < 20 AND v_producers && {schema}.lane_producers(v_lane.lane_id) LOOP
            PERFORM pg_sleep(0.01);
            v_tries := v_tries + 1;
        END LOOP;
        CONTINUE WHEN v_tries = 20;

        WHILE v_lo + p_stretch <= v_allocated LOOP
            INSERT INTO {schema}.queue_backlog_segments (lane_id, lane_lo, lane_hi, job_count)
            SELECT v_lane.lane_id, v_lo, v_lo + p_stretch, count(*)
            FROM {schema}.ready_entries AS e
            WHERE e.lane_id = v_lane.lane_id AND e.lane_seq > v_lo AND e.lane_seq <= v_lo + p_stretch
            ON CONFLICT DO NOTHING;
            v_lo := v_lo + p_stretch;
            v_added := v_added + 1;
        END LOOP;
    END LOOP;
    RETURN v_added;
END
$function$;

-- Forgets stretches that are wholly spent, unless an old snapshot would keep the dead rows.
CREATE FUNCTION {schema}.trim_backlog_segments() RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    IF {schema}.oldest_pin() > interval '5 seconds' THEN
        RETURN 0;
    END IF;
    DELETE FROM {schema}.queue_backlog_segments AS s
    USING {schema}.queue_lanes AS l
    WHERE l.lane_id = s.lane_id AND s.lane_hi <= pg_sequence_last_value(l.spent);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;

-- Jobs of a lane that can be claimed now. Scans at most one stretch and the part not yet counted; where that is over
-- p_scan numbers (a producer that stays open kept it from being counted), it is an estimate, and said to be one.
CREATE FUNCTION {schema}.lane_available(
    p_lane {schema}.queue_lanes, p_scan bigint DEFAULT 1000000, OUT available bigint, OUT is_exact boolean, OUT oldest_run_at timestamptz
)
LANGUAGE plpgsql AS $function$
DECLARE
    v_spent bigint := pg_sequence_last_value(p_lane.spent);
    v_allocated bigint := pg_sequence_last_value(p_lane.seq);
    v_emitted int8multirange;
    v_counted record;
    v_gaps int8multirange;
    v_head bigint := 0;
    v_tail bigint := 0;
BEGIN
    is_exact := true;
    available := 0;
    IF v_spent >= v_allocated THEN
        RETURN;
    END IF;
    SELECT coalesce(range_agg(b.lane_ranges), '{}') INTO v_emitted
    FROM {schema}.ready_claim_attempt_batches AS b
    WHERE b.lane_id = p_lane.lane_id AND b.lane_hi > v_spent;
    SELECT min(s.lane_lo) AS lo, max(s.lane_hi) AS hi, coalesce(sum(s.job_count), 0) AS job_count INTO v_counted
    FROM {schema}.queue_backlog_segments AS s
    WHERE s.lane_id = p_lane.lane_id AND s.lane_lo >= v_spent;
    IF v_counted.lo > v_spent THEN
        SELECT count(*) INTO v_head
        FROM {schema}.ready_entries AS e
        WHERE e.lane_id = p_lane.lane_id AND e.lane_seq > v_spent AND e.lane_seq <= v_counted.lo;
    END IF;
    IF v_allocated - coalesce(v_counted.hi, v_spent) > p_scan THEN
        is_exact := false;
        v_tail := v_allocated - coalesce(v_counted.hi, v_spent);
    ELSE
        SELECT count(*) INTO v_tail
        FROM {schema}.ready_entries AS e
        WHERE e.lane_id = p_lane.lane_id AND e.lane_seq > coalesce(v_counted.hi, v_spent);
    END IF;
    SELECT v_counted.job_count + v_head + v_tail - coalesce(sum(upper(r) - lower(r)), 0) INTO available
    FROM unnest(v_emitted * int8multirange(int8range(v_spent + 1, NULL))) AS r;

    v_gaps := int8multirange(int8range(v_spent + 1, NULL)) - v_emitted;
    SELECT f.run_at INTO oldest_run_at
    FROM unnest(v_gaps) AS g (gap)
    CROSS JOIN LATERAL (
        SELECT e.run_at, e.lane_seq
        FROM {schema}.ready_entries AS e
        WHERE e.lane_id = p_lane.lane_id AND e.lane_seq >= lower(g.gap)
          AND e.lane_seq < coalesce(upper(g.gap), 9223372036854775807)
        ORDER BY e.lane_seq
        LIMIT 1
    ) AS f
    ORDER BY f.lane_seq
    LIMIT 1;
END
$function$;

-- Every queue that ever had a job, with what is in it by state.
CREATE FUNCTION {schema}.queue_counts()
RETURNS TABLE (
    queue text, available bigint, available_exact boolean, scheduled bigint, retryable bigint, running bigint, completed bigint,
    failed bigint, cancelled bigint, oldest_ready_age_s double precision
)
LANGUAGE plpgsql AS $function$
BEGIN
    RETURN QUERY
        WITH ready AS MATERIALIZED (
            SELECT l.queue, sum(a.available)::bigint AS available, bool_and(a.is_exact) AS is_exact, min(a.oldest_run_at) AS oldest
            FROM {schema}.queue_lanes AS l CROSS JOIN LATERAL {schema}.lane_available(l) AS a
            GROUP BY l.queue
        ), deferred AS MATERIALIZED (
            SELECT d.queue, count(*) FILTER (WHERE d.state = 'scheduled') AS scheduled,
                   count(*) FILTER (WHERE d.state = 'retryable') AS retryable
            FROM {schema}.deferred_jobs AS d
            GROUP BY d.queue
        ), closed AS MATERIALIZED (
            SELECT c.claim_slot, c.batch_id, sum(c.job_count) AS job_count
            FROM {schema}.lease_claim_closure_batches AS c
            GROUP BY c.claim_slot, c.batch_id
        ), running AS MATERIALIZED (
            SELECT l.queue, sum(cardinality(b.job_ids) - coalesce(c.job_count, 0))::bigint AS running
            FROM {schema}.lease_claim_batches AS b
            JOIN {schema}.queue_lanes AS l ON l.lane_id = b.lane_id
            LEFT JOIN closed AS c ON c.claim_slot = b.claim_slot AND c.batch_id = b.batch_id
            GROUP BY l.queue
        ), ended AS MATERIALIZED (
            SELECT t.queue, sum(t.job_count) FILTER (WHERE t.state = 'completed') AS completed,
                   sum(t.job_count) FILTER (WHERE t.state = 'failed') AS failed,
                   sum(t.job_count) FILTER (WHERE t.state = 'cancelled') AS cancelled
            FROM (
                SELECT l.queue, 'completed'::{schema}.job_state AS state, c.job_count::bigint AS job_count
                FROM {schema}.receipt_completion_batches AS c JOIN {schema}.queue_lanes AS l ON l.lane_id = c.lane_id
                UNION ALL
                SELECT l.queue, d.state, 1 FROM {schema}.done_entries AS d JOIN {schema}.queue_lanes AS l ON l.lane_id = d.lane_id
                UNION ALL
                SELECT r.queue, r.state, r.job_count FROM {schema}.queue_terminal_rollup_deltas AS r
            ) AS t
            GROUP BY t.queue
        )
        SELECT q.queue, coalesce(r.available, 0), coalesce(r.is_exact, true), coalesce(d.scheduled, 0), coalesce(d.retryable, 0),
               coalesce(n.running, 0), coalesce(e.completed, 0)::bigint, coalesce(e.failed, 0)::bigint,
               coalesce(e.cancelled, 0)::bigint, extract(epoch FROM clock_timestamp() - r.oldest)::double precision
        FROM (SELECT l.queue FROM {schema}.queue_lanes AS l UNION SELECT d.queue FROM {schema}.deferred_jobs AS d) AS q
        LEFT JOIN ready AS r ON r.queue = q.queue
        LEFT JOIN deferred AS d ON d.queue = q.queue
        LEFT JOIN running AS n ON n.queue = q.queue
        LEFT JOIN ended AS e ON e.queue = q.queue
        ORDER BY q.queue;
END
$function$;

-- What is in each slot of a ring. Rows of a large slot are estimated from its size; counting them would be a scan.
CREATE FUNCTION {schema}.slot_contents(
    p_ring text, p_slot smallint, OUT row_count bigint, OUT is_exact boolean, OUT open_count bigint, OUT bytes bigint, OUT dead bigint
)
LANGUAGE plpgsql AS $function$
DECLARE
    c_scan constant bigint := 8 * 1024 * 1024;
    v_main regclass := format('%I.%I', {schema_literal}, ({schema}.ring_parents(p_ring))[1] || '_' || p_slot)::regclass;
    v_emitted bigint;
    v_sample bigint;
BEGIN
    SELECT sum(pg_total_relation_size(c.oid)), sum(pg_stat_get_dead_tuples(c.oid)) INTO bytes, dead
    FROM pg_inherits AS i
    JOIN pg_class AS c ON c.oid = i.inhrelid
    JOIN pg_class AS p ON p.oid = i.inhparent
    WHERE p.relnamespace = (SELECT n.oid FROM pg_namespace AS n WHERE n.nspname = {schema_literal})
      AND c.relname = p.relname || '_' || p_slot
      AND p.relname = ANY ({schema}.ring_parents(p_ring));

    IF p_ring = 'claim' THEN
        EXECUTE format('SELECT coalesce(sum(cardinality(b.job_ids)), 0) FROM %s AS b', v_main) INTO row_count;
        SELECT coalesce(sum(o.open_count), 0) INTO open_count FROM {schema}.open_claims(p_slot) AS o;
        is_exact := true;
        RETURN;
    END IF;

    is_exact := pg_relation_size(v_main) <= c_scan;
    IF is_exact THEN
        EXECUTE format('SELECT count(*) FROM %s', v_main) INTO row_count;
    ELSE
        EXECUTE format('SELECT count(*) FROM %s AS e WHERE e.ctid < ''(64,0)''', v_main) INTO v_sample;
        row_count := v_sample * (pg_relation_size(v_main) / current_setting('block_size')::bigint) / 64;
    END IF;
    EXECUTE format('SELECT coalesce(sum(b.job_count), 0) FROM %I.%I AS b', {schema_literal}, 'ready_claim_attempt_batches_' || p_slot)
    INTO v_emitted;
    -- Not claimed yet; the attempts that run are the claim ring's.
    open_count := greatest(row_count - v_emitted, 0);
END
$function$;
