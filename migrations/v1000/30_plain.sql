-- Tables outside the rings. None of them is written by claim, immediate enqueue or successful completion of a job
-- without a unique key (I5).

-- Jobs that are not claimable yet: scheduled (future run_at, snooze) or retryable (backoff).
CREATE TABLE {schema}.deferred_jobs (
    job_id        bigint PRIMARY KEY,
    run_lease     bigint             NOT NULL,
    run_at        timestamptz        NOT NULL,
    created_at    timestamptz        NOT NULL,
    priority      smallint           NOT NULL,
    attempt       smallint           NOT NULL,
    max_attempts  smallint           NOT NULL,
    state         {schema}.job_state NOT NULL CHECK (state IN ('scheduled', 'retryable')),
    queue         text               NOT NULL,
    kind          text               NOT NULL,
    args          jsonb              NOT NULL,
    tags          text[],
    metadata      jsonb,
    errors        jsonb[],
    progress      jsonb,
    unique_key    bytea,
    unique_states bit(8)
);
CREATE INDEX deferred_jobs_by_due ON {schema}.deferred_jobs (queue, run_at, job_id);

-- Of attempts that live long enough to be seen: that they live, and how far they are. Fenced by run_lease; a row whose
-- attempt is over means nothing.
CREATE TABLE {schema}.attempt_state (
    job_id       bigint PRIMARY KEY,
    run_lease    bigint      NOT NULL,
    heartbeat_at timestamptz NOT NULL,
    progress     jsonb
);

-- Jobs that failed for good: held for an operator (dlq), or only kept retryable for a while although the slot they failed
-- in is gone (retained).
CREATE TABLE {schema}.dlq_entries (
    job_id        bigint PRIMARY KEY,
    run_lease     bigint      NOT NULL,
    run_at        timestamptz NOT NULL,
    created_at    timestamptz NOT NULL,
    attempted_at  timestamptz,
    failed_at     timestamptz NOT NULL,
    priority      smallint    NOT NULL,
    attempt       smallint    NOT NULL,
    max_attempts  smallint    NOT NULL,
    held          text        NOT NULL CHECK (held IN ('dlq', 'retained')),
    queue         text        NOT NULL,
    kind          text        NOT NULL,
    args          jsonb       NOT NULL,
    tags          text[],
    metadata      jsonb,
    errors        jsonb[],
    progress      jsonb,
    unique_key    bytea,
    unique_states bit(8)
);
CREATE INDEX dlq_entries_by_queue ON {schema}.dlq_entries (queue, held, failed_at, job_id);
CREATE INDEX dlq_entries_by_age ON {schema}.dlq_entries (held, failed_at);

-- What operators set for a queue. A queue without a row has the defaults.
CREATE TABLE {schema}.queue_meta (
    queue            text PRIMARY KEY,
    paused           boolean     NOT NULL DEFAULT false,
    paused_at        timestamptz,
    paused_by        text,
    enqueue_shards   smallint    NOT NULL DEFAULT 1 CHECK (enqueue_shards BETWEEN 1 AND 64),
    dlq              boolean     NOT NULL DEFAULT false,
    dlq_retention    interval    NOT NULL DEFAULT '30 days' CHECK (dlq_retention > interval '0'),
    failed_retention interval    NOT NULL DEFAULT '72 hours' CHECK (failed_retention >= interval '0'),
    -- How long after its end a completed or cancelled job keeps its unique key, where its mask says so and its slot is gone.
    unique_retention interval    NOT NULL DEFAULT '24 hours' CHECK (unique_retention >= interval '0')
);

-- Who holds a unique key. A job holds it only while its state is in unique_states.
CREATE TABLE {schema}.job_unique_claims (
    unique_key    bytea PRIMARY KEY,
    job_id        bigint NOT NULL,
    unique_states bit(8) NOT NULL,
    held_until    timestamptz  -- NULL while the job is stored somewhere; set when its history is pruned
);
CREATE INDEX job_unique_claims_by_expiry ON {schema}.job_unique_claims (held_until) WHERE held_until IS NOT NULL;
CREATE INDEX job_unique_claims_by_job ON {schema}.job_unique_claims (job_id);

-- What finished in segments that are pruned, all told. Written by folding the deltas below, and only when no old snapshot
-- keeps the rows that this kills.
CREATE TABLE {schema}.queue_terminal_rollups (
    queue     text               NOT NULL,
    state     {schema}.job_state NOT NULL,
    job_count bigint             NOT NULL,
    PRIMARY KEY (queue, state)
);

-- What finished in segments that are pruned: one appended row per (pruned generation, queue, state).
CREATE TABLE {schema}.queue_terminal_rollup_deltas (
    generation bigint             NOT NULL,
    queue      text               NOT NULL,
    state      {schema}.job_state NOT NULL,
    job_count  bigint             NOT NULL
);

-- Counted stretches of a deep backlog, so that its size is never found by scanning it: rows of the lane with
-- lane_lo < lane_seq <= lane_hi, none of which can change any more.
CREATE TABLE {schema}.queue_backlog_segments (
    lane_id   integer NOT NULL,
    lane_lo   bigint  NOT NULL,
    lane_hi   bigint  NOT NULL,
    job_count bigint  NOT NULL,
    PRIMARY KEY (lane_id, lane_lo)
);

-- Processes that work or maintain. One row each, rewritten seldom.
CREATE TABLE {schema}.runtime_instances (
    instance_id   text PRIMARY KEY,
    role          text        NOT NULL,
    hostname      text,
    pid           integer,
    version       text,
    started_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    last_seen_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);
