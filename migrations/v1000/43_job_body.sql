-- A job on its way from one place to another, wherever it lies: what every transition but the hot path works on.

CREATE TYPE {schema}.job_body AS (
    job_id        bigint,
    run_lease     bigint,       -- of the last attempt
    run_at        timestamptz,
    created_at    timestamptz,
    claimed_at    timestamptz,  -- of the last attempt, NULL before the first
    lane_seq      bigint,       -- where the body lies in the queue ring; NULL when it lies elsewhere
    lane_id       integer,
    ready_slot    smallint,
    priority      smallint,
    attempt       smallint,     -- attempts counted so far
    max_attempts  smallint,
    queue         text,
    kind          text,
    args          jsonb,
    tags          text[],
    metadata      jsonb,
    errors        jsonb[],
    progress      jsonb,
    unique_key    bytea,
    unique_states bit(8)
);

-- ready_body_<slot>: the job at one place of a lane.
SELECT {schema}.create_slot_functions('queue', 'ready_body_in', 'p_lane_id integer, p_lane_seq bigint', '{schema}.job_body', $template$
DECLARE
    v_job {schema}.job_body;
BEGIN
    SELECT r.job_id, r.run_lease, r.run_at, r.created_at, NULL, r.lane_seq, r.lane_id, r.ready_slot, l.priority, r.attempt,
           r.max_attempts, l.queue, r.kind, r.args, r.tags, r.metadata, r.errors, r.progress, r.unique_key, r.unique_states
    INTO v_job
    FROM {schema}.ready_entries_<slot> AS r
    JOIN {schema}.queue_lanes AS l ON l.lane_id = r.lane_id
    WHERE r.lane_id = p_lane_id AND r.lane_seq = p_lane_seq;
    RETURN v_job;
END
$template$);

-- Errors as 0.5 keeps them: one object an attempt, the oldest first.
CREATE FUNCTION {schema}.with_error(p_errors jsonb[], p_attempt integer, p_error text, p_at timestamptz) RETURNS jsonb[]
LANGUAGE sql STABLE AS $function$
    SELECT CASE
        WHEN p_error IS NULL THEN p_errors
        ELSE p_errors || jsonb_build_object('attempt', p_attempt, 'error', p_error, 'at', p_at)
    END
$function$;

-- How long a failed attempt waits for the next: two seconds, doubled by every attempt, up to a quarter more so that jobs
-- that failed together do not come back together, a day at most (the shape 0.5 has).
CREATE FUNCTION {schema}.backoff_duration(p_attempt integer) RETURNS interval
LANGUAGE plpgsql VOLATILE AS $function$
BEGIN
    RETURN least(make_interval(secs => power(2::double precision, least(greatest(p_attempt, 0), 60)) * (1 + random() * 0.25)),
        interval '24 hours');
END
$function$;
