"""Whatever the peer does, a call ends by its deadline, with the answer or the reason."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fake_servers
import pytest
from fake_servers import ANSWERS, PASSING, REFUSING, REQUESTS, honest, peer, problem, reply

from flowtrain.records import UserError
from flowtrain.rollouts import client as client_module
from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import BatchRequest, Push, Refused, Unavailable

METHODS = tuple(REQUESTS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.02)


def ask(client: Client, method: str) -> Any:
    call = getattr(client, method)
    return call() if REQUESTS[method] is None else call(REQUESTS[method])


def outcome(client: Client, method: str) -> Any:
    """The answer or the error."""
    try:
        return ask(client, method)
    except (Refused, Unavailable) as error:
        return error


def all_at_once(client: Client) -> list[Any]:
    """The answers or the errors, as coroutines get them."""

    async def ask_all() -> list[Any]:
        asked = (client.ask(method, REQUESTS[method]) for method in METHODS)
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(ask_all())


# ---- the faults: every peer, and every method


def test_peers_that_do_not_get_better() -> None:
    """All of them at once: each takes all of its time."""
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(len(PASSING)) as threads:
        peers = [stack.enter_context(peer(answer)) for answer, _ in PASSING.values()]
        clients = [stack.enter_context(Client(url, wait_s=2.0, attempt_s=0.4)) for url, _ in peers]
        answers = threads.map(lambda client: outcome(client, "push"), clients)
        for kind, (url, seen), found in zip(PASSING, peers, answers, strict=True):
            assert isinstance(found, Unavailable), (kind, found)
            words = rf"{url} did not answer push within 2 s: .*({PASSING[kind][1]})"
            assert re.search(words, str(found)), (kind, found)
            assert len(seen) > 1, "it was asked again"


def test_every_method_is_asked_again_until_its_deadline() -> None:
    with peer(PASSING["500"][0]) as (url, seen), Client(url, wait_s=1.5) as client:
        for method, found in zip(METHODS, all_at_once(client), strict=True):
            assert isinstance(found, Unavailable), (method, found)
            assert f"{url} did not answer {method} within 1.5 s: HTTP 500" in str(found)
        assert len(seen) > len(METHODS)


@pytest.mark.parametrize("kind", PASSING)
def test_a_peer_that_gets_better(kind: str) -> None:
    with (
        peer(PASSING[kind][0], PASSING[kind][0], honest) as (url, seen),
        Client(url, wait_s=20.0, attempt_s=0.3) as client,
    ):
        assert ask(client, "push") == ANSWERS["push"]
        assert len(seen) >= 3, "and once more where a busy machine was not in time"


@pytest.mark.parametrize("kind", REFUSING)
def test_a_peer_that_refuses_is_asked_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_MAX_BYTES", 1 << 20)
    answer, words = REFUSING[kind]
    with peer(answer) as (url, seen), Client(url, "secret-token", wait_s=20.0) as client:
        for method, found in zip(METHODS, all_at_once(client), strict=True):
            assert isinstance(found, Refused), (method, found)
            with pytest.raises(Refused, match=words):
                raise found
            assert "secret-token" not in str(found)
        assert len(seen) == len(METHODS)


def test_a_dead_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", wait_s=2.0) as client:
        for found in all_at_once(client):
            assert isinstance(found, Unavailable) and "ConnectError" in str(found)


def test_a_peer_whose_queue_is_full_never_connects() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        filling = [socket.socket() for _ in range(4)]
        for each in filling:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        with Client(
            f"http://127.0.0.1:{listener.getsockname()[1]}", wait_s=0.3, attempt_s=0.1
        ) as client:
            found = outcome(client, "status")
        assert isinstance(found, Unavailable)
        for each in filling:
            each.close()


# ---- answers and requests


def test_every_method_is_answered_with_its_record() -> None:
    with peer(honest) as (url, seen), Client(url + "/", "tok", wait_s=20.0) as client:
        assert {method: ask(client, method) for method in METHODS} == ANSWERS
    found = [request.splitlines()[0] for request in seen]
    assert found == [f"POST /v6/{method} HTTP/1.1" for method in METHODS]
    assert all("authorization: bearer tok\r\n" in request.lower() for request in seen)


def test_the_run_goes_along_once_it_is_known() -> None:
    with peer(honest) as (url, seen), Client(url, wait_s=20.0) as client:
        for method in ("status", "join", "lease", "join", "register"):
            ask(client, method)
    expected = [False, False, True, False, False]
    assert ["flowtrain-run: run-1" in request.lower() for request in seen] == expected


def test_how_long_to_wait_is_the_peers_word_within_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LONGEST_PAUSE_S", 0.3)
    for header, least_s in (
        ("1", 0.3),
        ("99999", 0.3),
        ("0", 0),
        ("Fri, 20 Nov 2026 00:00:00 GMT", 0),
        ("-1", 0),
    ):
        with (
            peer(problem(429, "later", f"Retry-After: {header}"), honest) as (url, _),
            Client(url, wait_s=20.0) as client,
        ):
            began = time.monotonic()
            assert outcome(client, "status") == ANSWERS["status"]
            assert time.monotonic() - began >= least_s, header


def test_the_time_to_wait_for_a_batch_is_no_failure() -> None:
    def late(connection: socket.socket, method: str) -> None:
        time.sleep(0.3)
        honest(connection, method)

    with peer(late) as (url, seen), Client(url, wait_s=20.0, attempt_s=0.1) as client:
        assert client.batch(BatchRequest("planner", 8, wait_s=5.0)) == ANSWERS["batch"]
        assert len(seen) == 1


def test_what_the_service_would_not_take_is_not_sent() -> None:
    with peer(honest) as (url, seen), Client(url, wait_s=20.0) as client:
        told = r"push: a request of 671\d{5} bytes exceeds the service's limit of 67108864"
        with pytest.raises(Refused, match=told):
            client.push(Push("n1", 1, 1, bytes(64 << 20)))
        assert not seen


def test_the_log_tells_that_the_service_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with (
        peer(*[reply(500)] * 8, honest) as (url, _),
        Client(url, wait_s=20.0) as client,
        caplog.at_level(logging.WARNING),
    ):
        ask(client, "status")
        found = [record.getMessage() for record in caplog.records]
        assert found == [f"{url}: HTTP 500: ''; status is retried for up to 20 s"]


# ---- using it


@pytest.mark.parametrize(
    "url",
    ["", "host:80", "ftp://host", "http://", "http://u:p@host", "http://host/?a=b", "http://h h"],
)
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(UserError, match="url must be"):
        Client(url)


def test_a_token_that_fits_into_no_header() -> None:
    with pytest.raises(UserError, match="token must be") as caught:
        Client("http://host", "two words")
    assert "two words" not in str(caught.value)


def test_closing_ends_the_calls_that_wait() -> None:
    with peer(fake_servers.silent) as (url, seen):
        client = Client(url, wait_s=100.0)
        found: list[Any] = []
        threads = [
            threading.Thread(target=lambda: found.append(outcome(client, "lease")))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        while len(seen) < 3:
            time.sleep(0.005)
        client.close()
        for thread in threads:
            thread.join(10)
        assert len(found) == 3 and all(isinstance(error, Unavailable) for error in found)
        with pytest.raises(Unavailable):
            client.status()


def test_threads_share_a_client() -> None:
    with (
        peer(honest) as (url, seen),
        Client(url, wait_s=20.0) as client,
        ThreadPoolExecutor(16) as threads,
    ):
        jobs = [method for method in METHODS for _ in range(8)]
        found = list(threads.map(lambda method: ask(client, method), jobs))
        assert found == [ANSWERS[method] for method in jobs]
        assert len(seen) == len(jobs)
