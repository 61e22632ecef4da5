"""Measure how long honest nodes wait while strangers hold on to the servers.

    python -m tests.attacks.strangers --strangers 2000 --nodes 64

Starts a dataflow service and a weight server as their commands do, strangers without a token in a
process of their own, and nodes that ask both servers about once a second. A stranger sends half a
head, a byte of it now and then, half a body, or requests whose answers it never reads; thrown out,
it comes again after 3 to 7 s. Prints the latencies of the honest requests and counts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import multiprocessing
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Join, LeaseRequest, Unavailable
from flowtrain.weights import Publisher, PublishOptions, RemoteStore, StoreError, WeightStore
from flowtrain.weights.stores.http import HttpObjects

ROOT = Path(__file__).parents[2]
TOKEN = "a-token-of-the-tests"
KINDS = ("half a head", "head by bytes", "half a body", "body by bytes", "never reads")
_HEAD = b"POST /v5/join HTTP/1.1\r\nHost: h\r\n"
_LENGTH = b"Content-Length: 1000\r\n\r\n"


@dataclass
class Found:
    """What the honest nodes of one server saw."""

    seconds: list[float] = field(default_factory=list)
    num_failed: int = 0

    def line(self, name: str) -> str:
        ordered = sorted(self.seconds)

        def share(part: float) -> float:
            return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else math.nan

        return (
            f"{name:9} {len(ordered):6} answered {self.num_failed:4} not"
            f"   p50 {share(0.5):7.3f} s   p99 {share(0.99):7.3f} s   max {share(1):7.3f} s"
        )


# ---- the servers


@contextlib.contextmanager
def servers(folder: Path, limits: tuple[int, int]) -> Iterator[tuple[str, str]]:
    """Run both servers as processes that may open so many files (soft and hard limit); yields their
    URLs.
    """
    publisher = Publisher(WeightStore(folder / "weights"), PublishOptions())
    publisher.publish({"weight": torch.zeros(1 << 20)}, 0)
    config = ["--config", str(ROOT / "configs/quickstart.toml")]
    database = ["--database", str(folder / "flow.sqlite")]
    with (
        _server("flowtrain.dataflow", *config, *database, limits=limits) as dataflow,
        _server("flowtrain.weights", str(folder / "weights"), limits=limits) as weights,
    ):
        yield dataflow, weights


@contextlib.contextmanager
def _server(module: str, *words: str, limits: tuple[int, int]) -> Iterator[str]:
    # Set by the shell: in this process there may be threads.
    limit = f'ulimit -Hn {limits[1]}; ulimit -Sn {limits[0]}; exec "$@"'
    python = [sys.executable, "-m", module, "serve", "--port", "0", *words]
    process = subprocess.Popen(
        ["bash", "-c", limit, "bash", *python],
        env={**os.environ, "FLOWTRAIN_TOKEN": TOKEN},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        yield process.stdout.readline().rpartition(" ")[2].strip()
    finally:
        process.terminate()
        process.wait(20)


# ---- the strangers


@contextlib.contextmanager
def besieged(urls: Sequence[str], num: int, addresses: Sequence[str]) -> Iterator[Counter[str]]:
    """Let `num` strangers, in a process of their own, hold connections to each server; they are
    there when the block begins. Yields counts, complete after the block.
    """
    ports = [int(url.rpartition(":")[2]) for url in urls]
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_besiege, args=(ports, num, addresses, theirs), daemon=True
    )
    process.start()
    counts: Counter[str] = Counter()
    try:
        ours.recv()
        yield counts
    finally:
        ours.send("end")
        counts.update(ours.recv())
        process.join(20)


def _besiege(ports: Sequence[int], num: int, addresses: Sequence[str], pipe: Connection) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(_strangers(ports, num, addresses, pipe))


async def _strangers(
    ports: Sequence[int], num: int, addresses: Sequence[str], pipe: Connection
) -> None:
    counts: Counter[str] = Counter()
    rng = random.Random(0)
    strangers = [
        asyncio.create_task(
            _stranger(
                port,
                addresses[number // len(KINDS) % len(addresses)],
                KINDS[number % len(KINDS)],
                counts,
                random.Random(rng.random()),
            )
        )
        for number in range(num)
        for port in ports
    ]
    while counts["tried"] < len(strangers):
        await asyncio.sleep(0.01)
    pipe.send("all there")
    await asyncio.to_thread(pipe.recv)
    for stranger in strangers:
        stranger.cancel()
    await asyncio.gather(*strangers, return_exceptions=True)
    pipe.send(counts)


async def _stranger(
    port: int, address: str, kind: str, counts: Counter[str], rng: random.Random
) -> None:
    while True:
        counts["tried"] += 1
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(address, 0), limit=1 << 10
            )
        except OSError:
            counts["not let in"] += 1
        else:
            try:
                await _hold(reader, writer, kind)
            except OSError:
                pass
            finally:
                writer.transport.abort()
            counts["thrown out"] += 1
        await asyncio.sleep(rng.uniform(3.0, 7.0))


async def _hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: str) -> None:
    """Hold on to a connection until the server ends it."""
    if kind == "never reads":
        while True:  # the answers fill the buffers of both sides; then `drain` waits
            writer.write((_HEAD + b"Content-Length: 0\r\n\r\n") * 100)
            await writer.drain()
            await asyncio.sleep(0.1)
    start = _HEAD + (_LENGTH if "body" in kind else b"")
    writer.write(start)
    if "bytes" not in kind:
        while await reader.read(1 << 10):
            pass
        return
    while not reader.at_eof():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await reader.read(1 << 10)
        writer.write(b"x")
        await writer.drain()


# ---- the honest nodes


def honest(dataflow: str, weights: str, num: int, is_over: threading.Event) -> tuple[Found, Found]:
    """Let `num` nodes ask both servers until it is over, each for the first time at least."""
    asked, fetched = Found(), Found()
    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(2 * num) as threads:
        nodes = [threads.submit(_lease, dataflow, n, asked, is_over) for n in range(num)]
        readers = [
            threads.submit(_fetch, weights, Path(cache) / str(n), fetched, is_over)
            for n in range(num)
        ]
        for each in (*nodes, *readers):
            each.result()
    return asked, fetched


def _lease(url: str, number: int, found: Found, is_over: threading.Event) -> None:
    node = f"node-{number}"
    with Client(url, TOKEN, wait_s=20.0) as client:
        has_joined = False

        def ask() -> None:
            nonlocal has_joined
            if has_joined:
                client.lease(LeaseRequest(node, "life", 1))
            else:
                client.join(Join(node, "life"))
                has_joined = True

        _go_on(ask, found, is_over, random.Random(number))


def _fetch(url: str, cache: Path, found: Found, is_over: threading.Event) -> None:
    store = RemoteStore(HttpObjects(url, TOKEN, timeout_s=20.0, retries=2), cache)
    _go_on(lambda: store.manifest(0), found, is_over, random.Random(cache.name))


def _go_on(
    ask: Callable[[], object], found: Found, is_over: threading.Event, rng: random.Random
) -> None:
    is_over.wait(rng.uniform(0.0, 1.0))
    while True:
        began = time.monotonic()
        try:
            ask()
            found.seconds.append(time.monotonic() - began)
        except (Unavailable, StoreError):
            found.num_failed += 1
        if is_over.wait(rng.uniform(0.5, 1.5)):
            return


def chosen(urls: tuple[str, str], at: str) -> Sequence[str]:
    return {"both": urls, "dataflow": urls[:1], "weights": urls[1:]}[at]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strangers", type=int, default=2000, help="at each server")
    text = "the servers that strangers go to (default: both)"
    parser.add_argument("--at", choices=("both", "dataflow", "weights"), default="both", help=text)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--hosts", type=int, default=16, help="addresses of the strangers")
    parser.add_argument("--files", type=int, default=1024, help="soft limit of the servers")
    options = parser.parse_args()
    addresses = [f"127.0.0.{1 + number}" for number in range(options.hosts)]
    limits = (options.files, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    is_over = threading.Event()
    with (
        tempfile.TemporaryDirectory() as folder,
        servers(Path(folder), limits) as urls,
        besieged(chosen(urls, options.at), options.strangers, addresses) as counts,
    ):
        threading.Timer(options.seconds, is_over.set).start()
        asked, fetched = honest(*urls, options.nodes, is_over)
    print(asked.line("dataflow"))
    print(fetched.line("weights"))
    print("strangers", ", ".join(f"{name}: {num}" for name, num in sorted(counts.items())))
    return 1 if asked.num_failed or fetched.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
