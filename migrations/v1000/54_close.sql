-- Close: every end of an attempt but plain success. Same locks, fences and report of losers as complete; the attempt's
-- closure row and what becomes of the job are one transaction.

-- p_outcomes[n]: failed, cancelled, retryable or scheduled (snooze: the attempt is not counted). p_delays[n] is how long
-- a retryable or scheduled job waits. A retry with no attempt left fails. p_errors[n] is kept with the attempt's number
-- and the database's time; p_progress[n] replaces the job's progress where it is not NULL.
CREATE FUNCTION {schema}.close_attempts(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[],
    p_outcomes {schema}.job_state[], p_errors text[], p_delays interval[], p_progress jsonb[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_batch record;
    v_job record;
    v_state {schema}.job_state;
    v_attempt smallint;
    v_errors jsonb[];
    v_n integer;
BEGIN
    PERFORM {schema}.lock_claim_batches(p_receipt_ids);

    FOR v_n IN 1 .. cardinality(p_receipt_ids) LOOP
        IF NOT EXISTS (SELECT FROM {schema}.claim_ring_slots AS s WHERE s.slot = p_claim_slots[v_n]) THEN
            place := v_n;
            reason := {schema}.why_lost(p_claim_slots[v_n], p_receipt_ids[v_n], p_job_ids[v_n], p_run_leases[v_n]);
            RETURN NEXT;
            CONTINUE;
        END IF;
        -- Proof: as in complete; a receipt named twice finds its own closure the second time.
        EXECUTE format(
            'SELECT b.batch_id, b.lane_id, b.ready_slot, b.ready_generation, b.has_unique, b.claimed_at,
                    %1$I.nth_in_ranges(b.lane_ranges, ($1 & 1023)::integer) AS lane_seq
             FROM %1$I.%2$I AS b
             WHERE b.batch_id = $1 >> 10
               AND b.job_ids[($1 & 1023) + 1] = $2
               AND coalesce(b.run_lease, b.run_leases[($1 & 1023) + 1]) = $3
               AND NOT EXISTS (SELECT FROM %1$I.%3$I AS c WHERE c.batch_id = b.batch_id AND c.receipt_ranges @> $1)',
            {schema_literal}, 'lease_claim_batches_' || p_claim_slots[v_n], 'lease_claim_closure_batches_' || p_claim_slots[v_n])
        INTO v_batch
        USING p_receipt_ids[v_n], p_job_ids[v_n], p_run_leases[v_n];
        IF v_batch.batch_id IS NULL THEN
            place := v_n;
            reason := {schema}.why_lost(p_claim_slots[v_n], p_receipt_ids[v_n], p_job_ids[v_n], p_run_leases[v_n]);
            RETURN NEXT;
            CONTINUE;
        END IF;

        EXECUTE format('SELECT r.*, l.queue, l.priority FROM %1$I.%2$I AS r JOIN %1$I.queue_lanes AS l USING (lane_id)
                        WHERE r.lane_id = $1 AND r.lane_seq = $2',
            {schema_literal}, 'ready_entries_' || v_batch.ready_slot)
        INTO STRICT v_job
        USING v_batch.lane_id, v_batch.lane_seq;

        v_attempt := v_job.attempt + CASE WHEN p_outcomes[v_n] = 'scheduled' THEN 0 ELSE 1 END;
        v_state := CASE
            WHEN p_outcomes[v_n] = 'retryable' AND v_attempt >= v_job.max_attempts THEN 'failed'
            ELSE p_outcomes[v_n]
        END;
        v_errors := v_job.errors;
        IF p_errors[v_n] IS NOT NULL THEN
            v_errors := v_errors || jsonb_build_object('attempt', v_job.attempt + 1, 'error', p_errors[v_n], 'at', v_now);
        END IF;

        INSERT INTO {schema}.lease_claim_closure_batches (
            batch_id, ready_generation, closed_at, job_count, claim_slot, ready_slot, outcome, receipt_ranges)
        VALUES (v_batch.batch_id, v_batch.ready_generation, v_now, 1, p_claim_slots[v_n], v_batch.ready_slot, v_state::text,
            int8multirange(int8range(p_receipt_ids[v_n], p_receipt_ids[v_n] + 1)));

        IF v_state IN ('failed', 'cancelled') THEN
            INSERT INTO {schema}.done_entries (
                job_id, lane_seq, run_lease, attempted_at, finalized_at, lane_id, ready_slot, attempt, state, errors, progress)
            VALUES (v_job.job_id, v_job.lane_seq, v_job.run_lease + 1, v_batch.claimed_at, v_now, v_job.lane_id,
                v_batch.ready_slot, v_attempt, v_state, v_errors, coalesce(p_progress[v_n], v_job.progress));
        ELSE
            INSERT INTO {schema}.deferred_jobs (
                job_id, run_lease, run_at, created_at, priority, attempt, max_attempts, state, queue, kind, args, tags, metadata,
                errors, progress, unique_key, unique_states)
            VALUES (v_job.job_id, v_job.run_lease + 1, v_now + coalesce(p_delays[v_n], interval '0'), v_job.created_at,
                v_job.priority, v_attempt, v_job.max_attempts, v_state, v_job.queue, v_job.kind, v_job.args, v_job.tags,
                v_job.metadata, v_errors, coalesce(p_progress[v_n], v_job.progress), v_job.unique_key, v_job.unique_states);
        END IF;
        IF v_job.unique_key IS NOT NULL THEN
            PERFORM {schema}.release_unique_keys(ARRAY[v_job.job_id], v_state);
        END IF;
    END LOOP;
END
$function$;
