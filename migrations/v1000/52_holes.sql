-- Holes: lane_seqs below emitted rows that nobody committed so far. Calling a running producer dead would lose its jobs.
--
-- Every producer holds the lane's producer lock, shared, from before its first lane_seq until after its end is visible
-- to everybody. So once nobody who held it when a number was known to be handed out holds it any more, a fresh snapshot
-- shows either the row or, for ever, nothing. No xid is compared, so a stranger's transaction delays nothing (I6).

-- Whether a producer of the lane may still commit. Taken and released in one expression: producers hardly notice.
CREATE FUNCTION {schema}.lane_is_quiet(p_lane_id integer) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $function$
BEGIN
    RETURN CASE
        WHEN pg_try_advisory_lock('{schema}.ready_entries'::regclass::oid::integer, p_lane_id)
        THEN pg_advisory_unlock('{schema}.ready_entries'::regclass::oid::integer, p_lane_id)
        ELSE false
    END;
END
$function$;

-- The transactions that hold the lane's producer lock now.
CREATE FUNCTION {schema}.lane_producers(p_lane_id integer) RETURNS text[]
LANGUAGE plpgsql VOLATILE AS $function$
BEGIN
    RETURN (
        SELECT coalesce(array_agg(DISTINCT l.virtualtransaction), '{}')
        FROM pg_locks AS l
        WHERE l.locktype = 'advisory'
          AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
          AND l.classid = '{schema}.ready_entries'::regclass::oid
          AND l.objid = p_lane_id::bigint::oid
          AND l.objsubid = 2
          AND l.granted
    );
END
$function$;

-- What any slot knows of the ranges: rows, and ranges emitted or set aside. Looks into every partition, always by index: a
-- plan made while they are empty would read them whole for as long as the session lives. (The cost that this puts on what has no
-- index would make a server compile.)
CREATE FUNCTION {schema}.known_ranges(p_lane_id integer, p_ranges int8multirange, OUT emitted int8multirange, OUT rows int8multirange, OUT oldest bigint)
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $function$
BEGIN
    SELECT coalesce(range_agg(t.lane_ranges), '{}') INTO emitted
    FROM (
        SELECT b.lane_ranges FROM {schema}.ready_claim_attempt_batches AS b
        WHERE b.lane_id = p_lane_id AND b.lane_hi >= lower(p_ranges) AND b.lane_ranges && p_ranges
        UNION ALL
        SELECT h.lane_ranges FROM {schema}.ready_lane_holes AS h
        WHERE h.lane_id = p_lane_id AND h.lane_hi >= lower(p_ranges) AND h.lane_ranges && p_ranges
    ) AS t;
    -- A later statement than the one above: a row seen here and not there is not emitted.
    SELECT coalesce(range_agg(int8range(r.lane_seq, r.lane_seq + 1)), '{}'), min(r.generation) INTO rows, oldest
    FROM (
        SELECT e.lane_seq,
               (SELECT max(s.generation) FROM {schema}.queue_ring_state AS s WHERE s.slot = e.ready_slot) AS generation
        FROM unnest(p_ranges - emitted) AS g (gap)
        CROSS JOIN LATERAL (
            -- A unit of its own: as a plain join it would read the whole lane, once, and then compare.
            SELECT n.lane_seq, n.ready_slot
            FROM {schema}.ready_entries AS n
            WHERE n.lane_id = p_lane_id AND n.lane_seq >= lower(g.gap) AND n.lane_seq < upper(g.gap)
            OFFSET 0
        ) AS e
    ) AS r;
END
$function$;

-- Called by a claim that saw a hole, or nothing at all, below a number handed out. The caller holds the lane's lock.
CREATE FUNCTION {schema}.settle_holes(
    p_lane {schema}.queue_lanes, p_spent bigint, p_allocated bigint, p_emitted int8multirange, p_emitted_batches bigint,
    p_seen int8multirange, p_may_advance boolean
) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    -- A cursor held back costs each claim one range per claim since; past this many the hole is set aside.
    c_patience constant bigint := 64;
    v_top bigint := CASE WHEN p_seen = '{}' THEN p_allocated + 1 ELSE greatest(upper(p_emitted), upper(p_seen)) END;
    v_holes int8multirange := int8multirange(int8range(p_spent + 1, v_top)) - p_emitted - p_seen;
    v_known record;
    v_producers text[];
    v_cursor bigint;
    v_spent bigint;
BEGIN
    IF isempty(v_holes) THEN
        RETURN;
    END IF;

    IF {schema}.lane_is_quiet(p_lane.lane_id) THEN
        -- Proof: every number of v_holes was handed out before; its producer held the lock until its end was visible;
        -- nobody held it just now. What a statement from here on does not show never comes.
        SELECT k.* INTO v_known FROM {schema}.known_ranges(p_lane.lane_id, v_holes) AS k;
        IF v_known.oldest < pg_sequence_last_value(p_lane.generation) THEN
            PERFORM setval(p_lane.generation, v_known.oldest);
        END IF;
        IF p_may_advance THEN
            v_spent := lower(int8multirange(int8range(p_spent + 1, NULL)) - p_emitted - v_known.emitted - (v_holes - v_known.rows)) - 1;
            IF v_spent > p_spent THEN
                PERFORM setval(p_lane.spent, v_spent);
            END IF;
        END IF;
        RETURN;
    END IF;

    -- Only what lies below emitted rows is set aside.
    v_holes := v_holes * int8multirange(int8range(NULL, greatest(upper(p_emitted), upper(p_seen))));
    IF p_emitted_batches < c_patience OR isempty(v_holes) THEN
        RETURN;
    END IF;
    -- The holders are read before the rows: whoever may still fill the
    -- hole held the lock when its number was handed out, so is among them.
    v_producers := {schema}.lane_producers(p_lane.lane_id);
    SELECT k.* INTO v_known FROM {schema}.known_ranges(p_lane.lane_id, v_holes) AS k;
    v_holes := v_holes - v_known.emitted - v_known.rows;
    IF v_known.oldest < pg_sequence_last_value(p_lane.generation) THEN
        PERFORM setval(p_lane.generation, v_known.oldest);
    END IF;
    IF isempty(v_holes) THEN
        RETURN;
    END IF;
    v_cursor := {schema}.pin_ready_slot();
    INSERT INTO {schema}.ready_lane_holes (hole_id, lane_hi, lane_id, ready_slot, holders, lane_ranges)
    VALUES (nextval('{schema}.ready_lane_hole_ids'::regclass), upper(v_holes) - 1, p_lane.lane_id,
        (v_cursor & 255)::smallint, v_producers, v_holes);
END
$function$;

-- Claims what was committed into holes set aside, and ends the holes that can no longer be filled. The caller holds the
-- lane's lock and has pinned the claim slot.
CREATE FUNCTION {schema}.claim_late_rows(
    p_lane {schema}.queue_lanes, p_limit integer, p_claim_cursor bigint, p_now timestamptz, p_deadline_at timestamptz,
    p_claimed_by text, p_receipts boolean
) RETURNS SETOF {schema}.claimed_batch
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $function$
DECLARE
    v_batch {schema}.claimed_batch;
    v_open int8multirange;
    v_emitted int8multirange;
    v_producers text[];
    v_left integer := p_limit;
    v_slot record;
BEGIN
    SELECT range_agg(h.lane_ranges) INTO v_open
    FROM {schema}.ready_lane_holes AS h
    WHERE h.lane_id = p_lane.lane_id AND h.holders IS NOT NULL
      AND NOT EXISTS (SELECT FROM {schema}.ready_lane_holes AS o WHERE o.ready_slot = h.ready_slot AND o.hole_id = h.hole_id AND o.holders IS NULL);
    IF v_open IS NULL THEN
        RETURN;
    END IF;

    -- Before the rows are read: a transaction missing here has ended, and what it committed is visible from here on.
    v_producers := {schema}.lane_producers(p_lane.lane_id);
    SELECT coalesce(range_agg(b.lane_ranges), '{}') INTO v_emitted
    FROM {schema}.ready_claim_attempt_batches AS b
    WHERE b.lane_id = p_lane.lane_id AND b.lane_hi >= lower(v_open) AND b.lane_ranges && v_open;

    FOR v_slot IN
        SELECT s.slot, s.generation
        FROM (
            SELECT DISTINCT e.ready_slot
            FROM unnest(v_open - v_emitted) AS g (gap)
            CROSS JOIN LATERAL (
                SELECT n.ready_slot
                FROM {schema}.ready_entries AS n
                WHERE n.lane_id = p_lane.lane_id AND n.lane_seq >= lower(g.gap) AND n.lane_seq < upper(g.gap)
                OFFSET 0
            ) AS e
        ) AS r
        JOIN {schema}.ready_slots_from(0) AS s ON s.slot = r.ready_slot
        ORDER BY s.generation
    LOOP
        EXIT WHEN v_left <= 0;
        FOR v_batch IN
            SELECT r.*
            FROM {schema}.claim_rows_in(v_slot.slot, p_lane.lane_id, p_lane.priority, v_slot.generation, v_open - v_emitted, v_left,
                p_claim_cursor, p_now, p_deadline_at, p_claimed_by) AS r
        LOOP
            IF v_batch.has_unique OR NOT p_receipts THEN
                PERFORM {schema}.settle_claimed(v_batch, p_receipts);
            END IF;
            v_left := v_left - v_batch.job_count;
            v_emitted := v_emitted + v_batch.lane_ranges;
            RETURN NEXT v_batch;
        END LOOP;
    END LOOP;

    -- Over: filled to the last number, or nobody is left who could fill it and nothing was left behind for the limit.
    INSERT INTO {schema}.ready_lane_holes (hole_id, lane_hi, lane_id, ready_slot, holders, lane_ranges)
    SELECT h.hole_id, h.lane_hi, h.lane_id, h.ready_slot, NULL, h.lane_ranges
    FROM {schema}.ready_lane_holes AS h
    WHERE h.lane_id = p_lane.lane_id AND h.holders IS NOT NULL
      -- A prepared transaction shows as -1/xid after a restart, under another name than it was recorded with.
      AND (h.lane_ranges <@ v_emitted
           OR (v_left > 0 AND NOT h.holders && v_producers AND NOT EXISTS (SELECT FROM unnest(v_producers) AS p WHERE p LIKE '-1/%')))
      AND NOT EXISTS (SELECT FROM {schema}.ready_lane_holes AS o WHERE o.ready_slot = h.ready_slot AND o.hole_id = h.hole_id AND o.holders IS NULL);
END
$function$;
