"""A node's line to the dataflow: blocking calls in threads, made again while nobody answers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from flowtrain.dataflow.contract import Unavailable
from flowtrain.types import UserError

_Q = TypeVar("_Q")
_A = TypeVar("_A")

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0


class Line:
    """For one event loop; any number of calls at once."""

    def __init__(self, patience_s: float, num_threads: int = 8) -> None:
        """`patience_s`: seconds without any answer before giving up."""
        self._patience_s = patience_s
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="dataflow")
        self._silent_since: float | None = None

    @property
    def is_silent(self) -> bool:
        """The last call had no answer."""
        return self._silent_since is not None

    async def ask(self, call: Callable[[_Q], _A], request: _Q) -> _A:
        """What `call(request)` answers, which may be Refused. Raises UserError when there was no answer to any call for too long."""
        loop, pause_s = asyncio.get_running_loop(), _FIRST_PAUSE_S
        while True:
            try:
                answer = await loop.run_in_executor(self._threads, call, request)
            except Unavailable as error:
                self._note(error)
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # or a service that comes back would meet all nodes at once
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            else:
                self._heard()
                return answer

    def close(self) -> None:
        """Calls under way end by their own deadlines; nobody waits for them."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note(self, error: Unavailable) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            _log.warning("the dataflow does not answer (%s); trying on for dataflow.wait_s=%g", error, self._patience_s)
        elif now - self._silent_since > self._patience_s:
            raise UserError(f"the dataflow has not answered for dataflow.wait_s={self._patience_s:g} seconds: {error}") from error

    def _heard(self) -> None:
        if self._silent_since is not None:
            _log.warning("the dataflow answers again, after %.0f s", time.monotonic() - self._silent_since)
            self._silent_since = None
