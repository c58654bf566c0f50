-- What `bench ceiling` writes and reads: the rows of ready_entries with their index, without a queue around them.
DROP TABLE IF EXISTS {schema}.bench_ceiling_rows, {schema}.bench_ceiling_batches;
CREATE TABLE {schema}.bench_ceiling_rows (LIKE {schema}.ready_entries INCLUDING INDEXES) WITH (autovacuum_enabled = off);
CREATE TABLE {schema}.bench_ceiling_batches (lane_lo bigint NOT NULL, lane_hi bigint NOT NULL, job_count integer NOT NULL);
