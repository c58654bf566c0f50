-- Read surfaces.

-- A finished job as it is shown.
CREATE TYPE {schema}.terminal_job AS (
    id            bigint,
    kind          text,
    queue         text,
    args          jsonb,
    state         {schema}.job_state,
    priority      smallint,
    attempt       smallint,
    max_attempts  smallint,
    run_at        timestamptz,
    attempted_at  timestamptz,
    finalized_at  timestamptz,
    created_at    timestamptz,
    errors        jsonb[],
    metadata      jsonb,
    tags          text[],
    unique_key    bytea,
    unique_states bit(8),
    run_lease     bigint,
    progress      jsonb,
    ready_slot    smallint
);

-- The finished jobs of one slot, or one of them. A statement over one partition of each table: over the parents, of whose
-- sizes the planner knows nothing, it would take longer to compile than to run.
CREATE FUNCTION {schema}.terminal_jobs_in(p_slot smallint, p_job_id bigint DEFAULT NULL) RETURNS SETOF {schema}.terminal_job
LANGUAGE plpgsql STABLE ROWS 1000 SET jit = off AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT r.job_id, r.kind, l.queue, r.args, ''completed''::%1$I.job_state, l.priority, (r.attempt + 1)::smallint,
                r.max_attempts, r.run_at, c.claimed_at, c.finalized_at, r.created_at, r.errors, r.metadata, r.tags, r.unique_key,
                r.unique_states, r.run_lease + 1, NULL::jsonb, r.ready_slot
         FROM (
             -- The set-returning column keeps this a unit of its own: joined by lane alone every completion would meet
             -- every row of its lane.
             SELECT b.lane_id, a.lane_ranges, a.claimed_at, b.finalized_at,
                    generate_series(lower(g.receipts), upper(g.receipts) - 1) AS receipt_id
             FROM %1$I.%2$I AS b
             JOIN %1$I.%3$I AS a ON a.batch_id = b.batch_id
             CROSS JOIN LATERAL unnest(b.receipt_ranges) AS g (receipts)
         ) AS c
         JOIN %1$I.%4$I AS r
           ON r.lane_id = c.lane_id AND r.lane_seq = %1$I.nth_in_ranges(c.lane_ranges, (c.receipt_id & 1023)::integer)
         JOIN %1$I.queue_lanes AS l ON l.lane_id = r.lane_id
         WHERE ($1 IS NULL OR r.job_id = $1)
           AND NOT EXISTS (SELECT FROM %1$I.%6$I AS h WHERE h.job_id = r.job_id AND h.run_lease = r.run_lease + 1)
         UNION ALL
         SELECT d.job_id, coalesce(d.kind, r.kind), d.queue, coalesce(d.args, r.args), d.state, coalesce(d.priority, l.priority),
                d.attempt, coalesce(d.max_attempts, r.max_attempts), coalesce(d.run_at, r.run_at), d.attempted_at, d.finalized_at,
                coalesce(d.created_at, r.created_at), d.errors, coalesce(d.metadata, r.metadata), coalesce(d.tags, r.tags),
                coalesce(d.unique_key, r.unique_key), coalesce(d.unique_states, r.unique_states), d.run_lease, d.progress, d.ready_slot
         FROM %1$I.%5$I AS d
         LEFT JOIN %1$I.%4$I AS r ON r.lane_id = d.lane_id AND r.lane_seq = d.lane_seq
         LEFT JOIN %1$I.queue_lanes AS l ON l.lane_id = d.lane_id
         WHERE ($1 IS NULL OR d.job_id = $1)
           AND NOT EXISTS (SELECT FROM %1$I.%6$I AS h WHERE h.job_id = d.job_id AND h.run_lease = d.run_lease)',
        {schema_literal}, 'receipt_completion_batches_' || p_slot, 'ready_claim_attempt_batches_' || p_slot,
        'ready_entries_' || p_slot, 'done_entries_' || p_slot, 'terminal_tombstones_' || p_slot)
    USING p_job_id;
END
$function$;

-- Every finished job whose slot is not pruned yet, with its body; without those that were deleted, or retried since. Failed
-- jobs of pruned slots and of queues with a DLQ are in dlq_entries.
CREATE VIEW {schema}.terminal_jobs AS
SELECT t.* FROM {schema}.queue_ring_slots AS s CROSS JOIN LATERAL {schema}.terminal_jobs_in(s.slot) AS t;

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
    -- Not claimed yet; the attempts that run are the claim ring's. An estimate must not make up jobs where there are none.
    open_count := greatest(row_count - v_emitted, 0);
    IF NOT is_exact AND (SELECT p.reason FROM {schema}.queue_slot_pending(p_slot) AS p) IS DISTINCT FROM 'ready_rows' THEN
        open_count := 0;
    END IF;
END
$function$;

-- Everything that keeps a sealed slot from being pruned now, by name; no row when the next prune may take it. Looks, and
-- does not prove: never reads the jobs of a slot.
CREATE FUNCTION {schema}.slot_blockers(p_ring text, p_slot smallint) RETURNS TABLE (reason text, detail text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_children oid[];
BEGIN
    RETURN QUERY EXECUTE format('SELECT b.reason, b.detail FROM %I.%I($1) AS b WHERE b.reason IS NOT NULL',
        {schema_literal}, CASE p_ring WHEN 'queue' THEN 'queue_slot_pending' ELSE p_ring || '_slot_blocker' END)
    USING p_slot;
    IF p_ring = 'queue' AND NOT FOUND THEN
        RETURN QUERY SELECT b.reason, b.detail FROM {schema}.queue_slot_late_rows(p_slot) AS b WHERE b.reason IS NOT NULL;
    END IF;
    RETURN QUERY
        SELECT 'pinned', h
        FROM {schema}.lock_holders(format('%I.%I', {schema_literal}, p_ring || '_ring_slots')::regclass::oid, p_slot, '{}') AS h
        WHERE h IS NOT NULL;
    SELECT array_agg(format('%I.%I', {schema_literal}, p || '_' || p_slot)::regclass::oid) INTO v_children
    FROM unnest({schema}.ring_parents(p_ring)) AS p;
    RETURN QUERY SELECT 'reader', h FROM {schema}.lock_holders(NULL, NULL, v_children) AS h WHERE h IS NOT NULL;
END
$function$;

-- Jobs of a slot, below the cursor, in holes set aside in any slot and not claimed yet. Of its own, since it looks into
-- the partitions of other slots, which prune must not wait for.
CREATE FUNCTION {schema}.queue_slot_late_rows(p_slot smallint, OUT reason text, OUT detail text)
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    EXECUTE format(
        'SELECT ''ready_rows'', format(''%%s jobs of lane %%s, committed late by their producers, are not claimed yet'', count(*), h.lane_id)
         FROM %1$I.ready_lane_holes AS h
         CROSS JOIN LATERAL unnest(h.lane_ranges) AS g (gap)
         CROSS JOIN LATERAL (
             SELECT e.lane_seq
             FROM %1$I.%2$I AS e
             WHERE e.lane_id = h.lane_id AND e.lane_seq >= lower(g.gap) AND e.lane_seq < upper(g.gap)
             OFFSET 0
         ) AS e
         WHERE h.holders IS NOT NULL
           AND NOT EXISTS (
               SELECT FROM %1$I.ready_lane_holes AS o WHERE o.ready_slot = h.ready_slot AND o.hole_id = h.hole_id AND o.holders IS NULL)
           AND NOT EXISTS (
               SELECT FROM %1$I.%3$I AS b
               WHERE b.lane_id = h.lane_id AND b.lane_hi >= e.lane_seq AND b.lane_ranges @> e.lane_seq)
         GROUP BY h.lane_id
         LIMIT 1',
        {schema_literal}, 'ready_entries_' || p_slot, 'ready_claim_attempt_batches_' || p_slot)
    INTO reason, detail;
END
$function$;

-- What the next rotation of a ring would do: the slot it opens, or why it is skipped.
CREATE FUNCTION {schema}.rotation_outlook(p_ring text, OUT slot smallint, OUT reason text)
LANGUAGE plpgsql AS $function$
BEGIN
    SELECT o.slot, o.reason INTO slot, reason FROM {schema}.next_opening(p_ring, false) AS o;
    reason := coalesce(
        'another session is rotating this ring: '
            || {schema}.lock_holders(format('%I.%I', {schema_literal}, p_ring || '_ring_state')::regclass::oid, 0, '{}'),
        reason);
    IF reason IS NOT NULL THEN
        slot := NULL;
    END IF;
END
$function$;
