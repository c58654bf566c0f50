-- Read surfaces.

-- A finished job as it is shown.
CREATE TYPE {schema}.terminal_job AS (
    id            bigint,
    kind          text,
    queue         text,
    args          jsonb,
    state         {schema}.job_state,
    priority      smallint,
    attempt       smallint,
    max_attempts  smallint,
    run_at        timestamptz,
    attempted_at  timestamptz,
    finalized_at  timestamptz,
    created_at    timestamptz,
    errors        jsonb[],
    metadata      jsonb,
    tags          text[],
    unique_key    bytea,
    unique_states bit(8),
    run_lease     bigint,
    progress      jsonb,
    ready_slot    smallint
);

-- The finished jobs of one slot, or one of them. A statement over one partition of each table: over the parents, of whose
-- sizes the planner knows nothing, it would take longer to compile than to run.
CREATE FUNCTION {schema}.terminal_jobs_in(p_slot smallint, p_job_id bigint DEFAULT NULL) RETURNS SETOF {schema}.terminal_job
LANGUAGE plpgsql STABLE ROWS 1000 SET jit = off AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT r.job_id, r.kind, l.queue, r.args, ''completed''::%1$I.job_state, l.priority, (r.attempt + 1)::smallint,
                r.max_attempts, r.run_at, c.claimed_at, c.finalized_at, r.created_at, r.errors, r.metadata, r.tags, r.unique_key,
                r.unique_states, r.run_lease + 1, NULL::jsonb, r.ready_slot
         FROM (
             -- The set-returning column keeps this a unit of its own: joined by lane alone every completion would meet
             -- every row of its lane.
             SELECT b.lane_id, a.lane_ranges, a.claimed_at, b.finalized_at,
                    generate_series(lower(g.receipts), upper(g.receipts) - 1) AS receipt_id
             FROM %1$I.%2$I AS b
             JOIN %1$I.%3$I AS a ON a.batch_id = b.batch_id
             CROSS JOIN LATERAL unnest(b.receipt_ranges) AS g (receipts)
         ) AS c
         JOIN %1$I.%4$I AS r
           ON r.lane_id = c.lane_id AND r.lane_seq = %1$I.nth_in_ranges(c.lane_ranges, (c.receipt_id & 1023)::integer)
         JOIN %1$I.queue_lanes AS l ON l.lane_id = r.lane_id
         WHERE ($1 IS NULL OR r.job_id = $1)
           AND NOT EXISTS (SELECT FROM %1$I.%6$I AS h WHERE h.job_id = r.job_id AND h.run_lease = r.run_lease + 1)
         UNION ALL
         SELECT d.job_id, coalesce(d.kind, r.kind), d.queue, coalesce(d.args, r.args), d.state, coalesce(d.priority, l.priority),
                d.attempt, coalesce(d.max_attempts, r.max_attempts), coalesce(d.run_at, r.run_at), d.attempted_at, d.finalized_at,
                coalesce(d.created_at, r.created_at), d.errors, coalesce(d.metadata, r.metadata), coalesce(d.tags, r.tags),
                coalesce(d.unique_key, r.unique_key), coalesce(d.unique_states, r.unique_states), d.run_lease, d.progress, d.ready_slot
         FROM %1$I.%5$I AS d
         LEFT JOIN %1$I.%4$I AS r ON r.lane_id = d.lane_id AND r.lane_seq = d.lane_seq
         LEFT JOIN %1$I.queue_lanes AS l ON l.lane_id = d.lane_id
         WHERE ($1 IS NULL OR d.job_id = $1)
           AND NOT EXISTS (SELECT FROM %1$I.%6$I AS h WHERE h.job_id = d.job_id AND h.run_lease = d.run_lease)',
        {schema_literal}, 'receipt_completion_batches_' || p_slot, 'ready_claim_attempt_batches_' || p_slot,
        'ready_entries_' || p_slot, 'done_entries_' || p_slot, 'terminal_tombstones_' || p_slot)
    USING p_job_id;
END
$function$;

-- Every finished job whose slot is not pruned yet, with its body; without those that were deleted, or retried since. Failed
-- jobs of pruned slots and of queues with a DLQ are in dlq_entries.
CREATE VIEW {schema}.terminal_jobs AS
SELECT t.* FROM {schema}.queue_ring_slots AS s CROSS JOIN LATERAL {schema}.terminal_jobs_in(s.slot) AS t;
