-- Complete: many successful attempts in one call, whoever claimed them. INSERTs only, two rows per claim batch touched.
--
-- Lock: one advisory lock per claim batch, ascending by key; close, and later rescue, cancel and materialise, take the
-- same ones first. Under it a fresh statement sees every closure that came before, so of any racers exactly one wins (I2).
--
-- Jobs of one claim tend to end together, so what is completed is mostly a few runs of consecutive receipts. complete_runs
-- proves a whole run at once; a run that fails the proof, and everything given to complete, is proven receipt by receipt.

CREATE FUNCTION {schema}.lock_claim_batches(p_receipt_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_void boolean;
BEGIN
    -- Whoever waited here must see what the last holder committed.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'closing an attempt needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    IF cardinality(p_receipt_ids) = 1 THEN
        -- An expression is not planned and started as a statement is.
        v_void := pg_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, ((p_receipt_ids[1] >> 10) & 2147483647)::integer) IS NULL;
        RETURN;
    END IF;
    PERFORM pg_advisory_xact_lock('{schema}.lease_claim_batches'::regclass::oid::integer, k.key)
    FROM (SELECT DISTINCT ((r >> 10) & 2147483647)::integer AS key FROM unnest(p_receipt_ids) AS r ORDER BY 1) AS k;
END
$function$;

-- The n-th lane_seq (from 0) of a batch's ranges.
CREATE FUNCTION {schema}.nth_in_ranges(p_ranges int8multirange, p_n integer) RETURNS bigint
LANGUAGE sql IMMUTABLE AS $function$
    SELECT CASE
        WHEN upper(p_ranges) - lower(p_ranges) > p_n AND p_ranges @> int8range(lower(p_ranges), lower(p_ranges) + p_n + 1)
        THEN lower(p_ranges) + p_n
        ELSE (
            SELECT lower(g.r) + p_n - g.before
            FROM (
                SELECT r, sum(upper(r) - lower(r)) OVER (ORDER BY r) - (upper(r) - lower(r)) AS before
                FROM unnest(p_ranges) AS r
            ) AS g
            WHERE p_n >= g.before AND p_n < g.before + upper(g.r) - lower(g.r)
        )::bigint
    END
$function$;

-- Sorted receipts as ranges; one range in the common case.
CREATE FUNCTION {schema}.receipt_ranges(p_receipt_ids bigint[]) RETURNS int8multirange
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    IF p_receipt_ids[cardinality(p_receipt_ids)] - p_receipt_ids[1] + 1 = cardinality(p_receipt_ids) THEN
        RETURN int8multirange(int8range(p_receipt_ids[1], p_receipt_ids[cardinality(p_receipt_ids)] + 1));
    END IF;
    RETURN (SELECT range_agg(int8range(r, r + 1)) FROM unnest(p_receipt_ids) AS r);
END
$function$;

CREATE TYPE {schema}.completed_slot AS (
    lost        integer[],  -- places in the input, or '{}'; the value is NULL if there is no such slot
    unique_jobs bigint[]    -- winners that may hold a unique key
);

-- complete_<slot>: the attempts of one claim slot. The caller holds the batches' locks.
SELECT {schema}.create_slot_functions('claim', 'complete_in',
    'p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[], p_now timestamptz',
    '{schema}.completed_slot', $template$
DECLARE
    v_result {schema}.completed_slot;
BEGIN
    WITH input AS MATERIALIZED (
        SELECT i.receipt_id, i.job_id, i.run_lease, i.place::integer
        FROM unnest(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases) WITH ORDINALITY
            AS i (claim_slot, receipt_id, job_id, run_lease, place)
        WHERE i.claim_slot = <slot>
    ),
    -- Proof: the receipt exists, names this job and lease, and no closure row holds it.
    valid AS MATERIALIZED (
        SELECT DISTINCT ON (i.receipt_id)
               i.receipt_id, i.job_id, i.place, b.batch_id, b.lane_id, b.ready_slot, b.ready_generation, b.has_unique
        FROM input AS i
        JOIN {schema}.lease_claim_batches_<slot> AS b ON b.batch_id = i.receipt_id >> 10
        WHERE b.job_ids[(i.receipt_id & 1023) + 1] = i.job_id
          AND coalesce(b.run_lease, b.run_leases[(i.receipt_id & 1023) + 1]) = i.run_lease
          AND NOT EXISTS (
              SELECT FROM {schema}.lease_claim_closure_batches_<slot> AS c
              WHERE c.batch_id = i.receipt_id >> 10 AND c.receipt_ranges @> i.receipt_id)
        ORDER BY i.receipt_id, i.place
    ),
    per_batch AS MATERIALIZED (
        SELECT v.batch_id, v.lane_id, v.ready_slot, v.ready_generation, count(*)::integer AS job_count,
               {schema}.receipt_ranges(array_agg(v.receipt_id)) AS receipt_ranges
        FROM valid AS v
        GROUP BY v.batch_id, v.lane_id, v.ready_slot, v.ready_generation
    ),
    closures AS (
        INSERT INTO {schema}.lease_claim_closure_batches_<slot> (
            batch_id, ready_generation, closed_at, job_count, claim_slot, ready_slot, outcome, receipt_ranges)
        SELECT p.batch_id, p.ready_generation, p_now, p.job_count, <slot>, p.ready_slot, 'completed', p.receipt_ranges
        FROM per_batch AS p
    ),
    completions AS (
        INSERT INTO {schema}.receipt_completion_batches (batch_id, finalized_at, lane_id, job_count, ready_slot, receipt_ranges)
        SELECT p.batch_id, p_now, p.lane_id, p.job_count, p.ready_slot, p.receipt_ranges
        FROM per_batch AS p
    )
    SELECT CASE WHEN (SELECT count(*) FROM valid) < (SELECT count(*) FROM input) THEN (
               SELECT array_agg(i.place) FROM input AS i WHERE NOT EXISTS (SELECT FROM valid AS v WHERE v.place = i.place))
           ELSE '{}' END,
           (SELECT array_agg(v.job_id) FROM valid AS v WHERE v.has_unique)
    INTO v_result;
    RETURN v_result;
END
$template$, 'RETURN NULL;');

-- Completes attempts one by one. The caller holds the batches' locks. p_unique_jobs are completed already, and their keys not
-- given up yet. Returns the losers.
CREATE FUNCTION {schema}.complete_each(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[], p_unique_jobs bigint[],
    p_now timestamptz
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_slot smallint;
    v_lost integer[] := '{}';
    v_done {schema}.completed_slot;
    v_unique_jobs bigint[] := p_unique_jobs;
BEGIN
    FOR v_slot IN SELECT DISTINCT s FROM unnest(p_claim_slots) AS s ORDER BY s LOOP
        v_done := {schema}.complete_in(v_slot, p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, p_now);
        IF v_done.lost IS NULL THEN
            v_lost := v_lost || ARRAY(
                SELECT s.place::integer FROM unnest(p_claim_slots) WITH ORDINALITY AS s (slot, place) WHERE s.slot IS NOT DISTINCT FROM v_slot);
        ELSE
            v_lost := v_lost || v_done.lost;
        END IF;
        v_unique_jobs := v_unique_jobs || v_done.unique_jobs;
    END LOOP;

    IF v_lost <> '{}' THEN
        -- A receipt that is closed because its attempt materialised.
        v_lost := {schema}.complete_leases(v_lost, p_receipt_ids, p_job_ids, p_run_leases, p_now);
    END IF;
    -- Lock: given up last. It waits for nobody, but others wait for what is given up.
    IF v_unique_jobs IS NOT NULL THEN
        PERFORM {schema}.release_unique_keys(v_unique_jobs, 'completed');
    END IF;
    IF v_lost <> '{}' THEN
        RETURN QUERY
            WITH attempt AS MATERIALIZED (
                SELECT i.claim_slot, i.receipt_id, i.job_id, i.run_lease, i.place::integer, l.place IS NOT NULL AS lost
                FROM unnest(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases) WITH ORDINALITY
                    AS i (claim_slot, receipt_id, job_id, run_lease, place)
                LEFT JOIN unnest(v_lost) AS l (place) ON l.place = i.place
            )
            SELECT l.place,
                   CASE
                       WHEN w.place IS NOT NULL THEN 'named twice in one call'
                       ELSE {schema}.why_lost(l.claim_slot, l.receipt_id, l.job_id, l.run_lease)
                   END
            FROM attempt AS l
            LEFT JOIN attempt AS w
              ON (w.claim_slot, w.receipt_id, w.job_id, w.run_lease) = (l.claim_slot, l.receipt_id, l.job_id, l.run_lease)
             AND NOT w.lost
            WHERE l.lost
            ORDER BY l.place;
    END IF;
END
$function$;

-- Attempt n is (claim_slots[n], receipt_ids[n], job_ids[n], run_leases[n]), all four as the claim gave them. Returns the
-- ones that lost, by their place n (from 1): closed before, never claimed so, or named twice. Everyone else has won.
CREATE FUNCTION {schema}.complete(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
BEGIN
    PERFORM {schema}.lock_claim_batches(p_receipt_ids);
    RETURN QUERY SELECT e.* FROM {schema}.complete_each(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, NULL, clock_timestamp()) AS e;
END
$function$;

CREATE TYPE {schema}.completed_runs AS (
    proven      integer[],  -- runs that won as a whole, by their place
    unique_jobs bigint[]
);

-- complete_runs_<slot>: the runs of one claim slot, those that can be proven as a whole. They do not overlap. The caller
-- holds the batches' locks.
SELECT {schema}.create_slot_functions('claim', 'complete_runs_in',
    'p_claim_slots smallint[], p_first_receipts bigint[], p_run_leases bigint[], p_stops integer[], p_job_ids bigint[], p_now timestamptz',
    '{schema}.completed_runs', $template$
DECLARE
    v_result {schema}.completed_runs;
BEGIN
    WITH run AS (
        SELECT r.first_receipt, (r.first_receipt & 1023)::integer AS index, r.stop - r.start AS length, r.run_lease, r.start, r.stop,
               r.place::integer
        FROM unnest(p_claim_slots, p_first_receipts, p_run_leases, p_stops, 0 || p_stops) WITH ORDINALITY
            AS r (claim_slot, first_receipt, run_lease, stop, start, place)
        WHERE r.claim_slot = <slot>
    ),
    -- Proof: the receipts exist, name these jobs and this lease, and no closure row holds any of them.
    proven AS MATERIALIZED (
        SELECT b.batch_id, b.lane_id, b.ready_slot, b.ready_generation, b.has_unique, r.start, r.stop, r.length, r.place,
               int8range(r.first_receipt, r.first_receipt + r.length) AS receipts
        FROM run AS r
        JOIN {schema}.lease_claim_batches_<slot> AS b ON b.batch_id = r.first_receipt >> 10
        WHERE b.job_ids[r.index + 1 : r.index + r.length] = p_job_ids[r.start + 1 : r.stop]
          AND b.run_lease = r.run_lease
          AND NOT EXISTS (
              SELECT FROM {schema}.lease_claim_closure_batches_<slot> AS c
              WHERE c.batch_id = r.first_receipt >> 10
                AND c.receipt_ranges && int8range(r.first_receipt, r.first_receipt + r.length))
    ),
    per_batch AS MATERIALIZED (
        SELECT p.batch_id, p.lane_id, p.ready_slot, p.ready_generation, sum(p.length)::integer AS job_count,
               range_agg(p.receipts) AS receipt_ranges
        FROM proven AS p
        GROUP BY p.batch_id, p.lane_id, p.ready_slot, p.ready_generation
    ),
    closures AS (
        INSERT INTO {schema}.lease_claim_closure_batches_<slot> (
            batch_id, ready_generation, closed_at, job_count, claim_slot, ready_slot, outcome, receipt_ranges)
        SELECT p.batch_id, p.ready_generation, p_now, p.job_count, <slot>, p.ready_slot, 'completed', p.receipt_ranges
        FROM per_batch AS p
    ),
    completions AS (
        INSERT INTO {schema}.receipt_completion_batches (batch_id, finalized_at, lane_id, job_count, ready_slot, receipt_ranges)
        SELECT p.batch_id, p_now, p.lane_id, p.job_count, p.ready_slot, p.receipt_ranges
        FROM per_batch AS p
    )
    SELECT array_agg(p.place),
           CASE WHEN bool_or(p.has_unique) THEN (
               SELECT array_agg(p_job_ids[n]) FROM proven AS u CROSS JOIN generate_series(u.start + 1, u.stop) AS n WHERE u.has_unique)
           END
    INTO v_result
    FROM proven AS p;
    RETURN v_result;
END
$template$, 'RETURN NULL;');

-- Completes runs of consecutive receipts. Run n is the attempts of claim_slots[n] with run_leases[n], of one claim batch,
-- from first_receipts[n] on, whose jobs are job_ids[stops[n - 1] + 1 .. stops[n]]. Returns the attempts that lost by their
-- place in job_ids, as complete does.
CREATE FUNCTION {schema}.complete_runs(
    p_claim_slots smallint[], p_first_receipts bigint[], p_run_leases bigint[], p_stops integer[], p_job_ids bigint[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    c_runs constant integer := cardinality(p_stops);
    v_now timestamptz;
    v_start integer := 0;
    v_last bigint := -1;
    v_disjoint boolean := true;
    v_slot smallint;
    v_slots smallint[] := p_claim_slots;
    v_proven integer[] := '{}';
    v_done {schema}.completed_runs;
    v_unique_jobs bigint[];
    v_left record;
BEGIN
    IF c_runs = 0 THEN
        RETURN;
    END IF;
    FOR n IN 1 .. c_runs LOOP
        IF p_stops[n] > v_start AND (p_first_receipts[n] & 1023) + p_stops[n] - v_start <= 1024 THEN
            v_disjoint := v_disjoint AND p_first_receipts[n] > v_last;
            v_last := p_first_receipts[n] + p_stops[n] - v_start - 1;
            v_start := p_stops[n];
        ELSE
            RAISE EXCEPTION 'run % is not one or more receipts of one claim batch', n USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
    IF NOT (v_start = cardinality(p_job_ids) AND c_runs = cardinality(p_claim_slots) AND c_runs = cardinality(p_first_receipts)
            AND c_runs = cardinality(p_run_leases)) THEN
        RAISE EXCEPTION 'the arrays do not fit together' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM {schema}.lock_claim_batches(p_first_receipts);
    v_now := clock_timestamp();

    -- Runs that may overlap name a receipt twice: only one by one can the first of them win.
    IF v_disjoint THEN
        IF c_runs > 1 THEN
            v_slots := ARRAY(SELECT DISTINCT s FROM unnest(p_claim_slots) AS s ORDER BY s);
        END IF;
        FOREACH v_slot IN ARRAY v_slots LOOP
            v_done := {schema}.complete_runs_in(v_slot, p_claim_slots, p_first_receipts, p_run_leases, p_stops, p_job_ids, v_now);
            v_proven := v_proven || v_done.proven;
            v_unique_jobs := v_unique_jobs || v_done.unique_jobs;
        END LOOP;
        IF cardinality(v_proven) = c_runs THEN
            IF v_unique_jobs IS NOT NULL THEN
                PERFORM {schema}.release_unique_keys(v_unique_jobs, 'completed');
            END IF;
            RETURN;
        END IF;
    END IF;

    SELECT array_agg(r.claim_slot ORDER BY n) AS claim_slots, array_agg(r.first_receipt + n - r.start - 1 ORDER BY n) AS receipt_ids,
           array_agg(p_job_ids[n] ORDER BY n) AS job_ids, array_agg(r.run_lease ORDER BY n) AS run_leases,
           array_agg(n ORDER BY n) AS places
    INTO v_left
    FROM unnest(p_claim_slots, p_first_receipts, p_run_leases, p_stops, 0 || p_stops) WITH ORDINALITY
        AS r (claim_slot, first_receipt, run_lease, stop, start, place)
    CROSS JOIN generate_series(r.start + 1, r.stop) AS n
    WHERE r.place <> ALL (v_proven);
    RETURN QUERY
        SELECT v_left.places[e.place], e.reason
        FROM {schema}.complete_each(v_left.claim_slots, v_left.receipt_ids, v_left.job_ids, v_left.run_leases,
            v_unique_jobs, v_now) AS e;
END
$function$;

-- Gives up the keys of jobs whose new state is not in their mask. In key order, as the takers lock them.
CREATE FUNCTION {schema}.release_unique_keys(p_job_ids bigint[], p_state {schema}.job_state) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_key bytea;
BEGIN
    FOR v_key IN
        SELECT c.unique_key
        FROM {schema}.job_unique_claims AS c
        WHERE c.job_id = ANY (p_job_ids) AND NOT {schema}.holds_key(c.unique_states, p_state)
        ORDER BY c.unique_key
        FOR UPDATE
    LOOP
        DELETE FROM {schema}.job_unique_claims AS c WHERE c.unique_key = v_key;
    END LOOP;
END
$function$;

-- Why a writer lost, for the worker's log: off the hot path, only losers ask.
CREATE FUNCTION {schema}.why_lost(p_claim_slot smallint, p_receipt_id bigint, p_job_id bigint, p_run_lease bigint) RETURNS text
LANGUAGE plpgsql AS $function$
DECLARE
    v_batch record;
    v_outcome text;
BEGIN
    SELECT b.job_ids[(p_receipt_id & 1023) + 1] AS job_id,
           coalesce(b.run_lease, b.run_leases[(p_receipt_id & 1023) + 1]) AS run_lease
    INTO v_batch
    FROM {schema}.lease_claim_batches AS b
    WHERE b.claim_slot = p_claim_slot AND b.batch_id = p_receipt_id >> 10;
    IF NOT FOUND THEN
        RETURN 'no such receipt: its claim is closed and reclaimed, or was never made';
    ELSIF v_batch.job_id IS DISTINCT FROM p_job_id THEN
        RETURN format('receipt %s is of job %s', p_receipt_id, coalesce(v_batch.job_id::text, 'none'));
    ELSIF v_batch.run_lease IS DISTINCT FROM p_run_lease THEN
        RETURN format('stale run_lease: the attempt has %s', v_batch.run_lease);
    END IF;
    SELECT c.outcome INTO v_outcome
    FROM {schema}.lease_claim_closure_batches AS c
    WHERE c.claim_slot = p_claim_slot AND c.batch_id = p_receipt_id >> 10 AND c.receipt_ranges @> p_receipt_id;
    RETURN 'already closed: ' || v_outcome;
END
$function$;
