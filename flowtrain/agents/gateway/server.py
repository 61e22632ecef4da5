"""The endpoint: requests of programs under the keys of their rollouts.

The server runs on a thread with its own event loop, from the first rollout until `close`. The
responses of the policy are sampled where the rollouts live (rollout.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from flowtrain.agents.gateway.plain import PREFIX, Refusal
from flowtrain.agents.gateway.rollout import Rollout, over
from flowtrain.agents.gateway.wires import chat, messages, responses
from flowtrain.agents.gateway.wires.forms import MAX_SHOWN, Wire
from flowtrain.utils.net import serving
from flowtrain.utils.text import printable

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

WIRES: Mapping[str, Wire] = {"chat/completions": chat, "messages": messages, "responses": responses}
COUNT = "messages/count_tokens"
MAX_BODY = 16 << 20
"""Bytes of a request."""
MAX_REQUESTS = 32
"""Requests of a rollout under way at a time."""
_NUM_ENDED = 4096
"""Keys of rollouts that have ended that are remembered, to be told apart from wrong ones."""
_WARN_ON = (400, 404, 405)
"""Statuses for what a program asks and the gateway does not have."""
_MAX_WARNINGS = 20
_END_S = 10.0
_log = logging.getLogger(__name__)


class Gateway:
    """An ASGI application, and the thread that serves it."""

    def __init__(self) -> None:
        """Serve at once, this machine alone, at any free port."""
        serving.require("starlette.requests", "starlette.responses")
        _freeze_heap()
        self._rollouts: dict[bytes, Rollout] = {}
        self._ended: dict[bytes, None] = {}
        self._warned: set[str] = set()
        self._lock = threading.Lock()
        self._server, self._listener = serving.make_server(self)
        self.base_url = serving.address(self._listener) + PREFIX
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [self._listener]},
            name="gateway",
            daemon=True,
        )
        self._thread.start()

    @contextlib.contextmanager
    def serving(self, rollout: Rollout) -> Iterator[None]:
        """Let requests in under the rollout's key inside the block."""
        digest = _digest(rollout.key)
        with self._lock:
            self._rollouts[digest] = rollout
        try:
            yield
        finally:
            with self._lock:
                del self._rollouts[digest]
                self._ended[digest] = None
                if len(self._ended) > _NUM_ENDED:
                    del self._ended[next(iter(self._ended))]

    def close(self) -> None:
        """End the server; requests under way have a few seconds. May be called twice."""
        self._server.should_exit = True
        self._thread.join(_END_S)
        self._listener.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request
        from starlette.responses import Response

        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        # Anthropic's clients begin their paths with /v1, which may be in their URL already.
        path: str = scope["path"].rpartition(f"{PREFIX}/")[2]
        wire = WIRES.get(path) or (messages if path == COUNT else chat)
        try:
            response = await self._route(Request(scope, receive), path, wire)
        except serving.Rejected as rejected:
            body = wire.error(Refusal(str(rejected), status=rejected.status))
            response = Response(body, rejected.status, media_type="application/json")
        except Refusal as refusal:
            self._warn_once(path, refusal)
            body = wire.error(refusal)
            response = Response(body, refusal.status, refusal.headers, "application/json")
        await response(scope, receive, send)

    def _warn_once(self, path: str, refusal: Refusal) -> None:
        """Warn, once, of what programs ask in vain: some end as if nothing had been wrong."""
        # By the root Claude Code sees that the server is up.
        if (
            path == "/"
            or refusal.code == "context_length_exceeded"
            or refusal.status not in _WARN_ON
        ):
            return
        text = printable(f"{path}: {refusal}", keep="")[:MAX_SHOWN]
        if text not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(text)
            _log.warning("the gateway refused a program's request: %s", text)

    async def _route(self, request: Request, path: str, wire: Wire) -> Response:
        if path not in WIRES and path != COUNT:
            raise Refusal("unknown path", status=404)
        if request.method != "POST":
            raise Refusal("method not allowed for this path", status=405)
        rollout = self._rollout(request)
        if rollout.num_requests >= MAX_REQUESTS:
            text = f"more than {MAX_REQUESTS} requests of a rollout at a time"
            headers = {"Retry-After": "1"}
            raise Refusal(text, status=429, code="rate_limit_exceeded", headers=headers)
        rollout.num_requests += 1
        try:
            if path == COUNT:
                return await _count(request, rollout)
            return await _answer(request, rollout, wire)
        finally:
            rollout.num_requests -= 1

    def _rollout(self, request: Request) -> Rollout:
        """Return the rollout of the key, by digest, so that the duration reveals nothing."""
        digest = _digest(_key_of(request))
        with self._lock:
            rollout, is_over = self._rollouts.get(digest), digest in self._ended
        if rollout is not None:
            return rollout
        if is_over:
            raise over()
        raise Refusal("the key is missing or wrong", status=401, code="invalid_api_key")


async def _answer(request: Request, rollout: Rollout, wire: Wire) -> Response:
    body = await serving.read_body(request, MAX_BODY)
    chat_request = wire.read(body)
    working = rollout.ask(chat_request, body, retry_of=_retry_of(request))
    reply = await _while_connected(request, working)
    media_type = "text/event-stream" if chat_request.stream else "application/json"
    return _response(wire.write(chat_request, reply), media_type)


async def _count(request: Request, rollout: Rollout) -> Response:
    """Answer how long a prompt is, without sampling."""
    chat_request = messages.read(await serving.read_body(request, MAX_BODY))
    num_tokens = await _while_connected(request, rollout.count(chat_request))
    return _response(messages.write_count(num_tokens))


@functools.cache
def _freeze_heap() -> None:
    """Leave what is loaded by now to itself, once per process. All requests wait while Python looks
    for garbage, which takes a third of a second for all that torch and transformers have imported.
    """
    gc.collect()
    gc.freeze()


def new_key() -> str:
    return f"sk-{secrets.token_urlsafe(32)}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _key_of(request: Request) -> str:
    """Return the key as OpenAI's or Anthropic's clients send it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return str(key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", ""))


def _retry_of(request: Request) -> bytes | None:
    """Return what names the request among earlier ones; None where it is none of them again."""
    if key := request.headers.get("idempotency-key", ""):
        return str(key).encode()
    count = request.headers.get("x-stainless-retry-count", "0")
    return b"" if count.isdecimal() and count.strip("0") else None


async def _while_connected(request: Request, working: asyncio.Future[T]) -> T:
    """Wait for work, and cancel it when the client leaves."""
    # The body has been read, so the next message from the client is that it has left.
    leaving = asyncio.ensure_future(request.receive())
    futures: set[asyncio.Future[Any]] = {working, leaving}
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refusal("the client has left", status=499)
        return await working
    finally:
        working.cancel()
        leaving.cancel()


def _response(body: bytes, media_type: str = "application/json") -> Response:
    from starlette.responses import Response

    return Response(body, media_type=media_type)
