-- Unique keys. A job holds its key while its state is in its mask; no two jobs hold one key. Every transition of a job with a
-- key goes through enter_state (or release_unique_keys, where it can only let go).
--
-- No key outlives its use: whatever removes a job removes its claim in the same transaction (a rolled back enqueue, delete,
-- purge_expired). Only the history of completed and cancelled jobs goes with its slot, not the key: so short a memory would
-- let a job that is unique per hour run twice in it. Prune gives such a claim an end (queue_meta.unique_retention); from then
-- on it keeps nobody out, whether or not purge_unique_keys has been by.
--
-- Lock: the unique index. Who wants a key that an open transaction takes or gives up waits for its end: only then is it
-- known whether the holder exists. Those who take several keys take them in their order. Letting go waits for nobody, for
-- a claim is written by transitions of its own job alone.

-- Whether the mask keeps the key in this state. What is kept while running is kept from available on, and what is kept when
-- completed also while running: a claim and a completion never take a key, so that neither can fail for one.
CREATE FUNCTION {schema}.holds_key(p_unique_states bit(8), p_state {schema}.job_state) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    RETURN coalesce(CASE p_state
        WHEN 'scheduled' THEN p_unique_states & B'10000000'
        WHEN 'available' THEN p_unique_states & B'01110000'
        WHEN 'running' THEN p_unique_states & B'00110000'
        WHEN 'completed' THEN p_unique_states & B'00010000'
        WHEN 'retryable' THEN p_unique_states & B'00001000'
        WHEN 'failed' THEN p_unique_states & B'00000100'
        WHEN 'cancelled' THEN p_unique_states & B'00000010'
        WHEN 'waiting_external' THEN p_unique_states & B'00000001'
    END <> B'00000000', false);
END
$function$;

-- Takes or lets go the key as the new state requires. Returns the job that holds it instead; NULL when all is well.
CREATE FUNCTION {schema}.enter_state(
    p_job_id bigint, p_unique_key bytea, p_unique_states bit(8), p_state {schema}.job_state
) RETURNS bigint
LANGUAGE plpgsql AS $function$
BEGIN
    IF NOT {schema}.holds_key(p_unique_states, p_state) THEN
        DELETE FROM {schema}.job_unique_claims AS c WHERE c.unique_key = p_unique_key AND c.job_id = p_job_id;
        RETURN NULL;
    END IF;
    RETURN nullif({schema}.take_unique_key(p_unique_key, p_unique_states, p_job_id), p_job_id);
END
$function$;

-- Takes the key for the job, or says which job holds it.
CREATE FUNCTION {schema}.take_unique_key(p_unique_key bytea, p_unique_states bit(8), p_job_id bigint) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_holder bigint;
    v_held_until timestamptz;
BEGIN
    LOOP
        -- A holder that committed after the snapshot of a REPEATABLE READ caller makes this fail with 40001: to such a caller
        -- nobody can show the job that it would duplicate.
        INSERT INTO {schema}.job_unique_claims AS c (unique_key, job_id, unique_states)
        VALUES (p_unique_key, p_job_id, p_unique_states)
        ON CONFLICT (unique_key) DO NOTHING;
        IF FOUND THEN
            RETURN NULL;
        END IF;
        SELECT c.job_id, c.held_until INTO v_holder, v_held_until
        FROM {schema}.job_unique_claims AS c
        WHERE c.unique_key = p_unique_key;
        IF NOT FOUND THEN
            -- The holder let it go between the two statements: try again.
            CONTINUE;
        ELSIF v_held_until <= clock_timestamp() THEN
            DELETE FROM {schema}.job_unique_claims AS c
            WHERE c.unique_key = p_unique_key AND c.job_id = v_holder AND c.held_until <= clock_timestamp();
        ELSE
            RETURN v_holder;
        END IF;
    END LOOP;
END
$function$;

CREATE FUNCTION {schema}.superseded_by(p_holder bigint) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $function$
BEGIN
    RETURN format('superseded by job %s, which holds its unique key', p_holder);
END
$function$;

-- Forgets expired claims, at most p_limit. Returns how many.
CREATE FUNCTION {schema}.purge_unique_keys(p_limit integer) RETURNS integer
LANGUAGE plpgsql AS $function$
DECLARE
    v_deleted integer;
BEGIN
    DELETE FROM {schema}.job_unique_claims AS c
    WHERE c.unique_key IN (
        SELECT e.unique_key
        FROM {schema}.job_unique_claims AS e
        WHERE e.held_until <= clock_timestamp()
        ORDER BY e.held_until
        LIMIT p_limit
        FOR UPDATE SKIP LOCKED);
    GET DIAGNOSTICS v_deleted = ROW_COUNT;
    RETURN v_deleted;
END
$function$;
