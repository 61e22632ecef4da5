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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from flowtrain.records import UserError
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.contract import (
    PROTOCOL,
    WAITING,
    BatchRequest,
    LeaseRequest,
    NotAllowed,
    Refused,
    Unavailable,
)
from flowtrain.rollouts.wire import MAX_WAIT_S, MEDIA_TYPE, METHODS, PREFIX, RUN_HEADER, Problem
from flowtrain.utils.net import serving
from flowtrain.utils.net.credentials import Access, Caller, Role, TokenFile
from flowtrain.utils.net.serving import Rejected

if TYPE_CHECKING:
    from prometheus_client import Histogram
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from flowtrain.rollouts.ledger import Ledger

_log = logging.getLogger(__name__)

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_LOOK_S = 0.25
"""Between two looks at what there is to lease, while requests wait for it."""
_OVERHEAD = 64 << 10
"""Bytes that a request counts for beside its body."""
_COMPLAINT_S = 60.0


@dataclass(slots=True)
class _Desk:
    """Threads that answer, and the bytes of the requests that are read or answered: a slow upload
    takes the place that it needs in memory, and no other.
    """

    threads: ThreadPoolExecutor
    max_bytes: int
    num_bytes: int = 0

    @classmethod
    def of(cls, name: str, num_threads: int, max_bytes: int) -> _Desk:
        return cls(ThreadPoolExecutor(num_threads, name), max_bytes)

    @contextlib.contextmanager
    def place(self, num_bytes: int) -> Iterator[None]:
        num_bytes += _OVERHEAD
        if self.num_bytes + num_bytes > self.max_bytes:
            raise Rejected(503, "too many requests at a time", {"Retry-After": "1"})
        self.num_bytes += num_bytes
        try:
            yield
        finally:
            self.num_bytes -= num_bytes


class _Waiting(NamedTuple):
    """A request for leases that waits, and the future that ends its wait."""

    lease: LeaseRequest
    turn: asyncio.Future[bool]


class _Lobby:
    """Requests for leases that wait until there is something to lease, first come, first served. A
    single task polls for all of them, so that their number does not load the database.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[str, _Waiting] = {}
        """By the node, which waits once."""
        self._called: dict[int, LeaseRequest] = {}  # their turn has come, and no lease yet; by `id`
        self._looking: asyncio.Task[None] | None = None

    def leave(self, node: str) -> None:
        """End the wait of a node that has asked again: nobody hears what it would be given."""
        if node in self._waiting:
            self._waiting.pop(node).turn.set_result(False)

    async def wait(self, lease: LeaseRequest, request: Request, longest_s: float) -> bool:
        """Wait until the request should be answered anew; False where it is no use."""
        loop, turn = asyncio.get_running_loop(), asyncio.Future[bool]()
        self._called.pop(id(lease), None)
        self._waiting[lease.node] = _Waiting(lease, turn)
        if self._looking is None:
            self._looking = loop.create_task(self._watch(request.scope["is_ending"]))
        disconnect = loop.create_task(_disconnect(request))
        either: set[asyncio.Future[Any]] = {turn, disconnect}
        task: Any = asyncio.current_task()
        task.add_done_callback(lambda _: self._called.pop(id(lease), None))
        try:
            await asyncio.wait(either, timeout=longest_s, return_when=asyncio.FIRST_COMPLETED)
            return turn.result() if turn.done() else not disconnect.done()
        finally:
            disconnect.cancel()
            if not turn.done():
                del self._waiting[lease.node]

    async def _watch(self, is_ending: Callable[[], bool]) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(_LOOK_S)
                await self._admit(is_ending())
        finally:
            self._looking = None

    async def _admit(self, is_ending: bool) -> None:
        """End the waits of those for whom there is something; of all, where the server ends."""
        try:
            openings = await asyncio.to_thread(self._ledger.openings)
            # Those called before come first, as long as the ledger does not know of their leases.
            for lease in self._called.values():
                openings.take(lease)
            ready_nodes = [
                node for node, (lease, _) in self._waiting.items() if openings.take(lease)
            ]
        except (Unavailable, UserError):  # those who ask again are told
            ready_nodes = list(self._waiting)
        for node in list(self._waiting) if is_ending else ready_nodes:
            lease, turn = self._waiting.pop(node)
            self._called[id(lease)] = lease
            turn.set_result(not is_ending)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Service:
    """An ASGI application."""

    def __init__(
        self,
        ledger: Ledger,
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
        # Uploads may wait for an object store, and whoever asks for work for the database; nobody
        # who shows that he lives waits for them.
        uploads, signs = _Desk.of("uploads", 6, 512 << 20), _Desk.of("signs_of_life", 3, 4 << 20)
        self._uploads, self._others = uploads, _Desk.of("requests", 4, 32 << 20)
        self._desks = {"push": uploads, "evaluate": uploads, "renew": signs, "progress": signs}
        self._lobby = _Lobby(ledger)
        self._next_complaint, self._num_unsaid = 0.0, 0

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
            self._complain(error)
            rejected = Rejected(503, str(error))
        return Response(pack(Problem(str(rejected))), rejected.status, rejected.headers, MEDIA_TYPE)

    def _complain(self, error: Exception) -> None:
        """Log why requests are not answered, once a minute: all nodes may ask again and again."""
        self._num_unsaid += 1
        if (now := time.monotonic()) >= self._next_complaint:
            _log.warning("%s (%d requests)", error, self._num_unsaid)
            self._next_complaint, self._num_unsaid = now + _COMPLAINT_S, 0

    async def _answer(self, request: Request) -> bytes:
        """Answer a request. Batches and leases that are not ready are polled; between polls a
        request holds neither a thread nor a slot.
        """
        caller = self._caller(request)
        name = self._method(request, caller)
        desk, max_bytes = self._desks.get(name, self._others), METHODS[name].max_bytes
        loop = asyncio.get_running_loop()
        announced = int(request.headers.get("content-length", max_bytes))
        with desk.place(min(announced, max_bytes)):  # more is refused, and not read
            body = await serving.read_body(request, max_bytes)
            parse = partial(self._parse, caller, name, body)
            is_upload = desk is self._uploads
            query = await loop.run_in_executor(desk.threads, parse) if is_upload else parse()
            if isinstance(query, LeaseRequest):
                self._lobby.leave(query.node)
            answer, wait_s = await loop.run_in_executor(desk.threads, self._work, name, query)
        began = loop.time()
        while wait_s > (waited_s := loop.time() - began) and not request.scope["is_ending"]():
            left_s = wait_s - waited_s
            if isinstance(query, LeaseRequest):
                if not await self._lobby.wait(query, request, left_s):
                    break
            else:
                pause_s = min(max(waited_s / 10, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
                await asyncio.sleep(min(pause_s, left_s))
                if await request.is_disconnected():
                    break
            with desk.place(len(body)):
                answer, still_s = await loop.run_in_executor(desk.threads, self._work, name, query)
            wait_s = wait_s if still_s > 0 else 0.0
        return answer

    def _caller(self, request: Request) -> Caller:
        """Return who asks, by the token."""
        caller = self._access.caller(request.headers.get("authorization", ""))
        if caller is None:
            raise Rejected(401, "the token is missing or wrong", {"WWW-Authenticate": "Bearer"})
        return caller

    def _method(self, request: Request, caller: Caller) -> str:
        """Return the name of the method, if the request may ask for it."""
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
            raise Rejected(404, "unknown method")
        if request.method != "POST":
            raise Rejected(405, "methods require POST", {"Allow": "POST"})
        roles = METHODS[name].roles
        if roles and caller.role not in (*roles, Role.ALL):
            raise Rejected(
                403, f"the token of the {caller.role} {caller.name!r} is not allowed to call {name}"
            )
        if request.headers.get(RUN_HEADER, self._run) != self._run:
            raise Rejected(409, "this service now serves another run; join again")
        return name

    def _parse(self, caller: Caller, name: str, body: bytes) -> Any:
        """Return the request, if the caller may send it."""
        kind = METHODS[name].request
        if kind is None:
            return None
        try:
            query: Any = unpack(body, kind)
        except Refused as error:
            raise Rejected(400, str(error)) from error
        sender = getattr(query, METHODS[name].named_by)
        if caller.role != Role.ALL and sender != caller.name:
            raise Rejected(
                403,
                f"the token is that of the {caller.role} {caller.name!r}, the request is of "
                f"{sender[:100]!r}",
            )
        return query

    def _work(self, name: str, query: Any) -> tuple[bytes, float]:
        """Return the answer, and for how many seconds a better one may be waited for."""
        if query is None:
            return pack(self._ask(name)), 0.0
        if not isinstance(query, BatchRequest | LeaseRequest):
            return pack(self._ask(name, query)), 0.0
        answer = self._ask(name, replace(query, wait_s=0.0))
        if isinstance(query, BatchRequest):
            is_missing = answer.num_missing > 0
        else:
            heard = {name: policy.version for name, policy in answer.policies.items()}
            has_nothing = not answer.leases and answer.reason in WAITING
            is_missing = has_nothing and heard == dict(query.heard)
        return pack(answer), min(query.wait_s, MAX_WAIT_S) if is_missing else 0.0

    def _ask(self, name: str, *request: Any) -> Any:
        """Return the ledger's answer, and note how long it took."""
        began = time.monotonic()
        try:
            return getattr(self._ledger, name)(*request)
        finally:
            if self._seconds is not None:
                self._seconds.labels(name).observe(time.monotonic() - began)
