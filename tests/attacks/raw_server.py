"""A server on loopback that sends bytes as it likes, and goes on for as long as somebody reads."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

Pieces = Callable[[], Iterable[bytes | float]]
"""Makes the pieces of an answer; a number is a pause in seconds. It may have no end."""


@dataclass
class RawServer:
    """Answers every connection with `pieces` and closes it."""

    port: int = 0
    pieces: Pieces = field(default=lambda: ())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in self.pieces():
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                else:
                    writer.write(piece)
                    await writer.drain()
            await asyncio.sleep(0)
        writer.close()


@contextlib.contextmanager
def raw_server() -> Iterator[RawServer]:
    state = RawServer()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(state.answer, "127.0.0.1", 0))
    state.port = server.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result(20)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# ---- answers


def head(*headers: str, status: str = "200 OK", kind: str = "text/html") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {kind}", *headers, "", ""]).encode(
        "latin-1"
    )


def whole(body: bytes, *headers: str, **options: str) -> Pieces:
    return lambda: (head(f"Content-Length: {len(body)}", *headers, **options), body)


def forever(beginning: bytes, piece: bytes | float, *more: bytes | float) -> Pieces:
    def pieces() -> Iterator[bytes | float]:
        yield beginning
        while True:
            yield piece
            yield from more

    return pieces


def zeros(num_mib: int, wbits: int = 31) -> bytes:
    """Compress so many MiB of zeros."""
    packer = zlib.compressobj(9, wbits=wbits)
    block = bytes(1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(num_mib)), packer.flush()])


EMPTY_BLOCK = b"\0\0\0\xff\xff"
GZIP_HEAD = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"


@cache
def nothings(levels: int) -> bytes:
    """Compress 100 MB that unpack to nothing, `levels` times one in the other."""
    if levels > 1:
        return gzip.compress(nothings(levels - 1), 9)
    packer = zlib.compressobj(9, wbits=31)
    block = EMPTY_BLOCK * 200_000
    return b"".join(
        [packer.compress(GZIP_HEAD), *(packer.compress(block) for _ in range(100)), packer.flush()]
    )
