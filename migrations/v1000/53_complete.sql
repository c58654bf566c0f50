-- Complete: many successful attempts in one call, whoever claimed them. INSERTs only, two rows per claim batch touched.
--
-- Lock: one advisory lock per claim batch, ascending by key; close, and later rescue, cancel and materialise, take the
-- same ones first. Under it a fresh statement sees every closure that came before, so of any racers exactly one wins (I2).

CREATE FUNCTION {schema}.lock_claim_batches(p_receipt_ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    -- Whoever waited here must see what the last holder committed.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'closing an attempt needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
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
    lost        integer[],  -- places in the input
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
        ORDER BY i.receipt_id
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
           END,
           (SELECT array_agg(v.job_id) FROM valid AS v WHERE v.has_unique)
    INTO v_result;
    RETURN v_result;
END
$template$);

-- Attempt n is (claim_slots[n], receipt_ids[n], job_ids[n], run_leases[n]), all four as the claim gave them. Returns the
-- ones that lost, by their place n (from 1): closed before, never claimed so, or named twice. Everyone else has won.
CREATE FUNCTION {schema}.complete(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_slot smallint;
    v_lost integer[] := '{}';
    v_done {schema}.completed_slot;
BEGIN
    PERFORM {schema}.lock_claim_batches(p_receipt_ids);

    -- A receipt without a claim slot was a lease from the beginning.
    v_lost := ARRAY(
        SELECT i.place::integer
        FROM unnest(p_claim_slots) WITH ORDINALITY AS i (claim_slot, place)
        WHERE NOT EXISTS (SELECT FROM {schema}.claim_ring_slots AS s WHERE s.slot = i.claim_slot));
    FOR v_slot IN
        SELECT DISTINCT s.slot FROM unnest(p_claim_slots) AS i (claim_slot) JOIN {schema}.claim_ring_slots AS s ON s.slot = i.claim_slot
        ORDER BY s.slot
    LOOP
        v_done := {schema}.complete_in(v_slot, p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, v_now);
        v_lost := v_lost || v_done.lost;
        IF v_done.unique_jobs IS NOT NULL THEN
            PERFORM {schema}.release_unique_keys(v_done.unique_jobs, 'completed');
        END IF;
    END LOOP;

    IF v_lost <> '{}' THEN
        -- A receipt that is closed because its attempt materialised.
        v_lost := {schema}.complete_leases(v_lost, p_receipt_ids, p_job_ids, p_run_leases, v_now);
        RETURN QUERY
            SELECT l, {schema}.why_lost(p_claim_slots[l], p_receipt_ids[l], p_job_ids[l], p_run_leases[l])
            FROM unnest(v_lost) AS l
            ORDER BY l;
    END IF;
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
    RETURN coalesce('already closed: ' || v_outcome, 'named twice in one call');
END
$function$;
