"""A download in pieces, over several connections at a time.

TCP gives a connection little where the way is long and loses packets: about 50 KB/s at 300 ms and 1
%, however wide the link is. Several connections have several times as much there. Where they share
a link that is full they gain nothing, and take the places of others at the server: so there are two
at first, and twice as many each time that this has raised the rate.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

_FEWEST, _MOST = 2, 16
"""Connections."""
_GAIN = 1.2
"""Growth of the rate that twice as many connections must bring."""
_LOOK_S, _PIECE_S = 1.0, 2.0
"""Seconds for which a rate is measured at least, and those that a piece takes alone."""
SMALLEST, _LARGEST = 256 << 10, 2 << 20
"""Bytes of a piece."""


class Connections:
    """How many connections a download has."""

    def __init__(self, rate: float) -> None:
        """`rate`: bytes per second of one connection."""
        self.num = _FEWEST
        self._rate = rate
        self._may_grow = True
        self._num_pieces = self._num_bytes = 0
        self._began = time.monotonic()

    def note(self, num_bytes: int) -> None:
        """Take note of a piece that came."""
        self._num_pieces += 1
        self._num_bytes += num_bytes
        seconds = time.monotonic() - self._began
        if not self._may_grow or self._num_pieces < self.num or seconds < _LOOK_S:
            return
        rate = self._num_bytes / seconds
        has_gained = rate > _GAIN * self._rate
        self._may_grow = has_gained and self.num < _MOST
        self.num = min(2 * self.num, _MOST) if has_gained else max(self.num // 2, _FEWEST)
        self._rate, self._num_pieces, self._num_bytes = rate, 0, 0
        self._began = time.monotonic()


def in_pieces(
    fetch: Callable[[int, int], bytes], start: int, end: int, rate: float
) -> Iterator[bytes]:
    """Yield the bytes from `start` to `end` in their order. `fetch` gets bounds of a piece and
    returns its bytes, on several threads; where it returns fewer, they are the last. `rate`: bytes
    per second of one connection.

    At most twice as many pieces are under way or held as there are connections.
    """
    size = min(max(int(rate * _PIECE_S), SMALLEST), _LARGEST)
    connections = Connections(rate)
    pieces: deque[tuple[int, Future[bytes]]] = deque()
    with ThreadPoolExecutor(_MOST, "pieces") as pool:
        try:
            while start < end or pieces:
                under_way = [piece for _, piece in pieces if not piece.done()]
                has_room = len(pieces) < 2 * connections.num
                if start < end and has_room and len(under_way) < connections.num:
                    stop = min(start + size, end)
                    pieces.append((stop - start, pool.submit(fetch, start, stop)))
                    start = stop
                elif pieces[0][1].done():
                    wanted, piece = pieces.popleft()
                    data = piece.result()
                    yield data
                    if len(data) < wanted:
                        return
                    connections.note(len(data))
                else:
                    wait(under_way, return_when=FIRST_COMPLETED)
        finally:
            pool.shutdown(cancel_futures=True)
