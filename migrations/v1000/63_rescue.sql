-- Rescue: ends attempts whose worker is gone (stale), whose deadline passed, or whose callback never came (ADR-023, Open-claim
-- queries). Every pass is bounded. Per claim slot a cursor sweeps the batches in a circle and passes only what needs nothing:
-- closed, or alive. It stops before an attempt that should be closed, so what one pass closes the next one proves closed. The
-- cursors are sequences: they leave no dead tuples, and one that is lost costs a sweep.

DO $do$
DECLARE
    v_slot smallint;
BEGIN
    FOR v_slot IN SELECT s.slot FROM {schema}.claim_ring_slots AS s LOOP
        EXECUTE format('CREATE SEQUENCE %I.%I MINVALUE 0', {schema_literal}, 'claim_slot_' || v_slot || '_stale_cursor');
        EXECUTE format('CREATE SEQUENCE %I.%I MINVALUE 0', {schema_literal}, 'claim_slot_' || v_slot || '_deadline_cursor');
    END LOOP;
END
$do$;

CREATE FUNCTION {schema}.rescue_cursor(p_slot smallint, p_sweep text) RETURNS regclass
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    RETURN format('%I.%I', {schema_literal}, 'claim_slot_' || p_slot || '_' || p_sweep || '_cursor')::regclass;
END
$function$;

CREATE TYPE {schema}.rescue_scan AS (
    visited     integer,
    passable    bigint,   -- the cursor may stand here: up to it nothing is left to close
    receipt_ids bigint[],
    job_ids     bigint[],
    run_leases  bigint[]
);

-- stale_scan_<slot>: open attempts claimed up to p_cutoff in batches after p_after that gave no sign of life since.
SELECT {schema}.create_slot_functions('claim', 'stale_scan_in', 'p_after bigint, p_cutoff timestamptz, p_limit integer',
    '{schema}.rescue_scan', $template$
DECLARE
    v_scan {schema}.rescue_scan;
BEGIN
    WITH visited AS MATERIALIZED (
        SELECT b.batch_id, b.job_ids, b.run_lease, b.run_leases, c.closed, coalesce(c.job_count, 0) AS closed_count
        FROM {schema}.lease_claim_batches_<slot> AS b
        LEFT JOIN LATERAL (
            SELECT range_agg(x.receipt_ranges) AS closed, sum(x.job_count) AS job_count
            FROM {schema}.lease_claim_closure_batches_<slot> AS x
            WHERE x.batch_id = b.batch_id
        ) AS c ON true
        WHERE b.batch_id > p_after AND b.claimed_at <= p_cutoff
        ORDER BY b.batch_id
        LIMIT p_limit
    ),
    candidates AS MATERIALIZED (
        SELECT v.batch_id, v.batch_id * 1024 + j.n - 1 AS receipt_id, j.job_id, coalesce(v.run_lease, v.run_leases[j.n]) AS run_lease
        FROM visited AS v
        CROSS JOIN LATERAL unnest(v.job_ids) WITH ORDINALITY AS j (job_id, n)
        WHERE v.closed_count < cardinality(v.job_ids)
          AND NOT coalesce(v.closed @> (v.batch_id * 1024 + j.n - 1), false)
          AND NOT EXISTS (
              SELECT FROM {schema}.attempt_state AS s
              WHERE s.job_id = j.job_id AND s.run_lease = coalesce(v.run_lease, v.run_leases[j.n]) AND s.heartbeat_at > p_cutoff)
    )
    SELECT (SELECT count(*) FROM visited),
           coalesce((SELECT min(c.batch_id) - 1 FROM candidates AS c), (SELECT max(v.batch_id) FROM visited AS v)),
           array_agg(c.receipt_id ORDER BY c.receipt_id), array_agg(c.job_id ORDER BY c.receipt_id),
           array_agg(c.run_lease ORDER BY c.receipt_id)
    INTO v_scan
    FROM candidates AS c;
    RETURN v_scan;
END
$template$);

-- deadline_scan_<slot>: open attempts whose deadline passed, in batches after p_after by (deadline_at, batch_id). The cursor is
-- a batch, which tells its deadline: deadlines alone would not tell apart batches that share one.
SELECT {schema}.create_slot_functions('claim', 'deadline_scan_in', 'p_after bigint, p_cutoff timestamptz, p_limit integer',
    '{schema}.rescue_scan', $template$
DECLARE
    v_scan {schema}.rescue_scan;
    -- A cursor that names no batch of this slot means its start.
    v_after timestamptz := coalesce(
        (SELECT b.deadline_at FROM {schema}.lease_claim_batches_<slot> AS b WHERE b.batch_id = p_after), '-infinity');
BEGIN
    WITH visited AS MATERIALIZED (
        SELECT b.batch_id, b.deadline_at, b.job_ids, b.run_lease, b.run_leases, c.closed, coalesce(c.job_count, 0) AS closed_count
        FROM {schema}.lease_claim_batches_<slot> AS b
        LEFT JOIN LATERAL (
            SELECT range_agg(x.receipt_ranges) AS closed, sum(x.job_count) AS job_count
            FROM {schema}.lease_claim_closure_batches_<slot> AS x
            WHERE x.batch_id = b.batch_id
        ) AS c ON true
        WHERE (b.deadline_at, b.batch_id) > (v_after, p_after) AND b.deadline_at <= p_cutoff
        ORDER BY b.deadline_at, b.batch_id
        LIMIT p_limit
    ),
    candidates AS MATERIALIZED (
        SELECT v.batch_id, v.deadline_at, v.batch_id * 1024 + j.n - 1 AS receipt_id, j.job_id,
               coalesce(v.run_lease, v.run_leases[j.n]) AS run_lease
        FROM visited AS v
        CROSS JOIN LATERAL unnest(v.job_ids) WITH ORDINALITY AS j (job_id, n)
        WHERE v.closed_count < cardinality(v.job_ids) AND NOT coalesce(v.closed @> (v.batch_id * 1024 + j.n - 1), false)
    ),
    first AS (
        SELECT c.deadline_at, c.batch_id FROM candidates AS c ORDER BY c.deadline_at, c.batch_id LIMIT 1
    )
    SELECT (SELECT count(*) FROM visited),
           coalesce((
               SELECT v.batch_id
               FROM visited AS v
               WHERE NOT EXISTS (SELECT FROM first AS f WHERE (f.deadline_at, f.batch_id) <= (v.deadline_at, v.batch_id))
               ORDER BY v.deadline_at DESC, v.batch_id DESC
               LIMIT 1), p_after),
           array_agg(c.receipt_id ORDER BY c.receipt_id), array_agg(c.job_id ORDER BY c.receipt_id),
           array_agg(c.run_lease ORDER BY c.receipt_id)
    INTO v_scan
    FROM candidates AS c;
    RETURN v_scan;
END
$template$);

-- Attempts that a rescue is to end, whose locks it holds; claim_slots[n] is NULL for a lease.
CREATE TYPE {schema}.rescue_found AS (
    claim_slots smallint[],
    receipt_ids bigint[],
    job_ids     bigint[],
    run_leases  bigint[],
    sweeps      text[]     -- by which sweep: stale, deadline, callback
);

CREATE FUNCTION {schema}.found_more(p_found {schema}.rescue_found, p_more {schema}.rescue_found) RETURNS {schema}.rescue_found
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    p_found.claim_slots := p_found.claim_slots || p_more.claim_slots;
    p_found.receipt_ids := p_found.receipt_ids || p_more.receipt_ids;
    p_found.job_ids := p_found.job_ids || p_more.job_ids;
    p_found.run_leases := p_found.run_leases || p_more.run_leases;
    p_found.sweeps := p_found.sweeps || p_more.sweeps;
    RETURN p_found;
END
$function$;

-- Locks what a scan found, but not the attempts of a batch that somebody else is writing to, nor (p_silent_since) those that
-- gave a sign of life since the scan.
CREATE FUNCTION {schema}.lock_found(p_slot smallint, p_scan {schema}.rescue_scan, p_silent_since timestamptz, p_sweep text)
RETURNS {schema}.rescue_found
LANGUAGE plpgsql AS $function$
DECLARE
    v_found {schema}.rescue_found;
BEGIN
    -- Lock: as complete's, but not waited for: whoever holds it may be the worker that is late and not lost.
    SELECT array_agg(i.receipt_id ORDER BY i.receipt_id), array_agg(i.job_id ORDER BY i.receipt_id),
           array_agg(i.run_lease ORDER BY i.receipt_id)
    INTO v_found.receipt_ids, v_found.job_ids, v_found.run_leases
    FROM unnest(p_scan.receipt_ids, p_scan.job_ids, p_scan.run_leases) AS i (receipt_id, job_id, run_lease)
    JOIN (
        SELECT k.batch_id,
               pg_try_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, (k.batch_id & 2147483647)::integer) AS ours
        FROM (SELECT DISTINCT r >> 10 AS batch_id FROM unnest(p_scan.receipt_ids) AS r OFFSET 0) AS k
    ) AS b ON b.batch_id = i.receipt_id >> 10 AND b.ours;
    -- Proof, again under the lock that a heartbeat takes; the fences are checked again by close.
    SELECT array_agg(p_slot ORDER BY i.receipt_id), array_agg(i.receipt_id ORDER BY i.receipt_id),
           array_agg(i.job_id ORDER BY i.receipt_id), array_agg(i.run_lease ORDER BY i.receipt_id),
           array_agg(p_sweep ORDER BY i.receipt_id)
    INTO v_found
    FROM unnest(v_found.receipt_ids, v_found.job_ids, v_found.run_leases) AS i (receipt_id, job_id, run_lease)
    WHERE NOT EXISTS (
        SELECT FROM {schema}.attempt_state AS s
        WHERE s.job_id = i.job_id AND s.run_lease = i.run_lease AND s.heartbeat_at > p_silent_since);
    RETURN v_found;
END
$function$;

-- One sweep over the claim ring. p_sweep: stale (claimed up to p_cutoff and no heartbeat since) or deadline (due up to it).
-- Looks at p_limit batches a slot at most, and at no further slot once it found as many attempts: their locks are held to the
-- end of the transaction, and the lock table is of a fixed size.
CREATE FUNCTION {schema}.find_lost_claims(p_sweep text, p_cutoff timestamptz, p_limit integer) RETURNS {schema}.rescue_found
LANGUAGE plpgsql AS $function$
DECLARE
    v_slot record;
    v_cursor regclass;
    v_scan {schema}.rescue_scan;
    v_after bigint;
    v_found {schema}.rescue_found;
BEGIN
    -- Every slot: a rotator that died may have promised one that counts as pruned, and claims are in it.
    -- In no order, so that those that end many come to no slot's cost.
    FOR v_slot IN SELECT s.slot, s.opened_at FROM {schema}.ring_slots('claim') AS s ORDER BY random() LOOP
        EXIT WHEN cardinality(v_found.receipt_ids) >= p_limit;
        -- Whatever is in a slot is younger than its opening.
        CONTINUE WHEN p_sweep = 'stale' AND v_slot.opened_at > p_cutoff;
        v_cursor := {schema}.rescue_cursor(v_slot.slot, p_sweep);
        v_after := coalesce(pg_sequence_last_value(v_cursor), 0);
        v_scan := CASE p_sweep
            WHEN 'stale' THEN {schema}.stale_scan_in(v_slot.slot, v_after, p_cutoff, p_limit)
            ELSE {schema}.deadline_scan_in(v_slot.slot, v_after, p_cutoff, p_limit)
        END;
        IF v_scan.receipt_ids IS NOT NULL THEN
            v_found := {schema}.found_more(v_found,
                {schema}.lock_found(v_slot.slot, v_scan, CASE p_sweep WHEN 'stale' THEN p_cutoff END, p_sweep));
        END IF;
        -- Only over what was closed or alive when it was read; at the end, from the start again.
        IF v_scan.visited < p_limit AND v_scan.receipt_ids IS NULL THEN
            IF v_after > 0 THEN
                PERFORM setval(v_cursor, 0);
            END IF;
        ELSIF v_scan.passable IS DISTINCT FROM v_after THEN
            PERFORM setval(v_cursor, greatest(v_scan.passable, 0));
        END IF;
    END LOOP;
    RETURN v_found;
END
$function$;

-- Leases to end. Rows that somebody works on are passed over.
CREATE FUNCTION {schema}.find_lost_leases(p_sweep text, p_cutoff timestamptz, p_limit integer) RETURNS {schema}.rescue_found
LANGUAGE plpgsql AS $function$
DECLARE
    v_found {schema}.rescue_found;
BEGIN
    -- Lock: the rows, without waiting.
    WITH lost AS (
        SELECT l.receipt_id, l.job_id, l.run_lease
        FROM {schema}.leases AS l
        WHERE CASE p_sweep
            WHEN 'stale' THEN l.state = 'running' AND l.alive_at <= p_cutoff AND NOT EXISTS (
                SELECT FROM {schema}.attempt_state AS s
                WHERE s.job_id = l.job_id AND s.run_lease = l.run_lease AND s.heartbeat_at > p_cutoff)
            WHEN 'deadline' THEN l.state = 'running' AND l.deadline_at <= p_cutoff
            WHEN 'callback' THEN l.state = 'waiting_external' AND l.callback_timeout_at <= p_cutoff
        END
        ORDER BY l.job_id
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
    )
    SELECT array_agg(l.receipt_id ORDER BY l.job_id), array_agg(l.job_id ORDER BY l.job_id), array_agg(l.run_lease ORDER BY l.job_id)
    INTO v_found.receipt_ids, v_found.job_ids, v_found.run_leases
    FROM lost AS l;
    -- Proof, again under the lock that a heartbeat takes: one may have come between the look at it and the row's lock.
    SELECT array_agg(NULL::smallint), array_agg(i.receipt_id ORDER BY i.job_id), array_agg(i.job_id ORDER BY i.job_id),
           array_agg(i.run_lease ORDER BY i.job_id), array_agg(p_sweep)
    INTO v_found
    FROM unnest(v_found.receipt_ids, v_found.job_ids, v_found.run_leases) AS i (receipt_id, job_id, run_lease)
    WHERE p_sweep <> 'stale' OR NOT EXISTS (
        SELECT FROM {schema}.attempt_state AS s
        WHERE s.job_id = i.job_id AND s.run_lease = i.run_lease AND s.heartbeat_at > p_cutoff);
    RETURN v_found;
END
$function$;

-- One pass of every rescue, or of those named, by the database's clock (I7). p_stale_after is how long a worker may be silent.
-- An attempt that is both silent and late ends once, for the reason that comes first.
CREATE FUNCTION {schema}.rescue(
    p_stale_after interval DEFAULT '90 seconds', p_limit integer DEFAULT 500, p_sweeps text[] DEFAULT '{stale,deadline,callback}',
    OUT stale integer, OUT deadline integer, OUT callback_timeout integer
)
LANGUAGE plpgsql AS $function$
DECLARE
    v_sweep text;
    v_cutoff timestamptz;
    v_found {schema}.rescue_found;
    v_lost integer[];
BEGIN
    IF p_stale_after IS NULL OR p_stale_after < interval '0' THEN
        RAISE EXCEPTION 'stale_after must not be negative, not %', coalesce(p_stale_after::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'stale_after';
    ELSIF NOT p_sweeps <@ ARRAY['stale', 'deadline', 'callback'] THEN
        RAISE EXCEPTION 'sweeps must be of stale, deadline and callback, not %', array_to_string(p_sweeps, ', ')
            USING ERRCODE = 'check_violation', COLUMN = 'sweeps';
    END IF;
    -- Lock: all that is to be ended, by every sweep, before any of it is: keys come after rows.
    FOREACH v_sweep IN ARRAY p_sweeps LOOP
        v_cutoff := clock_timestamp() - CASE v_sweep WHEN 'stale' THEN p_stale_after ELSE interval '0' END;
        IF v_sweep <> 'callback' THEN
            v_found := {schema}.found_more(v_found, {schema}.find_lost_claims(v_sweep, v_cutoff, p_limit));
        END IF;
        v_found := {schema}.found_more(v_found, {schema}.find_lost_leases(v_sweep, v_cutoff, p_limit));
    END LOOP;
    v_lost := {schema}.end_found(v_found, p_stale_after);

    SELECT count(*) FILTER (WHERE f.sweep = 'stale'), count(*) FILTER (WHERE f.sweep = 'deadline'),
           count(*) FILTER (WHERE f.sweep = 'callback')
    INTO stale, deadline, callback_timeout
    FROM unnest(v_found.sweeps) WITH ORDINALITY AS f (sweep, place)
    WHERE f.place <> ALL (v_lost);
    PERFORM {schema}.signal_attempt(f.job_id, f.run_lease, 'over')
    FROM unnest(v_found.job_ids, v_found.run_leases) WITH ORDINALITY AS f (job_id, run_lease, place)
    WHERE f.place <> ALL (v_lost);
END
$function$;

-- Ends what was found, each to be retried. Returns the places of those that had ended before.
CREATE FUNCTION {schema}.end_found(p_found {schema}.rescue_found, p_stale_after interval) RETURNS integer[]
LANGUAGE plpgsql AS $function$
DECLARE
    c_lost constant text := format('the worker was lost: no sign of life for %s', p_stale_after);
    v_errors text[];
    v_causes text[];
BEGIN
    IF p_found.receipt_ids IS NULL THEN
        RETURN '{}';
    END IF;
    SELECT array_agg(CASE f.sweep
               WHEN 'stale' THEN c_lost
               WHEN 'deadline' THEN 'deadline exceeded'
               ELSE 'the callback timed out'
           END ORDER BY f.place),
           array_agg(CASE f.sweep WHEN 'deadline' THEN 'deadline_expired' ELSE f.sweep END ORDER BY f.place)
    INTO v_errors, v_causes
    FROM unnest(p_found.sweeps) WITH ORDINALITY AS f (sweep, place);
    RETURN ARRAY(
        SELECT c.place
        FROM {schema}.close_locked(
            p_found.claim_slots, p_found.receipt_ids, p_found.job_ids, p_found.run_leases,
            array_fill('retryable'::{schema}.job_state, ARRAY[cardinality(v_errors)]), v_errors, NULL, NULL, v_causes) AS c);
END
$function$;

-- Forgets states of attempts that ended without their worker's word. Nothing silent for so long is still open, unless it waits
-- for a callback.
CREATE FUNCTION {schema}.trim_attempt_state(p_older_than interval DEFAULT '1 day') RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_deleted bigint;
BEGIN
    DELETE FROM {schema}.attempt_state AS s
    WHERE s.heartbeat_at < clock_timestamp() - p_older_than
      AND NOT EXISTS (SELECT FROM {schema}.leases AS l WHERE l.job_id = s.job_id AND l.run_lease = s.run_lease);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
