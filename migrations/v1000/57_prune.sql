-- Prune: truncates a sealed slot once everything in it is proven over (I3). The proof runs before the exclusive locks, so
-- that a slot in use is passed over cheaply, and again under them, so that nothing committed meanwhile is missed (I4).
-- Lock order: ring slot row -> slot pin (advisory) -> partitions. All bounded; losing one is a skip with its reason.

-- Every slot of a ring with its newest generation and state.
CREATE FUNCTION {schema}.ring_slots(p_ring text)
RETURNS TABLE (slot smallint, generation bigint, state text, opened_at timestamptz)
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT n.slot, o.generation,
                CASE WHEN o.generation IS NULL THEN ''pruned''
                     WHEN o.generation = (SELECT max(s.generation) FROM %1$I.%3$I AS s) THEN ''open''
                     WHEN EXISTS (SELECT FROM %1$I.%4$I AS p WHERE p.generation = o.generation) THEN ''pruned''
                     ELSE ''sealed''
                END,
                o.opened_at
         FROM %1$I.%2$I AS n
         LEFT JOIN LATERAL (
             SELECT s.generation, s.opened_at FROM %1$I.%3$I AS s WHERE s.slot = n.slot ORDER BY s.generation DESC LIMIT 1
         ) AS o ON true
         ORDER BY n.slot',
        {schema_literal}, p_ring || '_ring_slots', p_ring || '_ring_state', p_ring || '_ring_prunes');
END
$function$;

-- Claims of one claim slot that have no closure for some receipt, oldest first: the open attempts.
CREATE FUNCTION {schema}.open_claims(p_claim_slot smallint)
RETURNS TABLE (batch_id bigint, claimed_at timestamptz, claimed_by text, lane_id integer, open_count bigint, first_open_job bigint)
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    RETURN QUERY EXECUTE format(
        'SELECT b.batch_id, b.claimed_at, b.claimed_by, b.lane_id, cardinality(b.job_ids) - coalesce(c.job_count, 0),
                (SELECT j.job_id FROM unnest(b.job_ids) WITH ORDINALITY AS j (job_id, n)
                 WHERE NOT coalesce(c.receipt_ranges @> (b.batch_id * 1024 + j.n - 1), false) ORDER BY j.n LIMIT 1)
         FROM %1$I.%2$I AS b
         LEFT JOIN (
             SELECT x.batch_id, sum(x.job_count) AS job_count, range_agg(x.receipt_ranges) AS receipt_ranges
             FROM %1$I.%3$I AS x GROUP BY x.batch_id
         ) AS c ON c.batch_id = b.batch_id
         WHERE coalesce(c.job_count, 0) < cardinality(b.job_ids)
         ORDER BY b.batch_id',
        {schema_literal}, 'lease_claim_batches_' || p_claim_slot, 'lease_claim_closure_batches_' || p_claim_slot);
END
$function$;

-- The proof for a claim slot: every receipt in it has its closure. NULL when it holds, else what is missing.
CREATE FUNCTION {schema}.claim_slot_blocker(p_slot smallint, OUT reason text, OUT detail text)
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    SELECT 'open_claims', format('%s open attempts in %s batches; the oldest is job %s, claimed by %s at %s',
               sum(o.open_count), count(*), (array_agg(o.first_open_job ORDER BY o.batch_id))[1],
               coalesce((array_agg(o.claimed_by ORDER BY o.batch_id))[1], 'unknown'), min(o.claimed_at))
    INTO reason, detail
    FROM {schema}.open_claims(p_slot) AS o
    HAVING count(*) > 0;
END
$function$;

-- What keeps a queue slot, as far as it can be told without reading its jobs: a hole set aside in it is still open; a lane's
-- last job in it is not claimed; an emitted attempt is not closed; a lane's cursor is not past it. Costs some index look-ups
-- a lane and a pass over the batches, however many jobs the slot holds.
CREATE FUNCTION {schema}.queue_slot_pending(p_slot smallint, OUT reason text, OUT detail text)
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    v_last record;
    v_cursor_detail text;
    v_open bigint;
    v_first text;
    v_claim_slot smallint;
BEGIN
    EXECUTE format(
        'SELECT ''open_holes'', format(''lane %%s may still be filled at %%s by %%s'', h.lane_id, h.lane_ranges,
                    coalesce(%1$I.lock_holders(%3$s, h.lane_id, ''{}''), ''transaction '' || h.holders::text))
         FROM %1$I.%2$I AS h
         WHERE h.holders IS NOT NULL AND NOT EXISTS (SELECT FROM %1$I.%2$I AS o WHERE o.hole_id = h.hole_id AND o.holders IS NULL)
         LIMIT 1',
        {schema_literal}, 'ready_lane_holes_' || p_slot, '{schema}.ready_entries'::regclass::oid)
    INTO reason, detail;
    IF reason IS NOT NULL THEN
        RETURN;
    END IF;

    -- Each lane's last job here, where the cursor is not past it: from one lane to the next by the index.
    FOR v_last IN EXECUTE format(
        'WITH RECURSIVE lanes AS (
             (SELECT e.lane_id FROM %1$I.%2$I AS e ORDER BY e.lane_id, e.lane_seq LIMIT 1)
             UNION ALL
             SELECT n.lane_id
             FROM lanes AS c
             CROSS JOIN LATERAL (
                 SELECT e.lane_id FROM %1$I.%2$I AS e WHERE e.lane_id > c.lane_id ORDER BY e.lane_id, e.lane_seq LIMIT 1
             ) AS n
         ), last AS MATERIALIZED (
             SELECT c.lane_id,
                    (SELECT e.lane_seq FROM %1$I.%2$I AS e WHERE e.lane_id = c.lane_id ORDER BY e.lane_id DESC, e.lane_seq DESC LIMIT 1) AS lane_seq
             FROM lanes AS c
         )
         SELECT t.lane_id, t.lane_seq, l.queue, l.priority, pg_sequence_last_value(l.spent) AS spent,
                EXISTS (SELECT FROM %1$I.%3$I AS b
                        WHERE b.lane_id = t.lane_id AND b.lane_hi >= t.lane_seq AND b.lane_ranges @> t.lane_seq) AS is_emitted
         FROM last AS t
         JOIN %1$I.queue_lanes AS l ON l.lane_id = t.lane_id
         WHERE pg_sequence_last_value(l.spent) < t.lane_seq',
        {schema_literal}, 'ready_entries_' || p_slot, 'ready_claim_attempt_batches_' || p_slot)
    LOOP
        IF NOT v_last.is_emitted THEN
            reason := 'ready_rows';
            detail := format('jobs of queue %s, priority %s, are not claimed yet, up to number %s of lane %s',
                v_last.queue, v_last.priority, v_last.lane_seq, v_last.lane_id);
            RETURN;
        END IF;
        v_cursor_detail := format('the claim cursor of lane %s (queue %s) is at %s, the slot holds up to %s',
            v_last.lane_id, v_last.queue, v_last.spent, v_last.lane_seq);
    END LOOP;

    -- An attempt is closed when its claim generation was pruned (that needed the proof), or its closures add up.
    FOR v_claim_slot IN EXECUTE format(
        'SELECT DISTINCT b.claim_slot FROM %1$I.%2$I AS b
         WHERE b.claim_slot IS NOT NULL AND NOT %1$I.claim_generation_is_pruned(b.claim_slot, b.claim_generation)',
        {schema_literal}, 'ready_claim_attempt_batches_' || p_slot)
    LOOP
        EXECUTE format(
            'SELECT sum(b.job_count - coalesce(c.job_count, 0)), min(b.batch_id)::text
             FROM %1$I.%2$I AS b
             LEFT JOIN (SELECT x.batch_id, sum(x.job_count) AS job_count FROM %1$I.%3$I AS x GROUP BY x.batch_id) AS c
               ON c.batch_id = b.batch_id
             WHERE b.claim_slot = $1 AND coalesce(c.job_count, 0) < b.job_count
               AND NOT %1$I.claim_generation_is_pruned(b.claim_slot, b.claim_generation)',
            {schema_literal}, 'ready_claim_attempt_batches_' || p_slot, 'lease_claim_closure_batches_' || v_claim_slot)
        INTO v_open, v_first
        USING v_claim_slot;
        IF v_open > 0 THEN
            reason := 'open_claims';
            detail := format('%s attempts are running in claim slot %s, the first in claim batch %s', v_open, v_claim_slot, v_first);
            RETURN;
        END IF;
    END LOOP;

    IF v_cursor_detail IS NOT NULL THEN
        reason := 'lane_cursor';
        detail := v_cursor_detail;
    END IF;
END
$function$;

-- The proof for a queue slot: nothing of the above, and every row is emitted, which is counted last, and only here. NULL
-- when it holds, else what is missing.
CREATE FUNCTION {schema}.queue_slot_blocker(p_slot smallint, OUT reason text, OUT detail text)
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    v_emitted bigint;
    v_rows bigint;
BEGIN
    SELECT p.reason, p.detail INTO reason, detail FROM {schema}.queue_slot_pending(p_slot) AS p;
    IF reason IS NOT NULL THEN
        RETURN;
    END IF;
    EXECUTE format('SELECT coalesce(sum(b.job_count), 0) FROM %1$I.%2$I AS b', {schema_literal}, 'ready_claim_attempt_batches_' || p_slot)
    INTO v_emitted;
    EXECUTE format('SELECT count(*) FROM %1$I.%2$I', {schema_literal}, 'ready_entries_' || p_slot) INTO v_rows;
    IF v_rows <> v_emitted THEN
        reason := 'ready_rows';
        detail := format('%s of %s jobs are not claimed yet, committed late by their producers', v_rows - v_emitted, v_rows);
    END IF;
END
$function$;

CREATE FUNCTION {schema}.claim_generation_is_pruned(p_slot smallint, p_generation bigint) RETURNS boolean
LANGUAGE sql STABLE AS $function$
    SELECT EXISTS (SELECT FROM {schema}.claim_ring_prunes AS p WHERE p.generation = p_generation)
        OR EXISTS (SELECT FROM {schema}.claim_ring_state AS s WHERE s.slot = p_slot AND s.generation > p_generation)
$function$;

-- Who holds an advisory lock (two-integer form) or one of some relations, for the reason of a skip.
CREATE FUNCTION {schema}.lock_holders(p_class oid, p_key integer, p_relations oid[]) RETURNS text
LANGUAGE sql VOLATILE AS $function$
    SELECT string_agg(DISTINCT CASE
               WHEN l.pid IS NULL THEN format('prepared transaction %L (of %s, prepared %s ago; COMMIT or ROLLBACK PREPARED ends it)',
                   coalesce(x.gid, 'unknown'), coalesce(x.owner, 'unknown'),
                   coalesce(date_trunc('second', clock_timestamp() - x.prepared)::text, '?'))
               ELSE format('pid %s (%s, %s, transaction open for %s)', l.pid, coalesce(nullif(a.application_name, ''), 'unnamed'),
                   coalesce(a.state, '?'), coalesce(date_trunc('second', clock_timestamp() - a.xact_start)::text, '?'))
           END, '; ')
    FROM pg_locks AS l
    LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
    -- A prepared transaction has no pid, and until a restart its locks have the name of the session that prepared it.
    LEFT JOIN pg_locks AS i
           ON l.pid IS NULL AND i.pid IS NULL AND i.locktype = 'transactionid' AND i.virtualtransaction = l.virtualtransaction
    LEFT JOIN pg_prepared_xacts AS x ON x.transaction = i.transactionid
    WHERE l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
      AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database())
      AND ((l.locktype = 'advisory' AND l.classid = p_class AND l.objid = p_key::bigint::oid AND l.objsubid = 2)
           OR (l.locktype = 'relation' AND l.relation = ANY (p_relations)))
$function$;

-- Prunes one slot, if it can be. One slot a transaction: the exclusive locks live until its end.
CREATE FUNCTION {schema}.prune(
    p_ring text, p_slot smallint, p_lock_timeout interval DEFAULT '50 milliseconds',
    OUT pruned boolean, OUT generation bigint, OUT reason text, OUT detail text
)
LANGUAGE plpgsql AS $function$
DECLARE
    v_class oid := format('%I.%I', {schema_literal}, p_ring || '_ring_slots')::regclass;
    v_state text;
    v_children text;
    v_relations oid[];
    v_blocker record;
    c_patience constant text := greatest(extract(epoch FROM p_lock_timeout) * 1000, 1)::integer::text;
    c_before constant text := current_setting('lock_timeout');
    v_locked boolean := false;
BEGIN
    pruned := false;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'prune needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    SELECT s.generation, s.state INTO generation, v_state FROM {schema}.ring_slots(p_ring) AS s WHERE s.slot = p_slot;
    IF v_state IS DISTINCT FROM 'sealed' THEN
        reason := coalesce(v_state, 'no_such_slot');
        RETURN;
    ELSIF pg_sequence_last_value(format('%I.%I', {schema_literal}, p_ring || '_ring_cursor')::regclass) & 255 = p_slot THEN
        -- Only after a restore (see next_opening): it is being written to, and leases would be carried from it to itself.
        reason := 'promised';
        detail := 'the cursor of the ring names this slot until the next rotation';
        RETURN;
    END IF;

    -- First proof, without any lock of ours; another pruner may hold the partitions.
    BEGIN
        PERFORM set_config('lock_timeout', c_patience, true);
        EXECUTE format('SELECT b.reason, b.detail FROM %I.%I($1) AS b', {schema_literal}, p_ring || '_slot_blocker')
        INTO v_blocker USING p_slot;
        PERFORM set_config('lock_timeout', c_before, true);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        reason := 'locked';
        detail := 'another session holds the partitions exclusively';
        RETURN;
    END;
    IF v_blocker.reason IS NOT NULL THEN
        reason := v_blocker.reason;
        detail := v_blocker.detail;
        RETURN;
    END IF;

    -- Lock: the slot's row (one pruner), then its pin (nobody is about to write here).
    EXECUTE format('SELECT 1 FROM %1$I.%2$I AS s WHERE s.slot = $1 FOR UPDATE SKIP LOCKED', {schema_literal}, p_ring || '_ring_slots')
    INTO v_blocker USING p_slot;
    IF v_blocker IS NULL THEN
        reason := 'locked';
        detail := 'another session is pruning this slot';
        RETURN;
    END IF;
    IF NOT pg_try_advisory_xact_lock(v_class::integer, p_slot) THEN
        reason := 'pinned';
        detail := {schema}.lock_holders(v_class, p_slot, '{}');
        RETURN;
    END IF;

    SELECT string_agg(format('%I.%I', {schema_literal}, p || '_' || p_slot), ', '),
           array_agg(format('%I.%I', {schema_literal}, p || '_' || p_slot)::regclass::oid)
    INTO v_children, v_relations
    FROM unnest({schema}.ring_parents(p_ring)) AS p;
    BEGIN
        -- Lock: the partitions, exclusively and briefly. A reader that does not let go costs a skip, and so does whoever holds
        -- something that is needed while they are held.
        PERFORM set_config('lock_timeout', c_patience, true);
        EXECUTE 'LOCK TABLE ' || v_children || ' IN ACCESS EXCLUSIVE MODE';
        v_locked := true;

        -- Second proof: a fresh statement under the locks sees what was committed while they were waited for.
        SELECT s.state INTO v_state FROM {schema}.ring_slots(p_ring) AS s WHERE s.slot = p_slot AND s.generation = prune.generation;
        EXECUTE format('SELECT b.reason, b.detail FROM %I.%I($1) AS b', {schema_literal}, p_ring || '_slot_blocker')
        INTO v_blocker USING p_slot;
        IF v_state IS DISTINCT FROM 'sealed' OR v_blocker.reason IS NOT NULL THEN
            reason := coalesce(v_blocker.reason, v_state, 'moved_on');
            detail := v_blocker.detail;
        ELSE
            PERFORM {schema}.empty_slot(p_ring, p_slot, generation, v_relations);
            pruned := true;
        END IF;
        PERFORM set_config('lock_timeout', c_before, true);
    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
        reason := CASE WHEN v_locked THEN 'locked' ELSE 'reader' END;
        detail := CASE
            WHEN v_locked THEN 'another session holds what the slot''s end needs: ' || sqlerrm
            ELSE {schema}.lock_holders(NULL, NULL, v_relations)
        END;
    END;
END
$function$;

-- Truncates a slot that is proven over, after what must outlive it was taken out. The caller holds its partitions exclusively.
CREATE FUNCTION {schema}.empty_slot(p_ring text, p_slot smallint, p_generation bigint, p_relations oid[]) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_children text;
BEGIN
    CASE p_ring
        WHEN 'queue' THEN PERFORM {schema}.fold_pruned_slot(p_slot, p_generation);
        WHEN 'claim' THEN
            PERFORM setval({schema}.rescue_cursor(p_slot, 'stale'), 0), setval({schema}.rescue_cursor(p_slot, 'deadline'), 0);
        WHEN 'lease' THEN PERFORM {schema}.carry_leases(p_slot);
    END CASE;
    -- An empty child is left alone: TRUNCATE would rewrite its rows in pg_class for nothing.
    SELECT string_agg(r::regclass::text, ', ') INTO v_children FROM unnest(p_relations) AS r WHERE pg_relation_size(r) > 0;
    IF v_children IS NOT NULL THEN
        EXECUTE 'TRUNCATE ' || v_children;
    END IF;
    EXECUTE format('INSERT INTO %1$I.%2$I (generation, slot) VALUES ($1, $2)', {schema_literal}, p_ring || '_ring_prunes')
    USING p_generation, p_slot;
END
$function$;

-- The proof for a lease slot: so few leases live in it that carrying them to the open slot is cheap.
CREATE FUNCTION {schema}.lease_slot_blocker(p_slot smallint, OUT reason text, OUT detail text)
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    c_carry constant bigint := 10000;
    v_live bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %I.%I', {schema_literal}, 'leases_' || p_slot) INTO v_live;
    IF v_live > c_carry THEN
        reason := 'live_leases';
        detail := format('%s attempts live in the slot; up to %s are carried to the open one', v_live, c_carry);
    END IF;
END
$function$;

-- Leases that live move to the open slot before theirs is truncated. The caller has the partition to itself, so nobody is
-- about to change one. By the partition's own name: through the parent it would wait for every partition, and two pruners for
-- each other.
CREATE FUNCTION {schema}.carry_leases(p_slot smallint) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_lease {schema}.leases;
    v_open smallint := {schema}.pin_lease_slot() & 255;
BEGIN
    FOR v_lease IN EXECUTE format('SELECT l.* FROM %I.%I AS l', {schema_literal}, 'leases_' || p_slot) LOOP
        v_lease.lease_slot := v_open;
        INSERT INTO {schema}.leases VALUES (v_lease.*);
    END LOOP;
END
$function$;

-- What must outlive a queue slot: its terminal counts; the jobs that failed in it, retryable for as long as their queue keeps
-- them; and the unique keys that its other finished jobs keep, which from now on expire.
CREATE FUNCTION {schema}.fold_pruned_slot(p_slot smallint, p_generation bigint) RETURNS void
LANGUAGE plpgsql SET jit = off AS $function$
DECLARE
    v_failed boolean;
    v_has_unique boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %I.%I AS d WHERE d.state = ''failed'')', {schema_literal}, 'done_entries_' || p_slot)
    INTO v_failed;
    IF v_failed THEN
        INSERT INTO {schema}.dlq_entries (
            job_id, run_lease, run_at, created_at, attempted_at, failed_at, priority, attempt, max_attempts, held, queue, kind,
            args, tags, metadata, errors, progress, unique_key, unique_states)
        SELECT t.id, t.run_lease, t.run_at, t.created_at, t.attempted_at, t.finalized_at, t.priority, t.attempt, t.max_attempts,
               'retained', t.queue, t.kind, t.args, t.tags, t.metadata, t.errors, t.progress, t.unique_key, t.unique_states
        FROM {schema}.terminal_jobs_in(p_slot) AS t
        WHERE t.state = 'failed';
    END IF;

    EXECUTE format(
        'INSERT INTO %1$I.queue_terminal_rollup_deltas (generation, queue, state, job_count)
         SELECT $1, t.queue, t.state, sum(t.job_count)
         FROM (SELECT l.queue, ''completed''::%1$I.job_state AS state, c.job_count
               FROM %1$I.%2$I AS c JOIN %1$I.queue_lanes AS l ON l.lane_id = c.lane_id
               UNION ALL
               SELECT d.queue, d.state, 1 FROM %1$I.%3$I AS d
               UNION ALL
               SELECT h.queue, h.state, -1 FROM %1$I.%4$I AS h) AS t
         WHERE t.state <> ''failed''
         GROUP BY t.queue, t.state
         HAVING sum(t.job_count) <> 0',
        {schema_literal}, 'receipt_completion_batches_' || p_slot, 'done_entries_' || p_slot, 'terminal_tombstones_' || p_slot)
    USING p_generation;

    EXECUTE format(
        'SELECT EXISTS (SELECT FROM %1$I.%2$I AS b WHERE b.has_unique)
             OR EXISTS (SELECT FROM %1$I.%3$I AS d WHERE d.unique_key IS NOT NULL)',
        {schema_literal}, 'ready_claim_attempt_batches_' || p_slot, 'done_entries_' || p_slot)
    INTO v_has_unique;
    IF v_has_unique THEN
        UPDATE {schema}.job_unique_claims AS c
        SET held_until = t.finalized_at + coalesce(m.unique_retention, interval '24 hours')
        FROM {schema}.terminal_jobs_in(p_slot) AS t
        LEFT JOIN {schema}.queue_meta AS m ON m.queue = t.queue
        WHERE c.unique_key = t.unique_key AND c.job_id = t.id AND t.state <> 'failed';
    END IF;
END
$function$;

-- Moves the cursors of lanes over what is committed, for lanes that no claim visits any more. Returns how many moved. Takes
-- three locks a lane until the end of the transaction, so it is called for some lanes at a time.
CREATE FUNCTION {schema}.advance_idle_cursors(p_first integer DEFAULT 0, p_last integer DEFAULT 2147483647) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    -- As in claim: what this transaction itself emitted may be rolled back.
    c_may_advance constant boolean := pg_current_xact_id_if_assigned() IS NULL;
    v_lane {schema}.queue_lanes;
    v_allocated bigint;
    v_spent bigint;
    v_known record;
    v_moved integer := 0;
BEGIN
    -- An old snapshot would show live rows as dead numbers.
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'advance_idle_cursors needs READ COMMITTED, not %', upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'feature_not_supported';
    END IF;
    IF NOT c_may_advance THEN
        RETURN 0;
    END IF;
    FOR v_lane IN SELECT l.* FROM {schema}.queue_lanes AS l WHERE l.lane_id BETWEEN p_first AND p_last ORDER BY l.lane_id LOOP
        v_allocated := pg_sequence_last_value(v_lane.seq);
        CONTINUE WHEN pg_sequence_last_value(v_lane.spent) >= v_allocated;
        CONTINUE WHEN NOT pg_try_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, v_lane.lane_id);
        v_spent := pg_sequence_last_value(v_lane.spent);
        SELECT coalesce(range_agg(t.lane_ranges), '{}') AS emitted, min(t.at) AS oldest INTO v_known
        FROM (
            SELECT b.lane_ranges, b.claimed_at AS at
            FROM {schema}.ready_claim_attempt_batches AS b WHERE b.lane_id = v_lane.lane_id AND b.lane_hi > v_spent
            UNION ALL
            SELECT h.lane_ranges, NULL FROM {schema}.ready_lane_holes AS h WHERE h.lane_id = v_lane.lane_id AND h.lane_hi > v_spent
        ) AS t;
        IF NOT isempty(v_known.emitted) THEN
            v_spent := lower(int8multirange(int8range(v_spent + 1, NULL)) - v_known.emitted) - 1;
            IF v_spent > pg_sequence_last_value(v_lane.spent) THEN
                PERFORM setval(v_lane.spent, v_spent);
                v_moved := v_moved + 1;
            END IF;
        END IF;
        IF v_spent < v_allocated THEN
            -- A hole that has held the cursor below claimed rows for a second holds their slots: set it aside, whatever
            -- the number of claims above it.
            PERFORM {schema}.settle_holes(v_lane, v_spent, v_allocated, v_known.emitted,
                CASE WHEN v_known.oldest < clock_timestamp() - interval '1 second' THEN 9999 ELSE 0 END, '{}', true);
        END IF;
    END LOOP;
    RETURN v_moved;
END
$function$;

-- Drops cursor rows that nothing needs any more, but only when no old snapshot would keep them as dead tuples. Keeps every
-- slot's newest row. Returns how many went.
CREATE FUNCTION {schema}.trim_ring_state(p_ring text, p_keep integer DEFAULT 64, p_at_least integer DEFAULT 256) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_deleted bigint := 0;
    v_rows bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM %1$I.%2$I', {schema_literal}, p_ring || '_ring_state') INTO v_rows;
    IF v_rows < p_at_least OR {schema}.oldest_pin() > interval '5 seconds' THEN
        RETURN 0;
    END IF;
    EXECUTE format(
        'WITH spare AS (
             SELECT s.generation FROM %1$I.%2$I AS s
             WHERE s.generation < (SELECT max(m.generation) FROM %1$I.%2$I AS m) - $1
               AND EXISTS (SELECT FROM %1$I.%2$I AS n WHERE n.slot = s.slot AND n.generation > s.generation)
         ), states AS (
             DELETE FROM %1$I.%2$I AS s USING spare WHERE s.generation = spare.generation RETURNING s.generation
         ), prunes AS (
             DELETE FROM %1$I.%3$I AS p USING spare WHERE p.generation = spare.generation
         )
         SELECT count(*) FROM states',
        {schema_literal}, p_ring || '_ring_state', p_ring || '_ring_prunes')
    INTO v_deleted USING p_keep;
    RETURN v_deleted;
END
$function$;

-- For how long somebody else has kept dead rows from being removed: sessions, prepared transactions, replication slots.
CREATE FUNCTION {schema}.oldest_pin() RETURNS interval
LANGUAGE sql VOLATILE AS $function$
    SELECT coalesce(max(p.age), interval '0')
    FROM (
        SELECT clock_timestamp() - a.xact_start AS age
        FROM pg_stat_activity AS a
        WHERE (a.backend_xmin IS NOT NULL OR a.backend_xid IS NOT NULL) AND a.pid <> pg_backend_pid()
          AND (a.datname IS NULL OR a.datname = current_database())  -- other databases keep nothing of ours
        UNION ALL
        SELECT clock_timestamp() - x.prepared FROM pg_prepared_xacts AS x WHERE x.database = current_database()
        UNION ALL
        SELECT interval '1 day' FROM pg_replication_slots AS s WHERE s.xmin IS NOT NULL
    ) AS p
$function$;
