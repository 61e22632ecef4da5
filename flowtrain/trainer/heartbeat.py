"""Signs of life of the ranks. A host that has lost its power or its network closes no connection,
so that a collective with it waits for as long as one with a rank that is busy.

Each rank counts up in the store that the ranks met at, and looks whether the next one does. One
that sees no sign ends its process, and so the connections that others wait at.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import NoReturn, Protocol

from flowtrain.utils.terminal import say

BEAT_S = 10.0
MOST_SILENT = 30
"""Beats without a sign of the next rank before a rank ends."""
_GOODBYE_S = 5.0
_ENDED = "ended"


class Store(Protocol):
    """Stands for the store at which torch's ranks meet: as much of it as is used."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...


class Heartbeat:
    """The signs of one rank of several."""

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
        """End in order, after which nobody misses this rank."""
        self._ended.set()
        for thread in self._threads:
            thread.join(_GOODBYE_S)

    def tell(self) -> None:
        """Give a sign, and take that of the next rank. It may take for ever: torch's store has no
        time limit where its host is lost.
        """
        self._num_told += 1
        with contextlib.suppress(RuntimeError):  # no sign then, which is for `misses` to judge
            self._store.set(self._rank, str(self._num_told))
            self._sign = self._store.get(self._next)

    def misses(self) -> bool:
        """Return whether the next rank is lost, at each beat.

        Beats are counted, not seconds: a machine that was suspended as a whole has lost nobody.
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
