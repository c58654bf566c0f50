-- placeholder until the unique branch is merged
CREATE FUNCTION {schema}.enter_state(p_job_id bigint, p_unique_key bytea, p_unique_states bit(8), p_state {schema}.job_state) RETURNS bigint
LANGUAGE plpgsql AS $function$
DECLARE
    v_bit integer := array_position(enum_range(NULL::{schema}.job_state), p_state) - 1;
    v_holder bigint;
BEGIN
    IF get_bit(p_unique_states, v_bit) = 0 THEN
        DELETE FROM {schema}.job_unique_claims AS c WHERE c.unique_key = p_unique_key AND c.job_id = p_job_id;
        RETURN NULL;
    END IF;
    v_holder := {schema}.take_unique_key(p_unique_key, p_unique_states, p_job_id);
    RETURN nullif(v_holder, p_job_id);
END
$function$;
