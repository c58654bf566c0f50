-- After a failover that lost something. A standby that was behind goes on from where it was, so numbers that the lost end of the
-- old timeline had handed out are handed out again, and a worker of before could end another job's attempt: same batch, same
-- place, same job, same run_lease. So whoever claims on a new timeline first takes the sequences past all that the old one can have used.

CREATE TABLE {schema}.schema_timelines (
    timeline text        PRIMARY KEY,
    since    timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- The server's timeline; NULL where it does not tell.
CREATE FUNCTION {schema}.current_timeline() RETURNS text
LANGUAGE plpgsql AS $function$
BEGIN
    RETURN left(pg_walfile_name(pg_current_wal_lsn()), 8);
EXCEPTION WHEN feature_not_supported OR object_not_in_prerequisite_state OR insufficient_privilege THEN
    RETURN NULL;
END
$function$;

INSERT INTO {schema}.schema_timelines (timeline)
SELECT t FROM {schema}.current_timeline() AS t WHERE t IS NOT NULL;

-- To be called on every new connection that will claim. True when it was the first on this timeline.
CREATE FUNCTION {schema}.enter_timeline() RETURNS boolean
LANGUAGE plpgsql AS $function$
DECLARE
    c_gap constant bigint := 1000000;
    v_timeline text := {schema}.current_timeline();
BEGIN
    IF v_timeline IS NULL OR EXISTS (SELECT FROM {schema}.schema_timelines AS t WHERE t.timeline = v_timeline) THEN
        RETURN false;
    END IF;
    -- Lock: the timeline's row. Whoever comes second waits until the gap is there.
    INSERT INTO {schema}.schema_timelines (timeline) VALUES (v_timeline) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM setval('{schema}.lease_claim_batch_ids'::regclass, nextval('{schema}.lease_claim_batch_ids'::regclass) + c_gap),
            setval('{schema}.jobs_id_seq'::regclass, nextval('{schema}.jobs_id_seq'::regclass) + c_gap);
    RETURN true;
END
$function$;
