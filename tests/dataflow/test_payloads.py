"""Payloads of groups in an object store: nothing committed is lost, nothing that was not stays."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
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
    Lease,
    Progress,
    Push,
    Refused,
    StoredPayload,
    Unavailable,
)
from flowtrain.dataflow.ledger import Ledger, audit_database
from flowtrain.dataflow.ledger.sql import Transaction
from flowtrain.dataflow.payloads import PayloadStore
from flowtrain.net.objects import Folder, open_objects
from flowtrain.node.membership import Membership
from flowtrain.types import UserError
from tests.s3_server import ENVIRONMENT, s3_server

OLD_S = 10_000.0


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

    def uploaded(self, each: Lease, **kind: Any) -> Push:
        """A push of a payload that the node has put into the store."""
        stored = self.store.put(each.work_item, each.attempt, pack_group(group(each.task, **kind)))
        return Push("n1", each.work_item, each.attempt, b"", stored)

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


def test_a_batch_names_what_service_and_node_have_put_into_the_store(place: Place) -> None:
    first, second = lease(place.flow, 2)
    assert push(place.flow, first) == "committed"
    request = place.uploaded(second)
    assert [place.flow.push(request).status for _ in range(2)] == ["committed", "duplicate"]
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
    assert place.flow.collector is not None and place.flow.collector.collect() == 0
    place.payloads(2)
    place.flow.progress(Progress("planner", 2, 1))
    assert len(place.keys()) == 4, "deleted by the collector alone"
    assert place.flow.collector.collect() == 2
    assert {place.store.owner(key) for key in sorted(place.keys())} == {
        (each.work_item, 1) for each in leases[2:]
    }
    assert len(place.payloads(2)) == 2
    check(place)


def test_the_loser_of_two_uploads_is_deleted_and_the_winner_stays(place: Place) -> None:
    (each,) = lease(place.flow)
    first, second = place.uploaded(each), place.uploaded(each)
    answers = [place.flow.push(request).status for request in (first, second, first)]
    assert answers == ["committed", "duplicate", "duplicate"]
    assert place.flow.collector is not None and place.flow.collector.collect() == 1
    assert first.stored is not None and place.keys() == {first.stored.key}
    check(place)


def test_groups_that_nobody_trains_leave_nothing_in_the_store(
    database: str, tmp_path: Path
) -> None:
    flow = ledger(database, payloads=str(tmp_path / "store"), group_filter="mixed")
    joined(flow)
    flow.register(planner())
    first, second = lease(flow, 2)
    place = PayloadStore(str(tmp_path / "store"), flow.run)
    stored = place.put(first.work_item, 1, pack_group(group(first.task, rewards=(1.0,))))
    request = Push("n1", first.work_item, 1, b"", stored)
    assert flow.push(request).status == "committed"
    push(flow, second, rewards=(0.0,))
    assert flow.collector is not None and flow.collector.collect() == 2
    assert not list(open_objects(str(tmp_path / "store")).list())
    assert flow.push(request).status == "duplicate", "a push that comes again after the deletion"
    flow.close()


def test_the_service_believes_nobody(place: Place, tmp_path: Path) -> None:
    first, second = lease(place.flow, 2)
    good = place.uploaded(first)
    assert good.stored is not None
    other = place.uploaded(second).stored
    data = b"x" * good.stored.num_bytes
    for stored, problem in (
        (replace(good.stored, sha256=hashlib.sha256(data).hexdigest()), "holds other bytes"),
        (replace(good.stored, num_bytes=good.stored.num_bytes + 1), "holds other bytes"),
        (other, "is no key of this run, work item and attempt"),
        (StoredPayload("../../etc/passwd", 1, ""), "is no key of this run"),
        (StoredPayload(f"{'0' * 32}/1-1-{'0' * 32}", 1, ""), "is no key of this run"),
        (StoredPayload(f"{place.flow.run}/1-1-{'0' * 32}", 1, ""), "is not there"),
    ):
        with pytest.raises(Refused, match=problem):
            place.flow.push(replace(good, stored=stored))
    junk = place.store.put(1, 1, b"junk")
    with pytest.raises(Refused, match="malformed group"):
        place.flow.push(replace(good, stored=junk))
    with pytest.raises(Refused, match="was not leased to 'n2'"):
        place.flow.push(replace(good, node="n2"))
    assert place.flow.push(good).status == "committed"
    place.flow.push(place.uploaded(second))
    (tmp_path / "store" / good.stored.key).write_bytes(data)
    with pytest.raises(Refused, match="holds other bytes than those that were pushed"):
        place.payloads(1)
    problems = audit_database(place.database, place.url).problems
    assert len(problems) == 1 and problems[0].endswith(
        "holds other bytes than those that were pushed (1)"
    )
    (tmp_path / "store" / good.stored.key).unlink()
    assert "is not there (1)" in audit_database(place.database, place.url).problems[0]


def test_orphans_are_swept_when_they_are_old(place: Place) -> None:
    first, second = lease(place.flow, 2)
    committed, orphan = place.uploaded(first), place.uploaded(second)
    place.flow.push(committed)
    assert committed.stored is not None and orphan.stored is not None
    root = Path(place.url)
    (root / f"{place.flow.run}/.1-1-{'0' * 32}.01234567").write_bytes(b"a put that was killed")
    others = ("mine.txt", "other-run/1-1-" + "0" * 32, f"{place.flow.run}/mine.txt")
    for name in others:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"not ours")
    collector = place.flow.collector
    assert collector is not None and (collector.sweep(OLD_S), collector.collect()) == (0, 0)
    for path in root.rglob("*"):
        os.utime(path, (0, 0))
    assert (collector.sweep(OLD_S), collector.sweep(OLD_S), collector.collect()) == (2, 0, 2)
    assert place.keys() == {committed.stored.key, *others}
    with pytest.raises(Refused, match="is not there"):
        place.flow.push(orphan)
    check(place)


def test_a_push_that_was_checked_before_the_sweep_is_not_committed_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (each,) = lease(place.flow)
    request = place.uploaded(each)
    get = PayloadStore.get

    def swept(self: PayloadStore, stored: StoredPayload) -> bytes:
        data = get(self, stored)
        os.utime(Path(place.url) / stored.key, (0, 0))
        assert place.flow.collector is not None
        assert (place.flow.collector.sweep(OLD_S), place.flow.collector.collect()) == (1, 1)
        return data

    monkeypatch.setattr(PayloadStore, "get", swept)
    with pytest.raises(Refused, match="has been deleted"):
        place.flow.push(request)
    monkeypatch.undo()
    assert place.flow.push(place.uploaded(each)).status == "committed"
    check(place)


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


def test_a_service_without_a_store_takes_no_keys(database: str, tmp_path: Path) -> None:
    flow = ledger(database)
    joined(flow)
    flow.register(planner())
    (each,) = lease(flow)
    stored = PayloadStore(str(tmp_path), flow.run).put(each.work_item, 1, b"x")
    with pytest.raises(Refused, match="this service has no object store"):
        flow.push(Push("n1", each.work_item, 1, b"", stored))
    flow.close()


@pytest.mark.parametrize("has_rights", [True, False])
def test_a_node_that_cannot_upload_pushes_through_the_service(
    tmp_path: Path, has_rights: bool, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(str(tmp_path / "l.db"), str(tmp_path / "store"))
    if not has_rights:
        (tmp_path / "file").write_text("")
    url = place.url if has_rights else str(tmp_path / "file")
    request = Join("n1", "a")
    member = Membership(place.flow, request, place.flow.join(request), url)
    seen: list[Push] = []
    push_to, place.flow.push = place.flow.push, lambda push: seen.append(push) or push_to(push)  # type: ignore[func-returns-value]
    (each,) = lease(place.flow)
    assert member._push(Push("n1", each.work_item, 1, pack_group(group(each.task)))).status == (
        "committed"
    )
    assert (seen[0].stored is not None) == has_rights == (not seen[0].payload)
    assert ("goes through the service" in caplog.text) != has_rights
    assert len(place.keys()) == 1
    member.close()
    place.flow.close()


def test_the_same_on_a_server_with_s3s_protocol(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with s3_server("groups") as address:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": address}).items():
            monkeypatch.setenv(name, value)
        place = Place(str(tmp_path / "l.db"), "s3://groups/mine")
        first, second, third = lease(place.flow, 3)
        push(place.flow, first)
        place.flow.push(place.uploaded(second))
        orphan = place.uploaded(third)
        assert len(place.payloads(1)) == 2 and len(place.keys()) == 3
        place.flow.progress(Progress("planner", 1, 0))
        place.flow.close()
        check(place)
        arguments = ["--database", place.database, "--payloads", place.url]
        time.sleep(1.1)  # S3 has times of whole seconds; what is younger stays
        assert main(["gc", *arguments, "--older-than", "0.1"]) == 0
        assert "1 orphans found, 1 objects deleted" in capsys.readouterr().out
        assert orphan.stored is not None
        assert len(place.keys()) == 2
        assert main(["audit", *arguments]) == 0
        place.flow = place.opened()
        place.flow.progress(Progress("planner", 1, 1))
        place.flow.close()
        assert main(["gc", *arguments]) == 0 and place.keys() == set()


# ---- kill -9


def _life(place: Callable[[], Ledger], rng: random.Random, num_left: int) -> None:
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
            request = Push("n1", each.work_item, each.attempt, payload)
            if rng.random() < 0.5:
                stored = store.put(each.work_item, each.attempt, payload)
                request = replace(request, payload=b"", stored=stored)
            flow.push(request)
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


def test_kills_between_upload_and_commit_lose_nothing_and_leave_nothing(tmp_path: Path) -> None:
    database, url, rng = str(tmp_path / "l.db"), str(tmp_path / "store"), random.Random(1)
    opened = partial(ledger, database, payloads=url, max_attempts=1000)
    for _ in range(15):
        pid = os.fork()
        if pid == 0:
            try:
                _life(opened, rng, rng.randrange(60, 400))
            except BaseException:
                traceback.print_exc()
                raise
            finally:
                os._exit(1)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        rng.random()
        assert audit_database(database, url).problems == (), "every group that is needed is there"
    flow = opened()
    with flow.database.read() as transaction:
        kept = {row.key for row in transaction.all("SELECT key FROM payloads")}
        num_groups = transaction.one("SELECT count(*) AS num FROM groups").num
    stored = {each.key for each in open_objects(url).list()}
    assert kept < stored and num_groups > len(kept), "the kills have left orphans"
    for path in Path(url).rglob("*"):
        os.utime(path, (0, 0))
    assert flow.collector is not None and flow.collector.sweep(OLD_S) > 0
    flow.collector.collect()
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
