-- All jobs as 0.5 showed them, wherever they lie. Every state is found from what is small: open claims, cursors, tables of
-- their own; nothing that is over is looked at to show what is not.

CREATE TYPE {schema}.shown_job AS (
    id                   bigint,
    kind                 text,
    queue                text,
    args                 jsonb,
    state                {schema}.job_state,
    priority             smallint,
    attempt              smallint,     -- the one that runs, or the last
    max_attempts         smallint,
    run_at               timestamptz,
    heartbeat_at         timestamptz,
    deadline_at          timestamptz,
    attempted_at         timestamptz,
    finalized_at         timestamptz,
    created_at           timestamptz,
    errors               jsonb[],
    metadata             jsonb,
    tags                 text[],
    unique_key           bytea,
    unique_states        bit(8),
    callback_id          uuid,
    callback_timeout_at  timestamptz,
    callback_filter      text,         -- these four are 0.5's; nothing sets them here
    callback_on_complete text,
    callback_on_fail     text,
    callback_transform   text,
    run_lease            bigint,
    progress             jsonb,
    stored_in            text          -- available, claim, lease, deferred, history, dlq, retained
);

-- Jobs of one queue slot that nobody took.
CREATE FUNCTION {schema}.available_jobs_in(p_slot smallint, p_queue text, p_kind text, p_tag text, p_limit bigint) RETURNS SETOF {schema}.shown_job
LANGUAGE plpgsql SET jit = off AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT r.job_id, r.kind, l.queue, r.args, ''available''::%1$I.job_state, l.priority, r.attempt, r.max_attempts, r.run_at,
                NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, r.created_at, r.errors, r.metadata, r.tags,
                r.unique_key, r.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL, r.run_lease, r.progress, ''available''
         FROM %1$I.queue_lanes AS l
         CROSS JOIN LATERAL (
             SELECT int8multirange(int8range(pg_sequence_last_value(l.spent) + 1, NULL)) + coalesce((
                 SELECT range_agg(h.lane_ranges)
                 FROM %1$I.ready_lane_holes AS h
                 WHERE h.lane_id = l.lane_id AND h.holders IS NOT NULL), ''{}'') AS ranges
         ) AS u
         CROSS JOIN LATERAL unnest(u.ranges) AS g (gap)
         CROSS JOIN LATERAL (
             SELECT e.*
             FROM %1$I.%2$I AS e
             WHERE e.lane_id = l.lane_id AND e.lane_seq >= lower(g.gap) AND e.lane_seq < coalesce(upper(g.gap), 9223372036854775807)
               AND ($2 IS NULL OR e.kind = $2) AND ($3 IS NULL OR $3 = ANY (e.tags))
               AND NOT EXISTS (
                   SELECT FROM %1$I.%3$I AS b
                   WHERE b.lane_id = e.lane_id AND b.lane_hi >= e.lane_seq AND b.lane_ranges @> e.lane_seq)
             ORDER BY e.lane_seq
             LIMIT $4
         ) AS r
         WHERE $1 IS NULL OR l.queue = $1
         LIMIT $4',
        {schema_literal}, 'ready_entries_' || p_slot, 'ready_claim_attempt_batches_' || p_slot)
    USING p_queue, p_kind, p_tag, p_limit;
END
$function$;

-- Open attempts of one claim slot.
CREATE FUNCTION {schema}.running_jobs_in(p_slot smallint) RETURNS SETOF {schema}.shown_job
LANGUAGE plpgsql SET jit = off AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'WITH open AS MATERIALIZED (
             SELECT b.claimed_at, b.deadline_at, b.lane_id, b.ready_slot, j.job_id,
                    coalesce(b.run_lease, b.run_leases[j.n]) AS run_lease,
                    %1$I.nth_in_ranges(b.lane_ranges, (j.n - 1)::integer) AS lane_seq
             FROM %1$I.%2$I AS b
             CROSS JOIN LATERAL unnest(b.job_ids) WITH ORDINALITY AS j (job_id, n)
             WHERE NOT EXISTS (
                 SELECT FROM %1$I.%3$I AS c
                 WHERE c.batch_id = b.batch_id AND c.receipt_ranges @> (b.batch_id * 1024 + j.n - 1))
         )
         SELECT o.job_id, r.kind, r.queue, r.args, ''running''::%1$I.job_state, r.priority, (r.attempt + 1)::smallint, r.max_attempts,
                r.run_at, s.heartbeat_at, o.deadline_at, o.claimed_at, NULL::timestamptz, r.created_at, r.errors, r.metadata, r.tags,
                r.unique_key, r.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL, o.run_lease,
                coalesce(s.progress, r.progress), ''claim''
         FROM open AS o
         CROSS JOIN LATERAL %1$I.ready_body_in(o.ready_slot, o.lane_id, o.lane_seq) AS r
         LEFT JOIN %1$I.attempt_state AS s ON s.job_id = o.job_id AND s.run_lease = o.run_lease',
        {schema_literal}, 'lease_claim_batches_' || p_slot, 'lease_claim_closure_batches_' || p_slot);
END
$function$;

-- Jobs that match all that is given, at most p_limit, in no order that holds across states.
CREATE FUNCTION {schema}.list_jobs(
    p_states {schema}.job_state[] DEFAULT NULL, p_queue text DEFAULT NULL, p_kind text DEFAULT NULL, p_tag text DEFAULT NULL,
    p_job_id bigint DEFAULT NULL, p_limit bigint DEFAULT NULL
) RETURNS SETOF {schema}.shown_job
LANGUAGE plpgsql SET jit = off AS $function$
DECLARE
    v_states {schema}.job_state[] := coalesce(p_states, enum_range(NULL::{schema}.job_state));
    v_limit bigint := coalesce(p_limit, 9223372036854775807);
    v_slot smallint;
    v_n bigint;
BEGIN
    IF v_states && '{scheduled,retryable}' THEN
        RETURN QUERY
            SELECT d.job_id, d.kind, d.queue, d.args, d.state, d.priority, d.attempt, d.max_attempts, d.run_at, NULL::timestamptz,
                   NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, d.created_at, d.errors, d.metadata, d.tags, d.unique_key,
                   d.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL, d.run_lease, d.progress, 'deferred'
            FROM {schema}.deferred_jobs AS d
            WHERE d.state = ANY (v_states) AND (p_queue IS NULL OR d.queue = p_queue) AND (p_kind IS NULL OR d.kind = p_kind)
              AND (p_tag IS NULL OR p_tag = ANY (d.tags)) AND (p_job_id IS NULL OR d.job_id = p_job_id)
            LIMIT v_limit;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        v_limit := v_limit - v_n;
    END IF;
    IF v_states && '{running,waiting_external}' THEN
        RETURN QUERY
            SELECT l.job_id, l.kind, l.queue, l.args, l.state, l.priority, (l.attempt + 1)::smallint, l.max_attempts, l.run_at,
                   s.heartbeat_at, l.deadline_at, l.claimed_at, NULL::timestamptz, l.created_at, l.errors, l.metadata, l.tags,
                   l.unique_key, l.unique_states, l.callback_id, l.callback_timeout_at, NULL, NULL, NULL, NULL, l.run_lease,
                   coalesce(s.progress, l.progress), 'lease'
            FROM {schema}.leases AS l
            LEFT JOIN {schema}.attempt_state AS s ON s.job_id = l.job_id AND s.run_lease = l.run_lease
            WHERE l.state = ANY (v_states) AND (p_queue IS NULL OR l.queue = p_queue) AND (p_kind IS NULL OR l.kind = p_kind)
              AND (p_tag IS NULL OR p_tag = ANY (l.tags)) AND (p_job_id IS NULL OR l.job_id = p_job_id)
            LIMIT v_limit;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        v_limit := v_limit - v_n;
    END IF;
    IF 'running' = ANY (v_states) THEN
        FOR v_slot IN SELECT s.slot FROM {schema}.claim_ring_slots AS s LOOP
            EXIT WHEN v_limit <= 0;
            RETURN QUERY
                SELECT r.*
                FROM {schema}.running_jobs_in(v_slot) AS r
                WHERE (p_queue IS NULL OR r.queue = p_queue) AND (p_kind IS NULL OR r.kind = p_kind)
                  AND (p_tag IS NULL OR p_tag = ANY (r.tags)) AND (p_job_id IS NULL OR r.id = p_job_id)
                LIMIT v_limit;
            GET DIAGNOSTICS v_n = ROW_COUNT;
            v_limit := v_limit - v_n;
        END LOOP;
    END IF;
    IF 'failed' = ANY (v_states) THEN
        RETURN QUERY
            SELECT q.job_id, q.kind, q.queue, q.args, 'failed'::{schema}.job_state, q.priority, q.attempt, q.max_attempts, q.run_at,
                   NULL::timestamptz, NULL::timestamptz, q.attempted_at, q.failed_at, q.created_at, q.errors, q.metadata, q.tags,
                   q.unique_key, q.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL, q.run_lease, q.progress, q.held
            FROM {schema}.dlq_entries AS q
            WHERE (p_queue IS NULL OR q.queue = p_queue) AND (p_kind IS NULL OR q.kind = p_kind)
              AND (p_tag IS NULL OR p_tag = ANY (q.tags)) AND (p_job_id IS NULL OR q.job_id = p_job_id)
            ORDER BY q.held, q.failed_at, q.job_id  -- the DLQ first: that is what an operator has to look at
            LIMIT v_limit;
        GET DIAGNOSTICS v_n = ROW_COUNT;
        v_limit := v_limit - v_n;
    END IF;
    FOR v_slot IN SELECT s.slot FROM {schema}.ready_slots_from(0) AS s LOOP
        IF v_states && '{completed,failed,cancelled}' AND v_limit > 0 THEN
            RETURN QUERY
                SELECT t.id, t.kind, t.queue, t.args, t.state, t.priority, t.attempt, t.max_attempts, t.run_at, NULL::timestamptz,
                       NULL::timestamptz, t.attempted_at, t.finalized_at, t.created_at, t.errors, t.metadata, t.tags, t.unique_key,
                       t.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL, t.run_lease, t.progress, 'history'
                FROM {schema}.terminal_jobs_in(v_slot, p_job_id) AS t
                WHERE t.state = ANY (v_states) AND (p_queue IS NULL OR t.queue = p_queue) AND (p_kind IS NULL OR t.kind = p_kind)
                  AND (p_tag IS NULL OR p_tag = ANY (t.tags))
                LIMIT v_limit;
            GET DIAGNOSTICS v_n = ROW_COUNT;
            v_limit := v_limit - v_n;
        END IF;
        IF 'available' = ANY (v_states) AND v_limit > 0 THEN
            IF p_job_id IS NULL THEN
                RETURN QUERY SELECT a.* FROM {schema}.available_jobs_in(v_slot, p_queue, p_kind, p_tag, v_limit) AS a;
            ELSE
                RETURN QUERY
                    SELECT a.job_id, a.kind, a.queue, a.args, 'available'::{schema}.job_state, a.priority, a.attempt, a.max_attempts,
                           a.run_at, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, NULL::timestamptz, a.created_at, a.errors,
                           a.metadata, a.tags, a.unique_key, a.unique_states, NULL::uuid, NULL::timestamptz, NULL, NULL, NULL, NULL,
                           a.run_lease, a.progress, 'available'
                    FROM unnest({schema}.ready_places_in(v_slot, ARRAY[p_job_id])) AS p
                    CROSS JOIN LATERAL {schema}.ready_body_in(v_slot, p.lane_id, p.lane_seq) AS a
                    WHERE p.batch_id IS NULL AND (p_queue IS NULL OR a.queue = p_queue) AND (p_kind IS NULL OR a.kind = p_kind)
                      AND (p_tag IS NULL OR p_tag = ANY (a.tags));
            END IF;
            GET DIAGNOSTICS v_n = ROW_COUNT;
            v_limit := v_limit - v_n;
        END IF;
    END LOOP;
END
$function$;

-- What 0.5 clients read.
CREATE VIEW {schema}.jobs AS
SELECT j.id, j.kind, j.queue, j.args, j.state, j.priority, j.attempt, j.max_attempts, j.run_at, j.heartbeat_at, j.deadline_at,
       j.attempted_at, j.finalized_at, j.created_at, coalesce(j.errors, '{}') AS errors, coalesce(j.metadata, '{}') AS metadata,
       coalesce(j.tags, '{}') AS tags, j.unique_key, j.unique_states, j.callback_id, j.callback_timeout_at, j.callback_filter,
       j.callback_on_complete, j.callback_on_fail, j.callback_transform, j.run_lease, j.progress
FROM {schema}.list_jobs() AS j;
