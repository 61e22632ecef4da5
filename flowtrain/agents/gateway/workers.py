"""Rollouts for workers elsewhere.

A worker asks for a rollout with its token, works under the rollout's key, and tells the outcome
with that key, too. There are no leases: a rollout whose worker is lost ends when its time is up.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from flowtrain.agents.gateway.rollout import Rollout

MAX_WAIT_S = 60.0
"""Longest wait of a worker for a rollout; it may ask again."""
_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A rollout to be made by some worker."""

    is_taken: Future[None] = field(default_factory=Future)
    """Done once a worker has asked for it; only then its time begins."""
    offer: Future[bytes] = field(default_factory=Future)
    """What the worker is told, once the rollout has begun; cancelled when that is over."""

    def begin(self, rollout: Rollout, task: Mapping[str, Any], base_url: str) -> None:
        """Tell the worker."""
        offer = {"task": task, "base_url": base_url, "api_key": rollout.key}
        body = json.dumps({**offer, "seconds": rollout.session.left_s()}).encode()
        self.offer.set_result(body)


class Waiting:
    """Rollouts that no worker has taken yet, oldest first. For any event loops."""

    def __init__(self) -> None:
        self._claims: deque[Claim] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._claims)

    @contextlib.contextmanager
    def offered(self, claim: Claim) -> Any:
        """Let workers take a rollout inside the block."""
        with self._lock:
            self._claims.append(claim)
        try:
            yield
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._claims.remove(claim)
            claim.offer.cancel()

    async def next(self, wait_s: float, is_ending: Callable[[], bool]) -> bytes | None:
        """Return what a worker needs to know of the next rollout; None where there is none for so
        long. Where the worker leaves before it is told, another one gets the rollout.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + min(wait_s, MAX_WAIT_S)
        while True:
            while (claim := self._take()) is None:
                if loop.time() >= until or is_ending():
                    return None
                await asyncio.sleep(_PAUSE_S)
            try:
                return await asyncio.shield(asyncio.wrap_future(claim.offer))
            except asyncio.CancelledError:
                if claim.offer.cancelled():
                    continue
                with self._lock:
                    self._claims.appendleft(claim)
                raise

    def _take(self) -> Claim | None:
        with self._lock:
            while self._claims:
                claim = self._claims.popleft()
                if claim.offer.cancelled():
                    continue
                if not claim.is_taken.done():
                    claim.is_taken.set_result(None)
                return claim
        return None
