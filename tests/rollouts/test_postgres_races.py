"""What SQLite's one writer hides: another session commits between two statements of a request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import fake_groups as fakes
import psycopg
import pytest

from flowtrain.rollouts.contract import (
    BatchRequest,
    Join,
    LeaseRequest,
    Progress,
    Renewal,
    Unavailable,
)
from flowtrain.rollouts.ledger.sql import connect

_HOLD = """
CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_advisory_lock(42); PERFORM pg_advisory_unlock(42); RETURN NULL; END $$;
CREATE TRIGGER hold AFTER {} FOR EACH STATEMENT EXECUTE FUNCTION hold();
SELECT pg_advisory_lock(42);
"""


@contextmanager
def held(url: str, event: str, request: Callable[[], Any]) -> Iterator[Any]:
    """Ask `request` on a thread and hold its session after `event`, until the block ends."""
    with psycopg.connect(url, autocommit=True) as own, ThreadPoolExecutor(1) as threads:
        own.execute(_HOLD.format(event))
        try:
            asked = threads.submit(request)
            wait_until_blocked(own, asked, "advisory")
            yield own, asked
        finally:
            own.execute("SELECT pg_advisory_unlock_all()")
        asked.result()
        own.execute("DROP FUNCTION hold CASCADE")


def wait_until_blocked(own: Any, asked: Future[Any], event: str = "transactionid") -> None:
    """Wait until a session waits for that kind of lock, or the request is answered."""
    blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = %s"
    while not own.execute(blocked, (event,)).fetchone()[0] and not asked.done():
        time.sleep(0.01)


def test_a_group_that_comes_while_a_batch_is_made_is_not_too_old_for_it(postgres: str) -> None:
    flow = fakes.begun(
        postgres, max_staleness=1, max_waiting=64, trainer=fakes.planner(max_staleness=1)
    )
    late = fakes.lease(flow)[0]
    for step in (1, 2, 3):
        for lease in fakes.lease(flow, 4):
            fakes.push(flow, lease, version=step - 1)
        assert not flow.batch(BatchRequest("planner", step)).num_missing
        flow.progress(Progress("planner", step, step))
    for lease in fakes.lease(flow, 4):
        fakes.push(flow, lease, version=3)
    with held(postgres, "UPDATE ON shares", lambda: flow.batch(BatchRequest("planner", 4))) as (
        _,
        asked,
    ):
        assert fakes.push(flow, late, version=0) == "committed"
    batch = asked.result()
    assert not batch.num_missing and batch.stats["staleness_max"] == 0
    assert flow.audit().problems == ()
    flow.progress(Progress("planner", 4, 4))
    assert flow.batch(BatchRequest("planner", 5)).num_missing == 4, "the late group is stale"


@pytest.mark.parametrize(
    ("request_of", "event"),
    [
        (
            lambda flow: partial(flow.lease, LeaseRequest("n1", "a", 1, sampled={"planner": 9})),
            "INSERT ON sampled",
        ),
        (lambda flow: partial(flow.join, Join("n1", "b")), "UPDATE ON nodes"),
    ],
    ids=["lease", "join"],
)
def test_a_renewal_and_another_request_of_its_node_do_not_wait_in_a_circle(
    postgres: str, request_of: Any, event: str
) -> None:
    flow = fakes.begun(postgres, max_waiting=64)
    (lease,) = flow.lease(LeaseRequest("n1", "a", 1, sampled={"planner": 1})).leases
    renewal = Renewal("n1", "a", ((lease.work_item, 1),), {"planner": 5})
    with ThreadPoolExecutor(1) as threads:
        with held(postgres, event, request_of(flow)) as (own, _):
            renewed = threads.submit(flow.renew, renewal)
            wait_until_blocked(own, renewed)
        assert set(renewed.result().policies) == {"planner"}
    assert flow.audit().problems == ()


def test_a_lease_that_ran_out_a_moment_ago_is_renewed(postgres: str) -> None:
    clock = fakes.Clock()
    flow = fakes.begun(postgres, clock, max_waiting=64)
    fakes.joined(flow, "n2")
    first, second = fakes.lease(flow, 2)
    clock.now += 61
    renewal = Renewal("n1", "a", ((second.work_item, 1),))
    with ThreadPoolExecutor(1) as threads:
        with held(postgres, "UPDATE ON leases", lambda: fakes.lease(flow, node="n2")) as (
            own,
            other,
        ):
            renewed = threads.submit(flow.renew, renewal)
            wait_until_blocked(own, renewed)
        assert [lease.work_item for lease in other.result()] == [first.work_item]
        assert renewed.result().lost == ()
    assert fakes.push(flow, second) == "committed"
    assert flow.audit().problems == ()


def test_a_lease_does_not_wait_for_the_lock_of_batches(postgres: str) -> None:
    flow = fakes.begun(postgres, max_waiting=3, trainer=fakes.planner(num_groups=2))
    fakes.lease(flow)  # others are drawn with it
    with psycopg.connect(postgres) as other, ThreadPoolExecutor(1) as threads:
        other.execute("SELECT * FROM meta FOR UPDATE")
        asked = threads.submit(fakes.lease, flow, 2)
        assert [lease.work_item for lease in asked.result(20)] == [2, 3]
        full = threads.submit(flow.lease, LeaseRequest("n1", "a", 1))
        assert full.result(20).reason == "full"


def test_a_request_for_leases_that_comes_twice_at_once_is_answered_once(postgres: str) -> None:
    flow = fakes.begun(postgres, max_waiting=64)
    with ThreadPoolExecutor(1) as threads:
        with held(postgres, "INSERT ON leases", lambda: fakes.lease(flow, 3, key="k")) as (
            own,
            first,
        ):
            second = threads.submit(fakes.lease, flow, 3, key="k")
            wait_until_blocked(own, second)
        assert first.result() == second.result() and len(first.result()) == 3
    assert flow.status()["work_items"]["leased"] == 3


def cut_connections(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as other:
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
        )


def test_no_lease_runs_out_because_the_database_was_away(postgres: str) -> None:
    clock = fakes.Clock()
    flow = fakes.begun(postgres, clock, max_waiting=64)
    fakes.joined(flow, "n2")
    (held_lease,) = fakes.lease(flow)
    clock.now += 100
    cut_connections(postgres)
    with pytest.raises(Unavailable, match="did not answer"):
        fakes.lease(flow, node="n2")
    (other_lease,) = fakes.lease(flow, node="n2")
    assert other_lease.work_item != held_lease.work_item
    clock.now += 61
    flow.progress(Progress("planner", 0, 0))
    assert {each.work_item for each in fakes.lease(flow, 2, "n2")} >= {held_lease.work_item}


def test_a_transaction_that_was_idle_for_too_long_is_an_outage(postgres: str) -> None:
    """The client reads the server's last words, or finds the connection closed."""
    flow = fakes.ledger(postgres)
    last_words = psycopg.errors.IdleInTransactionSessionTimeout("terminating connection")
    assert isinstance(flow.database._explained(last_words), Unavailable)
    own = "SELECT pg_backend_pid() AS pid"
    with (
        psycopg.connect(postgres, autocommit=True) as other,
        pytest.raises(Unavailable, match="did not answer"),
        flow.database.write() as transaction,
    ):
        transaction.run("SET LOCAL idle_in_transaction_session_timeout = 1")
        pid = transaction.one(own).pid
        there = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        while other.execute(there, (pid,)).fetchone()[0]:
            time.sleep(0.01)
        transaction.one(own)


def test_a_reader_of_the_whole_history_may_take_as_long_as_it_needs(postgres: str) -> None:
    for database, limit in ((connect(postgres), "30s"), (connect(postgres, is_patient=True), "0")):
        with closing(database), database.read() as transaction:
            for name in ("statement_timeout", "idle_in_transaction_session_timeout"):
                assert transaction.one(f"SHOW {name}")[0] == limit


def test_leases_run_out_behind_a_proxy_that_cuts_connections(postgres: str) -> None:
    clock = fakes.Clock()
    flow = fakes.ledger(postgres, clock, max_waiting=64)
    flow.register(fakes.planner())
    fakes.joined(flow)
    fakes.joined(flow, "n2")
    (held_lease,) = fakes.lease(flow)
    taken = []
    for _ in range(8):  # more often than a lease of 60 s lasts
        cut_connections(postgres)
        with pytest.raises(Unavailable, match="did not answer"):
            fakes.lease(flow, node="n2")
        taken += fakes.lease(flow, node="n2")
        clock.now += 20
        flow.progress(Progress("planner", 0, 0))
    assert held_lease.work_item in {each.work_item for each in taken}
