-- Promote: due deferred jobs become ready, in due order.

-- Queues with deferred jobs that are due, each found by one step over the index however many jobs it has.
CREATE FUNCTION {schema}.due_queues() RETURNS SETOF text
LANGUAGE plpgsql AS $function$
DECLARE
    v_queue text := '';
    v_first timestamptz;
BEGIN
    LOOP
        SELECT d.queue, d.run_at INTO v_queue, v_first
        FROM {schema}.deferred_jobs AS d
        WHERE d.queue > v_queue
        ORDER BY d.queue, d.run_at, d.job_id
        LIMIT 1;
        EXIT WHEN NOT FOUND;
        IF v_first <= clock_timestamp() THEN
            RETURN NEXT v_queue;
        END IF;
    END LOOP;
END
$function$;

-- About p_limit jobs, shared out evenly among the queues that have some, so that a flood in one delays no other. Returns how
-- many moved.
CREATE FUNCTION {schema}.promote(p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_queues text[] := ARRAY(SELECT {schema}.due_queues());
    v_queue text;
    v_due {schema}.deferred_jobs[] := '{}';
BEGIN
    FOREACH v_queue IN ARRAY v_queues LOOP
        v_due := v_due || {schema}.take_due(v_queue, greatest(p_limit / cardinality(v_queues), 1));
    END LOOP;
    PERFORM {schema}.make_ready(v_due);
    RETURN cardinality(v_due);
END
$function$;

CREATE FUNCTION {schema}.promote_queue(p_queue text, p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_due {schema}.deferred_jobs[] := {schema}.take_due(p_queue, p_limit);
BEGIN
    PERFORM {schema}.make_ready(v_due);
    RETURN cardinality(v_due);
END
$function$;

-- Takes what is due out of a queue, the first due first. Rows that another promotion, or an operator, holds are passed over.
CREATE FUNCTION {schema}.take_due(p_queue text, p_limit integer) RETURNS {schema}.deferred_jobs[]
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();  -- in a variable, so that the index tells where to stop
    v_due {schema}.deferred_jobs[];
BEGIN
    WITH due AS (
        SELECT d.job_id
        FROM {schema}.deferred_jobs AS d
        WHERE d.queue = p_queue AND d.run_at <= v_now
        ORDER BY d.run_at, d.job_id
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
    ),
    gone AS (
        DELETE FROM {schema}.deferred_jobs AS d USING due WHERE d.job_id = due.job_id RETURNING d.*
    )
    SELECT coalesce(array_agg(ROW(g.*)::{schema}.deferred_jobs ORDER BY g.run_at, g.job_id), '{}') INTO v_due FROM gone AS g;
    RETURN v_due;
END
$function$;

-- Makes jobs that were taken out of deferred_jobs ready, in the order given.
CREATE FUNCTION {schema}.make_ready(p_due {schema}.deferred_jobs[]) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_job {schema}.deferred_jobs;
    v_body {schema}.job_body;
    v_superseded bigint[] := '{}';
    v_holder bigint;
    v_to record;
    v_lane {schema}.queue_lanes;
    v_slot smallint;
BEGIN
    -- Keys in their order, as all who take several, of all queues together. The older of two gives way, with the reason.
    FOR v_job IN SELECT d.* FROM unnest(p_due) AS d WHERE d.unique_key IS NOT NULL ORDER BY d.unique_key, d.job_id LOOP
        v_holder := {schema}.enter_state(v_job.job_id, v_job.unique_key, v_job.unique_states, 'available');
        IF v_holder IS NOT NULL THEN
            v_superseded := v_superseded || v_job.job_id;
            v_body := {schema}.job_of_deferred(v_job);
            v_body.errors := {schema}.with_error(v_body.errors, v_body.attempt, {schema}.superseded_by(v_holder), v_now);
            PERFORM {schema}.store_done(v_body, 'cancelled', v_now);
        END IF;
    END LOOP;

    FOR v_to IN SELECT DISTINCT d.queue, d.priority FROM unnest(p_due) AS d ORDER BY 1, 2 LOOP
        v_lane := {schema}.join_lane(v_to.queue, v_to.priority);
        v_slot := {schema}.pin_ready_slot() & 255;
        INSERT INTO {schema}.ready_entries (
            job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt, max_attempts, kind, args, tags,
            metadata, errors, progress, unique_key, unique_states)
        SELECT d.job_id, nextval(v_lane.seq), d.run_lease, d.run_at, d.created_at, v_lane.lane_id, v_slot, d.attempt,
               d.max_attempts, d.kind, d.args, d.tags, d.metadata, d.errors, d.progress, d.unique_key, d.unique_states
        FROM unnest(p_due) AS d
        WHERE d.queue = v_to.queue AND d.priority = v_to.priority AND d.job_id <> ALL (v_superseded);
    END LOOP;
    PERFORM {schema}.wake_queue(q.queue) FROM (SELECT DISTINCT d.queue FROM unnest(p_due) AS d) AS q;
END
$function$;

CREATE FUNCTION {schema}.job_of_deferred(p_job {schema}.deferred_jobs) RETURNS {schema}.job_body
LANGUAGE plpgsql IMMUTABLE AS $function$
DECLARE
    v_job {schema}.job_body;
BEGIN
    v_job.job_id := p_job.job_id;
    v_job.run_lease := p_job.run_lease;
    v_job.run_at := p_job.run_at;
    v_job.created_at := p_job.created_at;
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
