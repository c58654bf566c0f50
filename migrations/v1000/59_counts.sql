-- Counts: exact per queue and state, and never by scanning a backlog (engine.md, Counts).

-- Counts stretches of deep backlogs once and keeps the numbers: of lanes with over p_stretch numbers beyond what is
-- counted, as far as nothing can change any more. Returns how many stretches it added. For some lanes at a time, as
-- advance_idle_cursors.
CREATE FUNCTION {schema}.settle_backlog_segments(
    p_stretch bigint DEFAULT 25000, p_first integer DEFAULT 0, p_last integer DEFAULT 2147483647
) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_lane {schema}.queue_lanes;
    v_allocated bigint;
    v_lo bigint;
    v_producers text[];
    v_tries integer;
    v_added integer := 0;
BEGIN
    -- Under an old snapshot the lock below would be worth nothing.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'settle_backlog_segments needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    FOR v_lane IN SELECT l.* FROM {schema}.queue_lanes AS l WHERE l.lane_id BETWEEN p_first AND p_last ORDER BY l.lane_id LOOP
        v_allocated := pg_sequence_last_value(v_lane.seq);
        CONTINUE WHEN v_allocated - pg_sequence_last_value(v_lane.spent) <= p_stretch;
        -- Lock: one settler a lane, until its stretches are committed; never waited for. Whoever gets it reads how far the
        -- one before came in a later statement, so stretches never overlap, however the cursor moves meanwhile.
        CONTINUE WHEN NOT pg_try_advisory_xact_lock('{schema}.queue_backlog_segments'::regclass::oid::integer, v_lane.lane_id);
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
            WHERE e.lane_id = v_lane.lane_id AND e.lane_seq > v_lo AND e.lane_seq <= v_lo + p_stretch;
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

-- Jobs by queue and state, with a row for 'available' of every queue that ever had a lane. Exact at one instant, whatever is
-- claimed, completed, promoted, rotated and pruned meanwhile: everything that must agree is read by one statement. Only
-- where over p_scan numbers of a lane are not counted yet (a producer that stays open keeps a deep backlog from being
-- settled) is 'available' an estimate, and said to be one.
CREATE FUNCTION {schema}.queue_counts(p_scan bigint DEFAULT 1000000)
RETURNS TABLE (queue text, state text, job_count bigint, is_exact boolean, oldest_ready_age_s double precision)
LANGUAGE plpgsql SET jit = off AS $function$
DECLARE
    v_lane_ids integer[];
    v_spents bigint[];
BEGIN
    -- TRUNCATE hides rows from snapshots older than itself. Here each statement has its own, taken after its locks.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'queue_counts needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;

    -- Lock: the partitions of the bodies, as every reader takes them; prune needs each of its slot's tables exclusively, so
    -- from here on no queue slot goes.
    LOCK TABLE {schema}.ready_entries IN ACCESS SHARE MODE;
    -- The cursors, which no snapshot holds still, between that lock and the snapshot of the statement below:
    -- what they are past was committed before, so it is seen as emitted there; and what was pruned lies below them, so a
    -- stretch counted above a cursor is still whole.
    SELECT array_agg(l.lane_id), array_agg(pg_sequence_last_value(l.spent)) INTO v_lane_ids, v_spents FROM {schema}.queue_lanes AS l;

    RETURN QUERY
        WITH open_holes AS MATERIALIZED (
            SELECT h.lane_id, range_agg(h.lane_ranges) AS ranges
            FROM {schema}.ready_lane_holes AS h
            WHERE h.holders IS NOT NULL
              AND NOT EXISTS (
                  SELECT FROM {schema}.ready_lane_holes AS o
                  WHERE o.ready_slot = h.ready_slot AND o.hole_id = h.hole_id AND o.holders IS NULL)
            GROUP BY h.lane_id
        ), unspent AS MATERIALIZED (
            -- Where a lane may hold a row that nobody took: above the cursor, and below it in holes set aside.
            SELECT l.lane_id, l.spent, int8multirange(int8range(l.spent + 1, greatest(l.spent, l.allocated) + 1)) + coalesce(h.ranges, '{}') AS ranges
            FROM (
                SELECT n.lane_id, coalesce(s.spent, 0) AS spent, pg_sequence_last_value(n.seq) AS allocated
                FROM {schema}.queue_lanes AS n
                LEFT JOIN unnest(v_lane_ids, v_spents) AS s (lane_id, spent) ON s.lane_id = n.lane_id
            ) AS l
            LEFT JOIN open_holes AS h ON h.lane_id = l.lane_id
            WHERE l.spent < l.allocated OR h.ranges IS NOT NULL
        ), known AS MATERIALIZED (
            SELECT u.lane_id, u.spent, u.ranges, c.job_count,
                   coalesce(c.ranges, '{}') AS counted,
                   coalesce((
                       SELECT range_agg(t.lane_ranges)
                       FROM (
                           SELECT b.lane_ranges FROM {schema}.ready_claim_attempt_batches AS b
                           WHERE b.lane_id = u.lane_id AND b.lane_hi >= lower(u.ranges) AND b.lane_ranges && u.ranges
                       ) AS t
                   ), '{}') AS taken
            FROM unspent AS u
            LEFT JOIN LATERAL (
                SELECT sum(s.job_count) AS job_count, range_agg(int8range(s.lane_lo + 1, s.lane_hi + 1)) AS ranges
                FROM {schema}.queue_backlog_segments AS s
                WHERE s.lane_id = u.lane_id AND s.lane_lo >= u.spent
            ) AS c ON true
        ), lanes AS MATERIALIZED (
            SELECT k.lane_id, k.ranges - k.taken AS free, k.ranges - k.taken - k.counted AS uncounted,
                   int8multirange(int8range(k.spent + 1, NULL)) AS above,
                   coalesce(k.job_count, 0) - {schema}.width_of(k.taken * k.counted) AS counted
            FROM known AS k
        ), scans AS MATERIALIZED (
            SELECT n.*, {schema}.width_of(n.uncounted * n.above) <= p_scan AS is_exact FROM lanes AS n
        ), available AS MATERIALIZED (
            SELECT n.lane_id, n.is_exact, f.run_at,
                   n.counted + c.rows + CASE WHEN n.is_exact THEN 0 ELSE {schema}.width_of(n.uncounted * n.above) END AS job_count
            FROM scans AS n
            CROSS JOIN LATERAL (
                SELECT coalesce(sum(r.rows), 0) AS rows
                FROM unnest(CASE WHEN n.is_exact THEN n.uncounted ELSE n.uncounted - n.above END) AS g (gap)
                CROSS JOIN LATERAL (
                    SELECT count(*) AS rows
                    FROM {schema}.ready_entries AS e
                    WHERE e.lane_id = n.lane_id AND e.lane_seq >= lower(g.gap) AND e.lane_seq < upper(g.gap)
                ) AS r
            ) AS c
            LEFT JOIN LATERAL (
                -- Gaps come in ascending order; the first that holds a row ends the search.
                SELECT r.run_at
                FROM unnest(n.free) AS g (gap)
                CROSS JOIN LATERAL (
                    SELECT e.run_at
                    FROM {schema}.ready_entries AS e
                    WHERE e.lane_id = n.lane_id AND e.lane_seq >= lower(g.gap) AND e.lane_seq < upper(g.gap)
                    ORDER BY e.lane_seq
                    LIMIT 1
                ) AS r
                LIMIT 1
            ) AS f ON true
        ), by_lane (lane_id, state, job_count) AS (
            SELECT c.lane_id, 'completed', sum(c.job_count) FROM {schema}.receipt_completion_batches AS c GROUP BY c.lane_id
            UNION ALL
            SELECT b.lane_id, 'running', sum(cardinality(b.job_ids)) FROM {schema}.lease_claim_batches AS b GROUP BY b.lane_id
            UNION ALL
            SELECT b.lane_id, 'running', -sum(c.job_count)
            FROM {schema}.lease_claim_closure_batches AS c
            JOIN {schema}.lease_claim_batches AS b ON b.claim_slot = c.claim_slot AND b.batch_id = c.batch_id
            GROUP BY b.lane_id
        ), facts (queue, state, job_count, is_exact, oldest_run_at) AS (
            SELECT l.queue, 'available', coalesce(a.job_count, 0), coalesce(a.is_exact, true), a.run_at
            FROM {schema}.queue_lanes AS l LEFT JOIN available AS a ON a.lane_id = l.lane_id
            UNION ALL
            SELECT l.queue, t.state, t.job_count, true, NULL FROM by_lane AS t JOIN {schema}.queue_lanes AS l ON l.lane_id = t.lane_id
            UNION ALL
            SELECT d.queue, d.state::text, count(*), true, NULL FROM {schema}.deferred_jobs AS d GROUP BY d.queue, d.state
            UNION ALL
            SELECT d.queue, d.state::text, count(*), true, NULL FROM {schema}.done_entries AS d GROUP BY d.queue, d.state
            UNION ALL
            SELECT h.queue, h.state::text, -count(*), true, NULL FROM {schema}.terminal_tombstones AS h GROUP BY h.queue, h.state
            UNION ALL
            SELECT l.queue, l.state::text, count(*), true, NULL FROM {schema}.leases AS l GROUP BY l.queue, l.state
            UNION ALL
            SELECT q.queue, CASE q.held WHEN 'dlq' THEN 'dlq' ELSE 'failed' END, count(*), true, NULL
            FROM {schema}.dlq_entries AS q GROUP BY q.queue, q.held
            UNION ALL
            SELECT r.queue, r.state::text, sum(r.job_count), true, NULL
            FROM (
                SELECT d.queue, d.state, d.job_count FROM {schema}.queue_terminal_rollup_deltas AS d
                UNION ALL
                SELECT t.queue, t.state, t.job_count FROM {schema}.queue_terminal_rollups AS t
            ) AS r
            GROUP BY r.queue, r.state
        )
        SELECT f.queue, f.state, sum(f.job_count)::bigint, bool_and(f.is_exact),
               extract(epoch FROM clock_timestamp() - min(f.oldest_run_at))::double precision
        FROM facts AS f
        GROUP BY f.queue, f.state
        ORDER BY f.queue, f.state;
END
$function$;

-- How many numbers the ranges hold.
CREATE FUNCTION {schema}.width_of(p_ranges int8multirange) RETURNS bigint
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    RETURN (SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM unnest(p_ranges) AS r);
END
$function$;

-- Adds the deltas of pruned segments to their totals, once there are p_at_least of them and nobody old would keep the dead
-- rows. Returns how many went.
CREATE FUNCTION {schema}.fold_terminal_rollups(p_at_least bigint DEFAULT 1000) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_folded bigint;
BEGIN
    IF (SELECT count(*) FROM {schema}.queue_terminal_rollup_deltas) < p_at_least OR {schema}.oldest_pin() > interval '5 seconds' THEN
        RETURN 0;
    END IF;
    -- One statement, so that every reader sees a count before or after, in one table or the other. Lock: the deltas' rows;
    -- a second folder finds them gone.
    WITH gone AS (
        DELETE FROM {schema}.queue_terminal_rollup_deltas AS d RETURNING d.queue, d.state, d.job_count
    ),
    totals AS (
        INSERT INTO {schema}.queue_terminal_rollups AS t (queue, state, job_count)
        SELECT g.queue, g.state, sum(g.job_count) FROM gone AS g GROUP BY g.queue, g.state ORDER BY g.queue, g.state
        ON CONFLICT (queue, state) DO UPDATE SET job_count = t.job_count + excluded.job_count
    )
    SELECT count(*) INTO v_folded FROM gone;
    RETURN v_folded;
END
$function$;
