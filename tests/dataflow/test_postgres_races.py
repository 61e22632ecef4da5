"""What SQLite's one writer hides: another session commits between two statements of a request."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import fake_groups as fakes
import psycopg

from flowtrain.dataflow.contract import BatchRequest, Progress

_HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_lock(42); PERFORM pg_advisory_unlock(42); RETURN NULL; END $$;
CREATE TRIGGER hold AFTER UPDATE ON shares FOR EACH STATEMENT EXECUTE FUNCTION hold();
"""
"""Holds who has marked shares until the test gives its lock up."""


def test_a_group_that_comes_while_a_batch_is_made_is_not_too_old_for_it(postgres: str) -> None:
    flow = fakes.ledger(postgres, max_staleness=1, max_waiting=64)
    fakes.joined(flow)
    flow.register(fakes.planner(max_staleness=1))
    late = fakes.lease(flow)[0]
    for step in (1, 2, 3):
        for lease in fakes.lease(flow, 4):
            fakes.push(flow, lease, version=step - 1)
        assert not flow.batch(BatchRequest("planner", step)).num_missing
        flow.progress(Progress("planner", step, step))
    for lease in fakes.lease(flow, 4):
        fakes.push(flow, lease, version=3)
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory'"
    with psycopg.connect(postgres, autocommit=True) as own, ThreadPoolExecutor(1) as threads:
        own.execute(_HOLD)
        own.execute("SELECT pg_advisory_lock(42)")
        asked = threads.submit(flow.batch, BatchRequest("planner", 4))
        while not own.execute(waits).fetchone()[0]:  # type: ignore[index]
            time.sleep(0.01)
        assert fakes.push(flow, late, version=0) == "committed"
        own.execute("SELECT pg_advisory_unlock(42)")
        batch = asked.result()
        own.execute("DROP TRIGGER hold ON shares")
    assert not batch.num_missing and batch.stats["staleness_max"] == 0
    assert flow.audit().problems == ()
    flow.progress(Progress("planner", 4, 4))
    assert flow.batch(BatchRequest("planner", 5)).num_missing == 4, "the late group is stale"
