-- Rotate: opens the next slot of a ring. The cursor is the newest row of an append-only table, so rotating is an INSERT;
-- a second rotator loses by key conflict. What differs between the rings is their name.

-- Why the open slot need not be left yet; NULL when it should.
CREATE FUNCTION {schema}.why_not_rotate(p_ring text, p_slot smallint) RETURNS text
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    c_worth constant bigint := 256 * 1024;
    v_size bigint;
    v_live bigint;
BEGIN
    -- Sizes, not rows: an uncommitted producer counts, and nothing is scanned.
    SELECT sum(pg_relation_size(format('%I.%I', {schema_literal}, p || '_' || p_slot)::regclass)) INTO v_size
    FROM unnest(CASE p_ring
        WHEN 'queue' THEN '{ready_entries,done_entries}'::text[]
        WHEN 'claim' THEN '{lease_claim_batches}'
        WHEN 'lease' THEN '{leases}'
    END) AS p;
    IF v_size = 0 THEN
        RETURN 'idle: the open slot is empty';
    ELSIF p_ring = 'lease' THEN
        -- Leases that live are carried along, so leaving pays only once most of the slot is dead.
        IF v_size < c_worth THEN
            RETURN 'small: nothing worth reclaiming yet';
        END IF;
        EXECUTE format('SELECT coalesce(sum(pg_column_size(l.*)), 0) FROM %I.%I AS l', {schema_literal}, 'leases_' || p_slot) INTO v_live;
        IF v_live * 2 > v_size THEN
            RETURN 'live: most of the open slot is in use';
        END IF;
    END IF;
    RETURN NULL;
END
$function$;

-- What a rotation opens now, or why it is skipped; reads only. Passes over slots that could not be pruned. An empty current
-- slot (idle) is a reason to skip unless forced.
CREATE FUNCTION {schema}.next_opening(p_ring text, p_force boolean, OUT generation bigint, OUT slot smallint, OUT reason text)
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    v_slots integer;
    v_current record;
    v_promised bigint;
    v_free boolean;
BEGIN
    EXECUTE format('SELECT s.generation, s.slot FROM %1$I.%2$I AS s ORDER BY s.generation DESC LIMIT 1',
        {schema_literal}, p_ring || '_ring_state')
    INTO v_current;
    -- A rotator that died between setval and its commit promised a slot, and somebody may have written there already:
    -- keep the promise, so that a generation never names two slots.
    v_promised := pg_sequence_last_value(format('%I.%I', {schema_literal}, p_ring || '_ring_cursor')::regclass);
    IF v_promised >> 8 > v_current.generation THEN
        generation := v_promised >> 8;
        slot := v_promised & 255;
        SELECT s.state = 'pruned' INTO v_free FROM {schema}.ring_slots(p_ring) AS s WHERE s.slot = next_opening.slot;
        IF v_free THEN
            RETURN;
        END IF;
        -- Only after a restore: the sequence was read later than the tables, and the slot it names is in use. What was
        -- written there since lies beside what was there before, and goes with it; the generation is not given twice.
    ELSIF NOT p_force THEN
        generation := v_current.generation;
        slot := v_current.slot;
        reason := {schema}.why_not_rotate(p_ring, v_current.slot);
        IF reason IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;

    EXECUTE format('SELECT count(*) FROM %1$I.%2$I', {schema_literal}, p_ring || '_ring_slots') INTO v_slots;
    EXECUTE format(
        'SELECT c.slot
         FROM (SELECT ((%4$s + n) %% %5$s)::smallint AS slot, n FROM generate_series(1, %5$s - 1) AS n) AS c
         LEFT JOIN LATERAL (
             SELECT max(s.generation) AS generation FROM %1$I.%2$I AS s WHERE s.slot = c.slot) AS o ON true
         WHERE o.generation IS NULL OR EXISTS (SELECT FROM %1$I.%3$I AS p WHERE p.generation = o.generation)
         ORDER BY c.n LIMIT 1',
        {schema_literal}, p_ring || '_ring_state', p_ring || '_ring_prunes', v_current.slot, v_slots)
    INTO slot;
    generation := greatest(v_current.generation, v_promised >> 8) + 1;
    IF slot IS NULL THEN
        generation := v_current.generation;
        slot := v_current.slot;
        reason := 'no pruned slot: the open one goes on';
    END IF;
END
$function$;

-- Opens it. Returns what happened; a skip has its reason.
CREATE FUNCTION {schema}.rotate(p_ring text, p_force boolean DEFAULT false, OUT rotated boolean, OUT generation bigint, OUT slot smallint, OUT reason text)
LANGUAGE plpgsql AS $function$
BEGIN
    rotated := false;
    -- Lock: the ring, so that the cursor sequence below is set by one rotator at a time. Not waited for.
    IF NOT pg_try_advisory_xact_lock(format('%I.%I', {schema_literal}, p_ring || '_ring_state')::regclass::oid::integer, 0) THEN
        reason := 'another session is rotating this ring';
        RETURN;
    END IF;
    SELECT o.generation, o.slot, o.reason INTO generation, slot, reason FROM {schema}.next_opening(p_ring, p_force) AS o;
    IF reason IS NOT NULL THEN
        RETURN;
    END IF;
    EXECUTE format('INSERT INTO %1$I.%2$I (generation, slot) VALUES ($1, $2)', {schema_literal}, p_ring || '_ring_state')
    USING generation, slot;
    PERFORM setval(format('%I.%I', {schema_literal}, p_ring || '_ring_cursor')::regclass, generation << 8 | slot);
    rotated := true;
END
$function$;
