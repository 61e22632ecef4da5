"""A worker that may die, and is then replaced by another: what an engine in processes of its own is
kept alive with.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, Protocol, TypeVar

_log = logging.getLogger(__name__)


class EngineDied(Exception):
    """A life has ended; what was under way in it is lost."""


class Worker(Protocol):
    """One of them. Its methods raise `EngineDied` once it has ended."""

    def kill(self) -> None:
        """End it at once, without waiting."""

    def close(self) -> None:
        """End it in order, with a deadline."""


L = TypeVar("L", bound=Worker)


class Supervisor(Generic[L]):
    """The present life. Beginning one takes long, so it happens on a thread of its own and is
    waited for by those who need it.
    """

    def __init__(self, begin: Callable[[], L]) -> None:
        self._begin = begin
        self._lock = threading.Lock()
        self.num_restarts = 0
        self.present = self._next()
        """Holds what kept the life from beginning, if anything did."""

    def replace(self, dead: L, reason: str) -> None:
        """Begin the next life, once: everyone who finds the present one dead comes here."""
        with self._lock:
            if (
                not self.present.done()
                or self.present.exception() is not None
                or self.present.result() is not dead
            ):
                return
            self.num_restarts += 1
            _log.warning("restart %d: %s", self.num_restarts, reason)
            dead.kill()
            self.present = self._next()

    def close(self) -> None:
        with self._lock:
            if self.present.done() and self.present.exception() is None:
                self.present.result().close()

    def _next(self) -> Future[L]:
        future: Future[L] = Future()
        # who gives up waiting for it must not cancel it for the others
        future.set_running_or_notify_cancel()

        def fill() -> None:
            try:
                future.set_result(self._begin())
            except Exception as error:  # noqa: BLE001  # told to all who wait
                future.set_exception(error)

        threading.Thread(target=fill, name="engine-start", daemon=True).start()
        return future
