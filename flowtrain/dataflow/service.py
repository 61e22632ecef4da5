"""The ledger behind HTTP; see wire.py.

All state is in the database: any number of these processes may serve one run, and when one is
killed, no answer that it gave is lost. (FastAPI would speak JSON, and need a function for each
request instead of one.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flowtrain.dataflow.codec import pack, unpack
from flowtrain.dataflow.contract import (
    PROTOCOL,
    Batch,
    BatchRequest,
    Dataflow,
    NotAllowed,
    Refused,
    Unavailable,
)
from flowtrain.dataflow.wire import (
    MAX_WAIT_S,
    MEDIA_TYPE,
    METHODS,
    PREFIX,
    RUN_HEADER,
    Problem,
)
from flowtrain.net import serving
from flowtrain.net.credentials import Access, Caller, Role, TokenFile
from flowtrain.net.serving import Rejected
from flowtrain.types import UserError

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

_log = logging.getLogger(__name__)

_NUM_THREADS = 8
_MAX_AT_WORK = 64
"""Requests of a kind read or answered at a time, without those that wait for a batch to fill."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(slots=True)
class _Desk:
    """Threads that answer, and the number of requests read or answered."""

    threads: ThreadPoolExecutor
    num_at_work: int = 0

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        if self.num_at_work >= _MAX_AT_WORK:
            raise Rejected(503, "too many requests at a time", {"Retry-After": "1"})
        self.num_at_work += 1
        try:
            yield
        finally:
            self.num_at_work -= 1


class Service:
    """An ASGI application."""

    def __init__(
        self,
        ledger: Dataflow,
        run: str,
        token: str,
        tokens: TokenFile | None = None,
        seconds: Histogram | None = None,
    ) -> None:
        """
        Args:
            run: identity of the ledger's run.
            token: opens everything; it may be empty where there are `tokens`.
            tokens: those of nodes and trainers, each for requests in its own name.
            seconds: gets the time that the ledger worked, by method.

        Raises:
            UserError: a package is missing, or a token fits into no header.
        """
        serving.require("starlette.requests", "starlette.responses")
        self._ledger, self._run, self._access = ledger, run, Access(token, tokens)
        self._seconds = seconds
        # Pushes may wait for an object store; renewals do not wait for pushes.
        self._pushes = _Desk(ThreadPoolExecutor(_NUM_THREADS, "pushes"))
        self._others = _Desk(ThreadPoolExecutor(_NUM_THREADS, "ledger"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        assert scope["type"] == "http", "the server is run without lifespan and websockets"
        response = await self._response(Request(scope, receive))
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        from starlette.responses import Response

        try:
            return Response(await self._answer(request), media_type=MEDIA_TYPE)
        except Rejected as error:
            rejected = error
        except NotAllowed as error:
            rejected = Rejected(403, str(error))
        except Refused as error:
            rejected = Rejected(422, str(error))
        except (Unavailable, UserError) as error:  # a full disk is a UserError until it is mended
            _log.warning("%s", error)
            rejected = Rejected(503, str(error))
        return Response(pack(Problem(str(rejected))), rejected.status, rejected.headers, MEDIA_TYPE)

    async def _answer(self, request: Request) -> bytes:
        """Answer a request. A batch that is not full yet is asked for again, less often the longer
        it takes; in between the request holds no thread and no slot.
        """
        caller = self._caller(request)
        name = self._method(request, caller)
        desk = self._pushes if name == "push" else self._others
        loop = asyncio.get_running_loop()
        with desk.slot():
            body = await serving.read_body(request, METHODS[name].max_bytes)
        began = loop.time()
        while True:
            with desk.slot():
                answer, wait_s = await loop.run_in_executor(
                    desk.threads, self._work, caller, name, body
                )
            waited_s = loop.time() - began
            is_over = not waited_s < wait_s or request.scope["is_ending"]()  # wait_s may be nan
            if is_over or await request.is_disconnected():
                return answer
            await asyncio.sleep(
                min(max(waited_s / 10, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S, wait_s - waited_s)
            )

    def _caller(self, request: Request) -> Caller:
        """Who asks, by the token."""
        caller = self._access.caller(request.headers.get("authorization", ""))
        if caller is None:
            raise Rejected(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        request.scope["admit"]()
        return caller

    def _method(self, request: Request, caller: Caller) -> str:
        """The name of the method, if the request may ask for it."""
        path: str = request.scope["path"]
        name = path.removeprefix(PREFIX)
        if re.match(r"/v\d+/", path) and name == path:
            version = path.split("/")[1].removeprefix("v")
            raise Rejected(
                410,
                f"the request is of protocol {version}, this service speaks {PROTOCOL}: install "
                "the same flowtrain on both",
            )
        if path != PREFIX + name or name not in METHODS:
            raise Rejected(404, "there is no such method")
        if request.method != "POST":
            raise Rejected(405, "methods are asked by POST", {"Allow": "POST"})
        roles = METHODS[name].roles
        if roles and caller.role not in (*roles, Role.ALL):
            raise Rejected(
                403, f"the token of the {caller.role} {caller.name!r} may not ask to {name}"
            )
        if request.headers.get(RUN_HEADER, self._run) != self._run:
            raise Rejected(409, "this service has another run now; join it again")
        return name

    def _work(self, caller: Caller, name: str, body: bytes) -> tuple[bytes, float]:
        """The answer, and for how many seconds a better one may be waited for."""
        kind, ask = METHODS[name].request, partial(self._ask, name)
        if kind is None:
            return pack(ask()), 0.0
        try:
            asked: Any = unpack(body, kind)
        except Refused as error:
            raise Rejected(400, str(error)) from error
        named = getattr(asked, METHODS[name].named_by)
        if caller.role != Role.ALL and named != caller.name:
            raise Rejected(
                403,
                f"the token is that of the {caller.role} {caller.name!r}, the request is of "
                f"{named[:100]!r}",
            )
        if not isinstance(asked, BatchRequest):
            return pack(ask(asked)), 0.0
        batch: Batch = ask(replace(asked, wait_s=0.0))
        return pack(batch), min(asked.wait_s, MAX_WAIT_S) if batch.num_missing else 0.0

    def _ask(self, name: str, *request: Any) -> Any:
        """The ledger's answer, and how long it took."""
        began = time.monotonic()
        try:
            return getattr(self._ledger, name)(*request)
        finally:
            if self._seconds is not None:
                self._seconds.labels(name).observe(time.monotonic() - began)
