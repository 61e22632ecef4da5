"""Requests for leases that wait; and those that wait for nobody: signs of life and pushes."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_groups as fake
import pytest
from http_servers import running
from test_dataflow_service import TOKEN, ask, head, service_of

from flowtrain.rollouts import service as service_module
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.codec import pack
from flowtrain.rollouts.contract import (
    BatchRequest,
    Done,
    EvalSettings,
    Evaluate,
    LeaseRequest,
    Leases,
    Progress,
    Push,
    Pushed,
    Renewal,
    Renewed,
    Unavailable,
)
from flowtrain.rollouts.service import Service


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_LOOK_S", 0.05)


class Counting:
    """A ledger, and how often it was asked for what."""

    def __init__(self, ledger: Any) -> None:
        self._ledger, self.asked = ledger, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._ledger, name)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Any]:
    """A ledger with a whole batch that waits: nothing is to be leased."""
    ledger = fake.begun(tmp_path / "flow.sqlite")
    for lease in fake.lease(ledger, 4):
        fake.push(ledger, lease)
    assert ledger.lease(LeaseRequest("n1", "a", 1)).reason == "full"
    yield ledger
    ledger.close()


def wanted(num: int = 1, node: str = "n1", wait_s: float = 20.0, key: str = "k") -> LeaseRequest:
    own = (node, "a", num, {"planner": 0})
    return LeaseRequest(*own, waited_s=1.0, key=key, wait_s=wait_s, heard={"planner": 0})


def test_who_waits_gets_what_comes_first_who_came_first(full: Any) -> None:
    service = Service(full, full.run, TOKEN)
    with running(service) as url, Client(url, TOKEN) as client, ThreadPoolExecutor(8) as threads:
        waiting = []
        for number in range(6):
            fake.joined(full, f"w{number}")
            waiting.append(threads.submit(client.lease, wanted(node=f"w{number}")))
            while len(service._lobby._waiting) < number + 1:
                time.sleep(0.005)
        full.batch(BatchRequest("planner", 1))  # room for four
        answers = [each.result(20) for each in waiting[:4]]
        assert [len(answer.leases) for answer in answers] == [1] * 4
        assert not any(each.done() for each in waiting[4:])
        full.progress(Progress("planner", 1, 0, is_done=True))
        assert [each.result(20).reason for each in waiting[4:]] == ["done"] * 2


class Slow(Counting):
    """A ledger that leases to w0 after two more looks for others, or one was faster."""

    was_overtaken = False

    def lease(self, request: LeaseRequest) -> Any:
        if request.node == "w0" and self._ledger.openings().room({"planner": 0}, 1)[0]:
            num_looks = self.asked["openings"] + 2
            while self.asked["openings"] < num_looks and not self.was_overtaken:
                time.sleep(0.005)
        answer = self._ledger.lease(request)
        self.was_overtaken |= request.node != "w0" and bool(answer.leases)
        return answer


def test_what_is_kept_for_one_goes_to_nobody_else(full: Any) -> None:
    slow = Slow(full)
    with (
        service_of(slow) as url,
        Client(url, TOKEN) as client,
        ThreadPoolExecutor(2) as threads,
    ):
        waiting = []
        for number in range(2):
            fake.joined(full, f"w{number}")
            waiting.append(threads.submit(client.lease, wanted(4, node=f"w{number}")))
            while slow.asked["openings"] < 2 * number + 1:
                time.sleep(0.005)
        full.batch(BatchRequest("planner", 1))  # room for four
        assert [len(waiting[0].result(20).leases), waiting[1].done()] == [4, False]
        full.progress(Progress("planner", 1, 0, is_done=True))
        assert waiting[1].result(20).reason == "done"


@pytest.mark.clock
def test_the_database_does_not_notice_how_many_wait(full: Any) -> None:
    counting, num = Counting(full), 30
    for number in range(num):
        fake.joined(full, f"w{number}")
    with (
        service_of(counting) as url,
        Client(url, TOKEN) as client,
        ThreadPoolExecutor(num) as threads,
    ):
        began = time.monotonic()
        asked = [wanted(node=f"w{number}", wait_s=2.0) for number in range(num)]
        answers = list(threads.map(client.lease, asked))
        num_looks = (time.monotonic() - began) / 0.05
    assert {answer.reason for answer in answers} == {"full"}
    assert counting.asked["lease"] == 2 * num, "at the beginning, and at the end"
    assert 0 < counting.asked["openings"] <= num_looks + 1
    assert full.status()["nodes"]["w0"]["waited_s"] == 1.0, "the seconds of a request count once"


def test_nothing_is_leased_to_who_has_hung_up(full: Any) -> None:
    counting, body = Counting(full), pack(wanted())
    with service_of(counting) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head("/v6/lease", f"Content-Length: {len(body)}") + body)
            while not counting.asked["openings"]:
                time.sleep(0.005)
        with Client(url, TOKEN) as client:
            fake.joined(full, "w1")
            other = threading.Thread(target=client.lease, args=(wanted(node="w1"),))
            other.start()
            full.batch(BatchRequest("planner", 1))
            other.join(20)
    leased = {name: node["num_leased"] for name, node in full.status()["nodes"].items()}
    assert leased == {"n1": 0, "w1": 1}


@contextmanager
def served(ledger: Any) -> Iterator[tuple[Client, ThreadPoolExecutor]]:
    """A client of a service of the ledger, and threads on which it may wait."""
    with (
        service_of(ledger) as url,
        Client(url, TOKEN) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        yield client, threads


def test_a_node_that_asks_again_waits_once(full: Any) -> None:
    """As when it ends: what it was given, and nothing more."""
    counting = Counting(full)
    with served(counting) as (client, threads):
        first = threads.submit(client.lease, wanted())
        while not counting.asked["openings"]:
            time.sleep(0.005)
        assert client.lease(wanted(wait_s=0.0)).reason == "full"
        assert first.result(20).reason == "full"
    assert counting.asked["lease"] == 2


def test_a_new_version_is_news_at_once(full: Any) -> None:
    """The node may have to load it before it can get anything."""
    counting = Counting(full)
    with served(counting) as (client, threads):
        first = threads.submit(client.lease, wanted())
        while not counting.asked["openings"]:
            time.sleep(0.005)
        full.batch(BatchRequest("planner", 1))
        assert len(first.result(20).leases) == 1
        for lease in fake.lease(full, 9):
            fake.push(full, lease)
        second = threads.submit(client.lease, wanted(key="l"))
        num_looks = counting.asked["openings"]
        while counting.asked["openings"] < num_looks + 2:
            time.sleep(0.005)
        assert not second.done()
        full.progress(Progress("planner", 1, 0))
        assert second.result(20).policies["planner"].version == 1
        assert client.lease(wanted(key="m")).policies["planner"].version == 1, "it has not heard"


def test_a_question_ends_the_wait_and_so_does_the_answer_to_the_last_one(full: Any) -> None:
    evaluate = Evaluate("planner", 0, "held out", EvalSettings(2), 5, tuple(fake.TASKS[:1]))
    fake.joined(full, "w1")
    with served(full) as (client, threads):
        first = threads.submit(client.lease, wanted())
        full.evaluate(evaluate)
        (question,) = first.result(20).leases
        assert question.work_item < 0
        full.progress(Progress("planner", 0, 0, is_done=True))
        second = threads.submit(client.lease, wanted(node="w1"))
        with pytest.raises(TimeoutError):
            second.result(0.3)
        fake.push(full, question, num=1)
        assert second.result(20).reason == "done"


def test_nodes_that_cannot_wait_ask_the_less_often_the_more_they_are(full: Any) -> None:
    assert full.lease(wanted(wait_s=0.0)).retry_after_s == 0.5
    for number in range(400):
        fake.joined(full, f"w{number}")
    assert full.lease(wanted(wait_s=0.0)).retry_after_s == pytest.approx(4.01)


def test_what_runs_out_is_to_be_leased(database: str) -> None:
    clock = fake.Clock()
    ledger = fake.begun(database, clock, trainer=fake.planner(num_groups=1, max_staleness=0))
    held = fake.lease(ledger, 8)
    assert held and not ledger.openings().take(wanted(1))
    clock.now += 61
    ledger.progress(Progress("planner", 0, 0))
    openings = ledger.openings()
    assert [openings.take(wanted(1)) for _ in range(2)] == [True, False]
    ledger.close()


def test_a_node_without_leases_shows_that_it_lives(database: str) -> None:
    clock = fake.Clock()
    ledger = fake.begun(database, clock)
    clock.now += 50
    assert ledger.renew(Renewal("n1", "a", ())).policies["planner"].version == 0
    assert ledger.status()["nodes"]["n1"]["seen_s_ago"] == 0
    ledger.close()


# ---- who waits for nobody


class Stuck:
    """A ledger whose answers about leases do not come."""

    def __init__(self) -> None:
        self.is_over, self.is_asked = threading.Event(), threading.Semaphore(0)

    def lease(self, request: LeaseRequest) -> Leases:
        self.is_asked.release()
        assert self.is_over.wait(20)
        return Leases((), {})

    def renew(self, request: Renewal) -> Renewed:
        return Renewed((), {})

    def progress(self, request: Progress) -> Done:
        return Done()

    def push(self, request: Push) -> Pushed:
        return Pushed("committed")


def test_signs_of_life_do_not_wait_for_those_who_want_work() -> None:
    stuck = Stuck()
    with (
        service_of(stuck) as url,
        Client(url, TOKEN, wait_s=20) as client,
        ThreadPoolExecutor(40) as threads,
    ):
        leases = [threads.submit(client.lease, wanted(node=f"n{n}")) for n in range(40)]
        assert stuck.is_asked.acquire(timeout=20)
        client.renew(Renewal("n1", "a", ()))
        client.progress(Progress("planner", 0, 0))
        assert client.push(Push("n1", 1, 1, b"")).status == "committed"
        stuck.is_over.set()
        assert all(each.result(20).leases == () for each in leases)


def test_slow_uploads_take_memory_and_no_place(tmp_path: Path) -> None:
    """Of 4 MB each, from 100 nodes; those of 64 MB are too many much sooner."""
    with service_of(Stuck()) as url:
        host, port = url.removeprefix("http://").split(":")

        def begun(num_bytes: int) -> socket.socket:
            connection = socket.create_connection((host, int(port)), timeout=20)
            connection.sendall(head("/v6/push", f"Content-Length: {num_bytes}") + b"begin")
            return connection

        slow = [begun(4 << 20) for _ in range(100)]
        push = pack(Push("n1", 1, 1, b""))
        assert ask(url, "/v6/push", push)[0] == 200
        large = [begun(64 << 20) for _ in range(2)]
        while ask(url, "/v6/push", pack(Push("n1", 1, 1, bytes(4 << 20))))[0] != 503:
            large.append(begun(4 << 20))
            assert len(large) < 20
        for connection in (*slow, *large):
            connection.close()


def test_the_log_says_once_a_minute_why_nothing_is_answered(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Down:
        def lease(self, request: LeaseRequest) -> Leases:
            raise Unavailable("the database is busy")

    with caplog.at_level(logging.WARNING), service_of(Down()) as url:
        statuses = {ask(url, "/v6/lease", pack(wanted()))[0] for _ in range(5)}
    assert statuses == {503}
    assert [each.message for each in caplog.records] == ["the database is busy (1 requests)"]
