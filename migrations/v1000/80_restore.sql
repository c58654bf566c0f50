-- After pg_restore. pg_dump reads the tables in one snapshot and each sequence when it comes to it, so a dump of a queue that
-- works has sequences ahead of its tables. Numbers to hand out may be ahead; the ring cursors may too (see next_opening).
-- A claim cursor may not: the jobs between would be taken for spent and never be claimed.

-- Where this schema lay when its cursors were last known to fit: the cluster, and the oid of a relation, which no restore
-- gives back.
CREATE TABLE {schema}.schema_homes (
    home     text        NOT NULL,
    since    timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE FUNCTION {schema}.current_home() RETURNS text
LANGUAGE plpgsql STABLE AS $function$
DECLARE
    v_cluster text := '';
BEGIN
    IF has_function_privilege('pg_catalog.pg_control_system()', 'execute') THEN
        SELECT c.system_identifier INTO v_cluster FROM pg_control_system() AS c;
    END IF;
    RETURN v_cluster || '/' || '{schema}.queue_ring_cursor'::regclass::oid;
END
$function$;

INSERT INTO {schema}.schema_homes (home) VALUES ({schema}.current_home());

-- Whether this schema came from elsewhere, and its cursors have not been looked at since.
CREATE FUNCTION {schema}.was_restored() RETURNS boolean
LANGUAGE plpgsql STABLE AS $function$
BEGIN
    RETURN (SELECT h.home FROM {schema}.schema_homes AS h ORDER BY h.since DESC LIMIT 1) IS DISTINCT FROM {schema}.current_home();
END
$function$;

-- Once every lane is looked at.
CREATE FUNCTION {schema}.settle_in() RETURNS void
LANGUAGE plpgsql AS $function$
BEGIN
    INSERT INTO {schema}.schema_homes (home) VALUES ({schema}.current_home());
END
$function$;

-- Takes claim cursors of lanes back to before the first job that nobody claimed. Returns how many lanes that was. For a schema
-- that was_restored, by whoever begins to maintain; for some lanes at a time, as advance_idle_cursors.
CREATE FUNCTION {schema}.fit_cursors_after_restore(p_first integer DEFAULT 0, p_last integer DEFAULT 2147483647) RETURNS integer
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $function$
DECLARE
    v_lane {schema}.queue_lanes;
    v_spent bigint;
    v_first bigint;
    v_emitted int8multirange;
    v_moved integer := 0;
BEGIN
    PERFORM {schema}.refuse_old_snapshot('fit_cursors_after_restore');
    FOR v_lane IN SELECT l.* FROM {schema}.queue_lanes AS l WHERE l.lane_id BETWEEN p_first AND p_last ORDER BY l.lane_id LOOP
        -- Lock: the lane, so that nothing is emitted and the cursor stands still. Waited for: a claim holds it briefly.
        PERFORM pg_advisory_xact_lock('{schema}.queue_lanes'::regclass::oid::integer, v_lane.lane_id);
        v_spent := pg_sequence_last_value(v_lane.spent);
        SELECT coalesce(range_agg(t.lane_ranges), '{}') INTO v_emitted
        FROM (
            SELECT b.lane_ranges FROM {schema}.ready_claim_attempt_batches AS b WHERE b.lane_id = v_lane.lane_id
            UNION ALL
            SELECT h.lane_ranges FROM {schema}.ready_lane_holes AS h WHERE h.lane_id = v_lane.lane_id
        ) AS t;
        SELECT min(e.lane_seq) INTO v_first
        FROM {schema}.ready_entries AS e
        WHERE e.lane_id = v_lane.lane_id AND e.lane_seq <= v_spent AND NOT v_emitted @> e.lane_seq;
        IF v_first IS NOT NULL THEN
            PERFORM setval(v_lane.spent, v_first - 1), setval(v_lane.generation, 0);
            v_moved := v_moved + 1;
        END IF;
    END LOOP;
    RETURN v_moved;
END
$function$;

-- Cursors are read wherever tables are. Without this a role that may SELECT from all tables gets an error from PostgreSQL 15 to
-- 17, and from 18 on NULL, which would count as nothing. They tell no more than pg_stat_all_tables does to everybody.
GRANT SELECT ON ALL SEQUENCES IN SCHEMA {schema} TO PUBLIC;
