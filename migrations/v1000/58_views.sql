-- Read surfaces.

-- Every finished job whose slot is not pruned yet, with its body.
CREATE VIEW {schema}.terminal_jobs AS
SELECT r.job_id AS id, r.kind, l.queue, r.args, 'completed'::{schema}.job_state AS state, l.priority,
       (r.attempt + 1)::smallint AS attempt, r.max_attempts, r.run_at, c.claimed_at AS attempted_at, c.finalized_at,
       r.created_at, r.errors, r.metadata, r.tags, r.unique_key, r.unique_states, r.run_lease + 1 AS run_lease,
       NULL::jsonb AS progress, r.ready_slot
FROM (
    -- The set-returning column keeps this a unit of its own: ring children have no statistics, and joined by lane alone
    -- every completion would meet every row of its lane.
    SELECT b.ready_slot, b.lane_id, a.lane_ranges, a.claimed_at, b.finalized_at,
           generate_series(lower(g.receipts), upper(g.receipts) - 1) AS receipt_id
    FROM {schema}.receipt_completion_batches AS b
    JOIN {schema}.ready_claim_attempt_batches AS a ON a.ready_slot = b.ready_slot AND a.batch_id = b.batch_id
    CROSS JOIN LATERAL unnest(b.receipt_ranges) AS g (receipts)
) AS c
JOIN {schema}.ready_entries AS r
  ON r.ready_slot = c.ready_slot AND r.lane_id = c.lane_id
 AND r.lane_seq = {schema}.nth_in_ranges(c.lane_ranges, (c.receipt_id & 1023)::integer)
JOIN {schema}.queue_lanes AS l ON l.lane_id = r.lane_id
UNION ALL
SELECT r.job_id, r.kind, l.queue, r.args, d.state, l.priority,
       d.attempt, r.max_attempts, r.run_at, d.attempted_at, d.finalized_at,
       r.created_at, d.errors, r.metadata, r.tags, r.unique_key, r.unique_states, d.run_lease,
       d.progress, r.ready_slot
FROM {schema}.done_entries AS d
JOIN {schema}.ready_entries AS r ON r.ready_slot = d.ready_slot AND r.lane_id = d.lane_id AND r.lane_seq = d.lane_seq
JOIN {schema}.queue_lanes AS l ON l.lane_id = r.lane_id;
