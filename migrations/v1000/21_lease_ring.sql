-- The lease ring: attempts that need a row of their own to write to (ADR-023, Hot path; engine.md, Callback wait).
--
-- A compact claim that materialises is closed with outcome 'materialized', and the attempt goes on here with its body, so
-- that neither the claim slot nor the queue slot has to wait for somebody else's callback.

-- The same as the queue ring's, where they are explained.
CREATE TABLE {schema}.lease_ring_state (LIKE {schema}.queue_ring_state INCLUDING ALL);
CREATE TABLE {schema}.lease_ring_prunes (LIKE {schema}.queue_ring_prunes INCLUDING ALL);
CREATE TABLE {schema}.lease_ring_slots (LIKE {schema}.queue_ring_slots INCLUDING ALL);
CREATE SEQUENCE {schema}.lease_ring_cursor MINVALUE 0;

-- Updated and deleted in place; what dies here goes with TRUNCATE once the few rows that live are carried to the open slot.
CREATE TABLE {schema}.leases (
    job_id              bigint             NOT NULL,
    run_lease           bigint             NOT NULL,
    receipt_id          bigint             NOT NULL,  -- of the claim it came from: the fence, with job_id and run_lease
    run_at              timestamptz        NOT NULL,
    created_at          timestamptz        NOT NULL,
    claimed_at          timestamptz        NOT NULL,
    alive_at            timestamptz        NOT NULL,  -- since when it runs without a heartbeat: claimed or resumed
    deadline_at         timestamptz,
    callback_timeout_at timestamptz,
    callback_id         uuid,
    lease_slot          smallint           NOT NULL,
    priority            smallint           NOT NULL,
    attempt             smallint           NOT NULL,  -- attempts counted before this one
    max_attempts        smallint           NOT NULL,
    state               {schema}.job_state NOT NULL CHECK (state IN ('running', 'waiting_external')),
    claimed_by          text,
    queue               text               NOT NULL,
    kind                text               NOT NULL,
    args                jsonb              NOT NULL,
    tags                text[],
    metadata            jsonb,
    errors              jsonb[],
    progress            jsonb,
    callback_payload    jsonb,                        -- what resumed it
    unique_key          bytea,
    unique_states       bit(8)
) PARTITION BY LIST (lease_slot);
CREATE INDEX leases_by_job ON {schema}.leases (job_id);
CREATE INDEX leases_by_callback ON {schema}.leases (callback_id) WHERE callback_id IS NOT NULL;
CREATE INDEX leases_by_callback_timeout ON {schema}.leases (callback_timeout_at) WHERE callback_timeout_at IS NOT NULL;
CREATE INDEX leases_by_deadline ON {schema}.leases (deadline_at) WHERE deadline_at IS NOT NULL;
