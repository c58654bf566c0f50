-- Who owns this schema, and in which version.
--
-- awactl_version is ours. schema_version is what awa 0.5.7 and the peer's 0.6/0.7 look at, and
-- it has to hold exactly what 0.5.7 wrote: 0.5.7's own migrate() takes any other highest version
-- for pre-0.4 numbering, deletes every row from 3 on and runs its migrations again (0.6.0 does the
-- same to what is newer than itself). With 11 on top, and a relation queue_state_counts to prove it is not
-- pre-0.4, 0.5.7 finds itself up to date. Newer peers try to add a version 12; the guard stops
-- that statement, and with it the whole batch it is in.

DO $do$
BEGIN
    -- Not CREATE SCHEMA IF NOT EXISTS: that asks for CREATE on the database even when the
    -- schema was made beforehand by somebody who has it.
    IF NOT EXISTS (SELECT FROM pg_namespace WHERE nspname = {schema_literal}) THEN
        CREATE SCHEMA {schema};
    END IF;
END
$do$;

CREATE TABLE {schema}.awactl_version (
    version     integer PRIMARY KEY,
    description text NOT NULL,
    checksum    text NOT NULL,
    awactl      text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now(),
    applied_by  text NOT NULL DEFAULT current_user
);
COMMENT ON TABLE {schema}.awactl_version IS
    'Schema versions applied by awactl. This schema belongs to awactl; change it with awactl migrate only.';

CREATE TABLE IF NOT EXISTS {schema}.schema_version (
    version     integer PRIMARY KEY,
    description text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
INSERT INTO {schema}.schema_version (version, description)
SELECT v, 'kept for awa 0.5.7 clients by awactl'
FROM unnest('{1,2,3,4,5,6,7,9,10,11}'::integer[]) AS v
ON CONFLICT (version) DO NOTHING;

-- Same columns as 0.5.7's table, so that whatever reads it gets an answer.
DO $do$
BEGIN
    IF to_regclass(format('%I.queue_state_counts', {schema_literal}::text)) IS NULL THEN
        CREATE VIEW {schema}.queue_state_counts AS
        SELECT NULL::text AS queue,
               0::bigint AS scheduled, 0::bigint AS available, 0::bigint AS running,
               0::bigint AS completed, 0::bigint AS retryable, 0::bigint AS failed,
               0::bigint AS cancelled, 0::bigint AS waiting_external
        WHERE false;
    END IF;
END
$do$;

CREATE FUNCTION {schema}.schema_version_guard() RETURNS trigger
LANGUAGE plpgsql AS $guard$
BEGIN
    RAISE EXCEPTION 'this schema belongs to awactl: no other migration may run on it'
        USING ERRCODE = 'object_not_in_prerequisite_state',
              HINT = 'Run "awactl migrate status" to see its version, "awactl migrate" to change it.';
END
$guard$;

CREATE TRIGGER schema_version_guard
    BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON {schema}.schema_version
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.schema_version_guard();
