"""A download in pieces, over several connections at a time.

TCP gives a connection little where the way is long and loses packets: about 50 KB/s at 300 ms and 1
%, however wide the link is. Several connections have several times as much.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

_NUM_CONNECTIONS = 16
SMALLEST, _LARGEST = 256 << 10, 2 << 20
"""Bytes of a piece."""


def in_pieces(fetch: Callable[[int, int], bytes], start: int, end: int) -> Iterator[bytes]:
    """Yield the bytes from `start` to `end` in their order. `fetch` gets bounds of a piece and
    returns its bytes, on several threads; where it returns fewer, they are the last.

    At most twice as many pieces are under way or held as there are connections.
    """
    size = min(max((end - start) // _NUM_CONNECTIONS, SMALLEST), _LARGEST)
    under_way: deque[tuple[int, Future[bytes]]] = deque()
    starts = iter(range(start, end, size))
    with ThreadPoolExecutor(_NUM_CONNECTIONS, "pieces") as pool:
        try:
            while True:
                for at in starts:
                    stop = min(at + size, end)
                    under_way.append((stop - at, pool.submit(fetch, at, stop)))
                    if len(under_way) == 2 * _NUM_CONNECTIONS:
                        break
                if not under_way:
                    return
                wanted, piece = under_way.popleft()
                yield piece.result()
                if len(piece.result()) < wanted:
                    return
        finally:
            pool.shutdown(cancel_futures=True)
