"""Servers: what one request may cost, and how many there may be."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from http_servers import running
from starlette.requests import Request
from starlette.responses import PlainTextResponse

from flowtrain.utils.net import protocol, serving

began = threading.Event()


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with what it was sent."""
    began.set()
    try:
        body, status = await serving.read_body(Request(scope, receive), 1 << 20), 200
    except serving.Rejected as rejected:
        body, status = str(rejected).encode(), rejected.status
    await PlainTextResponse(body or b"hello", status)(scope, receive, send)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)
    with running(app) as url:
        yield int(url.rpartition(":")[2])


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"POST / HTTP/1.1", b"Host: h", *lines, b"", b""))


EMPTY = head(b"Content-Length: 0")


def answer(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


@pytest.mark.clock
@pytest.mark.parametrize("sent", [b"", b"P", EMPTY[:-1], EMPTY + b"POST"])
def test_a_head_that_does_not_end_is_not_waited_for(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)
    monkeypatch.setattr(serving, "_KEEP_ALIVE_S", 1)
    with running(app) as url, connected(int(url.rpartition(":")[2])) as connection:
        connection.sendall(sent)
        if sent.startswith(EMPTY):
            assert answer(connection) == (200, b"hello")
        assert connection.recv(1) == b""


@pytest.mark.clock
def test_a_head_that_comes_by_bytes_has_no_more_time(port: int) -> None:
    with connected(port) as connection, pytest.raises(ConnectionError):
        for byte in EMPTY * 100:
            connection.sendall(bytes([byte]))
            time.sleep(0.02)


@pytest.mark.clock
def test_the_next_head_has_a_deadline_too(port: int) -> None:
    with connected(port) as connection:
        for _ in range(2):
            connection.sendall(EMPTY)
            assert answer(connection) == (200, b"hello")
            time.sleep(0.5)  # longer than a head may take: between requests there is time
        connection.sendall(EMPTY[:-1])
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""


@pytest.mark.clock
def test_a_request_under_way_has_the_time_of_its_body(port: int) -> None:
    with connected(port) as connection:
        connection.sendall(head(b"Content-Length: 2") + b"a")
        time.sleep(0.6)
        connection.sendall(b"b")
        assert answer(connection) == (200, b"ab")


def test_who_sends_a_long_body_still_hears_why_it_is_refused(port: int) -> None:
    for _ in range(5):
        with connected(port) as connection:
            connection.sendall(head(b"Content-Length: 4000000"))
            for _ in range(400):
                connection.sendall(bytes(10_000))
            assert answer(connection)[0] == 413


def test_who_finds_no_place_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_MOST", 2)
    with running(app) as url:
        port = int(url.rpartition(":")[2])
        with connected(port) as first:
            began.clear()
            first.sendall(head(b"Content-Length: 1"))
            assert began.wait(20)
            with connected(port) as second:
                second.sendall(EMPTY)
                assert answer(second)[0] == 503
            first.sendall(b"x")
            assert answer(first) == (200, b"x")
