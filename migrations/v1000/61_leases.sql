-- Leases: an attempt that needs a mutable row gets one. Materialising moves the attempt from its receipt, under the same lock
-- and fence as any other end of it, into a lease with the job's body; from then on the lease row is the attempt, and whoever
-- locks and deletes it has ended it.
--
-- Lock order: claim batch, then lease row. Those who know only the lease (callbacks, rescue) lock the row alone.

-- The lease ring's open slot, kept from being truncated until this transaction ends; see pin_ready_slot.
CREATE FUNCTION {schema}.pin_lease_slot() RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_cursor bigint := pg_sequence_last_value('{schema}.lease_ring_cursor'::regclass);
    v_seen bigint;
BEGIN
    LOOP
        PERFORM pg_advisory_xact_lock_shared('{schema}.lease_ring_slots'::regclass::oid::integer, (v_cursor & 255)::integer);
        v_seen := pg_sequence_last_value('{schema}.lease_ring_cursor'::regclass);
        EXIT WHEN v_seen = v_cursor;
        IF v_seen IS NULL THEN
            PERFORM {schema}.refuse_unreadable('{schema}.lease_ring_cursor'::regclass);
        END IF;
        v_cursor := v_seen;
    END LOOP;
    RETURN v_cursor;
END
$function$;

-- A lease moves when its slot is pruned, and a snapshot from before that shows it nowhere: whoever looks for one must look anew.
CREATE FUNCTION {schema}.refuse_old_snapshot(p_what text) RETURNS void
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION '% needs READ COMMITTED, not %', p_what, upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
END
$function$;

CREATE FUNCTION {schema}.job_of_lease(p_lease {schema}.leases) RETURNS {schema}.job_body
LANGUAGE plpgsql IMMUTABLE AS $function$
DECLARE
    v_job {schema}.job_body;
BEGIN
    v_job.job_id := p_lease.job_id;
    v_job.run_lease := p_lease.run_lease;
    v_job.run_at := p_lease.run_at;
    v_job.created_at := p_lease.created_at;
    v_job.claimed_at := p_lease.claimed_at;
    v_job.priority := p_lease.priority;
    v_job.attempt := p_lease.attempt;
    v_job.max_attempts := p_lease.max_attempts;
    v_job.queue := p_lease.queue;
    v_job.kind := p_lease.kind;
    v_job.args := p_lease.args;
    v_job.tags := p_lease.tags;
    v_job.metadata := p_lease.metadata;
    v_job.errors := p_lease.errors;
    v_job.progress := p_lease.progress;
    v_job.unique_key := p_lease.unique_key;
    v_job.unique_states := p_lease.unique_states;
    RETURN v_job;
END
$function$;

-- Ends a lease and returns its job; job_id is NULL when there is none, or it is another attempt's.
CREATE FUNCTION {schema}.take_lease(p_receipt_id bigint, p_job_id bigint, p_run_lease bigint) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_lease {schema}.leases;
BEGIN
    -- Lock and proof in one: of two that delete the row, the second finds nothing.
    DELETE FROM {schema}.leases AS l
    WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id
    RETURNING l.* INTO v_lease;
    RETURN {schema}.job_of_lease(v_lease);
END
$function$;

-- Gives a job's attempt a lease, in the slot that is open now.
CREATE FUNCTION {schema}.store_lease(
    p_job {schema}.job_body, p_receipt_id bigint, p_deadline_at timestamptz, p_claimed_by text, p_now timestamptz
) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    INSERT INTO {schema}.leases (
        job_id, run_lease, receipt_id, run_at, created_at, claimed_at, alive_at, deadline_at, lease_slot, priority, attempt,
        max_attempts, state, claimed_by, queue, kind, args, tags, metadata, errors, progress, unique_key, unique_states)
    VALUES (p_job.job_id, p_job.run_lease, p_receipt_id, p_job.run_at, p_job.created_at, p_job.claimed_at, p_now, p_deadline_at,
        ({schema}.pin_lease_slot() & 255)::smallint, p_job.priority, p_job.attempt, p_job.max_attempts, 'running', p_claimed_by,
        p_job.queue, p_job.kind, p_job.args, p_job.tags, p_job.metadata, p_job.errors, p_job.progress, p_job.unique_key,
        p_job.unique_states);
END
$function$;

-- Moves an open attempt from its receipt to a lease. True also when it has one already; false when the attempt is over.
CREATE FUNCTION {schema}.materialise(p_claim_slot smallint, p_receipt_id bigint, p_job_id bigint, p_run_lease bigint) RETURNS boolean
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_attempt {schema}.open_attempt;
    v_job {schema}.job_body;
BEGIN
    PERFORM {schema}.lock_claim_batches(ARRAY[p_receipt_id]);
    -- Lock: the lease row, so that what is answered here is still true for the caller's next statement.
    PERFORM FROM {schema}.leases AS l
    WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id
    FOR UPDATE;
    IF FOUND THEN
        RETURN true;
    END IF;
    IF EXISTS (SELECT FROM {schema}.claim_ring_slots AS s WHERE s.slot = p_claim_slot) THEN
        v_attempt := {schema}.open_attempt_in(p_claim_slot, p_receipt_id, p_job_id, p_run_lease);
    END IF;
    IF v_attempt.batch_id IS NULL THEN
        RETURN false;
    END IF;
    v_job := {schema}.take_attempt(p_claim_slot, p_receipt_id, p_job_id, p_run_lease, 'materialized', v_now);
    PERFORM {schema}.store_lease(v_job, p_receipt_id, v_attempt.deadline_at, v_attempt.claimed_by, v_now);
    RETURN true;
END
$function$;

-- Callbacks: a running attempt gets a token; who holds the token decides once what becomes of the attempt.

CREATE FUNCTION {schema}.check_callback_timeout(p_timeout interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    IF p_timeout IS NULL OR p_timeout <= interval '0' THEN
        RAISE EXCEPTION 'timeout must be longer than zero, not %', coalesce(p_timeout::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'timeout';
    END IF;
END
$function$;

-- Registers a callback for a running attempt, in place of an earlier one, and returns its token; NULL when the attempt is over.
CREATE FUNCTION {schema}.register_callback(
    p_claim_slot smallint, p_receipt_id bigint, p_job_id bigint, p_run_lease bigint, p_timeout interval
) RETURNS uuid
LANGUAGE plpgsql AS $function$
DECLARE
    v_token uuid;
BEGIN
    PERFORM {schema}.check_callback_timeout(p_timeout);
    IF NOT {schema}.materialise(p_claim_slot, p_receipt_id, p_job_id, p_run_lease) THEN
        RETURN NULL;
    END IF;
    UPDATE {schema}.leases AS l
    SET callback_id = gen_random_uuid(), callback_timeout_at = clock_timestamp() + p_timeout, callback_payload = NULL
    WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id AND l.state = 'running'
    RETURNING l.callback_id INTO v_token;
    RETURN v_token;
END
$function$;

-- Takes or gives up the unique key of an attempt that changes its state. Where somebody else took the key meanwhile the
-- attempt, the older, is ended with that reason. The caller has locked the lease row.
CREATE FUNCTION {schema}.lease_is_superseded(p_lease {schema}.leases, p_state {schema}.job_state) RETURNS boolean
LANGUAGE plpgsql AS $function$
DECLARE
    v_holder bigint;
BEGIN
    IF p_lease.unique_key IS NULL THEN
        RETURN false;
    END IF;
    -- Lock: the attempt's state before the key, as whoever ends an attempt.
    PERFORM FROM {schema}.attempt_state AS s WHERE s.job_id = p_lease.job_id FOR UPDATE;
    v_holder := {schema}.enter_state(p_lease.job_id, p_lease.unique_key, p_lease.unique_states, p_state);
    IF v_holder IS NULL THEN
        RETURN false;
    END IF;
    PERFORM {schema}.finish_job(
        {schema}.forget_attempt({schema}.take_lease(p_lease.receipt_id, p_lease.job_id, p_lease.run_lease)), 'cancelled',
        clock_timestamp(), {schema}.superseded_by(v_holder), NULL, NULL);
    RETURN true;
END
$function$;

-- The attempt now waits for its callback. Says where it stands: waiting; resumed, when the callback came first; or over.
CREATE FUNCTION {schema}.wait_for_callback(p_receipt_id bigint, p_job_id bigint, p_run_lease bigint, p_callback_id uuid) RETURNS text
LANGUAGE plpgsql AS $function$
DECLARE
    v_lease {schema}.leases;
BEGIN
    PERFORM {schema}.refuse_old_snapshot('wait_for_callback');
    -- Lock: the lease row. A callback that comes meanwhile waits here, or came before and is seen.
    SELECT l.* INTO v_lease
    FROM {schema}.leases AS l
    WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'over';
    ELSIF v_lease.callback_id = p_callback_id THEN
        IF v_lease.state = 'running' THEN
            IF {schema}.lease_is_superseded(v_lease, 'waiting_external') THEN
                RETURN 'over';
            END IF;
            UPDATE {schema}.leases AS l
            SET state = 'waiting_external', deadline_at = NULL  -- a deadline does not run while somebody else does the work
            WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease;
        END IF;
        RETURN 'waiting';
    ELSIF v_lease.callback_id IS NULL AND v_lease.state = 'running' THEN
        RETURN 'resumed';
    END IF;
    RAISE EXCEPTION 'job % waits for another callback', p_job_id USING ERRCODE = 'object_not_in_prerequisite_state';
END
$function$;

-- What resumed a waiting handler; NULL while it waits. is_over when the attempt ended instead.
CREATE FUNCTION {schema}.callback_result(
    p_receipt_id bigint, p_job_id bigint, p_run_lease bigint, OUT is_over boolean, OUT resumed boolean, OUT payload jsonb
)
LANGUAGE plpgsql AS $function$
DECLARE
    v_lease {schema}.leases;
BEGIN
    PERFORM {schema}.refuse_old_snapshot('callback_result');
    SELECT l.* INTO v_lease
    FROM {schema}.leases AS l
    WHERE l.job_id = p_job_id AND l.run_lease = p_run_lease AND l.receipt_id = p_receipt_id;
    is_over := NOT FOUND;
    resumed := NOT is_over AND v_lease.state = 'running' AND v_lease.callback_id IS NULL;
    payload := CASE WHEN resumed THEN v_lease.callback_payload END;
END
$function$;

-- Answers a callback, once. p_action: complete, fail, retry, resume (the handler goes on with p_payload). Returns the job and
-- its new state, or no row when the token is unknown, used, timed out or its attempt over.
CREATE FUNCTION {schema}.resolve_callback(p_callback_id uuid, p_action text, p_payload jsonb DEFAULT NULL, p_error text DEFAULT NULL)
RETURNS TABLE (job_id bigint, run_lease bigint, state {schema}.job_state)
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lease {schema}.leases;
    v_job {schema}.job_body;
BEGIN
    IF p_action IS NULL OR p_action NOT IN ('complete', 'fail', 'retry', 'resume') THEN
        RAISE EXCEPTION 'action must be complete, fail, retry or resume, not %', coalesce(p_action, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'action';
    END IF;
    PERFORM {schema}.refuse_old_snapshot('resolve_callback');
    -- Lock: the lease row. The second of two answers finds the token gone.
    SELECT l.* INTO v_lease FROM {schema}.leases AS l WHERE l.callback_id = p_callback_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    job_id := v_lease.job_id;
    run_lease := v_lease.run_lease;

    IF p_action = 'resume' THEN
        IF {schema}.lease_is_superseded(v_lease, 'running') THEN
            PERFORM {schema}.signal_attempt(v_lease.job_id, v_lease.run_lease, 'over');
            state := 'cancelled';
            RETURN NEXT;
            RETURN;
        END IF;
        UPDATE {schema}.leases AS l
        SET state = 'running', alive_at = v_now, callback_id = NULL, callback_timeout_at = NULL, callback_payload = p_payload
        WHERE l.callback_id = p_callback_id;
        state := 'running';
        PERFORM {schema}.signal_attempt(v_lease.job_id, v_lease.run_lease, 'resumed');
        RETURN NEXT;
        RETURN;
    END IF;

    DELETE FROM {schema}.leases AS l WHERE l.callback_id = p_callback_id;
    -- The answer stays with the job, where 0.5 keeps it.
    IF p_payload IS NOT NULL THEN
        v_lease.metadata := coalesce(v_lease.metadata, '{}') || jsonb_build_object('_awa_callback_result', p_payload);
    END IF;
    v_job := {schema}.forget_attempt({schema}.job_of_lease(v_lease));
    IF p_action = 'retry' THEN
        -- As 0.5 does it, and as an operator's retry: now, with all its attempts.
        state := {schema}.restart_job(v_job, p_error, v_now);
    ELSE
        state := {schema}.finish_job(v_job,
            CASE p_action WHEN 'complete' THEN 'completed' ELSE 'failed' END::{schema}.job_state, v_now,
            CASE p_action WHEN 'fail' THEN coalesce(p_error, 'failed by its callback') END, NULL, NULL);
    END IF;
    PERFORM {schema}.signal_attempt(v_lease.job_id, v_lease.run_lease, 'over');
    RETURN NEXT;
END
$function$;

-- Gives a job whose attempt was just taken and forgotten all its attempts again, at once.
CREATE FUNCTION {schema}.restart_job(p_job {schema}.job_body, p_error text, p_now timestamptz) RETURNS {schema}.job_state
LANGUAGE plpgsql AS $function$
DECLARE
    v_holder bigint;
BEGIN
    p_job.errors := {schema}.with_error(p_job.errors, p_job.attempt + 1, p_error, p_now);
    p_job.attempt := 0;
    p_job.run_at := p_now;
    IF p_job.unique_key IS NOT NULL THEN
        v_holder := {schema}.enter_state(p_job.job_id, p_job.unique_key, p_job.unique_states, 'available');
        IF v_holder IS NOT NULL THEN
            p_job.errors := {schema}.with_error(p_job.errors, 0, {schema}.superseded_by(v_holder), p_now);
            PERFORM {schema}.store_done(p_job, 'cancelled', p_now);
            RETURN 'cancelled';
        END IF;
    END IF;
    PERFORM {schema}.store_ready(p_job);
    RETURN 'available';
END
$function$;

-- Puts off a callback's timeout: whoever will answer is still at it. False when the token is unknown or used.
CREATE FUNCTION {schema}.extend_callback(p_callback_id uuid, p_timeout interval) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
    PERFORM {schema}.check_callback_timeout(p_timeout);
    PERFORM {schema}.refuse_old_snapshot('extend_callback');
    UPDATE {schema}.leases AS l
    SET callback_timeout_at = clock_timestamp() + p_timeout
    WHERE l.callback_id = p_callback_id;
    RETURN FOUND;
END
$function$;

-- Tells a worker that something happened to its attempt. Rare, so the lock of NOTIFY does no harm; a worker that does not
-- hear it learns it from its next heartbeat.
CREATE FUNCTION {schema}.signal_attempt(p_job_id bigint, p_run_lease bigint, p_what text) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    PERFORM pg_notify('awa_wake_' || '{schema}.runtime_instances'::regclass::oid::integer,
        jsonb_build_object('job_id', p_job_id, 'run_lease', p_run_lease, 'what', p_what)::text);
END
$function$;

-- Of the places of a call to complete that lost by their receipt: completes those whose attempt is a lease, and returns the
-- rest. The caller holds the claim batches' locks, and has not touched a unique key yet.
CREATE FUNCTION {schema}.complete_leases(
    p_places integer[], p_receipt_ids bigint[], p_job_ids bigint[], p_run_leases bigint[], p_now timestamptz
) RETURNS integer[]
LANGUAGE plpgsql AS $function$
DECLARE
    v_place integer;
    v_nth integer;
    v_job {schema}.job_body;
    v_jobs {schema}.job_body[] := '{}';
    v_keys bytea[] := '{}';
    v_lost integer[] := '{}';
BEGIN
    -- Lock: the rows, by job, all of them before the first key.
    FOREACH v_place IN ARRAY ARRAY(SELECT p FROM unnest(p_places) AS p ORDER BY p_job_ids[p]) LOOP
        v_job := {schema}.forget_attempt(
            {schema}.take_lease(p_receipt_ids[v_place], p_job_ids[v_place], p_run_leases[v_place]));
        IF v_job.job_id IS NULL THEN
            v_lost := v_lost || v_place;
        ELSE
            v_jobs := v_jobs || v_job;
            v_keys := v_keys || v_job.unique_key;
        END IF;
    END LOOP;
    FOR v_nth IN SELECT k.nth FROM unnest(v_keys) WITH ORDINALITY AS k (unique_key, nth) ORDER BY k.unique_key, k.nth LOOP
        PERFORM {schema}.finish_job(v_jobs[v_nth], 'completed', p_now, NULL, NULL, NULL);
    END LOOP;
    RETURN v_lost;
END
$function$;
