-- Heartbeats: workers say of their longer attempts that they live, and how far they are (engine.md, Heartbeat, progress).
-- Many attempts a call; nothing is written for an attempt that is over, and its worker is told.

-- live_attempts_<slot>: which of the attempts of one claim slot are open, by their place. The caller holds the batches' locks.
SELECT {schema}.create_slot_functions('claim', 'live_attempts_in',
    'p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[]', 'integer[]', $template$
DECLARE
    v_places integer[];
BEGIN
    SELECT array_agg(i.place::integer) INTO v_places
    FROM unnest(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases) WITH ORDINALITY
        AS i (claim_slot, receipt_id, job_id, run_lease, place)
    JOIN {schema}.lease_claim_batches_<slot> AS b ON b.batch_id = i.receipt_id >> 10
    WHERE i.claim_slot = <slot>
      AND b.job_ids[(i.receipt_id & 1023) + 1] = i.job_id
      AND coalesce(b.run_lease, b.run_leases[(i.receipt_id & 1023) + 1]) = i.run_lease
      AND NOT EXISTS (
          SELECT FROM {schema}.lease_claim_closure_batches_<slot> AS c
          WHERE c.batch_id = i.receipt_id >> 10 AND c.receipt_ranges @> i.receipt_id);
    RETURN v_places;
END
$template$);

-- p_progress[n] replaces what is stored where it is not NULL. Returns the attempts that are over.
CREATE FUNCTION {schema}.heartbeat(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[], p_progress jsonb[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_slot smallint;
    v_live integer[] := '{}';
BEGIN
    -- Lock: the same as of every end of an attempt, so that none is seen to live after its end.
    PERFORM {schema}.lock_claim_batches(p_receipt_ids);
    FOR v_slot IN
        SELECT DISTINCT s.slot
        FROM unnest(p_claim_slots) AS i (claim_slot)
        JOIN {schema}.claim_ring_slots AS s ON s.slot = i.claim_slot
        ORDER BY s.slot
    LOOP
        v_live := v_live || {schema}.live_attempts_in(v_slot, p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases);
    END LOOP;
    -- Lock: the lease rows, by job, as every path that takes several.
    v_live := v_live || ARRAY(
        SELECT i.place::integer
        FROM unnest(p_receipt_ids, p_job_ids, p_run_leases) WITH ORDINALITY AS i (receipt_id, job_id, run_lease, place)
        JOIN {schema}.leases AS l
          ON l.job_id = i.job_id AND l.run_lease = i.run_lease AND l.receipt_id = i.receipt_id
        ORDER BY l.job_id
        FOR NO KEY UPDATE OF l);

    INSERT INTO {schema}.attempt_state AS s (job_id, run_lease, heartbeat_at, progress)
    SELECT DISTINCT ON (i.job_id) i.job_id, i.run_lease, v_now, i.progress
    FROM unnest(p_job_ids, p_run_leases, p_progress) WITH ORDINALITY AS i (job_id, run_lease, progress, place)
    WHERE i.place = ANY (v_live)
    ORDER BY i.job_id, i.place DESC
    ON CONFLICT (job_id) DO UPDATE
    SET run_lease = excluded.run_lease,
        heartbeat_at = excluded.heartbeat_at,
        progress = coalesce(excluded.progress, CASE WHEN s.run_lease = excluded.run_lease THEN s.progress END);

    RETURN QUERY
        SELECT n, {schema}.why_lost(p_claim_slots[n], p_receipt_ids[n], p_job_ids[n], p_run_leases[n])
        FROM generate_series(1, coalesce(cardinality(p_receipt_ids), 0)) AS n
        WHERE n <> ALL (v_live)
        ORDER BY n;
END
$function$;

-- Forgets the state of attempts that completed: their worker knows that it wrote some, so that others need not look.
CREATE FUNCTION {schema}.drop_attempt_state(p_job_ids bigint[], p_run_leases bigint[]) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    DELETE FROM {schema}.attempt_state AS s
    USING (
        SELECT d.job_id
        FROM unnest(p_job_ids, p_run_leases) AS i (job_id, run_lease)
        JOIN {schema}.attempt_state AS d ON d.job_id = i.job_id AND d.run_lease <= i.run_lease
        ORDER BY d.job_id
        FOR UPDATE OF d
    ) AS over
    WHERE s.job_id = over.job_id;
END
$function$;
