-- A schema that a bench made: only such a one is filled again without being named.
COMMENT ON SCHEMA {schema} IS 'made by awactl bench';
