-- Partitions, and the first opening of each ring. Nothing in a child is ever updated, and all of it goes with TRUNCATE,
-- so autovacuum has nothing to do there. Arrays of a batch stay in the row, uncompressed, while they fit.

-- The partitioned tables of a ring, for everything that treats them alike; slot N of each is the child with _N behind its
-- name. The first is the one whose rows make a slot used.
CREATE FUNCTION {schema}.ring_parents(p_ring text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    RETURN CASE p_ring
        WHEN 'queue' THEN ARRAY['ready_entries', 'ready_claim_attempt_batches', 'ready_lane_holes', 'receipt_completion_batches', 'done_entries',
                                'terminal_tombstones']
        WHEN 'claim' THEN ARRAY['lease_claim_batches', 'lease_claim_closure_batches']
        WHEN 'lease' THEN ARRAY['leases']
    END;
END
$function$;

CREATE FUNCTION {schema}.create_ring(p_ring text, p_slots integer) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_parent text;
    v_slot integer;
BEGIN
    FOR v_slot IN 0 .. p_slots - 1 LOOP
        FOREACH v_parent IN ARRAY {schema}.ring_parents(p_ring) LOOP
            EXECUTE format(
                'CREATE TABLE %1$I.%2$I PARTITION OF %1$I.%3$I FOR VALUES IN (%4$s)
                 WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off, toast_tuple_target = 8160)',
                {schema_literal}, v_parent || '_' || v_slot, v_parent, v_slot);
        END LOOP;
        EXECUTE format('INSERT INTO %I.%I (slot) VALUES (%s)', {schema_literal}, p_ring || '_ring_slots', v_slot);
    END LOOP;
    EXECUTE format('INSERT INTO %I.%I (generation, slot) VALUES (0, 0)', {schema_literal}, p_ring || '_ring_state');
    PERFORM setval(format('%I.%I', {schema_literal}, p_ring || '_ring_cursor')::regclass, 0);
END
$function$;

ALTER TABLE {schema}.lease_claim_batches
    ALTER COLUMN job_ids SET STORAGE EXTERNAL,
    ALTER COLUMN run_leases SET STORAGE EXTERNAL,
    ALTER COLUMN lane_ranges SET STORAGE EXTERNAL;
ALTER TABLE {schema}.lease_claim_closure_batches ALTER COLUMN receipt_ranges SET STORAGE EXTERNAL;
ALTER TABLE {schema}.receipt_completion_batches ALTER COLUMN receipt_ranges SET STORAGE EXTERNAL;
ALTER TABLE {schema}.ready_claim_attempt_batches ALTER COLUMN lane_ranges SET STORAGE EXTERNAL;

SELECT {schema}.create_ring('queue', 16);
SELECT {schema}.create_ring('claim', 8);
SELECT {schema}.create_ring('lease', 8);

-- One function a slot, from a template with <slot> in it, and one named p_name that picks by its first argument; p_otherwise
-- is for a number that no slot has. A plan over the parent would lock every partition, and so wait for whichever is being
-- truncated; a statement made up at run time would be planned at every call. This way a session plans each slot once and
-- touches one partition.
CREATE FUNCTION {schema}.create_slot_functions(
    p_ring text, p_name text, p_arguments text, p_returns text, p_template text,
    p_otherwise text DEFAULT 'RAISE case_not_found;', p_set boolean DEFAULT false
) RETURNS void
LANGUAGE plpgsql AS $function$
DECLARE
    v_slot smallint;
    v_slots smallint[];
    v_names text;
    v_branches text;
    v_returns text := CASE WHEN p_set THEN 'SETOF ' ELSE '' END || p_returns;
    v_return text := CASE WHEN p_set THEN 'RETURN QUERY SELECT * FROM' ELSE 'RETURN' END;
BEGIN
    SELECT array_agg(s.slot ORDER BY s.slot) INTO v_slots FROM {schema}.ring_slot_numbers(p_ring) AS s (slot);
    FOREACH v_slot IN ARRAY v_slots LOOP
        EXECUTE format('CREATE FUNCTION %I.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L',
            {schema_literal}, p_name || '_' || v_slot, p_arguments, v_returns, replace(p_template, '<slot>', v_slot::text));
    END LOOP;
    SELECT string_agg(split_part(btrim(a, E' \n'), ' ', 1), ', ' ORDER BY n) INTO v_names
    FROM string_to_table(p_arguments, ',') WITH ORDINALITY AS t (a, n);
    SELECT string_agg(format('    WHEN %s THEN %s %I.%I(%s);', s, v_return, {schema_literal}, p_name || '_' || s, v_names), E'\n' ORDER BY s)
    INTO v_branches
    FROM unnest(v_slots) AS s;
    EXECUTE format('CREATE FUNCTION %I.%I(p_slot smallint, %s) RETURNS %s LANGUAGE plpgsql AS %L',
        {schema_literal}, p_name, p_arguments, v_returns, E'BEGIN\n    CASE p_slot\n' || v_branches || E'\n    ELSE ' || p_otherwise || E'\n    END CASE;\nEND');
END
$function$;

CREATE FUNCTION {schema}.ring_slot_numbers(p_ring text) RETURNS SETOF smallint
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    RETURN QUERY EXECUTE format('SELECT s.slot FROM %I.%I AS s', {schema_literal}, p_ring || '_ring_slots');
END
$function$;

-- What a job may have beside its args, in one value; NULL for nearly every job.
CREATE FUNCTION {schema}.job_extras(p_tags text[], p_metadata jsonb, p_errors jsonb[], p_progress jsonb) RETURNS jsonb
LANGUAGE sql STABLE AS $function$
    SELECT CASE WHEN num_nonnulls(p_tags, p_metadata, p_errors, p_progress) > 0 THEN
        jsonb_build_object('tags', p_tags, 'metadata', p_metadata, 'errors', p_errors, 'progress', p_progress)
    END
$function$;

CREATE FUNCTION {schema}.union_of(p_ranges int8multirange[]) RETURNS int8multirange
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    -- Not LANGUAGE sql: what cannot be inlined is parsed again at every call.
    IF cardinality(p_ranges) = 1 THEN
        RETURN p_ranges[1];
    END IF;
    RETURN (SELECT range_agg(r) FROM unnest(p_ranges) AS r);
END
$function$;
