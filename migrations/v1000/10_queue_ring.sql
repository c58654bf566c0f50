-- The queue ring: job bodies and everything that tells what became of them, reclaimed slot by slot with TRUNCATE.
-- Rows are only ever inserted (ADR-023, Decision). A slot holds one generation at a time, so its rows do not repeat it.

CREATE TYPE {schema}.job_state AS ENUM (
    'scheduled', 'available', 'running', 'completed', 'retryable', 'failed', 'cancelled', 'waiting_external'
);

CREATE SEQUENCE {schema}.jobs_id_seq;

-- One row per opening; the newest is the ring's cursor. Rotating is an INSERT, so a cursor never leaves a dead tuple.
CREATE TABLE {schema}.queue_ring_state (
    generation bigint PRIMARY KEY,
    slot       smallint    NOT NULL,
    opened_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- One row per truncation: generation G of its slot is gone.
CREATE TABLE {schema}.queue_ring_prunes (
    generation bigint PRIMARY KEY,
    slot       smallint    NOT NULL,
    pruned_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- Lock targets: rotate and prune lock the slot's row; nobody updates it.
CREATE TABLE {schema}.queue_ring_slots (
    slot smallint PRIMARY KEY
);

-- The newest (generation << 8 | slot) again, outside of any snapshot: a producer under REPEATABLE READ must still see
-- where the ring is now. Set by rotation only, in the transaction that inserts the row above.
CREATE SEQUENCE {schema}.queue_ring_cursor MINVALUE 0;

-- A lane is one ordered stream. Not unique on (queue, priority, enqueue_shard): two producers that first use a queue at
-- once must not wait for each other's transaction, so each makes a lane, and later producers take the lowest.
CREATE TABLE {schema}.queue_lanes (
    lane_id        integer PRIMARY KEY,
    queue          text        NOT NULL,
    priority       smallint    NOT NULL,
    enqueue_shard  smallint    NOT NULL DEFAULT 0,
    seq            regclass    NOT NULL,  -- the last lane_seq handed out
    spent          regclass    NOT NULL,  -- the claim cursor: every lane_seq up to it is spent
    generation     regclass    NOT NULL,  -- hint: nothing unspent is known in an older generation
    created_at     timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX queue_lanes_by_queue ON {schema}.queue_lanes (queue, priority, enqueue_shard, lane_id);
CREATE SEQUENCE {schema}.queue_lane_ids AS integer;

-- Immutable job bodies. Nullable columns are NULL when they hold what nearly every job has.
CREATE TABLE {schema}.ready_entries (
    job_id        bigint      NOT NULL,
    lane_seq      bigint      NOT NULL,
    run_lease     bigint      NOT NULL,  -- of the last attempt; a claim raises it by one
    run_at        timestamptz NOT NULL,
    created_at    timestamptz NOT NULL,
    lane_id       integer     NOT NULL,
    ready_slot    smallint    NOT NULL,
    attempt       smallint    NOT NULL,  -- attempts already counted
    max_attempts  smallint    NOT NULL,
    kind          text        NOT NULL,
    args          jsonb       NOT NULL,
    tags          text[],
    metadata      jsonb,
    errors        jsonb[],
    progress      jsonb,
    unique_key    bytea,
    unique_states bit(8)
) PARTITION BY LIST (ready_slot);
CREATE INDEX ready_entries_by_lane ON {schema}.ready_entries (lane_id, lane_seq);

-- Which rows of a lane are spent: the truth about the claim cursor, kept beside the rows themselves. Handed to attempts,
-- or, without a claim slot, withdrawn before anybody claimed them (a tombstone: cancelled, moved, deleted).
CREATE TABLE {schema}.ready_claim_attempt_batches (
    batch_id         bigint         NOT NULL,
    ready_generation bigint         NOT NULL,
    claim_generation bigint,
    lane_hi          bigint         NOT NULL,  -- highest lane_seq of lane_ranges
    claimed_at       timestamptz    NOT NULL,
    lane_id          integer        NOT NULL,
    job_count        integer        NOT NULL,
    ready_slot       smallint       NOT NULL,
    claim_slot       smallint,                 -- NULL: no receipt holds these rows
    has_unique       boolean        NOT NULL,
    lane_ranges      int8multirange NOT NULL   -- exactly the rows taken, ascending; the n-th has receipt batch_id * 1024 + n
) PARTITION BY LIST (ready_slot);
CREATE INDEX ready_claim_attempt_batches_by_lane ON {schema}.ready_claim_attempt_batches (lane_id, lane_hi);

-- Ranges below emitted rows that a transaction may still fill, set aside so that the cursor can move on (I6).
-- A second row with the same hole_id and no holders says the hole is over.
CREATE TABLE {schema}.ready_lane_holes (
    hole_id      bigint         NOT NULL,
    lane_hi      bigint         NOT NULL,
    recorded_at  timestamptz    NOT NULL DEFAULT clock_timestamp(),
    lane_id      integer        NOT NULL,
    ready_slot   smallint       NOT NULL,
    holders      text[],                        -- virtual transactions that held the lane's producer lock then
    lane_ranges  int8multirange NOT NULL
) PARTITION BY LIST (ready_slot);
CREATE SEQUENCE {schema}.ready_lane_hole_ids;

-- Compact successes: which receipts of a claim batch completed.
CREATE TABLE {schema}.receipt_completion_batches (
    batch_id       bigint         NOT NULL,
    finalized_at   timestamptz    NOT NULL,
    lane_id        integer        NOT NULL,
    job_count      integer        NOT NULL,
    ready_slot     smallint       NOT NULL,
    receipt_ranges int8multirange NOT NULL
) PARTITION BY LIST (ready_slot);

-- Every other end of a job. Where the body lies in ready_entries of the same slot it is found by (lane_id, lane_seq) and
-- not repeated; a job that ended elsewhere (deferred, in a lease, in the DLQ) brings its body, and lane_id is NULL.
CREATE TABLE {schema}.done_entries (
    job_id        bigint             NOT NULL,
    lane_seq      bigint,
    run_lease     bigint             NOT NULL,
    attempted_at  timestamptz,                   -- NULL: cancelled before its first attempt
    finalized_at  timestamptz        NOT NULL,
    run_at        timestamptz,
    created_at    timestamptz,
    lane_id       integer,
    ready_slot    smallint           NOT NULL,
    attempt       smallint           NOT NULL,
    max_attempts  smallint,
    priority      smallint,
    state         {schema}.job_state NOT NULL,
    queue         text               NOT NULL,
    kind          text,
    args          jsonb,
    tags          text[],
    metadata      jsonb,
    errors        jsonb[],
    progress      jsonb,
    unique_key    bytea,
    unique_states bit(8)
) PARTITION BY LIST (ready_slot);

-- Finished jobs that were deleted or retried: their row in terminal history no longer counts (either shape of history).
CREATE TABLE {schema}.terminal_tombstones (
    job_id     bigint             NOT NULL,
    run_lease  bigint             NOT NULL,
    hidden_at  timestamptz        NOT NULL DEFAULT clock_timestamp(),
    ready_slot smallint           NOT NULL,
    state      {schema}.job_state NOT NULL,
    queue      text               NOT NULL
) PARTITION BY LIST (ready_slot);
CREATE INDEX terminal_tombstones_by_job ON {schema}.terminal_tombstones (job_id);
