"""A TCP proxy that loses, delays, repeats, cuts and reorders requests and answers, by a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from urllib.parse import urlsplit

FAULTS = (
    *("lose request", "lose answer", "cut request", "cut answer", "delay request", "delay answer"),
    *("repeat at once", "repeat later"),
)
_MOST_S = 0.03
"""Seconds of a delay: requests that come meanwhile overtake, which reorders them."""
_LATER_S = 0.15
"""Until a request comes a second time, long after its answer."""


class FaultyProxy:
    """`share` of the requests meet a fault; each request on a connection of its own."""

    def __init__(self, url: str, seed: int, share: float) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._random, self._share = random.Random(seed), share
        self.counts: Counter[str] = Counter()
        """Requests by fault; "" without one."""
        self._later: set[asyncio.Task[None]] = set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError):
            request = await _request(reader)
            fault = self._random.choice(FAULTS) if self._random.random() < self._share else ""
            self.counts[fault] += 1
            answer = await self._through(fault, request)
            if fault == "cut answer":
                answer = answer[: self._random.randrange(len(answer))]
            writer.write(answer)
            await writer.drain()
        writer.close()

    async def _through(self, fault: str, request: bytes) -> bytes:
        """Return what the client gets; nothing where something is lost."""
        pause_s = self._random.uniform(0, _MOST_S)
        if fault == "lose request":
            return b""
        if fault == "cut request":
            await self._send(request[: self._random.randrange(len(request))], is_whole=False)
            return b""
        if fault == "delay request":
            await asyncio.sleep(pause_s)
        if fault == "repeat later":
            task = asyncio.create_task(self._again(request, self._random.uniform(0, _LATER_S)))
            self._later.add(task)
        answers = await asyncio.gather(
            *[self._send(request) for _ in range(2 if fault == "repeat at once" else 1)]
        )
        if fault == "delay answer":
            await asyncio.sleep(pause_s)
        return b"" if fault == "lose answer" else answers[-1]

    async def _again(self, request: bytes, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        with contextlib.suppress(OSError):
            await self._send(request)

    async def _send(self, request: bytes, is_whole: bool = True) -> bytes:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(request)
            await writer.drain()
            return await reader.read() if is_whole else b""
        finally:
            writer.close()

    async def rest(self) -> None:
        """Until what comes later has come."""
        await asyncio.gather(*self._later)


async def _request(reader: asyncio.StreamReader) -> bytes:
    """Whole, and asking for the end of the connection after its answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
    body = await reader.readexactly(int(length[1]) if length else 0)
    return (
        re.sub(rb"(?i)\r\nconnection: [^\r]*", b"", head).replace(
            b"\r\n", b"\r\nConnection: close\r\n", 1
        )
        + body
    )


@contextlib.contextmanager
def faulty(url: str, seed: int, share: float = 0.4) -> Iterator[tuple[str, Counter[str]]]:
    """The URL of a proxy before `url`, and the faults; nothing is under way after it."""
    started: list[tuple[int, FaultyProxy]] = []
    is_up, is_over = threading.Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def run() -> None:
        proxy = FaultyProxy(url, seed, share)
        server = await asyncio.start_server(proxy.handle, "127.0.0.1", 0)
        started.append((server.sockets[0].getsockname()[1], proxy))
        loops.append(asyncio.get_running_loop())
        is_up.set()
        await is_over.wait()
        server.close()
        await proxy.rest()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert is_up.wait(20)
    port, proxy = started[0]
    try:
        yield f"http://127.0.0.1:{port}", proxy.counts
    finally:
        loops[0].call_soon_threadsafe(is_over.set)
        thread.join(20)
        assert not thread.is_alive()
