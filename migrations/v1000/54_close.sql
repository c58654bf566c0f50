-- Close: every end of an attempt but plain success. Same locks, fences and report of losers as complete; the attempt's
-- closure row and what becomes of the job are one transaction.
--
-- Lock order: whatever ends several jobs locks all of them first (claim batches, rows, attempt states) and only then takes and
-- gives up their unique keys, in the keys' order: end_attempt for each, then finish_job for each.

-- Terminal history of a job that does not complete compactly: beside its body where that lies in the queue ring, else with it
-- in the slot that is open now.
CREATE FUNCTION {schema}.store_done(p_job {schema}.job_body, p_state {schema}.job_state, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    IF p_job.ready_slot IS NOT NULL THEN
        INSERT INTO {schema}.done_entries (
            job_id, lane_seq, run_lease, attempted_at, finalized_at, lane_id, ready_slot, attempt, state, queue, errors, progress)
        VALUES (p_job.job_id, p_job.lane_seq, p_job.run_lease, p_job.claimed_at, p_now, p_job.lane_id, p_job.ready_slot,
            p_job.attempt, p_state, p_job.queue, p_job.errors, p_job.progress);
    ELSE
        INSERT INTO {schema}.done_entries (
            job_id, run_lease, attempted_at, finalized_at, run_at, created_at, ready_slot, attempt, max_attempts, priority,
            state, queue, kind, args, tags, metadata, errors, progress, unique_key, unique_states)
        VALUES (p_job.job_id, p_job.run_lease, p_job.claimed_at, p_now, p_job.run_at, p_job.created_at,
            ({schema}.pin_ready_slot() & 255)::smallint, p_job.attempt, p_job.max_attempts, p_job.priority, p_state, p_job.queue,
            p_job.kind, p_job.args, p_job.tags, p_job.metadata, p_job.errors, p_job.progress, p_job.unique_key, p_job.unique_states);
    END IF;
END
$function$;

-- A job that waits for its time.
CREATE FUNCTION {schema}.store_deferred(p_job {schema}.job_body, p_state {schema}.job_state, p_run_at timestamptz) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    INSERT INTO {schema}.deferred_jobs (
        job_id, run_lease, run_at, created_at, priority, attempt, max_attempts, state, queue, kind, args, tags, metadata,
        errors, progress, unique_key, unique_states)
    VALUES (p_job.job_id, p_job.run_lease, p_run_at, p_job.created_at, p_job.priority, p_job.attempt, p_job.max_attempts, p_state,
        p_job.queue, p_job.kind, p_job.args, p_job.tags, p_job.metadata, p_job.errors, p_job.progress, p_job.unique_key,
        p_job.unique_states);
END
$function$;

-- A job that failed for good: held for an operator where its queue has a DLQ, else in terminal history, from where prune
-- carries it forward.
CREATE FUNCTION {schema}.store_failed(p_job {schema}.job_body, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    IF EXISTS (SELECT FROM {schema}.queue_meta AS m WHERE m.queue = p_job.queue AND m.dlq) THEN
        INSERT INTO {schema}.dlq_entries (
            job_id, run_lease, run_at, created_at, attempted_at, failed_at, priority, attempt, max_attempts, held, queue, kind,
            args, tags, metadata, errors, progress, unique_key, unique_states)
        VALUES (p_job.job_id, p_job.run_lease, p_job.run_at, p_job.created_at, p_job.claimed_at, p_now, p_job.priority,
            p_job.attempt, p_job.max_attempts, 'dlq', p_job.queue, p_job.kind, p_job.args, p_job.tags, p_job.metadata, p_job.errors,
            p_job.progress, p_job.unique_key, p_job.unique_states);
    ELSE
        PERFORM {schema}.store_done(p_job, 'failed', p_now);
    END IF;
END
$function$;

-- A job that can be claimed at once.
CREATE FUNCTION {schema}.store_ready(p_job {schema}.job_body) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_lane {schema}.queue_lanes := {schema}.join_lane(p_job.queue, p_job.priority);
    v_slot smallint := {schema}.pin_ready_slot() & 255;
BEGIN
    INSERT INTO {schema}.ready_entries (
        job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt, max_attempts, kind, args, tags, metadata,
        errors, progress, unique_key, unique_states)
    VALUES (p_job.job_id, nextval(v_lane.seq), p_job.run_lease, p_job.run_at, p_job.created_at, v_lane.lane_id, v_slot,
        p_job.attempt, p_job.max_attempts, p_job.kind, p_job.args, p_job.tags, p_job.metadata, p_job.errors, p_job.progress,
        p_job.unique_key, p_job.unique_states);
    PERFORM {schema}.wake_queue(p_job.queue);
END
$function$;

-- Forgets what an attempt that is over left in attempt_state; its progress stays with the job.
CREATE FUNCTION {schema}.forget_attempt(p_job {schema}.job_body) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_progress jsonb;
BEGIN
    IF p_job.job_id IS NOT NULL THEN
        DELETE FROM {schema}.attempt_state AS s
        WHERE s.job_id = p_job.job_id AND s.run_lease <= p_job.run_lease
        RETURNING CASE WHEN s.run_lease = p_job.run_lease THEN s.progress END INTO v_progress;
        p_job.progress := coalesce(v_progress, p_job.progress);
    END IF;
    RETURN p_job;
END
$function$;

-- What becomes of the job of an attempt that the caller took and forgot (end_attempt), stored. p_job has run_lease and claimed_at
-- of the attempt, and the attempts counted before it. p_outcome: completed, failed, cancelled, retryable or scheduled (snooze:
-- not counted). Without p_delay a retry backs off. Returns the state.
CREATE FUNCTION {schema}.finish_job(
    p_job {schema}.job_body, p_outcome {schema}.job_state, p_now timestamptz, p_error text, p_delay interval, p_progress jsonb
) RETURNS {schema}.job_state
LANGUAGE plpgsql AS $function$
DECLARE
    v_state {schema}.job_state := p_outcome;
    v_holder bigint;
BEGIN
    p_job.errors := {schema}.with_error(p_job.errors, p_job.attempt + 1, p_error, p_now);
    IF p_outcome <> 'scheduled' THEN
        p_job.attempt := p_job.attempt + 1;
    END IF;
    IF p_outcome = 'retryable' AND p_job.attempt >= p_job.max_attempts THEN
        v_state := 'failed';
    END IF;
    p_job.progress := CASE WHEN v_state <> 'completed' THEN coalesce(p_progress, p_job.progress) END;

    IF p_job.unique_key IS NOT NULL THEN
        v_holder := {schema}.enter_state(p_job.job_id, p_job.unique_key, p_job.unique_states, v_state);
        IF v_holder IS NOT NULL AND v_state IN ('retryable', 'scheduled') THEN
            -- Somebody took the key while this job did not hold it. The older gives way, and its neighbours go on. (What is
            -- over is over: it just does not hold the key.)
            v_state := 'cancelled';
            p_job.errors := {schema}.with_error(p_job.errors, p_job.attempt, {schema}.superseded_by(v_holder), p_now);
        END IF;
    END IF;

    CASE v_state
        WHEN 'retryable' THEN
            PERFORM {schema}.store_deferred(p_job, v_state, p_now + coalesce(p_delay, {schema}.backoff_duration(p_job.attempt)));
        WHEN 'scheduled' THEN
            PERFORM {schema}.store_deferred(p_job, v_state, p_now + coalesce(p_delay, interval '0'));
        WHEN 'failed' THEN
            PERFORM {schema}.store_failed(p_job, p_now);
        WHEN 'completed', 'cancelled' THEN
            PERFORM {schema}.store_done(p_job, v_state, p_now);
    END CASE;
    RETURN v_state;
END
$function$;

-- An open attempt of the claim ring: where its job lies.
CREATE TYPE {schema}.open_attempt AS (
    batch_id         bigint,
    ready_generation bigint,
    lane_seq         bigint,
    claimed_at       timestamptz,
    deadline_at      timestamptz,
    lane_id          integer,
    ready_slot       smallint,
    claimed_by       text
);

-- open_attempt_<slot>: the attempt, if it is open and it is the one that is named. The caller holds its batch's lock.
SELECT {schema}.create_slot_functions('claim', 'open_attempt_in', 'p_receipt_id bigint, p_job_id bigint, p_run_lease bigint',
    '{schema}.open_attempt', $template$
DECLARE
    v_attempt {schema}.open_attempt;
BEGIN
    -- Proof: as in complete; a receipt named twice finds its own closure the second time.
    SELECT b.batch_id, b.ready_generation, {schema}.nth_in_ranges(b.lane_ranges, (p_receipt_id & 1023)::integer), b.claimed_at,
           b.deadline_at, b.lane_id, b.ready_slot, b.claimed_by
    INTO v_attempt
    FROM {schema}.lease_claim_batches_<slot> AS b
    WHERE b.batch_id = p_receipt_id >> 10
      AND b.job_ids[(p_receipt_id & 1023) + 1] = p_job_id
      AND coalesce(b.run_lease, b.run_leases[(p_receipt_id & 1023) + 1]) = p_run_lease
      AND NOT EXISTS (
          SELECT FROM {schema}.lease_claim_closure_batches_<slot> AS c
          WHERE c.batch_id = b.batch_id AND c.receipt_ranges @> p_receipt_id);
    RETURN v_attempt;
END
$template$);

-- Takes one attempt out of wherever it is open and returns its job; job_id is NULL when somebody else ended it before, or it
-- never was. p_closure says how, in the closure row. The caller holds the claim batch's lock.
CREATE FUNCTION {schema}.take_attempt(
    p_claim_slot smallint, p_receipt_id bigint, p_job_id bigint, p_run_lease bigint, p_closure text, p_now timestamptz
) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_attempt {schema}.open_attempt;
    v_job {schema}.job_body;
BEGIN
    -- A receipt without a claim slot was a lease from the beginning.
    IF EXISTS (SELECT FROM {schema}.claim_ring_slots AS s WHERE s.slot = p_claim_slot) THEN
        v_attempt := {schema}.open_attempt_in(p_claim_slot, p_receipt_id, p_job_id, p_run_lease);
    END IF;
    IF v_attempt.batch_id IS NULL THEN
        RETURN {schema}.take_lease(p_receipt_id, p_job_id, p_run_lease);
    END IF;
    v_job := {schema}.ready_body_in(v_attempt.ready_slot, v_attempt.lane_id, v_attempt.lane_seq);
    IF v_job.job_id IS NULL THEN
        RAISE EXCEPTION 'job % has an open attempt but no body in queue slot %', p_job_id, v_attempt.ready_slot
            USING ERRCODE = 'data_corrupted';
    END IF;
    v_job.run_lease := p_run_lease;
    v_job.claimed_at := v_attempt.claimed_at;
    INSERT INTO {schema}.lease_claim_closure_batches (
        batch_id, ready_generation, closed_at, job_count, claim_slot, ready_slot, outcome, receipt_ranges)
    VALUES (v_attempt.batch_id, v_attempt.ready_generation, p_now, 1, p_claim_slot, v_attempt.ready_slot, p_closure,
        int8multirange(int8range(p_receipt_id, p_receipt_id + 1)));
    RETURN v_job;
END
$function$;

-- Takes one attempt as take_attempt does, with its attempt_state. The caller holds the claim batch's lock.
CREATE FUNCTION {schema}.end_attempt(
    p_claim_slot smallint, p_receipt_id bigint, p_job_id bigint, p_run_lease bigint, p_closure text, p_now timestamptz
) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
BEGIN
    RETURN {schema}.forget_attempt(
        {schema}.take_attempt(p_claim_slot, p_receipt_id, p_job_id, p_run_lease, p_closure, p_now));
END
$function$;

-- p_outcomes[n]: failed, cancelled, retryable, scheduled (snooze: the attempt is not counted) or completed. p_delays[n] is
-- how long a retryable or scheduled job waits; a retry without one backs off, a retry with no attempt left fails.
-- p_errors[n] is kept with the attempt's number and the database's time; p_progress[n] replaces the job's progress where it
-- is not NULL. Returns the ones that lost, by their place.
CREATE FUNCTION {schema}.close_attempts(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[],
    p_outcomes {schema}.job_state[], p_errors text[], p_delays interval[], p_progress jsonb[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_bad text;
BEGIN
    SELECT format('outcome must be completed, failed, cancelled, retryable or scheduled, not %s', coalesce(o::text, 'null'))
    INTO v_bad
    FROM unnest(p_outcomes) AS o
    WHERE o IS NULL OR o NOT IN ('completed', 'failed', 'cancelled', 'retryable', 'scheduled')
    LIMIT 1;
    IF v_bad IS NOT NULL THEN
        RAISE EXCEPTION '%', v_bad USING ERRCODE = 'check_violation', COLUMN = 'outcomes';
    END IF;
    PERFORM {schema}.lock_claim_batches(p_receipt_ids);
    RETURN QUERY
        SELECT c.*
        FROM {schema}.close_locked(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, p_outcomes, p_errors, p_delays,
            p_progress, NULL) AS c;
END
$function$;

-- The same for whoever holds the locks already. p_causes[n] is what the closure says instead of the outcome.
CREATE FUNCTION {schema}.close_locked(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[],
    p_outcomes {schema}.job_state[], p_errors text[], p_delays interval[], p_progress jsonb[], p_causes text[]
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
BEGIN
    BEGIN
        RETURN QUERY
            SELECT c.*
            FROM {schema}.close_each(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, p_outcomes, p_errors, p_delays,
                p_progress, p_causes, false) AS c;
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception OR program_limit_exceeded THEN
        -- One of them cannot be stored. Once more one by one, so that it costs its neighbours nothing.
        RETURN QUERY
            SELECT c.*
            FROM {schema}.close_each(p_claim_slots, p_receipt_ids, p_job_ids, p_run_leases, p_outcomes, p_errors, p_delays,
                p_progress, p_causes, true) AS c;
    END;
END
$function$;

CREATE FUNCTION {schema}.close_each(
    p_claim_slots smallint[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[],
    p_outcomes {schema}.job_state[], p_errors text[], p_delays interval[], p_progress jsonb[], p_causes text[],
    p_one_by_one boolean
) RETURNS TABLE (place integer, reason text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_n integer;
    v_nth integer;
    v_job {schema}.job_body;
    v_keyed {schema}.job_body[] := '{}';
    v_keys bytea[] := '{}';
    v_places integer[] := '{}';
BEGIN
    FOR v_n IN 1 .. coalesce(cardinality(p_receipt_ids), 0) LOOP
        v_job := {schema}.end_attempt(p_claim_slots[v_n], p_receipt_ids[v_n], p_job_ids[v_n], p_run_leases[v_n],
            coalesce(p_causes[v_n], p_outcomes[v_n]::text), v_now);
        IF v_job.job_id IS NULL THEN
            place := v_n;
            reason := {schema}.why_lost(p_claim_slots[v_n], p_receipt_ids[v_n], p_job_ids[v_n], p_run_leases[v_n]);
            RETURN NEXT;
        ELSIF v_job.unique_key IS NOT NULL THEN
            v_keyed := v_keyed || v_job;
            v_keys := v_keys || v_job.unique_key;
            v_places := v_places || v_n;
        ELSE
            PERFORM {schema}.finish_at_any_rate(v_job, p_outcomes[v_n], v_now, p_errors[v_n], p_delays[v_n], p_progress[v_n],
                p_one_by_one);
        END IF;
    END LOOP;
    -- Lock: the keys, in their order, now that every row is locked.
    FOR v_nth IN SELECT k.nth FROM unnest(v_keys) WITH ORDINALITY AS k (unique_key, nth) ORDER BY k.unique_key, k.nth LOOP
        v_n := v_places[v_nth];
        PERFORM {schema}.finish_at_any_rate(v_keyed[v_nth], p_outcomes[v_n], v_now, p_errors[v_n], p_delays[v_n], p_progress[v_n],
            p_one_by_one);
    END LOOP;
END
$function$;

-- finish_job; if p_one_by_one, also where that cannot be stored.
CREATE FUNCTION {schema}.finish_at_any_rate(
    p_job {schema}.job_body, p_outcome {schema}.job_state, p_now timestamptz, p_error text, p_delay interval, p_progress jsonb,
    p_one_by_one boolean
) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    IF NOT p_one_by_one THEN
        PERFORM {schema}.finish_job(p_job, p_outcome, p_now, p_error, p_delay, p_progress);
        RETURN;
    END IF;
    BEGIN
        PERFORM {schema}.finish_job(p_job, p_outcome, p_now, p_error, p_delay, p_progress);
    EXCEPTION WHEN data_exception OR integrity_constraint_violation OR raise_exception OR program_limit_exceeded THEN
        -- Finishing must succeed somewhere: failed, and what went wrong beside what the handler left.
        PERFORM {schema}.finish_job(p_job, 'failed', p_now,
            concat_ws('; ', left(p_error, 1000), format('its outcome (%s) could not be stored: %s', p_outcome, sqlerrm)), NULL, NULL);
    END;
END
$function$;
