"""A dataflow behind a URL.

Requests that may succeed later are sent again, after growing pauses, until the caller's deadline.
httpx2 speaks HTTP; its time limits apply to a single read or write, so asyncio adds the limit that
counts, on the whole request. The client has an event loop and a thread of its own, because on that
of the process the rollouts' code may block, and leases and trainers are lost without news of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2

from flowtrain import __version__
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.contract import NotAllowed, Refused, Unavailable
from flowtrain.rollouts.wire import (
    MAX_WAIT_S,
    MEDIA_TYPE,
    METHODS,
    PASSING,
    PREFIX,
    RUN_HEADER,
    Problem,
)
from flowtrain.utils.net import serving
from flowtrain.utils.net.bodies import SLOWEST
from flowtrain.utils.net.retries import GaveUp, Transient, retried, retry_after_s
from flowtrain.utils.threads import Ended, LoopThread, cancel

_log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 30
"""Largest answer."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _GRACE_S = 0.1, 10.0, 1.0
_SAY_AFTER = 6
"""Number of failures after which the log tells that the client waits for the service."""
_OPENING = ("join", "register")
"""Methods whose answer tells the identity of the run."""
_NOT_ALLOWED = (401, 403)
_PASSING_LATER = (401, 410)
"""Statuses that a client need not believe at once that was answered before: the file of tokens may
be mended, a service of another version may be replaced.
"""
_ADVICE = {
    301: "; redirects are not followed, give the final address",
    302: "; redirects are not followed, give the final address",
    307: "; redirects are not followed, give the final address",
    308: "; redirects are not followed, give the final address",
    401: f"; set {serving.TOKEN_VARIABLE} to the token of the service",
    404: "; is this the address of a dataflow service of the same flowtrain version?",
}


class Client:
    """A `contract.Dataflow` with all its methods, that threads may share. A coroutine asks with
    `await client.ask("lease", request)`.
    """

    def __init__(
        self, url: str, token: str = "", wait_s: float = 1800.0, attempt_s: float = 30.0
    ) -> None:
        """
        Args:
            url: address of the service, without a path.
            token: sent as `Authorization: Bearer`, never to another address than `url`.
            wait_s: seconds until a call, with all its attempts, gives up with Unavailable.
            attempt_s: seconds until an attempt counts as failed; long requests and requests that
                wait get more.

        Raises:
            UserError: the URL or the token cannot be used.
        """
        self.url = serving.check_url(url)
        self.wait_s = wait_s
        self._attempt_s = attempt_s
        self._run: dict[str, str] = {}
        headers = {
            "Content-Type": MEDIA_TYPE,
            "Accept-Encoding": "identity",
            "User-Agent": f"flowtrain/{__version__}",
        }
        if token:
            headers["Authorization"] = f"Bearer {serving.check_token(token)}"
        limits = httpx2.Limits(
            max_connections=None, max_keepalive_connections=32, keepalive_expiry=30.0
        )
        self._http = httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)
        self._thread = LoopThread("dataflow-client")

    def __getattr__(self, name: str) -> Any:
        """Return a method of `contract.Dataflow`."""
        if name not in METHODS:
            raise AttributeError(f"a dataflow has no {name!r}")
        return partial(self._ask, name)

    async def ask(self, name: str, request: Any) -> Any:
        """Do as the method of this name, for a coroutine on any event loop."""
        deadline = time.monotonic() + self.wait_s
        with self._unless_closed(name):
            answer = self._answer(name, request, deadline)
            return await self._thread.call(answer, deadline + _GRACE_S)

    def close(self) -> None:
        """End the client; calls that still wait for an answer raise Unavailable."""
        self._thread.close(self._end, _GRACE_S)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, name: str, request: Any = None) -> Any:
        deadline = time.monotonic() + self.wait_s
        with self._unless_closed(name):
            return self._thread.run(self._answer(name, request, deadline), self.wait_s + _GRACE_S)

    @contextlib.contextmanager
    def _unless_closed(self, name: str) -> Iterator[None]:
        try:
            yield
        except (Ended, TimeoutError):
            raise Unavailable(
                f"{self.url}: the caller no longer waits for an answer to {name}"
            ) from None

    async def _answer(self, name: str, request: Any, deadline: float) -> Any:
        """Try until an attempt succeeds or is refused, or the time is up."""
        body = b"" if request is None else pack(request)
        if len(body) > METHODS[name].max_bytes:
            raise Refused(
                f"{name}: a request of {len(body)} bytes exceeds the service's limit of "
                f"{METHODS[name].max_bytes}"
            )
        limit_s = (
            self._attempt_s + len(body) / SLOWEST + min(getattr(request, "wait_s", 0.0), MAX_WAIT_S)
        )

        def say(num_failures: int, failure: Transient) -> None:
            if num_failures == _SAY_AFTER:
                text = "%s: %s; %s is retried for up to %g s"
                _log.warning(text, self.url, failure, name, self.wait_s)

        try:
            answer = await retried(
                lambda: self._attempt(name, body, limit_s),
                deadline,
                (_FIRST_PAUSE_S, _LONGEST_PAUSE_S),
                on_retry=say,
            )
        except GaveUp as end:
            raise Unavailable(
                f"{self.url} did not answer {name} within {self.wait_s:g} s: {end.problem}"
            ) from None
        if name in _OPENING:
            self._run = {RUN_HEADER: answer.run}
        return answer

    async def _attempt(self, name: str, body: bytes, limit_s: float) -> Any:
        url = f"{self.url}{PREFIX}{name}"
        run = {} if name in _OPENING else self._run
        try:
            async with (
                asyncio.timeout(limit_s) as patience,
                self._http.stream("POST", url, content=body, headers=run) as response,
            ):
                content = await _read(response, patience)
        except TimeoutError:
            raise Transient(f"no answer within {limit_s:.0f} s") from None
        except httpx2.TransportError as error:
            raise Transient(f"{type(error).__name__}: {str(error)[:200]}") from error
        if response.status_code == 200:
            return _decoded(content, METHODS[name].answer)
        status = response.status_code
        problem = f"HTTP {status}: {_problem(content)}{_ADVICE.get(status, '')}"
        may_pass = status in PASSING or (self._run and status in _PASSING_LATER)
        if may_pass or status >= 500:
            asked_s = retry_after_s(response.headers.get("retry-after", ""))
            raise Transient(problem, min(asked_s, _LONGEST_PAUSE_S))
        kind = NotAllowed if status in _NOT_ALLOWED else Refused
        raise kind(f"{url}: {problem}")

    async def _end(self) -> None:
        await cancel(asyncio.all_tasks() - {asyncio.current_task()})
        await self._http.aclose()


async def _read(response: httpx2.Response, patience: asyncio.Timeout) -> bytes:
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        if len(content) > _MAX_BYTES:
            raise Refused(f"{response.url} answers with more than {_MAX_BYTES} bytes")
        patience.reschedule((patience.when() or 0.0) + len(part) / SLOWEST)
    return bytes(content)


def _decoded(content: bytes, kind: Any) -> Any:
    try:
        return unpack(content, kind)
    except Refused as error:
        raise Transient(
            f"an invalid answer ({str(error)[:200]}); is this the address of a dataflow service?"
        ) from error


def _problem(content: bytes) -> str:
    """Return the service's message about a problem, or the beginning of any other body."""
    try:
        return unpack(content, Problem).error
    except Refused:
        return repr(" ".join(content[:400].decode(errors="replace").split())[:200])
