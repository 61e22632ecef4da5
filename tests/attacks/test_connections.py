"""Connections that are half open, too slow, too many, or not what they seem."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_servers import running

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.service import Service
from flowtrain.net import connections
from flowtrain.net.connections import Rank, Room, places
from tests.dataflow.fake_groups import ledger as make_ledger

TOKEN = b"a-token"
BIG = 48 << 20


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers who has the token: with what it was sent, or with much."""
    headers = dict(scope["headers"])
    is_known = headers.get(b"authorization") == TOKEN
    body = b"unknown"
    if is_known:
        scope["admit"]()
        body = b""
        while (message := await receive()).get("more_body"):
            body += message["body"]
        body += message.get("body", b"")
        body = body or b"hello" if scope["path"] == "/" else bytes(BIG)
    length = (b"content-length", str(len(body)).encode())
    status = 200 if is_known else 401
    await send({"type": "http.response.start", "status": status, "headers": [length]})
    size = 1 << 16 if scope["path"] == "/parts" else BIG
    for start in range(0, len(body), size):
        part = body[start : start + size]
        more = start + size < len(body)
        await send({"type": "http.response.body", "body": part, "more_body": more})


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that tests can wait for."""
    monkeypatch.setattr(connections, "_HEAD_S", 0.3)
    monkeypatch.setattr(connections, "_PATIENCE_S", 0.5)


@pytest.fixture
def port() -> Iterator[int]:
    with running(app) as url:
        yield int(url.rpartition(":")[2])


@contextlib.contextmanager
def connected(port: int, host: str = "127.0.0.1") -> Iterator[socket.socket]:
    address = ("127.0.0.1", port)
    with socket.create_connection(address, timeout=20, source_address=(host, 0)) as connection:
        yield connection


def ended(connection: socket.socket) -> bytes:
    """What the server still sends until it ends the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(1 << 16):
            found += data
    return found


def head(*lines: bytes, path: bytes = b"/", token: bytes = TOKEN) -> bytes:
    first = (b"POST " + path + b" HTTP/1.1", b"Host: h", b"Authorization: " + token)
    return b"\r\n".join((*first, *lines, b"", b""))


EMPTY = head(b"Content-Length: 0")


def answer(connection: socket.socket) -> tuple[int, bytes, Any]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read(), response.headers


# ---- heads


@pytest.mark.parametrize("sent", [b"", b"P", b"POST / HTTP/1.1\r\nHost: h\r\n", EMPTY[:-1]])
def test_a_head_that_does_not_end_is_not_waited_for(port: int, sent: bytes) -> None:
    with connected(port) as connection:
        connection.sendall(sent)
        assert ended(connection) == b""


def test_a_head_that_comes_by_bytes_has_no_more_time(port: int) -> None:
    with connected(port) as connection, pytest.raises(ConnectionError):
        for _ in range(400):
            connection.sendall(b"x")
            time.sleep(0.05)


def test_the_next_head_has_a_deadline_too(port: int) -> None:
    with connected(port) as connection:
        for _ in range(2):
            connection.sendall(EMPTY)
            assert answer(connection)[:2] == (200, b"hello")
            time.sleep(0.5)  # longer than a head may take: between requests there is time
        connection.sendall(EMPTY[:-1])
        assert ended(connection) == b""


def test_a_pipelined_half_of_a_head_is_not_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected(port) as connection:
        connection.sendall(EMPTY + b"POST")
        assert answer(connection)[0] == 200
        connection.sendall(b" ")
        assert ended(connection) == b""


def test_a_request_under_way_has_the_time_of_its_body(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: 2") + b"a")
        time.sleep(0.6)
        connection.sendall(b"b")
        assert answer(connection)[:2] == (200, b"ab")


def test_a_head_in_one_piece_is_no_longer_than_one_in_several(port: int) -> None:
    for size, status in ((15 << 10, 200), (17 << 10, 400), (50 << 10, 400)):
        with connected(port) as connection:
            connection.sendall(head(b"Content-Length: 0", b"X: " + b"x" * size))
            assert answer(connection)[0] == status
    for long in (head(path=b"/" + b"x" * (17 << 10)), head(*[b"X: y"] * 4000)):
        with connected(port) as connection:
            connection.sendall(long)
            assert answer(connection)[0] == 400


def test_a_request_has_one_length(port: int) -> None:
    """Proxies differ over which one counts, and so over where the next request begins."""
    for lengths in (
        (b"Content-Length: 5", b"Transfer-Encoding: chunked"),
        (b"Transfer-Encoding: chunked", b"Content-Length: 0"),
        (b"Content-Length: 5", b"Content-Length: 6"),
        (b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"),
    ):
        with connected(port) as connection:
            connection.sendall(head(*lengths) + b"0\r\n\r\n" + EMPTY)
            assert answer(connection)[0] == 400
            assert b"hello" not in ended(connection), "the smuggled request is not answered"


# ---- refused requests


@pytest.mark.parametrize("length", [0, 1000])
def test_an_error_ends_the_connection(
    port: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LINGER_S", 0.3)
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: %d" % length, token=b"wrong"))
        status, body, headers = answer(connection)
        assert (status, body, headers["connection"]) == (401, b"unknown", "close")
        assert ended(connection) == b""


def test_who_sends_a_long_body_still_hears_why_it_is_refused(port: int) -> None:
    for _ in range(5):
        with connected(port) as connection:
            connection.sendall(head(b"Content-Length: 4000000", token=b"wrong"))
            for _ in range(400):
                connection.sendall(bytes(10_000))
            assert answer(connection)[0] == 401


def test_the_rest_of_a_refused_request_is_not_waited_for(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_LINGER_S", 0.3)
    with connected(port) as connection, pytest.raises(ConnectionError):
        connection.sendall(head(b"Content-Length: 1000", token=b"wrong"))
        for _ in range(400):
            connection.sendall(b"x")
            time.sleep(0.05)


# ---- answers


def test_an_answer_that_is_never_read_is_given_up(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: 0", path=b"/big"))
        time.sleep(2.0)
        assert len(ended(connection)) < BIG


@pytest.mark.parametrize("path", [b"/big", b"/parts"])
def test_who_reads_too_slowly_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch, path: bytes
) -> None:
    """It reads a little within each pause that is allowed."""
    monkeypatch.setattr(connections, "SLOWEST", 64 << 20)  # 48 MiB: 0.75 s and the patience
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: 0", path=path))
        num_read = 0
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(800_000, socket.MSG_WAITALL):
                num_read += len(data)
                time.sleep(0.1)
        assert num_read < BIG


def test_a_long_answer_has_the_time_that_its_length_takes(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_PATIENCE_S", 1.2)
    monkeypatch.setattr(connections, "SLOWEST", 8 << 20)  # 48 MiB: 6 s more
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: 0", path=b"/big"))
        num_read = 0
        while num_read < BIG:
            data = connection.recv(4 << 20, socket.MSG_WAITALL)
            assert data
            num_read += len(data)
            time.sleep(0.15)  # 1.8 s in all


# ---- places


def test_the_oldest_stranger_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_HEAD_S", 60.0)
    monkeypatch.setattr(connections, "_MOST", 3)
    with running(app) as url, contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        under_way, known, *strangers = (stack.enter_context(connected(port)) for _ in range(3))
        under_way.sendall(head(b"Content-Length: 1"))
        known.sendall(EMPTY)
        assert answer(known)[0] == 200
        for _ in range(20):
            strangers.append(stack.enter_context(connected(port)))
            assert ended(strangers[-2]) == b""
        known.sendall(EMPTY)
        under_way.sendall(b"x")
        assert answer(known)[0] == 200 and answer(under_way)[:2] == (200, b"x")


def test_who_finds_no_place_is_told_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those who wait to be told, with half a request, are few."""
    for name, value in (("_HEAD_S", 60.0), ("_MOST", 1), ("_MOST_REFUSED", 2)):
        monkeypatch.setattr(connections, name, value, raising=False)
    with running(app) as url, contextlib.ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        under_way = stack.enter_context(connected(port))
        under_way.sendall(head(b"Content-Length: 1", b"Expect: 100-continue"))
        assert under_way.recv(1 << 16).startswith(b"HTTP/1.1 100")
        others = [stack.enter_context(connected(port)) for _ in range(4)]
        for other in others:
            other.sendall(EMPTY[:-2])
        assert [ended(other) for other in others[:2]] == [b"", b""]
        for other in others[2:]:
            other.sendall(EMPTY[-2:])
            status, _, headers = answer(other)
            assert status == 503 and headers["retry-after"] == "5"
        under_way.sendall(b"x")
        assert answer(under_way)[:2] == (200, b"x")
        again = stack.enter_context(connected(port))
        again.sendall(EMPTY)
        assert answer(again)[0] == 200


def test_a_client_whose_idle_connection_was_closed_does_not_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_MOST", 1)
    monkeypatch.setenv("no_proxy", "*")
    ledger = make_ledger(tmp_path / "flow.sqlite")
    with (
        running(Service(ledger, ledger.run, "a-token")) as url,
        Client(url, "a-token", wait_s=60.0) as one,
        Client(url, "a-token", wait_s=60.0) as other,
    ):
        for _ in range(20):
            assert one.status()["run"] == other.status()["run"] == ledger.run
    ledger.close()


class Fake:
    """A connection, as far as places are concerned."""

    def __init__(self) -> None:
        self.rank, self.is_closed, self.transport = Rank.STRANGER, False, self

    def abort(self) -> None:
        self.is_closed = True


def test_places_are_given_up_from_the_lowest_rank_and_the_oldest() -> None:
    room: Any = Room(4)
    fakes = [Fake() for _ in range(4)]
    assert all(map(room.enter, fakes))
    room.move(fakes[0], Rank.UNDER_WAY)
    room.move(fakes[1], Rank.KNOWN)
    order = []
    for _ in range(3):
        new = Fake()
        assert room.enter(new)
        order.append([number for number, fake in enumerate(fakes) if fake.is_closed])
        room.move(new, Rank.UNDER_WAY)
    assert order == [[2], [2, 3], [1, 2, 3]]
    assert not room.enter(Fake()), "all are under way"
    room.leave(fakes[0])
    room.leave(fakes[0])
    assert room.enter(Fake())


@pytest.mark.parametrize(("num_files", "most"), [(20_000, 4096), (1024, 320), (256, 32), (16, 1)])
def test_places_leave_files_for_answers_and_the_database(
    monkeypatch: pytest.MonkeyPatch, num_files: int, most: int
) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (num_files, num_files))
    found, backlog = places()
    assert found == most
    assert num_files < 256 or 2 * found + backlog < num_files - 60
