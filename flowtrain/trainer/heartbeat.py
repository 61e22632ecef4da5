"""Heartbeats of the ranks. A host that loses power or network closes no connection, so that a
collective with it waits for as long as with a busy rank.

Each rank increments a counter in the rendezvous store and watches the counter of the next rank. A
rank that sees no progress ends its process, which closes the connections that others wait at.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NoReturn, Protocol

from flowtrain.utils.terminal import say

BEAT_S = 10.0
MOST_SILENT = 30
"""Number of missed beats of the next rank after which a rank ends."""
_GOODBYE_S = 5.0
_ENDED = "ended"


class Store(Protocol):
    """Stands for the store at which torch's ranks meet: as much of it as is used."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


class Heartbeat:
    """The heartbeat of one rank."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._next = store, str(rank), str((rank + 1) % size)
        self._num_told = self._num_silent = 0
        self._sign = self._last_sign = b""
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=run, name="heartbeat", daemon=True)
            for run in (self._talk, self._watch)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop in order, so that no other rank misses this one."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_GOODBYE_S)

    def tell(self) -> None:
        """Send a beat, and return the next rank's. May block forever, because torch's store has no
        timeout if its host is lost.
        """
        self._num_told += 1
        with contextlib.suppress(RuntimeError):  # no sign then, which is for `misses` to judge
            self._store.set(self._rank, str(self._num_told))
            self._sign = self._store.get(self._next)

    def misses(self) -> bool:
        """Return whether the next rank is lost, at each beat.

        The limit is in beats, not seconds, so that suspending the whole machine loses no rank.
        """
        is_alive = self._sign != self._last_sign or self._sign == _ENDED.encode()
        self._num_silent = 0 if is_alive else self._num_silent + 1
        self._last_sign = self._sign
        return self._num_silent >= MOST_SILENT

    def _talk(self) -> None:
        self.tell()
        while not self._ended.wait(BEAT_S):
            self.tell()
        with contextlib.suppress(RuntimeError):
            self._store.set(self._rank, _ENDED)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_S):
            if self.misses():
                say(
                    f"rank {self._rank} ends: rank {self._next}, or the rendezvous host, has sent "
                    f"no heartbeat for {MOST_SILENT * BEAT_S:g} s"
                )
                _end()


def _end() -> NoReturn:
    os._exit(os.EX_TEMPFAIL)  # from a thread, and while others wait without end
