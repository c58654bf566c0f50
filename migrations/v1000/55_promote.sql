-- Promote: due deferred jobs become ready, in due order.

-- At most p_limit jobs. Rows that another promotion holds are passed over. Returns how many moved.
CREATE FUNCTION {schema}.promote(p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_due {schema}.deferred_jobs[];
    v_pair record;
    v_lane {schema}.queue_lanes;
    v_slot smallint;
BEGIN
    WITH due AS (
        SELECT d.job_id
        FROM {schema}.deferred_jobs AS d
        WHERE d.run_at <= clock_timestamp()
        ORDER BY d.run_at, d.job_id
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED
    ),
    gone AS (
        DELETE FROM {schema}.deferred_jobs AS d USING due WHERE d.job_id = due.job_id RETURNING d.*
    )
    SELECT array_agg(ROW(g.*)::{schema}.deferred_jobs ORDER BY g.run_at, g.job_id) INTO v_due FROM gone AS g;
    IF v_due IS NULL THEN
        RETURN 0;
    END IF;

    FOR v_pair IN SELECT DISTINCT d.queue, d.priority FROM unnest(v_due) AS d ORDER BY 1, 2 LOOP
        v_lane := {schema}.join_lane(v_pair.queue, v_pair.priority);
        v_slot := {schema}.pin_ready_slot() & 255;
        INSERT INTO {schema}.ready_entries (
            job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt, max_attempts, kind, args, tags,
            metadata, errors, progress, unique_key, unique_states)
        SELECT d.job_id, nextval(v_lane.seq), d.run_lease, d.run_at, d.created_at, v_lane.lane_id, v_slot, d.attempt,
               d.max_attempts, d.kind, d.args, d.tags, d.metadata, d.errors, d.progress, d.unique_key, d.unique_states
        FROM unnest(v_due) AS d
        WHERE d.queue = v_pair.queue AND d.priority = v_pair.priority;
        PERFORM {schema}.wake_queue(v_pair.queue);
    END LOOP;
    RETURN cardinality(v_due);
END
$function$;
