-- Operators: cancel, retry, delete, move, re-prioritise, in whatever state a job is. Each job is one decision under the lock of
-- the place where it lies; a job that moves meanwhile is looked for again.
--
-- Lock order: lane, claim batch, row (deferred, lease, DLQ) — one job at a time, so nothing is held twice.

-- Withdraws available jobs from one lane before anybody claims them, and returns them. They are spent like claimed ones, by a
-- range without a claim slot (a tombstone).
CREATE FUNCTION {schema}.withdraw_ready(p_lane_id integer, p_lane_seqs bigint[]) RETURNS SETOF {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_slot record;
    v_jobs {schema}.job_body[];
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'withdrawing jobs needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    -- Lock: the lane, as a claim does, so that a row goes to one of us. A claim holds it for milliseconds.
    PERFORM pg_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, p_lane_id);
    FOR v_slot IN SELECT s.slot, s.generation FROM {schema}.ready_slots_from(0) AS s LOOP
        v_jobs := {schema}.unclaimed_in(v_slot.slot, p_lane_id, p_lane_seqs);
        CONTINUE WHEN v_jobs = '{}';
        INSERT INTO {schema}.ready_claim_attempt_batches (
            batch_id, ready_generation, claim_generation, lane_hi, claimed_at, lane_id, job_count, ready_slot, claim_slot,
            has_unique, lane_ranges)
        SELECT nextval('{schema}.lease_claim_batch_ids'::regclass), v_slot.generation, NULL, max(j.lane_seq), clock_timestamp(),
               p_lane_id, count(*), v_slot.slot, NULL, bool_or(j.unique_key IS NOT NULL),
               range_agg(int8range(j.lane_seq, j.lane_seq + 1))
        FROM unnest(v_jobs) AS j;
        RETURN QUERY SELECT j.* FROM unnest(v_jobs) AS j;
    END LOOP;
END
$function$;

-- unclaimed_<slot>: which of these places of a lane nobody took. The caller holds the lane's lock.
SELECT {schema}.create_slot_functions('queue', 'unclaimed_in', 'p_lane_id integer, p_lane_seqs bigint[]', '{schema}.job_body[]', $template$
BEGIN
    RETURN ARRAY(
        SELECT {schema}.ready_body_in(<slot>::smallint, r.lane_id, r.lane_seq)
        FROM {schema}.ready_entries_<slot> AS r
        WHERE r.lane_id = p_lane_id AND r.lane_seq = ANY (p_lane_seqs)
          AND NOT EXISTS (
              SELECT FROM {schema}.ready_claim_attempt_batches_<slot> AS b
              WHERE b.lane_id = r.lane_id AND b.lane_hi >= r.lane_seq AND b.lane_ranges @> r.lane_seq)
        ORDER BY r.lane_seq);
END
$template$);

-- Takes the job out of the place it was found in; job_id NULL when it is not there any more. For history: hides it and returns
-- it. p_closure is what the closure of a running attempt says.
CREATE FUNCTION {schema}.take_job(p_job_id bigint, p_place {schema}.job_place, p_closure text) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_job {schema}.job_body;
    v_deferred {schema}.deferred_jobs;
    v_done {schema}.done_entries;
    v_dlq {schema}.dlq_entries;
BEGIN
    CASE p_place.place
        WHEN 'ready' THEN
            SELECT w.* INTO v_job FROM {schema}.withdraw_ready(p_place.lane_id, ARRAY[p_place.lane_seq]) AS w;
        WHEN 'claim' THEN
            PERFORM {schema}.lock_claim_batches(ARRAY[p_place.receipt_id]);
            v_job := {schema}.take_attempt(p_place.claim_slot, p_place.receipt_id, p_job_id, p_place.run_lease, p_closure,
                clock_timestamp());
        WHEN 'lease' THEN
            v_job := {schema}.take_lease(p_place.receipt_id, p_job_id, p_place.run_lease);
        WHEN 'deferred' THEN
            -- Lock: the row. A promotion passes over it, or has it and we wait.
            DELETE FROM {schema}.deferred_jobs AS d WHERE d.job_id = p_job_id RETURNING d.* INTO v_deferred;
            v_job := {schema}.job_of_deferred(v_deferred);
        WHEN 'dlq' THEN
            DELETE FROM {schema}.dlq_entries AS q WHERE q.job_id = p_job_id RETURNING q.* INTO v_dlq;
            v_job := {schema}.job_of_dlq(v_dlq);
        WHEN 'history' THEN
            -- Lock: the job's, so that of two operators who would retry it one does.
            PERFORM pg_advisory_xact_lock('{schema}.terminal_tombstones'::regclass::oid::integer, (p_job_id & 2147483647)::integer);
            v_job := {schema}.job_of_history(p_job_id, p_place);
            IF v_job.job_id IS NOT NULL THEN
                INSERT INTO {schema}.terminal_tombstones (job_id, run_lease, ready_slot, state, queue)
                VALUES (p_job_id, p_place.run_lease, p_place.ready_slot, p_place.state, v_job.queue);
            END IF;
    END CASE;
    RETURN v_job;
END
$function$;

CREATE FUNCTION {schema}.job_of_dlq(p_job {schema}.dlq_entries) RETURNS {schema}.job_body
LANGUAGE plpgsql IMMUTABLE AS $function$
DECLARE
    v_job {schema}.job_body;
BEGIN
    v_job.job_id := p_job.job_id;
    v_job.run_lease := p_job.run_lease;
    v_job.run_at := p_job.run_at;
    v_job.created_at := p_job.created_at;
    v_job.claimed_at := p_job.attempted_at;
    v_job.priority := p_job.priority;
    v_job.attempt := p_job.attempt;
    v_job.max_attempts := p_job.max_attempts;
    v_job.queue := p_job.queue;
    v_job.kind := p_job.kind;
    v_job.args := p_job.args;
    v_job.tags := p_job.tags;
    v_job.metadata := p_job.metadata;
    v_job.errors := p_job.errors;
    v_job.progress := p_job.progress;
    v_job.unique_key := p_job.unique_key;
    v_job.unique_states := p_job.unique_states;
    RETURN v_job;
END
$function$;

-- A finished job out of the slot it ended in, unless it is hidden.
CREATE FUNCTION {schema}.job_of_history(p_job_id bigint, p_place {schema}.job_place) RETURNS {schema}.job_body
LANGUAGE plpgsql AS $function$
DECLARE
    v_job {schema}.job_body;
BEGIN
    SELECT t.id, t.run_lease, t.run_at, t.created_at, t.attempted_at, NULL, NULL, NULL, t.priority, t.attempt, t.max_attempts,
           t.queue, t.kind, t.args, t.tags, t.metadata, t.errors, t.progress, t.unique_key, t.unique_states
    INTO v_job
    FROM {schema}.terminal_jobs_in(p_place.ready_slot, p_job_id) AS t
    WHERE t.run_lease = p_place.run_lease AND t.state = p_place.state;
    RETURN v_job;
END
$function$;

-- What an operator asked for and what came of it: done, or why not.
CREATE TYPE {schema}.operation_result AS (
    job_id bigint,
    done   boolean,
    state  {schema}.job_state,  -- before; NULL when there is no such job
    reason text                 -- NULL when done
);

-- One job, one operation. p_operation: cancel, retry, delete, move (to p_queue, at p_priority; either may be NULL). p_seen as of
-- find_job.
CREATE FUNCTION {schema}.operate(
    p_job_id bigint, p_operation text, p_reason text DEFAULT NULL, p_queue text DEFAULT NULL, p_priority integer DEFAULT NULL,
    p_seen {schema}.ready_place DEFAULT NULL
) RETURNS {schema}.operation_result
LANGUAGE plpgsql AS $function$
DECLARE
    v_result {schema}.operation_result;
    v_place {schema}.job_place;
    v_tries integer;
BEGIN
    -- Two with old snapshots would each hide and retry the same history.
    PERFORM {schema}.refuse_old_snapshot('operate');
    v_result.job_id := p_job_id;
    v_result.done := false;
    FOR v_tries IN 1 .. 10 LOOP
        v_place := {schema}.find_job(p_job_id, CASE v_tries WHEN 1 THEN p_seen END);
        IF v_place.place IS NULL OR v_place.hidden THEN
            -- Between two places it is in neither for a reader without locks: look again before denying it.
            v_result.reason := 'no such job';
            CONTINUE;
        END IF;
        v_result.state := v_place.state;
        v_result.reason := {schema}.why_not(p_operation, v_place.state, v_place.place);
        -- What was seen a while ago is no reason.
        CONTINUE WHEN v_result.reason IS NOT NULL AND v_tries = 1 AND p_seen.job_id IS NOT NULL;
        IF v_result.reason IS NOT NULL THEN
            RETURN v_result;
        END IF;
        v_result := {schema}.operate_at(v_result, v_place, p_operation, p_reason, p_queue, p_priority);
        IF v_result.done OR v_result.reason IS NOT NULL THEN
            RETURN v_result;
        END IF;
        v_result.reason := 'the job keeps moving; try again';
    END LOOP;
    RETURN v_result;
END
$function$;

-- Why an operation does not suit a state; NULL when it does.
CREATE FUNCTION {schema}.why_not(p_operation text, p_state {schema}.job_state, p_place text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    IF p_operation = 'cancel' AND p_state IN ('completed', 'failed', 'cancelled') THEN
        RETURN format('it is %s already', p_state);
    ELSIF p_operation = 'retry' AND p_state IN ('available', 'running', 'waiting_external', 'completed') THEN
        RETURN format('it is %s: only scheduled, retryable, failed and cancelled jobs can be retried', p_state);
    ELSIF p_operation = 'delete' AND p_state IN ('running', 'waiting_external') THEN
        RETURN format('it is %s: cancel it first', p_state);
    ELSIF p_operation = 'move' AND p_state NOT IN ('available', 'scheduled', 'retryable') THEN
        RETURN format('it is %s: only available, scheduled and retryable jobs can be moved', p_state);
    ELSIF p_operation NOT IN ('cancel', 'retry', 'delete', 'move') THEN
        RAISE EXCEPTION 'operation must be cancel, retry, delete or move, not %', p_operation USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END
$function$;

-- The operation on a job at the place where it was found; neither done nor a reason when it is not there any more.
CREATE FUNCTION {schema}.operate_at(
    p_result {schema}.operation_result, p_place {schema}.job_place, p_operation text, p_reason text, p_queue text, p_priority integer
) RETURNS {schema}.operation_result
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_job {schema}.job_body;
    v_holder bigint;
BEGIN
    -- A subtransaction, so that a refusal found late leaves the job where it was.
    BEGIN
        v_job := {schema}.take_job(p_result.job_id, p_place, CASE p_operation WHEN 'cancel' THEN 'cancelled' ELSE p_operation END);
        IF v_job.job_id IS NULL THEN
            RETURN p_result;
        END IF;
        CASE p_operation
            WHEN 'cancel' THEN
                IF p_place.place IN ('claim', 'lease') THEN
                    PERFORM {schema}.finish_job({schema}.forget_attempt(v_job), 'cancelled', v_now, coalesce(p_reason, 'cancelled by an operator'), NULL, NULL);
                    PERFORM {schema}.signal_attempt(v_job.job_id, v_job.run_lease, 'cancelled');
                ELSE
                    PERFORM {schema}.cancel_body(v_job, p_reason, v_now);
                END IF;
            WHEN 'retry' THEN
                v_job.run_at := v_now;
                -- A life of its own: what was told of the last one, and what hides that, is of another lease.
                v_job.run_lease := v_job.run_lease + 1;
                IF p_place.state IN ('failed', 'cancelled') THEN
                    v_job.attempt := 0;
                END IF;
            WHEN 'delete' THEN
                IF v_job.unique_key IS NOT NULL THEN
                    DELETE FROM {schema}.job_unique_claims AS c WHERE c.unique_key = v_job.unique_key AND c.job_id = v_job.job_id;
                END IF;
            ELSE
                NULL;
        END CASE;
        IF p_operation IN ('retry', 'move') THEN
            v_job.queue := coalesce(p_queue, v_job.queue);
            v_job.priority := coalesce(p_priority, v_job.priority);
            PERFORM {schema}.check_job(v_job.kind, v_job.queue, v_job.args, v_job.priority, v_job.max_attempts, v_job.tags,
                v_job.metadata, v_job.unique_key);
            -- The body is stored anew; where it lay it is spent or hidden.
            v_job.ready_slot := NULL;
            IF p_operation = 'move' AND p_place.place = 'deferred' THEN
                PERFORM {schema}.store_deferred(v_job, p_place.state, v_job.run_at);
            ELSE
                IF v_job.unique_key IS NOT NULL THEN
                    v_holder := {schema}.enter_state(v_job.job_id, v_job.unique_key, v_job.unique_states, 'available');
                    IF v_holder IS NOT NULL THEN
                        RAISE EXCEPTION 'job % holds its unique key', v_holder USING ERRCODE = 'unique_violation';
                    END IF;
                END IF;
                PERFORM {schema}.store_ready(v_job);
            END IF;
        END IF;
    EXCEPTION WHEN unique_violation OR check_violation THEN
        p_result.reason := sqlerrm;
        RETURN p_result;
    END;
    p_result.done := true;
    p_result.reason := NULL;
    RETURN p_result;
END
$function$;

-- The DLQ and its retention: at most p_limit jobs that were held longer than their queue keeps them. Returns how many went.
CREATE FUNCTION {schema}.purge_expired(p_limit integer DEFAULT 1000) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_deleted integer;
    v_jobs bigint[];
BEGIN
    WITH expired AS (
        SELECT q.job_id
        FROM {schema}.dlq_entries AS q
        LEFT JOIN {schema}.queue_meta AS m ON m.queue = q.queue
        WHERE q.failed_at < clock_timestamp() - CASE q.held
            WHEN 'dlq' THEN coalesce(m.dlq_retention, interval '30 days')
            ELSE coalesce(m.failed_retention, interval '72 hours')
        END
        ORDER BY q.job_id
        LIMIT p_limit
        FOR UPDATE OF q SKIP LOCKED
    ),
    gone AS (
        DELETE FROM {schema}.dlq_entries AS q USING expired AS e WHERE q.job_id = e.job_id
        RETURNING q.job_id, q.queue, q.held, q.unique_key
    ),
    counted AS (
        INSERT INTO {schema}.queue_terminal_rollup_deltas (generation, queue, state, job_count)
        SELECT -1, g.queue, 'failed', count(*) FROM gone AS g GROUP BY g.queue
    )
    SELECT count(*), array_agg(g.job_id) FILTER (WHERE g.unique_key IS NOT NULL) INTO v_deleted, v_jobs FROM gone AS g;
    IF v_jobs IS NOT NULL THEN
        DELETE FROM {schema}.job_unique_claims AS c WHERE c.job_id = ANY (v_jobs);
    END IF;
    PERFORM {schema}.purge_unique_keys(p_limit);
    RETURN v_deleted;
END
$function$;
