"""Rollouts that wait for a worker elsewhere.

A worker asks for one with its token, works under the rollout's key, and tells the outcome with that
key, too. There are no leases: a rollout whose worker is lost ends when its time is up.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from flowtrain.agents.gateway.rollout import Outcome, Rollout

MAX_WAIT_S = 60.0
"""Longest wait of a worker for a rollout; it may ask again."""
_PAUSE_S = 0.05


class Waiting:
    """Rollouts that no worker has taken yet, oldest first."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._rollouts: deque[tuple[Rollout, Mapping[str, Any]]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rollouts)

    async def solve(self, rollout: Rollout, task: Mapping[str, Any]) -> Outcome:
        """Offer a rollout to workers, and wait for its outcome."""
        offered = (rollout, task)
        self._rollouts.append(offered)
        try:
            return await rollout.outcome
        finally:
            with self._lock:
                if offered in self._rollouts:
                    self._rollouts.remove(offered)

    async def next(self, wait_s: float, is_ending: Callable[[], bool]) -> bytes | None:
        """Return what a worker needs to know of the next rollout; None where there is none for
        that long. A worker that leaves while it waits takes none.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + min(wait_s, MAX_WAIT_S)
        while (found := self._take()) is None:
            if loop.time() >= until or is_ending():
                return None
            await asyncio.sleep(_PAUSE_S)
        rollout, task = found
        offer = {"task": task, "base_url": self._base_url, "api_key": rollout.key}
        return json.dumps({**offer, "seconds": rollout.session.left_s()}).encode()

    def _take(self) -> tuple[Rollout, Mapping[str, Any]] | None:
        with self._lock:
            return self._rollouts.popleft() if self._rollouts else None
