-- Claim: makes ready jobs belong to one attempt each. Writes INSERTs only: per lane and slot one ready_claim_attempt_batches
-- row (these rows of the lane are spent) and one lease_claim_batches row (these receipts are open).
--
-- The cursor (lane.spent) is a hint that lives outside transactions; the committed ranges are the truth. It is moved only
-- over what is committed already, never over what this transaction takes: a rollback would lose that.

CREATE TYPE {schema}.claimed_batch AS (
    batch_id     bigint,       -- receipt n (from 0) is batch_id * 1024 + n
    claim_slot   smallint,
    priority     smallint,
    claimed_at   timestamptz,
    deadline_at  timestamptz,
    job_ids      bigint[],
    run_leases   bigint[],     -- of this attempt, as are the attempts
    attempts     smallint[],
    max_attempts smallint[],
    run_ats      timestamptz[],
    created_ats  timestamptz[],
    kinds        text[],
    args         jsonb[],
    extras       jsonb[],      -- tags, metadata, errors, progress; NULL where the job has none
    job_count    integer,
    lane_ranges  int8multirange,
    has_unique   boolean       -- whether any of the jobs has a unique key
);

-- The claim ring's open slot, kept from being truncated until this transaction ends; see pin_ready_slot.
CREATE FUNCTION {schema}.pin_claim_slot() RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_cursor bigint := pg_sequence_last_value('{schema}.claim_ring_cursor'::regclass);
    v_seen bigint;
BEGIN
    LOOP
        PERFORM pg_advisory_xact_lock_shared('{schema}.claim_ring_slots'::regclass::oid::integer, (v_cursor & 255)::integer);
        v_seen := pg_sequence_last_value('{schema}.claim_ring_cursor'::regclass);
        EXIT WHEN v_seen = v_cursor;
        IF v_seen IS NULL THEN
            PERFORM {schema}.refuse_unreadable('{schema}.claim_ring_cursor'::regclass);
        END IF;
        v_cursor := v_seen;
    END LOOP;
    RETURN v_cursor;
END
$function$;

-- Slots that may hold rows of generation p_from and later, oldest first.
CREATE FUNCTION {schema}.ready_slots_from(p_from bigint) RETURNS TABLE (generation bigint, slot smallint)
LANGUAGE plpgsql AS $function$
DECLARE
    v_cursor bigint := pg_sequence_last_value('{schema}.queue_ring_cursor'::regclass);
BEGIN
    IF p_from >= v_cursor >> 8 THEN
        generation := v_cursor >> 8;
        slot := (v_cursor & 255)::smallint;
        RETURN NEXT;
        RETURN;
    END IF;
    -- The last row: a slot that a rotator promised and has not committed, or never will. Producers write there already.
    -- One statement, so that a slot that an earlier claim saw so is not missed while the rotator commits. Never a slot
    -- twice: after a restore the promised one may be in use, and a claim would take its rows twice.
    RETURN QUERY
        SELECT s.generation, s.slot
        FROM {schema}.queue_ring_state AS s
        WHERE s.generation >= p_from
          AND NOT EXISTS (SELECT FROM {schema}.queue_ring_prunes AS p WHERE p.generation = s.generation)
        UNION ALL
        SELECT v_cursor >> 8, (v_cursor & 255)::smallint
        WHERE NOT EXISTS (
            SELECT FROM {schema}.queue_ring_state AS s
            WHERE s.generation = v_cursor >> 8
               OR (s.slot = (v_cursor & 255)::smallint AND s.generation >= p_from
                   AND NOT EXISTS (SELECT FROM {schema}.queue_ring_prunes AS p WHERE p.generation = s.generation)))
        ORDER BY 1;
END
$function$;

-- emitted_ranges_<slot>: what is known to be spent above p_spent: ranges handed out, and holes set aside.
SELECT {schema}.create_slot_functions('queue', 'emitted_ranges_in', 'p_lane_id integer, p_spent bigint', 'int8multirange[]', $template$
DECLARE
    v_ranges int8multirange[];
BEGIN
    SELECT array_agg(t.lane_ranges) INTO v_ranges
    FROM (
        SELECT b.lane_ranges FROM {schema}.ready_claim_attempt_batches_<slot> AS b WHERE b.lane_id = p_lane_id AND b.lane_hi > p_spent
        UNION ALL
        SELECT h.lane_ranges FROM {schema}.ready_lane_holes_<slot> AS h WHERE h.lane_id = p_lane_id AND h.lane_hi > p_spent
    ) AS t;
    RETURN v_ranges;
END
$template$);

-- claim_rows_<slot>: takes the first p_limit rows of a lane within one slot, out of p_gaps; no row if there are none. The
-- caller holds the lane's lock and has pinned the claim slot. One statement, so that the bodies are copied once.
SELECT {schema}.create_slot_functions('queue', 'claim_rows_in',
    'p_lane_id integer, p_priority smallint, p_ready_generation bigint, p_gaps int8multirange, p_limit integer, p_claim_cursor bigint,
     p_now timestamptz, p_deadline_at timestamptz, p_claimed_by text',
    '{schema}.claimed_batch', $template$
BEGIN
    RETURN QUERY
    WITH picked AS MATERIALIZED (
        SELECT count(*)::integer AS row_count, min(r.lane_seq) AS seq_lo, max(r.lane_seq) AS seq_hi,
               min(r.run_lease) + 1 AS lease_lo, max(r.run_lease) + 1 AS lease_hi, bool_or(r.unique_key IS NOT NULL) AS has_unique,
               array_agg(r.lane_seq) AS lane_seqs, array_agg(r.job_id) AS job_ids, array_agg(r.run_lease + 1) AS run_leases,
               array_agg(r.attempt + 1::smallint) AS attempts, array_agg(r.max_attempts) AS max_attempts,
               array_agg(r.run_at) AS run_ats, array_agg(r.created_at) AS created_ats, array_agg(r.kind) AS kinds,
               array_agg(r.args) AS args, array_agg({schema}.job_extras(r.tags, r.metadata, r.errors, r.progress)) AS extras
        FROM (
            SELECT s.*
            FROM unnest(p_gaps) AS g (gap)
            CROSS JOIN LATERAL (
                SELECT e.*
                FROM {schema}.ready_entries_<slot> AS e
                WHERE e.lane_id = p_lane_id AND e.lane_seq >= lower(g.gap)
                  AND e.lane_seq < coalesce(upper(g.gap), 9223372036854775807)
                ORDER BY e.lane_seq
                LIMIT p_limit
            ) AS s
            LIMIT p_limit
        ) AS r
        HAVING count(*) > 0
    ),
    batch AS MATERIALIZED (
        SELECT nextval('{schema}.lease_claim_batch_ids'::regclass) AS batch_id,
               CASE
                   WHEN p.seq_hi - p.seq_lo + 1 = p.row_count THEN int8multirange(int8range(p.seq_lo, p.seq_hi + 1))
                   ELSE (SELECT range_agg(int8range(s, s + 1)) FROM unnest(p.lane_seqs) AS s)
               END AS taken
        FROM picked AS p
    ),
    receipts AS (
        INSERT INTO {schema}.lease_claim_batches (
            batch_id, claim_generation, ready_generation, run_lease, claimed_at, deadline_at, lane_id, claim_slot, ready_slot,
            has_unique, claimed_by, lane_ranges, job_ids, run_leases)
        SELECT b.batch_id, p_claim_cursor >> 8, p_ready_generation, CASE WHEN p.lease_lo = p.lease_hi THEN p.lease_lo END, p_now,
               p_deadline_at, p_lane_id, (p_claim_cursor & 255)::smallint, <slot>, p.has_unique, p_claimed_by, b.taken, p.job_ids,
               CASE WHEN p.lease_lo <> p.lease_hi THEN p.run_leases END
        FROM picked AS p CROSS JOIN batch AS b
    ),
    emitted AS (
        INSERT INTO {schema}.ready_claim_attempt_batches_<slot> (
            batch_id, ready_generation, claim_generation, lane_hi, claimed_at, lane_id, job_count, ready_slot, claim_slot,
            has_unique, lane_ranges)
        SELECT b.batch_id, p_ready_generation, p_claim_cursor >> 8, p.seq_hi, p_now, p_lane_id, p.row_count, <slot>,
               (p_claim_cursor & 255)::smallint, p.has_unique, b.taken
        FROM picked AS p CROSS JOIN batch AS b
    )
    SELECT b.batch_id, (p_claim_cursor & 255)::smallint, p_priority, p_now, p_deadline_at, p.job_ids, p.run_leases, p.attempts,
           p.max_attempts, p.run_ats, p.created_ats, p.kinds, p.args, p.extras, p.row_count, b.taken,
           p.has_unique
    FROM picked AS p CROSS JOIN batch AS b;
END
$template$, p_set => true);

-- What a batch just claimed needs beside its receipts, seldom: jobs give up unique keys whose mask leaves out running, and
-- without receipts (lease_claim_receipts = false) every attempt gets a lease at once.
CREATE FUNCTION {schema}.settle_claimed(p_batch {schema}.claimed_batch, p_receipts boolean) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    IF p_batch.has_unique THEN
        PERFORM {schema}.release_unique_keys(p_batch.job_ids, 'running');
    END IF;
    IF NOT p_receipts THEN
        PERFORM {schema}.materialise(p_batch.claim_slot, p_batch.batch_id * 1024 + n - 1, p_batch.job_ids[n], p_batch.run_leases[n])
        FROM generate_series(1, p_batch.job_count) AS n;
    END IF;
END
$function$;

-- first_run_at_<slot>: since when the first row of a lane above p_spent could have run. It may be taken already; then the
-- lane seems a little older than it is.
SELECT {schema}.create_slot_functions('queue', 'first_run_at_in', 'p_lane_id integer, p_spent bigint', 'timestamptz', $template$
BEGIN
    RETURN (
        SELECT r.run_at
        FROM {schema}.ready_entries_<slot> AS r
        WHERE r.lane_id = p_lane_id AND r.lane_seq > p_spent
        ORDER BY r.lane_seq
        LIMIT 1);
END
$template$);

-- Since when a lane's head waits; NULL when the lane is empty.
CREATE FUNCTION {schema}.waiting_since(p_lane {schema}.queue_lanes) RETURNS timestamptz
LANGUAGE plpgsql AS $function$
DECLARE
    v_spent bigint := pg_sequence_last_value(p_lane.spent);
    v_slot smallint;
    v_since timestamptz;
BEGIN
    IF v_spent >= pg_sequence_last_value(p_lane.seq) THEN
        RETURN NULL;
    END IF;
    FOR v_slot IN SELECT s.slot FROM {schema}.ready_slots_from(pg_sequence_last_value(p_lane.generation)) AS s LOOP
        v_since := {schema}.first_run_at_in(v_slot, p_lane.lane_id, v_spent);
        EXIT WHEN v_since IS NOT NULL;
    END LOOP;
    RETURN v_since;
END
$function$;

-- A queue's lanes in the order a claim takes them. With p_aging a lane rises one priority for every p_aging its head has
-- waited, and among equals the older head goes first, so that no priority starves. Shards of one priority take turns.
CREATE FUNCTION {schema}.lanes_of(p_queue text, p_aging interval, p_now timestamptz) RETURNS SETOF {schema}.queue_lanes
LANGUAGE plpgsql AS $function$
DECLARE
    c_turn constant integer := floor(random() * 64);
BEGIN
    IF p_aging IS NULL THEN
        RETURN QUERY
            SELECT l.*
            FROM {schema}.queue_lanes AS l
            WHERE l.queue = p_queue
            ORDER BY l.priority, (l.enqueue_shard + c_turn) & 63, l.lane_id;
        RETURN;
    END IF;
    RETURN QUERY
        SELECT (o.lane).*
        FROM (
            SELECT l AS lane, l.priority, l.enqueue_shard, l.lane_id, {schema}.waiting_since(l) AS since
            FROM {schema}.queue_lanes AS l
            WHERE l.queue = p_queue
        ) AS o
        ORDER BY greatest(o.priority - coalesce(floor(extract(epoch FROM p_now - o.since) / extract(epoch FROM p_aging)), 0), 1),
                 o.since, (o.enqueue_shard + c_turn) & 63, o.lane_id;
END
$function$;

-- Up to p_limit jobs of a queue. Lanes by priority, first in first out within a lane. A row with batch_id NULL says that
-- a lane with work was busy in another claim: ask again soon.
-- p_probe also looks into the holes set aside; callers ask for it once per poll interval and on wake-up.
CREATE FUNCTION {schema}.claim(
    p_queue text, p_limit integer, p_deadline interval DEFAULT NULL, p_claimed_by text DEFAULT NULL, p_probe boolean DEFAULT false,
    p_aging interval DEFAULT NULL, p_receipts boolean DEFAULT true
) RETURNS SETOF {schema}.claimed_batch
LANGUAGE plpgsql AS $function$
DECLARE
    c_limit constant integer := least(p_limit, 1024);
    -- Ranges this transaction itself emitted are not committed: after a first write the cursor stays where it is.
    c_may_advance constant boolean := pg_current_xact_id_if_assigned() IS NULL;
    c_now constant timestamptz := clock_timestamp();
    v_lane {schema}.queue_lanes;
    v_batch {schema}.claimed_batch;
    v_left integer := c_limit;
    v_claim_cursor bigint;
    v_allocated bigint;
    v_spent bigint;
    v_busy boolean := false;
    v_slot record;
    v_ranges int8multirange;
    v_known int8multirange[];
    v_emitted int8multirange;
    v_emitted_batches bigint;
    v_generations bigint[];
    v_highs bigint[];
    v_gaps int8multirange;
    v_seen int8multirange;
    v_hint bigint;
    v_oldest bigint;
BEGIN
    -- Every statement here must see what the last holder of the lane's lock committed.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'claim needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;

    IF EXISTS (SELECT FROM {schema}.queue_meta AS m WHERE m.queue = p_queue AND m.paused) THEN
        RETURN;
    END IF;

    FOR v_lane IN SELECT l.* FROM {schema}.lanes_of(p_queue, p_aging, c_now) AS l LOOP
        EXIT WHEN v_left <= 0;
        v_allocated := pg_sequence_last_value(v_lane.seq);
        CONTINUE WHEN pg_sequence_last_value(v_lane.spent) >= v_allocated AND NOT p_probe;

        -- Lock: one claimer a lane. Never waited for, so holding several lanes cannot deadlock.
        IF NOT pg_try_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, v_lane.lane_id) THEN
            v_busy := true;
            CONTINUE;
        END IF;
        IF v_claim_cursor IS NULL THEN
            v_claim_cursor := {schema}.pin_claim_slot();
        END IF;

        IF p_probe THEN
            FOR v_batch IN
                SELECT r.*
                FROM {schema}.claim_late_rows(v_lane, v_left, v_claim_cursor, c_now, c_now + p_deadline, p_claimed_by,
                    p_receipts) AS r
            LOOP
                v_left := v_left - v_batch.job_count;
                RETURN NEXT v_batch;
            END LOOP;
            EXIT WHEN v_left <= 0;
        END IF;

        v_spent := pg_sequence_last_value(v_lane.spent);
        CONTINUE WHEN v_spent >= v_allocated;
        -- A probe takes no hint: rows committed late into an older slot are found while other producers are active.
        v_hint := CASE WHEN p_probe THEN 0 ELSE pg_sequence_last_value(v_lane.generation) END;
        v_emitted := '{}';
        v_emitted_batches := 0;
        v_generations := '{}';
        v_highs := '{}';
        FOR v_slot IN SELECT s.generation, s.slot FROM {schema}.ready_slots_from(v_hint) AS s LOOP
            v_known := {schema}.emitted_ranges_in(v_slot.slot, v_lane.lane_id, v_spent);
            IF v_known IS NOT NULL THEN
                v_ranges := {schema}.union_of(v_known);
                v_emitted := v_emitted + v_ranges;
                v_emitted_batches := v_emitted_batches + cardinality(v_known);
                v_generations := v_generations || v_slot.generation;
                v_highs := v_highs || upper(v_ranges);
            END IF;
        END LOOP;

        -- Proof: everything below the first gap is covered by committed ranges.
        v_gaps := int8multirange(int8range(v_spent + 1, NULL)) - v_emitted;
        IF c_may_advance AND lower(v_gaps) > v_spent + 1 THEN
            v_spent := lower(v_gaps) - 1;
            PERFORM setval(v_lane.spent, v_spent);
            CONTINUE WHEN v_spent >= v_allocated;
        END IF;

        v_seen := '{}';
        FOR v_slot IN SELECT s.generation, s.slot FROM {schema}.ready_slots_from(v_hint) AS s LOOP
            EXIT WHEN v_left <= 0;
            FOR v_batch IN
                SELECT r.*
                FROM {schema}.claim_rows_in(v_slot.slot, v_lane.lane_id, v_lane.priority, v_slot.generation, v_gaps, v_left,
                    v_claim_cursor, c_now, c_now + p_deadline, p_claimed_by) AS r
            LOOP
                IF v_batch.has_unique OR NOT p_receipts THEN
                    PERFORM {schema}.settle_claimed(v_batch, p_receipts);
                END IF;
                v_left := v_left - v_batch.job_count;
                v_seen := v_seen + v_batch.lane_ranges;
                v_generations := v_generations || v_slot.generation;
                v_highs := v_highs || upper(v_batch.lane_ranges);
                RETURN NEXT v_batch;
            END LOOP;
        END LOOP;

        -- The hint: the oldest slot that still says something above the cursor. A slow producer may yet commit into an
        -- older one; then there is a hole, and settle_holes takes the hint back.
        SELECT min(g.generation) INTO v_oldest FROM unnest(v_generations, v_highs) AS g (generation, high) WHERE g.high > v_spent + 1;
        IF v_oldest <> pg_sequence_last_value(v_lane.generation) THEN
            PERFORM setval(v_lane.generation, v_oldest);
        END IF;

        -- Anything missing below what is emitted was handed to a producer that has not committed it, or never will.
        v_gaps := v_gaps - v_seen;
        IF v_seen = '{}' OR lower(v_gaps) < greatest(upper(v_emitted), upper(v_seen)) THEN
            PERFORM {schema}.settle_holes(v_lane, v_spent, v_allocated, v_emitted, v_emitted_batches, v_seen, c_may_advance);
        END IF;
    END LOOP;

    IF v_busy AND v_left = c_limit THEN
        v_batch := NULL;
        RETURN NEXT v_batch;
    END IF;
END
$function$;
