-- Queues as a whole: pause, resume, settings, drain.

-- Sets what is not NULL; a queue need not have had a job. Returns the row.
CREATE FUNCTION {schema}.set_queue(
    p_queue text, p_enqueue_shards integer DEFAULT NULL, p_dlq boolean DEFAULT NULL, p_dlq_retention interval DEFAULT NULL,
    p_failed_retention interval DEFAULT NULL
) RETURNS {schema}.queue_meta
LANGUAGE plpgsql AS $function$
DECLARE
    v_meta {schema}.queue_meta;
BEGIN
    IF p_queue IS NULL OR length(p_queue) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'queue must have 1 to 200 characters, not %', coalesce(length(p_queue)::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'queue';
    ELSIF p_enqueue_shards NOT BETWEEN 1 AND 64 THEN
        RAISE EXCEPTION 'enqueue_shards must be 1 to 64, not %', p_enqueue_shards
            USING ERRCODE = 'check_violation', COLUMN = 'enqueue_shards';
    ELSIF p_dlq_retention <= interval '0' THEN
        RAISE EXCEPTION 'dlq_retention must be longer than zero, not %', p_dlq_retention
            USING ERRCODE = 'check_violation', COLUMN = 'dlq_retention';
    ELSIF p_failed_retention < interval '0' THEN
        RAISE EXCEPTION 'failed_retention must not be negative, not %', p_failed_retention
            USING ERRCODE = 'check_violation', COLUMN = 'failed_retention';
    END IF;
    INSERT INTO {schema}.queue_meta AS m (queue) VALUES (p_queue) ON CONFLICT DO NOTHING;
    UPDATE {schema}.queue_meta AS m
    SET enqueue_shards = coalesce(p_enqueue_shards, m.enqueue_shards),
        dlq = coalesce(p_dlq, m.dlq),
        dlq_retention = coalesce(p_dlq_retention, m.dlq_retention),
        failed_retention = coalesce(p_failed_retention, m.failed_retention)
    WHERE m.queue = p_queue
      AND (m.enqueue_shards, m.dlq, m.dlq_retention, m.failed_retention) IS DISTINCT FROM (
          coalesce(p_enqueue_shards, m.enqueue_shards), coalesce(p_dlq, m.dlq), coalesce(p_dlq_retention, m.dlq_retention),
          coalesce(p_failed_retention, m.failed_retention));
    SELECT m.* INTO v_meta FROM {schema}.queue_meta AS m WHERE m.queue = p_queue;
    RETURN v_meta;
END
$function$;

-- A paused queue takes jobs and gives none; what runs goes on. Returns whether that changed anything.
CREATE FUNCTION {schema}.pause_queue(p_queue text, p_by text DEFAULT NULL) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
    PERFORM {schema}.set_queue(p_queue);
    UPDATE {schema}.queue_meta AS m
    SET paused = true, paused_at = clock_timestamp(), paused_by = p_by
    WHERE m.queue = p_queue AND NOT m.paused;
    RETURN FOUND;
END
$function$;

CREATE FUNCTION {schema}.resume_queue(p_queue text) RETURNS boolean
LANGUAGE plpgsql AS $function$
DECLARE
    v_changed boolean;
BEGIN
    UPDATE {schema}.queue_meta AS m
    SET paused = false, paused_at = NULL, paused_by = NULL
    WHERE m.queue = p_queue AND m.paused;
    v_changed := FOUND;
    PERFORM {schema}.wake_queue(p_queue);
    RETURN v_changed;
END
$function$;

-- Cancels what waits in a queue, available and deferred, at most about p_limit jobs a call. Returns how many; what runs goes on.
CREATE FUNCTION {schema}.drain_queue(p_queue text, p_reason text DEFAULT NULL, p_limit integer DEFAULT 10000) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lane {schema}.queue_lanes;
    v_slot smallint;
    v_jobs {schema}.job_body[] := '{}';
    v_withdrawn {schema}.job_body[];
    v_deferred {schema}.deferred_jobs[];
    v_left integer := p_limit;
BEGIN
    -- Lock: the lanes and the rows, in their order, before the keys. Nobody else waits for two lanes.
    FOR v_lane IN SELECT l.* FROM {schema}.queue_lanes AS l WHERE l.queue = p_queue ORDER BY l.lane_id LOOP
        FOR v_slot IN SELECT s.slot FROM {schema}.ready_slots_from(0) AS s LOOP
            EXIT WHEN v_left <= 0;
            SELECT array_agg(w.*) INTO v_withdrawn
            FROM {schema}.withdraw_ready(v_lane.lane_id, {schema}.unclaimed_seqs(v_slot, v_lane, v_left)) AS w;
            CONTINUE WHEN v_withdrawn IS NULL;
            v_jobs := v_jobs || v_withdrawn;
            v_left := v_left - cardinality(v_withdrawn);
        END LOOP;
    END LOOP;
    IF v_left > 0 THEN
        WITH taken AS (
            SELECT d.job_id FROM {schema}.deferred_jobs AS d WHERE d.queue = p_queue ORDER BY d.job_id LIMIT v_left FOR UPDATE SKIP LOCKED
        ),
        gone AS (
            DELETE FROM {schema}.deferred_jobs AS d USING taken AS t WHERE d.job_id = t.job_id RETURNING d.*
        )
        SELECT array_agg(ROW(g.*)::{schema}.deferred_jobs) INTO v_deferred FROM gone AS g;
        IF v_deferred IS NOT NULL THEN
            v_jobs := v_jobs || ARRAY(SELECT {schema}.job_of_deferred(d) FROM unnest(v_deferred) AS d);
            v_left := v_left - cardinality(v_deferred);
        END IF;
    END IF;
    PERFORM {schema}.cancel_bodies(v_jobs, p_reason, v_now);
    RETURN p_limit - v_left;
END
$function$;

-- Places of a lane in one slot that nobody took, as far as can be seen without its lock.
CREATE FUNCTION {schema}.unclaimed_seqs(p_slot smallint, p_lane {schema}.queue_lanes, p_limit integer) RETURNS bigint[]
LANGUAGE plpgsql AS $function$
DECLARE
    v_seqs bigint[];
BEGIN
    EXECUTE format(
        'SELECT array_agg(r.lane_seq)
         FROM (
             SELECT e.lane_seq
             FROM %1$I.%2$I AS e
             WHERE e.lane_id = $1
               AND NOT EXISTS (
                   SELECT FROM %1$I.%3$I AS b
                   WHERE b.lane_id = e.lane_id AND b.lane_hi >= e.lane_seq AND b.lane_ranges @> e.lane_seq)
             ORDER BY e.lane_seq
             LIMIT $2
         ) AS r',
        {schema_literal}, 'ready_entries_' || p_slot, 'ready_claim_attempt_batches_' || p_slot)
    INTO v_seqs
    USING p_lane.lane_id, p_limit;
    RETURN coalesce(v_seqs, '{}');
END
$function$;

-- Ends jobs that were taken out of where they waited.
CREATE FUNCTION {schema}.cancel_bodies(p_jobs {schema}.job_body[], p_reason text, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_job {schema}.job_body;
BEGIN
    FOREACH v_job IN ARRAY p_jobs LOOP
        IF v_job.unique_key IS NULL THEN
            PERFORM {schema}.cancel_body(v_job, p_reason, p_now);
        END IF;
    END LOOP;
    -- Keys in their order, as all who change several.
    FOR v_job IN SELECT j.* FROM unnest(p_jobs) AS j WHERE j.unique_key IS NOT NULL ORDER BY j.unique_key, j.job_id LOOP
        PERFORM {schema}.cancel_body(v_job, p_reason, p_now);
    END LOOP;
END
$function$;

CREATE FUNCTION {schema}.cancel_body(p_job {schema}.job_body, p_reason text, p_now timestamptz) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    p_job.errors := {schema}.with_error(p_job.errors, p_job.attempt, p_reason, p_now);
    IF p_job.unique_key IS NOT NULL THEN
        PERFORM {schema}.enter_state(p_job.job_id, p_job.unique_key, p_job.unique_states, 'cancelled');
    END IF;
    PERFORM {schema}.store_done(p_job, 'cancelled', p_now);
END
$function$;
