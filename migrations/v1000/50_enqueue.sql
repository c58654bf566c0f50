-- Enqueue: for any client, in any language, inside any transaction and isolation level.
--
-- Locks, all shared and all until the end of the caller's transaction, so that no producer waits for another:
--   (queue_ring_slots, slot)   keeps prune away from the slot being written, from before it is known to be current;
--   (ready_entries, lane_id)   tells the claimers that a hole in this lane may still be filled.
-- The lane's lock is taken before its first lane_seq: whoever finds no holder knows that every number handed out so far
-- has been committed or is dead.

-- To whom may not read a sequence PostgreSQL 18 shows NULL, where those before it say this.
CREATE FUNCTION {schema}.refuse_unreadable(p_sequence regclass) RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    RAISE EXCEPTION 'permission denied for sequence %', p_sequence
        USING ERRCODE = 'insufficient_privilege', HINT = 'Grant SELECT on all sequences of the schema.';
END
$function$;

-- The slot that is open now, kept from being truncated until this transaction ends. Reads the cursor sequence and not
-- queue_ring_state, which an old snapshot would show as it was.
CREATE FUNCTION {schema}.pin_ready_slot() RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_cursor bigint := pg_sequence_last_value('{schema}.queue_ring_cursor'::regclass);
    v_seen bigint;
BEGIN
    LOOP
        -- Lock: prune takes the same one exclusively before it proves anything, so a slot found current under it stays.
        PERFORM pg_advisory_xact_lock_shared('{schema}.queue_ring_slots'::regclass::oid::integer, (v_cursor & 255)::integer);
        v_seen := pg_sequence_last_value('{schema}.queue_ring_cursor'::regclass);
        EXIT WHEN v_seen = v_cursor;
        IF v_seen IS NULL THEN
            PERFORM {schema}.refuse_unreadable('{schema}.queue_ring_cursor'::regclass);
        END IF;
        v_cursor := v_seen;
    END LOOP;
    RETURN v_cursor;
END
$function$;

CREATE FUNCTION {schema}.create_lane(p_queue text, p_priority smallint, p_shard smallint) RETURNS {schema}.queue_lanes
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    v_lane {schema}.queue_lanes;
    v_name text;
BEGIN
    v_lane.lane_id := nextval('{schema}.queue_lane_ids'::regclass);
    FOREACH v_name IN ARRAY ARRAY['seq', 'spent', 'generation'] LOOP
        EXECUTE format('CREATE SEQUENCE %I.%I MINVALUE 0',
            {schema_literal}, 'lane_' || v_lane.lane_id || '_' || v_name);
        -- Who may read the tables reads cursors beside them; see 80_restore.sql.
        EXECUTE format('GRANT SELECT ON SEQUENCE %I.%I TO PUBLIC',
            {schema_literal}, 'lane_' || v_lane.lane_id || '_' || v_name);
        PERFORM setval(format('%I.%I', {schema_literal}, 'lane_' || v_lane.lane_id || '_' || v_name)::regclass, 0);
    END LOOP;
    INSERT INTO {schema}.queue_lanes (lane_id, queue, priority, enqueue_shard, seq, spent, generation)
    VALUES (
        v_lane.lane_id, p_queue, p_priority, p_shard,
        format('%I.%I', {schema_literal}, 'lane_' || v_lane.lane_id || '_seq')::regclass,
        format('%I.%I', {schema_literal}, 'lane_' || v_lane.lane_id || '_spent')::regclass,
        format('%I.%I', {schema_literal}, 'lane_' || v_lane.lane_id || '_generation')::regclass)
    RETURNING * INTO v_lane;
    RETURN v_lane;
END
$function$;

-- The lane to append to, with this transaction registered on it as a producer.
CREATE FUNCTION {schema}.join_lane(p_queue text, p_priority smallint) RETURNS {schema}.queue_lanes
LANGUAGE plpgsql AS $function$
DECLARE
    v_lane {schema}.queue_lanes;
    v_shards integer;
    v_shard smallint := 0;
BEGIN
    SELECT m.enqueue_shards INTO v_shards FROM {schema}.queue_meta AS m WHERE m.queue = p_queue;
    IF v_shards > 1 THEN
        -- By session, so that what one producer sends keeps its order.
        v_shard := pg_backend_pid() % v_shards;
    END IF;
    SELECT l.* INTO v_lane
    FROM {schema}.queue_lanes AS l
    WHERE l.queue = p_queue AND l.priority = p_priority AND l.enqueue_shard = v_shard
    ORDER BY l.lane_id
    LIMIT 1;
    IF NOT FOUND THEN
        v_lane := {schema}.create_lane(p_queue, p_priority, v_shard);
    END IF;
    PERFORM pg_advisory_xact_lock_shared('{schema}.ready_entries'::regclass::oid::integer, v_lane.lane_id);
    RETURN v_lane;
END
$function$;

-- Refuses a job that must not be stored, naming the field, the value and what is allowed.
CREATE FUNCTION {schema}.check_job(
    p_kind text, p_queue text, p_args jsonb, p_priority integer, p_max_attempts integer, p_tags text[], p_metadata jsonb,
    p_unique_key bytea, p_run_at timestamptz DEFAULT NULL
) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    IF p_kind IS NULL OR length(p_kind) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'kind must have 1 to 200 characters, not %',
            CASE WHEN p_kind <> '' THEN length(p_kind) || ' (' || left(p_kind, 40) || '…)' ELSE coalesce(length(p_kind)::text, 'null') END
            USING ERRCODE = 'check_violation', COLUMN = 'kind';
    ELSIF p_queue IS NULL OR length(p_queue) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'queue must have 1 to 200 characters, not %',
            CASE WHEN p_queue <> '' THEN length(p_queue) || ' (' || left(p_queue, 40) || '…)' ELSE coalesce(length(p_queue)::text, 'null') END
            USING ERRCODE = 'check_violation', COLUMN = 'queue';
    ELSIF p_args IS NULL THEN
        RAISE EXCEPTION 'args must be JSON, not null; use {} for none' USING ERRCODE = 'check_violation', COLUMN = 'args';
    ELSIF p_priority IS NULL OR p_priority NOT BETWEEN 1 AND 4 THEN
        RAISE EXCEPTION 'priority must be 1 (first) to 4, not %', coalesce(p_priority::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'priority';
    ELSIF p_max_attempts IS NULL OR p_max_attempts NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'max_attempts must be 1 to 1000, not %', coalesce(p_max_attempts::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'max_attempts';
    ELSIF p_run_at NOT BETWEEN '0001-01-01 00:00Z' AND '9999-12-31 00:00Z' THEN
        -- Clients cannot read others, and infinity is among them: one such job would keep all that is claimed with it from running.
        RAISE EXCEPTION 'run_at must be in the years 1 to 9999, not %', p_run_at
            USING ERRCODE = 'check_violation', COLUMN = 'run_at';
    ELSIF cardinality(p_tags) > 20 THEN
        RAISE EXCEPTION 'tags must be at most 20, not %', cardinality(p_tags)
            USING ERRCODE = 'check_violation', COLUMN = 'tags';
    ELSIF array_position(p_tags, NULL) IS NOT NULL THEN
        RAISE EXCEPTION 'tags must not contain null' USING ERRCODE = 'check_violation', COLUMN = 'tags';
    ELSIF p_metadata IS NOT NULL AND jsonb_typeof(p_metadata) <> 'object' THEN
        RAISE EXCEPTION 'metadata must be a JSON object, not %', jsonb_typeof(p_metadata)
            USING ERRCODE = 'check_violation', COLUMN = 'metadata';
    ELSIF p_unique_key IS NOT NULL AND length(p_unique_key) NOT BETWEEN 1 AND 64 THEN
        RAISE EXCEPTION 'unique_key must have 1 to 64 bytes, not %', length(p_unique_key)
            USING ERRCODE = 'check_violation', COLUMN = 'unique_key';
    END IF;
END
$function$;

-- Wakes the workers of a queue, but only if somebody sleeps on it: NOTIFY serialises every commit of the database.
-- A sleeper holds (runtime_instances, hash of the queue) shared. A transaction that notified cannot be PREPAREd: for one that
-- shall be, SET LOCAL awa.wake = off leaves its jobs to the workers' next poll.
CREATE FUNCTION {schema}.wake_queue(p_queue text) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_class integer := '{schema}.runtime_instances'::regclass::oid::integer;
    v_key integer := hashtext(p_queue);
BEGIN
    -- Taken and released in one expression: a cancelled statement must not leave the session holding it.
    IF NOT (CASE WHEN pg_try_advisory_lock(v_class, v_key) THEN pg_advisory_unlock(v_class, v_key) ELSE false END) THEN
        IF current_setting('awa.wake', true) IS DISTINCT FROM 'off' THEN
            PERFORM pg_notify('awa_wake_' || v_class, p_queue);
        END IF;
    END IF;
END
$function$;

CREATE TYPE {schema}.enqueue_result AS (
    job_id       bigint,   -- of the job that exists now: the new one, or the one it duplicates
    inserted     boolean,
    duplicate_of bigint    -- NULL when inserted
);

-- One job. Times are the database's. Returns its id, or the job that holds its unique key.
CREATE FUNCTION {schema}.enqueue(
    kind          text,
    queue         text        DEFAULT 'default',
    args          jsonb       DEFAULT '{}',
    priority      integer     DEFAULT 2,
    max_attempts  integer     DEFAULT 25,
    run_at        timestamptz DEFAULT NULL,
    tags          text[]      DEFAULT NULL,
    metadata      jsonb       DEFAULT NULL,
    unique_key    bytea       DEFAULT NULL,
    unique_states bit(8)      DEFAULT B'11111000'
) RETURNS {schema}.enqueue_result
LANGUAGE plpgsql AS $function$
DECLARE
    v_result {schema}.enqueue_result;
    v_now timestamptz := clock_timestamp();
    v_lane {schema}.queue_lanes;
    v_cursor bigint;
BEGIN
    -- Checked as integers, so that 70000 is refused by name and not by a cast.
    PERFORM {schema}.check_job(kind, queue, args, priority, max_attempts, tags, metadata, unique_key, run_at);
    v_result.job_id := nextval('{schema}.jobs_id_seq'::regclass);
    v_result.inserted := true;

    IF unique_key IS NOT NULL THEN
        IF unique_states IS NULL THEN
            RAISE EXCEPTION 'unique_states must not be null beside a unique_key'
                USING ERRCODE = 'check_violation', COLUMN = 'unique_states';
        END IF;
        v_result.duplicate_of := {schema}.enter_state(v_result.job_id, unique_key, unique_states,
            CASE WHEN run_at > v_now THEN 'scheduled' ELSE 'available' END::{schema}.job_state);
        IF v_result.duplicate_of IS NOT NULL THEN
            v_result.job_id := v_result.duplicate_of;
            v_result.inserted := false;
            RETURN v_result;
        END IF;
    END IF;

    IF run_at > v_now THEN
        INSERT INTO {schema}.deferred_jobs (
            job_id, run_lease, run_at, created_at, priority, attempt, max_attempts, state, queue, kind, args, tags, metadata,
            unique_key, unique_states)
        VALUES (
            v_result.job_id, 0, run_at, v_now, priority, 0, max_attempts, 'scheduled', queue, kind, args, tags, metadata,
            unique_key, CASE WHEN unique_key IS NOT NULL THEN unique_states END);
        RETURN v_result;
    END IF;

    v_lane := {schema}.join_lane(queue, priority::smallint);
    v_cursor := {schema}.pin_ready_slot();
    INSERT INTO {schema}.ready_entries (
        job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt, max_attempts, kind, args, tags, metadata,
        unique_key, unique_states)
    VALUES (
        v_result.job_id, nextval(v_lane.seq), 0, coalesce(run_at, v_now), v_now, v_lane.lane_id, (v_cursor & 255)::smallint, 0,
        max_attempts, kind, args, tags, metadata,
        unique_key, CASE WHEN unique_key IS NOT NULL THEN unique_states END);
    PERFORM {schema}.wake_queue(queue);
    RETURN v_result;
END
$function$;

-- A job as enqueue_many takes it; NULL stands for enqueue's default.
CREATE TYPE {schema}.new_job AS (
    kind          text,
    queue         text,
    args          jsonb,
    priority      integer,
    max_attempts  integer,
    run_at        timestamptz,
    tags          text[],
    metadata      jsonb,
    unique_key    bytea,
    unique_states bit(8)
);

-- Many jobs, all or none, in their order; one result a job, in the same order.
CREATE FUNCTION {schema}.enqueue_many(jobs {schema}.new_job[]) RETURNS SETOF {schema}.enqueue_result
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_ids bigint[];
    v_duplicates bigint[];
    v_lanes integer[];
    v_seqs regclass[];
    v_queues text[];
    v_priorities smallint[];
    v_lane {schema}.queue_lanes;
    v_cursor bigint;
    v_bad record;
    v_pair record;
    v_unique record;
BEGIN
    FOR v_bad IN
        SELECT j.ord, j.kind, coalesce(j.queue, 'default') AS queue, coalesce(j.args, '{}') AS args,
               coalesce(j.priority, 2) AS priority, coalesce(j.max_attempts, 25) AS max_attempts,
               j.tags, j.metadata, j.unique_key, j.run_at
        FROM unnest(jobs) WITH ORDINALITY AS j (
            kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key, unique_states, ord)
        WHERE NOT coalesce(
            length(j.kind) BETWEEN 1 AND 200 AND length(coalesce(j.queue, 'default')) BETWEEN 1 AND 200
            AND coalesce(j.priority, 2) BETWEEN 1 AND 4 AND coalesce(j.max_attempts, 25) BETWEEN 1 AND 1000
            AND j.tags IS NULL AND j.metadata IS NULL AND j.unique_key IS NULL
            AND coalesce(j.run_at BETWEEN '0001-01-01 00:00Z' AND '9999-12-31 00:00Z', true), false)
        ORDER BY j.ord
    LOOP
        BEGIN
            PERFORM {schema}.check_job(v_bad.kind, v_bad.queue, v_bad.args, v_bad.priority, v_bad.max_attempts,
                v_bad.tags, v_bad.metadata, v_bad.unique_key, v_bad.run_at);
        EXCEPTION WHEN check_violation THEN
            RAISE EXCEPTION 'job %: %', v_bad.ord, sqlerrm USING ERRCODE = 'check_violation';
        END;
    END LOOP;

    SELECT array_agg(nextval('{schema}.jobs_id_seq'::regclass)) INTO v_ids FROM generate_series(1, cardinality(jobs));

    -- Keys before any lane_seq, so that a conflict costs no hole; in their order, so that two callers cannot deadlock.
    FOR v_unique IN
        SELECT j.ord, j.unique_key, coalesce(j.unique_states, B'11111000') AS unique_states,
               CASE WHEN j.run_at > v_now THEN 'scheduled' ELSE 'available' END::{schema}.job_state AS state
        FROM unnest(jobs) WITH ORDINALITY AS j (
            kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key, unique_states, ord)
        WHERE j.unique_key IS NOT NULL
        ORDER BY j.unique_key, j.ord
    LOOP
        v_duplicates[v_unique.ord] :=
            {schema}.enter_state(v_ids[v_unique.ord], v_unique.unique_key, v_unique.unique_states, v_unique.state);
    END LOOP;

    INSERT INTO {schema}.deferred_jobs (
        job_id, run_lease, run_at, created_at, priority, attempt, max_attempts, state, queue, kind, args, tags, metadata,
        unique_key, unique_states)
    SELECT v_ids[j.ord], 0, j.run_at, v_now, coalesce(j.priority, 2), 0, coalesce(j.max_attempts, 25), 'scheduled',
           coalesce(j.queue, 'default'), j.kind, coalesce(j.args, '{}'), j.tags, j.metadata,
           j.unique_key, CASE WHEN j.unique_key IS NOT NULL THEN coalesce(j.unique_states, B'11111000') END
    FROM unnest(jobs) WITH ORDINALITY AS j (
        kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key, unique_states, ord)
    WHERE j.run_at > v_now AND v_duplicates[j.ord] IS NULL;

    FOR v_pair IN
        SELECT DISTINCT coalesce(j.queue, 'default') AS queue, coalesce(j.priority, 2)::smallint AS priority
        FROM unnest(jobs) WITH ORDINALITY AS j (
            kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key, unique_states, ord)
        WHERE (j.run_at > v_now) IS NOT TRUE AND v_duplicates[j.ord] IS NULL
        ORDER BY 1, 2
    LOOP
        v_lane := {schema}.join_lane(v_pair.queue, v_pair.priority);
        v_lanes := v_lanes || v_lane.lane_id;
        v_seqs := v_seqs || v_lane.seq;
        v_queues := v_queues || v_pair.queue;
        v_priorities := v_priorities || v_pair.priority;
    END LOOP;

    IF v_lanes IS NOT NULL THEN
        v_cursor := {schema}.pin_ready_slot();
        INSERT INTO {schema}.ready_entries (
            job_id, lane_seq, run_lease, run_at, created_at, lane_id, ready_slot, attempt, max_attempts, kind, args, tags,
            metadata, unique_key, unique_states)
        SELECT v_ids[j.ord], nextval(j.seq), 0, coalesce(j.run_at, v_now), v_now, j.lane_id, (v_cursor & 255)::smallint, 0,
               coalesce(j.max_attempts, 25), j.kind, coalesce(j.args, '{}'), j.tags, j.metadata,
               j.unique_key, CASE WHEN j.unique_key IS NOT NULL THEN coalesce(j.unique_states, B'11111000') END
        FROM (
            SELECT i.*, l.lane_id, l.seq
            FROM unnest(jobs) WITH ORDINALITY AS i (
                kind, queue, args, priority, max_attempts, run_at, tags, metadata, unique_key, unique_states, ord)
            JOIN unnest(v_lanes, v_seqs, v_queues, v_priorities) AS l (lane_id, seq, queue, priority)
              ON l.queue = coalesce(i.queue, 'default') AND l.priority = coalesce(i.priority, 2)
            ORDER BY i.ord
        ) AS j
        WHERE (j.run_at > v_now) IS NOT TRUE AND v_duplicates[j.ord] IS NULL;
        PERFORM {schema}.wake_queue(q) FROM (SELECT DISTINCT unnest(v_queues) AS q) AS woken;
    END IF;

    RETURN QUERY
        SELECT coalesce(v_duplicates[o], v_ids[o]), v_duplicates[o] IS NULL, v_duplicates[o]
        FROM generate_series(1, cardinality(jobs)) AS o;
END
$function$;

-- The same from a JSON array of objects with new_job's fields, for clients without composite types.
CREATE FUNCTION {schema}.enqueue_many(jobs jsonb) RETURNS SETOF {schema}.enqueue_result
LANGUAGE plpgsql AS $function$
DECLARE
    v_jobs {schema}.new_job[];
    v_element record;
BEGIN
    IF jsonb_typeof(jobs) <> 'array' THEN
        RAISE EXCEPTION 'jobs must be a JSON array of objects, not %', jsonb_typeof(jobs) USING ERRCODE = 'check_violation';
    END IF;
    BEGIN
        SELECT array_agg(j ORDER BY ord) INTO v_jobs
        FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e (value, ord),
             jsonb_populate_record(NULL::{schema}.new_job, e.value) AS j;
    EXCEPTION WHEN data_exception THEN
        -- Once more one by one, to name the place.
        FOR v_element IN SELECT e.value, e.ord FROM jsonb_array_elements(jobs) WITH ORDINALITY AS e (value, ord) LOOP
            BEGIN
                PERFORM jsonb_populate_record(NULL::{schema}.new_job, v_element.value);
            EXCEPTION WHEN data_exception THEN
                RAISE EXCEPTION 'job %: %', v_element.ord, sqlerrm USING ERRCODE = sqlstate;
            END;
        END LOOP;
    END;
    RETURN QUERY SELECT r.* FROM {schema}.enqueue_many(v_jobs) AS r;
END
$function$;

-- The first half of a bulk enqueue: numbers and a pinned slot for counts[n] jobs of (queues[n], priorities[n]), for the
-- caller to COPY into ready_entries within the same transaction. Ends with wake_queue and COMMIT.
CREATE FUNCTION {schema}.enqueue_reserve(queues text[], priorities smallint[], counts integer[])
RETURNS TABLE (lane_id integer, ready_slot smallint, enqueued_at timestamptz, job_ids bigint[], lane_seqs bigint[])
LANGUAGE plpgsql AS $function$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lane {schema}.queue_lanes;
    v_n integer;
BEGIN
    FOR v_n IN 1 .. cardinality(queues) LOOP
        v_lane := {schema}.join_lane(queues[v_n], priorities[v_n]);
        lane_id := v_lane.lane_id;
        ready_slot := {schema}.pin_ready_slot() & 255;
        enqueued_at := v_now;
        SELECT array_agg(nextval('{schema}.jobs_id_seq'::regclass)), array_agg(nextval(v_lane.seq))
        INTO job_ids, lane_seqs
        FROM generate_series(1, counts[v_n]);
        RETURN NEXT;
    END LOOP;
END
$function$;
