-- Finding jobs by their id, wherever they are. Off the hot path, which pays for no index on job_id: what lies in the queue ring
-- is found by reading it, once for as many jobs as are looked for together.

CREATE TYPE {schema}.job_place AS (
    place        text,      -- ready, claim, lease, deferred, dlq, history
    state        {schema}.job_state,
    hidden       boolean,   -- of history: deleted, or retried since
    ready_slot   smallint,
    lane_id      integer,
    lane_seq     bigint,
    run_lease    bigint,    -- of the last attempt
    claim_slot   smallint,
    receipt_id   bigint,
    held         text       -- of dlq: dlq or retained
);

-- ready_places_<slot>: rows of these jobs in one slot, with the batch that took each, if one did.
CREATE TYPE {schema}.ready_place AS (
    job_id bigint, run_lease bigint, lane_seq bigint, lane_id integer, ready_slot smallint,
    batch_id bigint, claim_slot smallint, claim_generation bigint, lane_ranges int8multirange
);

SELECT {schema}.create_slot_functions('queue', 'ready_places_in', 'p_job_ids bigint[]', '{schema}.ready_place[]', $template$
BEGIN
    RETURN ARRAY(
        SELECT ROW(r.job_id, r.run_lease, r.lane_seq, r.lane_id, <slot>::smallint, b.batch_id, b.claim_slot, b.claim_generation,
                   b.lane_ranges)::{schema}.ready_place
        FROM unnest(p_job_ids) AS i (job_id)
        JOIN {schema}.ready_entries_<slot> AS r ON r.job_id = i.job_id
        LEFT JOIN LATERAL (
            SELECT x.*
            FROM {schema}.ready_claim_attempt_batches_<slot> AS x
            WHERE x.lane_id = r.lane_id AND x.lane_hi >= r.lane_seq AND x.lane_ranges @> r.lane_seq
            LIMIT 1
        ) AS b ON true);
END
$template$);

-- Every row of these jobs in the queue ring. A job that was retried has several; the one of the highest run_lease is the last.
CREATE FUNCTION {schema}.ready_places(p_job_ids bigint[]) RETURNS SETOF {schema}.ready_place
LANGUAGE plpgsql AS $function$
DECLARE
    v_slot record;
BEGIN
    FOR v_slot IN SELECT s.slot FROM {schema}.ready_slots_from(0) AS s LOOP
        RETURN QUERY SELECT p.* FROM unnest({schema}.ready_places_in(v_slot.slot, p_job_ids)) AS p;
    END LOOP;
END
$function$;

-- Of each of these jobs that has one, its last row. Tombstones last among equals: a job that was moved has a row of the same
-- run_lease elsewhere.
CREATE FUNCTION {schema}.last_ready_places(p_job_ids bigint[]) RETURNS SETOF {schema}.ready_place
LANGUAGE plpgsql AS $function$
BEGIN
    RETURN QUERY
        SELECT DISTINCT ON (p.job_id) p.*
        FROM {schema}.ready_places(p_job_ids) AS p
        ORDER BY p.job_id, p.run_lease DESC, (p.batch_id IS NOT NULL AND p.claim_slot IS NULL AND p.claim_generation IS NULL),
            p.lane_seq DESC;
END
$function$;

-- Where the job is now; NULL when there is none of that id (any more). A look without locks: check again under them. p_seen is its
-- last_ready_places, from whoever has looked for many; it may have moved on since.
CREATE FUNCTION {schema}.find_job(p_job_id bigint, p_seen {schema}.ready_place DEFAULT NULL) RETURNS {schema}.job_place
LANGUAGE plpgsql AS $function$
DECLARE
    v_place {schema}.job_place;
    v_ready {schema}.ready_place := p_seen;
BEGIN
    SELECT 'deferred', d.state, false, NULL, NULL, NULL, d.run_lease, NULL, NULL, NULL INTO v_place
    FROM {schema}.deferred_jobs AS d WHERE d.job_id = p_job_id;
    IF FOUND THEN
        RETURN v_place;
    END IF;
    SELECT 'lease', l.state, false, NULL, NULL, NULL, l.run_lease, NULL, l.receipt_id, NULL INTO v_place
    FROM {schema}.leases AS l WHERE l.job_id = p_job_id;
    IF FOUND THEN
        RETURN v_place;
    END IF;
    SELECT 'dlq', 'failed', false, NULL, NULL, NULL, q.run_lease, NULL, NULL, q.held INTO v_place
    FROM {schema}.dlq_entries AS q WHERE q.job_id = p_job_id;
    IF FOUND THEN
        RETURN v_place;
    END IF;

    IF v_ready.job_id IS NULL THEN
        SELECT p.* INTO v_ready FROM {schema}.last_ready_places(ARRAY[p_job_id]) AS p;
    END IF;
    IF v_ready.job_id IS NOT NULL AND v_ready.batch_id IS NULL THEN
        v_place := ROW('ready', 'available', false, v_ready.ready_slot, v_ready.lane_id, v_ready.lane_seq, v_ready.run_lease, NULL,
            NULL, NULL);
        RETURN v_place;
    END IF;
    IF v_ready.claim_slot IS NOT NULL THEN
        v_place := {schema}.attempt_place(v_ready);
        IF v_place.state IS NOT NULL THEN
            RETURN v_place;
        END IF;
    END IF;

    -- History with the job's last word; beside the body or with it.
    SELECT 'history', d.state,
           EXISTS (SELECT FROM {schema}.terminal_tombstones AS t
                   WHERE t.ready_slot = d.ready_slot AND t.job_id = d.job_id AND t.run_lease = d.run_lease),
           d.ready_slot, d.lane_id, d.lane_seq, d.run_lease, NULL, NULL, NULL
    INTO v_place
    FROM {schema}.done_entries AS d
    WHERE d.job_id = p_job_id
    ORDER BY d.run_lease DESC, d.finalized_at DESC
    LIMIT 1;
    RETURN v_place;
END
$function$;

-- What became of the attempt that took a row: running, completed, or (state NULL) something another table tells.
CREATE FUNCTION {schema}.attempt_place(p_ready {schema}.ready_place) RETURNS {schema}.job_place
LANGUAGE plpgsql AS $function$
DECLARE
    v_place {schema}.job_place;
    v_receipt bigint := p_ready.batch_id * 1024 + {schema}.place_in_ranges(p_ready.lane_ranges, p_ready.lane_seq);
BEGIN
    v_place.ready_slot := p_ready.ready_slot;
    v_place.lane_id := p_ready.lane_id;
    v_place.lane_seq := p_ready.lane_seq;
    v_place.run_lease := p_ready.run_lease + 1;
    v_place.claim_slot := p_ready.claim_slot;
    v_place.receipt_id := v_receipt;
    v_place.hidden := false;
    IF EXISTS (
        SELECT FROM {schema}.receipt_completion_batches AS c
        WHERE c.ready_slot = p_ready.ready_slot AND c.batch_id = p_ready.batch_id AND c.receipt_ranges @> v_receipt)
    THEN
        v_place.place := 'history';
        v_place.state := 'completed';
        v_place.hidden := EXISTS (
            SELECT FROM {schema}.terminal_tombstones AS t
            WHERE t.ready_slot = p_ready.ready_slot AND t.job_id = p_ready.job_id AND t.run_lease = v_place.run_lease);
    ELSIF NOT {schema}.claim_generation_is_pruned(p_ready.claim_slot, p_ready.claim_generation) AND NOT EXISTS (
        SELECT FROM {schema}.lease_claim_closure_batches AS c
        WHERE c.claim_slot = p_ready.claim_slot AND c.batch_id = p_ready.batch_id AND c.receipt_ranges @> v_receipt)
    THEN
        v_place.place := 'claim';
        v_place.state := 'running';
    END IF;
    RETURN v_place;
END
$function$;

-- The inverse of nth_in_ranges.
CREATE FUNCTION {schema}.place_in_ranges(p_ranges int8multirange, p_value bigint) RETURNS integer
LANGUAGE sql IMMUTABLE AS $function$
    SELECT coalesce(sum(least(upper(r), p_value) - lower(r)), 0)::integer FROM unnest(p_ranges) AS r WHERE lower(r) < p_value
$function$;
