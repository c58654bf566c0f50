"""Asks the real awa 0.5.7 for unique keys: cases as JSON lines in, the same with `key` and `mask` out.

    python unique_keys_057.py postgres://…/empty_or_0.5_database < cases > keys

Needs the Python package awa-pg 0.5.7. A case is {kind, queue, args (JSON as text), by_queue, by_args, bucket, states}.
unique_keys_057.json was recorded by feeding its own cases to this script.
"""

import json
import sys

import awa

client = awa.Client(sys.argv[1])
client.migrate()
for line in sys.stdin:
    case = json.loads(line)
    options = {"by_queue": case["by_queue"], "by_args": case["by_args"]}
    if case["bucket"] is not None:
        options["by_period"] = case["bucket"]
    if case["states"] is not None:
        options["states"] = case["states"]
    with client.transaction() as transaction:
        job = transaction.insert(json.loads(case["args"]), kind=case["kind"], queue=case["queue"], unique_opts=options)
        row = transaction.fetch_one(
            "SELECT encode(unique_key, 'hex') AS key, unique_states::text AS mask FROM awa.jobs WHERE id = $1", job.id
        )
        transaction.execute("DELETE FROM awa.jobs WHERE id = $1", job.id)
    print(json.dumps(case | {"key": row["key"], "mask": row["mask"]}), flush=True)
