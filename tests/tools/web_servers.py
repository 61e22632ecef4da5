"""Servers on loopback, and a network in which they pass for the public internet."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpcore2
import pytest

PUBLIC = "93.184.215.14"
"""An address of the public internet; nothing is ever sent there."""

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Notes the request and lets the server's answer decide."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.body = self.rfile.read(length)
        self.server.seen.append(self)
        answers = self.server.answers
        (answers.pop(0) if len(answers) > 1 else answers[0])(self)
        self.close_connection = not self.server.keeps_alive

    do_POST = do_GET

    def reply(self, status: int, body: bytes | str = b"", **headers: object) -> None:
        body = body.encode() if isinstance(body, str) else body
        self.send_response(status)
        for key, value in {"Content_Length": len(body), "Connection": "close", **headers}.items():
            if value is not None:
                self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()
        with contextlib.suppress(OSError):  # the client may have heard enough
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    """`answers`: one after the other, the last for all further requests. `seen`: the requests."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, answers: Iterable[Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = list(answers)
        self.seen: list[Handler] = []
        self.released = threading.Event()
        """Set when the server ends, for answers that wait."""
        self.keeps_alive = False
        self.hung_up = False
        """Return whether a client left while an answer was under way."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what many tests are about."""


@contextlib.contextmanager
def serving(*answers: Answer, ssl_context: Any = None) -> Iterator[Server]:
    with Server(answers) as server:
        if ssl_context:
            server.socket = ssl_context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join(20)


# ---- answers


def json_answer(value: object, status: int = 200, **headers: object) -> Answer:
    return lambda handler: handler.reply(
        status, json.dumps(value), Content_Type="application/json", **headers
    )


def html(body: str | bytes, **headers: object) -> Answer:
    return lambda handler: handler.reply(
        200, body, **{"Content_Type": "text/html; charset=utf-8", **headers}
    )


def redirect(location: str, status: int = 302) -> Answer:
    return lambda handler: handler.reply(status, Location=location)


def status(code: int, body: str = "", **headers: object) -> Answer:
    return lambda handler: handler.reply(code, body, **headers)


def silent(handler: Handler) -> None:
    """Takes the request and says nothing for as long as the server lives."""
    handler.server.released.wait(30)


def hang_up(handler: Handler) -> None:
    """The connection ends without an answer."""
    handler.connection.close()


def drip(handler: Handler) -> None:
    """A byte now and then, for as long as the client stays."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.end_headers()
    try:
        while not handler.server.released.wait(0.02):
            handler.wfile.write(b"<")
    except OSError:
        handler.server.hung_up = True


def endless(handler: Handler) -> None:
    """A body without length that does not end."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/html")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while not handler.server.released.is_set():
            handler.wfile.write(b"word " * 10_000)


# ---- the network


class Internet(httpcore2.AsyncNetworkBackend):
    """Names and public addresses that lead to loopback; `asked` and `connected` say how."""

    def __init__(self, names: dict[str, list[list[str]]], routes: dict[str, Server]) -> None:
        """`names`: what a name resolves to, the first time, the second, ..., the last for ever.
        `routes`: where an address leads.
        """
        self.names, self.routes = names, routes
        self.asked: list[str] = []
        self.connected: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host)
        if answers is None:
            return [host]  # an IP address stands for itself
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect_tcp(
        self, host: str, port: int, *_: object, **__: object
    ) -> httpcore2.AsyncNetworkStream:
        self.connected.append(f"{host}:{port}")
        if host not in self.routes:
            raise httpcore2.ConnectError("nobody there")
        return await httpcore2.AnyIOBackend().connect_tcp(
            "127.0.0.1", self.routes[host].server_port
        )


async def tasks_left() -> list[asyncio.Task[Any]]:
    """Tasks of this loop besides the caller's."""
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


async def cancel_once_seen(asking: Coroutine[Any, Any, Any], server: Server) -> None:
    task = asyncio.create_task(asking)
    while not server.seen:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def check_cancelled(ask: Callable[[Server], Coroutine[Any, Any, Any]]) -> None:
    """What is cancelled while its answer drips closes the connection and leaves no task behind."""

    async def main(server: Server) -> None:
        await cancel_once_seen(ask(server), server)
        assert await tasks_left() == []

    with serving(drip) as server:
        asyncio.run(main(server))
        while not server.hung_up:  # it notices by the error that its next byte meets
            server.released.wait(0.01)
