-- The claim ring: who holds which receipt, and the proof that it is over (ADR-023, Physical layout 1-5).

-- The same as the queue ring's, where they are explained.
CREATE TABLE {schema}.claim_ring_state (LIKE {schema}.queue_ring_state INCLUDING ALL);
CREATE TABLE {schema}.claim_ring_prunes (LIKE {schema}.queue_ring_prunes INCLUDING ALL);
CREATE TABLE {schema}.claim_ring_slots (LIKE {schema}.queue_ring_slots INCLUDING ALL);
CREATE SEQUENCE {schema}.claim_ring_cursor MINVALUE 0;

-- receipt_id = batch_id * 1024 + index: a receipt finds its batch by division and is never used again.
CREATE SEQUENCE {schema}.lease_claim_batch_ids MAXVALUE 9007199254740991;

-- One row per lane and slot that a claim took from. Both deadline modes (#246).
CREATE TABLE {schema}.lease_claim_batches (
    batch_id         bigint         NOT NULL,
    claim_generation bigint         NOT NULL,
    ready_generation bigint         NOT NULL,
    run_lease        bigint,                    -- when every attempt of the batch has the same, else NULL
    claimed_at       timestamptz    NOT NULL,
    deadline_at      timestamptz,
    lane_id          integer        NOT NULL,
    claim_slot       smallint       NOT NULL,
    ready_slot       smallint       NOT NULL,
    has_unique       boolean        NOT NULL,
    claimed_by       text,
    lane_ranges      int8multirange NOT NULL,
    job_ids          bigint[]       NOT NULL,   -- index 0 of the receipt is element 1
    run_leases       bigint[]                   -- only where run_lease is NULL
) PARTITION BY LIST (claim_slot);
CREATE INDEX lease_claim_batches_by_id ON {schema}.lease_claim_batches (batch_id);
CREATE INDEX lease_claim_batches_by_deadline ON {schema}.lease_claim_batches (deadline_at, batch_id)
    WHERE deadline_at IS NOT NULL;

-- The durable proof that attempts are over, whatever way. A receipt is in at most one row.
CREATE TABLE {schema}.lease_claim_closure_batches (
    batch_id         bigint         NOT NULL,
    ready_generation bigint         NOT NULL,
    closed_at        timestamptz    NOT NULL,
    job_count        integer        NOT NULL,
    claim_slot       smallint       NOT NULL,
    ready_slot       smallint       NOT NULL,
    outcome          text           NOT NULL,
    receipt_ranges   int8multirange NOT NULL
) PARTITION BY LIST (claim_slot);
CREATE INDEX lease_claim_closure_batches_by_id ON {schema}.lease_claim_closure_batches (batch_id);
