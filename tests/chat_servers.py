"""An OpenAI-compatible server on loopback with scripted replies, and a raw one that sends bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Script = Callable[[dict[str, Any]], "Response | str"]
"""From the body of a request to the reply: a text, or a whole response."""


@dataclass
class ChatServer:
    """The requests that a server has got."""

    base_url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests, in the order in which they came."""
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    now: int = 0
    most: int = 0
    """Requests under way at a time."""

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.asked]


class Gate:
    """Holds every request after the first `open_for`."""

    def __init__(self) -> None:
        self.open_for: float = float("inf")
        self.num_held = 0
        self._count = 0

    async def __call__(self) -> None:
        self._count += 1
        if self._count > self.open_for:
            self.num_held += 1
            while self._count > self.open_for:
                await asyncio.sleep(0.01)


@contextlib.contextmanager
def chat_server(script: Script, wait: Callable[[], Any] | None = None) -> Iterator[ChatServer]:
    """Serve replies of `script`; every request first awaits what `wait` returns."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    state = ChatServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")

    async def complete(request: Request) -> Response:
        body = await request.json()
        state.asked.append(body)
        state.headers.append(dict(request.headers))
        state.times.append(time.monotonic())
        state.now += 1
        state.most = max(state.most, state.now)
        try:
            if wait is not None:
                await wait()
            said = script(body)
        finally:
            state.now -= 1
        return JSONResponse(reply(said, body)) if isinstance(said, str) else said

    paths = ("/v1/chat/completions", "/v1/completions")
    app = Starlette(routes=[Route(path, complete, methods=["POST"]) for path in paths])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(10)


def reply(text: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Make a chat completion in OpenAI's format; its usage counts words."""
    prompt = body["messages"][0]["content"] if body else ""
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len((text or "").split())}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage}


@contextlib.contextmanager
def raw_server(*answers: bytes) -> Iterator[ChatServer]:
    """Answer each connection with the next of these bytes and close it; the last answer repeats."""
    listener = socket.create_server(("127.0.0.1", 0))
    state = ChatServer(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
    listener.settimeout(0.05)
    is_over = threading.Event()

    def serve() -> None:
        while not is_over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            with connection:
                connection.settimeout(5)
                state.asked.append(_request(connection))
                state.times.append(time.monotonic())
                with contextlib.suppress(OSError):  # the client may have had enough
                    connection.sendall(answers[min(len(state.asked), len(answers)) - 1])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        is_over.set()
        thread.join(10)
        listener.close()


def http(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    """Make a response; `length`: the length that its header claims."""
    lines = [
        f"HTTP/1.1 {status}",
        f"Content-Length: {len(body) if length is None else length}",
        "Connection: close",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def _request(connection: socket.socket) -> dict[str, Any]:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    while found and len(body) < int(found[1]):
        body += connection.recv(65536)
    return dict(json.loads(body))
