"""Payloads of groups in an object store: nothing committed is lost, nothing that was not stays."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_groups import Clock, group, joined, lease, ledger, planner, push

from flowtrain.dataflow.__main__ import main
from flowtrain.dataflow.codec import pack_group, unpack_group
from flowtrain.dataflow.contract import (
    BatchRequest,
    Join,
    Progress,
    Push,
    Refused,
    StoredPayload,
    Unavailable,
)
from flowtrain.dataflow.ledger import Ledger, audit_database
from flowtrain.dataflow.ledger.garbage import PUSH_S
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.net.objects import Folder, open_objects
from flowtrain.types import UserError
from tests.s3_server import ENVIRONMENT, s3_server


class Place:
    """A ledger with its payloads in a store, and what is in the store."""

    def __init__(self, database: str, url: str, clock: Clock | None = None) -> None:
        self.database, self.url, self.clock = database, url, clock
        self.flow = self.opened()
        joined(self.flow)
        self.flow.register(planner(num_groups=2, max_staleness=100))
        self.store = PayloadStore(url, self.flow.run)

    def opened(self) -> Ledger:
        return ledger(self.database, self.clock, payloads=self.url)

    def keys(self) -> set[str]:
        return {each.key for each in open_objects(self.url).list()}

    def collect(self) -> int:
        assert self.flow.collector is not None
        return self.flow.collector.collect()

    def payloads(self, step: int) -> list[bytes]:
        batch = self.flow.batch(BatchRequest("planner", step))
        assert not batch.num_missing and all(each.stored for each in batch.groups)
        return [each.payload for each in self.store.filled(batch).groups]


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[Place]:
    made = Place(database, str(tmp_path / "store"))
    yield made
    made.flow.close()


def check(place: Place) -> None:
    assert audit_database(place.database, place.url).problems == ()


def test_a_batch_names_what_the_service_has_put_into_the_store(place: Place) -> None:
    first, second = lease(place.flow, 2)
    assert push(place.flow, first) == "committed"
    assert [push(place.flow, second) for _ in range(2)] == ["committed", "duplicate"]
    assert len(place.keys()) == 3 and place.collect() == 1, "that of the duplicate"
    assert len(place.keys()) == 2
    tasks = [unpack_group(payload).trajectories[0].task for payload in place.payloads(1)]
    assert tasks == [first.task, second.task]
    assert (
        sum(len(each.payload) for each in place.flow.batch(BatchRequest("planner", 1)).groups) == 0
    )
    check(place)


def test_payloads_leave_the_store_when_no_checkpoint_needs_them(place: Place) -> None:
    leases = lease(place.flow, 4)
    for each in leases:
        push(place.flow, each)
    place.payloads(1)
    place.flow.progress(Progress("planner", 1, 0))
    assert place.collect() == 0
    place.payloads(2)
    place.flow.progress(Progress("planner", 2, 1))
    assert len(place.keys()) == 4, "deleted by the collector alone"
    assert place.collect() == 2
    numbers = {key.partition("/")[2].partition("-")[0] for key in sorted(place.keys())}
    assert numbers == {str(each.work_item) for each in leases[2:]}
    assert len(place.payloads(2)) == 2
    check(place)


def test_groups_that_nobody_trains_leave_nothing_in_the_store(
    database: str, tmp_path: Path
) -> None:
    flow = ledger(database, payloads=str(tmp_path / "store"), group_filter="mixed")
    joined(flow)
    flow.register(planner())
    push(flow, lease(flow)[0], rewards=(0.0,))
    assert flow.collector is not None and flow.collector.collect() == 1
    assert not list(open_objects(str(tmp_path / "store")).list())
    flow.close()


def test_other_bytes_than_those_that_were_pushed_are_found(place: Place, tmp_path: Path) -> None:
    for each in lease(place.flow, 2):
        push(place.flow, each)
    key = min(place.keys())
    (tmp_path / "store" / key).write_bytes(b"x" * (tmp_path / "store" / key).stat().st_size)
    with pytest.raises(Refused, match="holds other bytes than those that were pushed"):
        place.payloads(1)
    problems = audit_database(place.database, place.url).problems
    assert len(problems) == 1 and problems[0].endswith(
        "holds other bytes than those that were pushed (1)"
    )
    (tmp_path / "store" / key).unlink()
    assert "is not there (1)" in audit_database(place.database, place.url).problems[0]


def test_the_object_of_a_push_that_was_cut_off_goes_when_no_push_can_be_that_old(
    database: str, tmp_path: Path
) -> None:
    clock = Clock()
    place = Place(database, str(tmp_path / "store"), clock)
    first, second = lease(place.flow, 2)
    push(place.flow, first)
    kept = place.keys()

    def cut_off(self: PayloadStore, key: str, payload: bytes) -> StoredPayload:
        put(self, key, payload)
        raise Unavailable("cut off")

    put, PayloadStore.put = PayloadStore.put, cut_off  # type: ignore[method-assign]
    try:
        with pytest.raises(Unavailable, match="cut off"):
            push(place.flow, second)
    finally:
        PayloadStore.put = put  # type: ignore[method-assign]
    assert place.collect() == 0 and len(place.keys()) == 2, "its push may be under way"
    clock.now += PUSH_S + 1
    assert place.collect() == 1 and place.keys() == kept
    place.flow.close()


def test_a_push_that_waited_for_too_long_is_not_committed_without_its_object(
    database: str, tmp_path: Path
) -> None:
    clock = Clock()
    place = Place(database, str(tmp_path / "store"), clock)
    (each,) = lease(place.flow)

    def late(self: PayloadStore, key: str, payload: bytes) -> StoredPayload:
        stored = put(self, key, payload)
        clock.now += PUSH_S + 1
        assert place.collect() == 1
        return stored

    put, PayloadStore.put = PayloadStore.put, late  # type: ignore[method-assign]
    try:
        with pytest.raises(Unavailable, match="push again"):
            push(place.flow, each)
    finally:
        PayloadStore.put = put  # type: ignore[method-assign]
    assert push(place.flow, each) == "committed"
    check(place)
    place.flow.close()


def test_nodes_and_trainers_hear_where_the_store_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flow = ledger("l.db", payloads="store")
    there = str(tmp_path / "store")
    assert f'payloads = "{there}"' in flow.join(Join("n1", "a")).config
    assert flow.register(planner()).payloads == there
    flow.close()


def test_what_waits_in_a_store_needs_the_store(place: Place) -> None:
    push(place.flow, lease(place.flow)[0])
    with pytest.raises(UserError, match="are in an object store, such as"):
        ledger(place.database)


def test_the_same_on_a_server_with_s3s_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("groups") as address:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        place = Place(str(tmp_path / "l.db"), "s3://groups/mine")
        for each in lease(place.flow, 2):
            push(place.flow, each)
        assert len(place.payloads(1)) == 2 and len(place.keys()) == 2
        place.flow.progress(Progress("planner", 1, 0))
        place.flow.close()
        check(place)
        assert main(["audit", "--database", place.database, "--payloads", place.url]) == 0
        place.flow = place.opened()
        place.flow.progress(Progress("planner", 1, 1))
        assert place.collect() == 2 and place.keys() == set()
        place.flow.close()


# ---- kill -9


def _life(place: Callable[[], Ledger], num_left: int) -> None:
    """Push, train, report and collect until this process kills itself at one of its requests of the
    database or the store.
    """
    left = iter(range(num_left))

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            found = method(*arguments)
            if next(left, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return run

    for kind, names in ((Transaction, ("run", "many")), (Folder, ("put", "delete"))):
        for name in names:
            setattr(kind, name, counted(getattr(kind, name)))
    flow = place()
    life = str(os.getpid())
    joined(flow, life=life)
    store = PayloadStore(flow.config.dataflow.payloads, flow.run)
    flow.register(planner(num_groups=2, max_staleness=100, step=_steps(flow)[1]))
    for number in range(1000):
        for each in lease(flow, 2, life=life, key=f"{life}-{number}"):
            payload = pack_group(group(each.task))
            flow.push(Push("n1", each.work_item, each.attempt, payload))
        version, checkpoint = _steps(flow)
        batch = flow.batch(BatchRequest("planner", version + 1))
        if not batch.num_missing:
            store.filled(batch)
            flow.progress(Progress("planner", version + 1, max(checkpoint, version)))
        assert flow.collector is not None
        flow.collector.collect()


def _steps(flow: Ledger) -> tuple[int, int]:
    """(version, checkpoint) of the planner."""
    with flow.database.read() as transaction:
        row = transaction.one("SELECT version, checkpoint FROM policies")
    return (row.version, row.checkpoint) if row else (0, 0)


def test_kills_between_object_and_commit_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    database, url, rng = str(tmp_path / "l.db"), str(tmp_path / "store"), random.Random(1)
    opened = partial(ledger, database, payloads=url, max_attempts=1000)
    for _ in range(15):
        pid = os.fork()
        if pid == 0:
            try:
                _life(opened, rng.randrange(100, 700))
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        assert audit_database(database, url).problems == (), "every group that is needed is there"
    flow = opened()
    with flow.database.read() as transaction:
        kept = {row.key for row in transaction.all("SELECT key FROM payloads")}
        num_groups = transaction.one("SELECT count(*) AS num FROM groups").num
    stored = {each.key for each in open_objects(url).list()}
    assert kept < stored and num_groups > len(kept), "the kills have left orphans"
    flow.close()
    later = Clock()
    later.now = time.time() + PUSH_S + 60
    flow = ledger(database, later, payloads=url, max_attempts=1000)
    assert flow.collector is not None and flow.collector.collect() > 0
    assert {each.key for each in open_objects(url).list()} == kept
    assert flow.audit().problems == ()
    flow.close()


def test_a_store_that_is_silent_is_asked_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = lease(place.flow)

    def full(self: Folder, key: str, data: bytes) -> None:
        with self._explained(key):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(Folder, "put", full)
    with pytest.raises(Unavailable, match="No space left on device"):
        push(place.flow, each)
    monkeypatch.undo()
    assert push(place.flow, each) == "committed"
