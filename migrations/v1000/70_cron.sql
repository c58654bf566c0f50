-- Cron: jobs that come due by a schedule, in a time zone.
--
-- SQL keeps the cursor and the clock; what an expression means, daylight saving included, is the leader's to compute
-- (engine/cron/schedule.rs). The leader is told what is due by the database's clock (I7), and hands back the occurrence to
-- fire together with the revision it computed it from. These rows are written once an occurrence, never by a job's way
-- through the rings (I5).

-- The first thirteen columns are 0.5's, with their meaning: last_enqueued_at is the due time of the last occurrence fired.
CREATE TABLE {schema}.cron_jobs (
    name             text PRIMARY KEY,
    cron_expr        text        NOT NULL,
    timezone         text        NOT NULL DEFAULT 'UTC',
    kind             text        NOT NULL,
    queue            text        NOT NULL DEFAULT 'default',
    args             jsonb       NOT NULL DEFAULT '{}',
    priority         smallint    NOT NULL DEFAULT 2,
    max_attempts     smallint    NOT NULL DEFAULT 25,
    tags             text[]      NOT NULL DEFAULT '{}',
    metadata         jsonb       NOT NULL DEFAULT '{}',
    last_enqueued_at timestamptz,
    created_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    updated_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    paused           boolean     NOT NULL DEFAULT false,
    -- Every occurrence up to here is dealt with: the progress that outlives a leader.
    cursor_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The first occurrence after cursor_at; NULL until a leader has computed it, infinity when there is none.
    next_due_at      timestamptz,
    last_fired_at    timestamptz,
    last_job_id      bigint,
    -- Occurrences that made no job: coalesced into a later one, or refused.
    missed_count     bigint      NOT NULL DEFAULT 0,
    last_error       text,
    last_error_at    timestamptz,
    -- What a leader computed from; any change makes it another one.
    revision         bigint      NOT NULL DEFAULT 0
);

-- By trigger and not by the functions below, because 0.5 clients and people write into this table directly.
CREATE FUNCTION {schema}.revise_cron_job() RETURNS trigger
LANGUAGE plpgsql AS $function$
BEGIN
    NEW.revision := OLD.revision + 1;
    -- Another schedule begins now, and what came due while paused was not missed.
    IF (NEW.cron_expr, NEW.timezone) IS DISTINCT FROM (OLD.cron_expr, OLD.timezone) OR (OLD.paused AND NOT NEW.paused) THEN
        NEW.cursor_at := clock_timestamp();
        NEW.next_due_at := NULL;
    END IF;
    IF (NEW.cron_expr, NEW.timezone, NEW.kind, NEW.queue, NEW.args, NEW.priority, NEW.max_attempts, NEW.tags, NEW.metadata)
        IS DISTINCT FROM
       (OLD.cron_expr, OLD.timezone, OLD.kind, OLD.queue, OLD.args, OLD.priority, OLD.max_attempts, OLD.tags, OLD.metadata) THEN
        NEW.updated_at := clock_timestamp();
        NEW.last_error := NULL;
        NEW.last_error_at := NULL;
    END IF;
    RETURN NEW;
END
$function$;

CREATE TRIGGER revise_cron_job BEFORE UPDATE ON {schema}.cron_jobs
    FOR EACH ROW EXECUTE FUNCTION {schema}.revise_cron_job();

-- Adds a cron job, or changes the one of that name. Says 'added', 'changed', 'unchanged', or 'exists' when it differs and
-- may not be replaced. Unchanged writes nothing, so that every worker may apply its configuration at each start.
CREATE FUNCTION {schema}.put_cron_job(
    p_name text, p_cron_expr text, p_timezone text, p_kind text, p_queue text, p_args jsonb, p_priority integer,
    p_max_attempts integer, p_tags text[], p_metadata jsonb, p_replace boolean
) RETURNS text
LANGUAGE plpgsql AS $function$
DECLARE
    v_old {schema}.cron_jobs;
BEGIN
    IF p_name IS NULL OR length(p_name) NOT BETWEEN 1 AND 200 THEN
        RAISE EXCEPTION 'name must have 1 to 200 characters, not %', coalesce(length(p_name)::text, 'null')
            USING ERRCODE = 'check_violation', COLUMN = 'name';
    END IF;
    PERFORM {schema}.check_job(p_kind, p_queue, p_args, p_priority, p_max_attempts, p_tags, p_metadata, NULL);
    LOOP
        INSERT INTO {schema}.cron_jobs (
            name, cron_expr, timezone, kind, queue, args, priority, max_attempts, tags, metadata)
        VALUES (
            p_name, p_cron_expr, p_timezone, p_kind, p_queue, p_args, p_priority, p_max_attempts, coalesce(p_tags, '{}'),
            coalesce(p_metadata, '{}'))
        ON CONFLICT (name) DO NOTHING;
        IF FOUND THEN
            RETURN 'added';
        END IF;
        -- Lock: the row, so that of two that change it the second compares with what the first wrote.
        SELECT c.* INTO v_old FROM {schema}.cron_jobs AS c WHERE c.name = p_name FOR UPDATE;
        EXIT WHEN FOUND;
        -- It was removed between the two statements: try again.
    END LOOP;
    IF (v_old.cron_expr, v_old.timezone, v_old.kind, v_old.queue, v_old.args, v_old.priority, v_old.max_attempts,
        v_old.tags, v_old.metadata)
        IS NOT DISTINCT FROM
       (p_cron_expr, p_timezone, p_kind, p_queue, p_args, p_priority, p_max_attempts, coalesce(p_tags, '{}'),
        coalesce(p_metadata, '{}')) THEN
        RETURN 'unchanged';
    ELSIF NOT p_replace THEN
        RETURN 'exists';
    END IF;
    UPDATE {schema}.cron_jobs AS c
    SET cron_expr = p_cron_expr, timezone = p_timezone, kind = p_kind, queue = p_queue, args = p_args,
        priority = p_priority, max_attempts = p_max_attempts, tags = coalesce(p_tags, '{}'),
        metadata = coalesce(p_metadata, '{}')
    WHERE c.name = p_name;
    RETURN 'changed';
END
$function$;

-- What a leader has to look at: due by the database's clock, or without a next occurrence yet. Read, not locked: whoever
-- fires checks again. after_at counts what a 0.5 leader fired on the same table.
CREATE FUNCTION {schema}.due_cron_jobs(p_limit integer)
RETURNS TABLE (name text, cron_expr text, timezone text, revision bigint, after_at timestamptz, now_at timestamptz)
LANGUAGE plpgsql AS $function$
BEGIN
    RETURN QUERY
        SELECT c.name, c.cron_expr, c.timezone, c.revision, greatest(c.cursor_at, c.last_enqueued_at), clock_timestamp()
        FROM {schema}.cron_jobs AS c
        WHERE NOT c.paused AND (c.next_due_at IS NULL OR c.next_due_at <= clock_timestamp())
        ORDER BY c.next_due_at NULLS FIRST, c.name
        LIMIT p_limit;
END
$function$;

CREATE FUNCTION {schema}.enqueue_cron_job(p_job {schema}.cron_jobs, p_due_at timestamptz, p_more jsonb) RETURNS bigint
LANGUAGE plpgsql AS $function$
BEGIN
    -- The two keys are those of 0.5, written as it does, so that handlers go on reading them.
    RETURN (
        SELECT e.job_id
        FROM {schema}.enqueue(
            kind => p_job.kind, queue => p_job.queue, args => p_job.args, priority => p_job.priority,
            max_attempts => p_job.max_attempts, tags => nullif(p_job.tags, '{}'),
            metadata => p_job.metadata || p_more
                || jsonb_build_object(
                    'cron_name', p_job.name,
                    'cron_fire_time', to_char(p_due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') || '+00')) AS e);
END
$function$;

-- Moves the cursor to p_through, counting p_missed occurrences, and fires the one at p_through if p_fire; all in one
-- transaction, so that a leader that dies on the way has done nothing. Refuses whoever computed from another revision.
CREATE FUNCTION {schema}.fire_cron(
    p_name text, p_revision bigint, p_through timestamptz, p_fire boolean, p_missed bigint, p_next_due_at timestamptz
) RETURNS TABLE (outcome text, job_id bigint, error text)
LANGUAGE plpgsql AS $function$
DECLARE
    v_job {schema}.cron_jobs;
BEGIN
    -- Lock: the row, so that one of any leaders, editors and pausers goes first. Not waited for: a leader that hangs here
    -- with its transaction open must not stop another one's maintenance.
    SELECT c.* INTO v_job FROM {schema}.cron_jobs AS c WHERE c.name = p_name FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        outcome := CASE WHEN EXISTS (SELECT FROM {schema}.cron_jobs AS c WHERE c.name = p_name)
            THEN 'busy' ELSE 'gone' END;
        RETURN NEXT;
        RETURN;
    END IF;
    -- Proof: nobody fired, edited, paused or resumed it since the caller read it.
    IF v_job.revision <> p_revision THEN
        outcome := 'lost';
        RETURN NEXT;
        RETURN;
    ELSIF v_job.paused THEN
        outcome := 'paused';
        RETURN NEXT;
        RETURN;
    ELSIF p_through > clock_timestamp() THEN
        outcome := 'early';
        RETURN NEXT;
        RETURN;
    END IF;

    IF NOT p_fire THEN
        UPDATE {schema}.cron_jobs AS c
        SET cursor_at = p_through, next_due_at = p_next_due_at, missed_count = c.missed_count + p_missed
        WHERE c.name = p_name;
        outcome := 'moved';
        RETURN NEXT;
        RETURN;
    END IF;

    BEGIN
        job_id := {schema}.enqueue_cron_job(v_job, p_through, '{}');
    EXCEPTION WHEN integrity_constraint_violation OR data_exception OR program_limit_exceeded THEN
        -- It would be refused again: the occurrence is given up, and said. Whatever may pass (a lost lock, a full disk)
        -- is not caught, and leaves the occurrence due.
        error := sqlerrm;
    END;
    UPDATE {schema}.cron_jobs AS c
    SET cursor_at = p_through, next_due_at = p_next_due_at,
        missed_count = c.missed_count + p_missed + CASE WHEN error IS NULL THEN 0 ELSE 1 END,
        last_enqueued_at = CASE WHEN error IS NULL THEN p_through ELSE c.last_enqueued_at END,
        last_fired_at = CASE WHEN error IS NULL THEN clock_timestamp() ELSE c.last_fired_at END,
        last_job_id = CASE WHEN error IS NULL THEN fire_cron.job_id ELSE c.last_job_id END,
        last_error = error,
        last_error_at = CASE WHEN error IS NULL THEN NULL ELSE clock_timestamp() END
    WHERE c.name = p_name;
    outcome := CASE WHEN error IS NULL THEN 'fired' ELSE 'refused' END;
    RETURN NEXT;
END
$function$;

-- Notes why it could not be fired. Its occurrences stay due; it is looked at again after p_retry_in.
CREATE FUNCTION {schema}.note_cron_error(p_name text, p_revision bigint, p_error text, p_retry_in interval) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
    UPDATE {schema}.cron_jobs AS c
    SET last_error = p_error, last_error_at = clock_timestamp(), next_due_at = clock_timestamp() + p_retry_in
    WHERE c.name = p_name AND c.revision = p_revision;
    RETURN FOUND;
END
$function$;

-- Fires it now, paused or not; its schedule does not move. NULL when there is none of that name.
CREATE FUNCTION {schema}.trigger_cron(p_name text) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_job {schema}.cron_jobs;
BEGIN
    SELECT c.* INTO v_job FROM {schema}.cron_jobs AS c WHERE c.name = p_name;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN {schema}.enqueue_cron_job(v_job, clock_timestamp(), '{"cron_triggered": true}');
END
$function$;

-- NULL when there is none of that name; false when it already was so.
CREATE FUNCTION {schema}.pause_cron(p_name text, p_paused boolean) RETURNS boolean
LANGUAGE plpgsql AS $function$
BEGIN
    -- Lock: the row's, by the write. Waits for a leader that is firing, so that nothing is fired after this has committed.
    UPDATE {schema}.cron_jobs AS c SET paused = p_paused WHERE c.name = p_name AND c.paused <> p_paused;
    IF FOUND THEN
        RETURN true;
    END IF;
    RETURN (SELECT false FROM {schema}.cron_jobs AS c WHERE c.name = p_name);
END
$function$;
