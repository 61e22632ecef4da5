"""Readers of one site, with a relay and without:  python -m bench.relays [--json F]

Readers follow versions of a server over one link of limited speed, which is a proxy with a token
bucket; a relay is on their side of it. First each loads a full snapshot, then it follows the deltas
as they are published. Reported: bytes over the link and seconds until the last reader is there.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bench.measure import print_table, write_json
from bench.weights import _change
from flowtrain.weights import Publisher, SnapshotPolicy, WeightReader, WeightStore, open_source

_TOKEN = "of-the-bench"
_CHUNK = 1 << 14


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--readers", type=int, default=8, help="default: 8")
    parser.add_argument("--versions", type=int, default=10, help="default: 10")
    parser.add_argument("--mwords", type=int, default=16, help="million words (default: 16)")
    parser.add_argument("--mbps", type=float, default=100.0, help="link, Mbit/s (default: 100)")
    args = parser.parse_args()
    rows = []
    for has_relay in (False, True):
        with TemporaryDirectory(prefix="flowtrain-bench-") as folder:
            rows += _measure(Path(folder), args, has_relay=has_relay)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _measure(folder: Path, args: argparse.Namespace, *, has_relay: bool) -> list[dict[str, Any]]:
    rng = torch.Generator().manual_seed(0)
    weights = {"w": torch.empty(args.mwords * 10**6, dtype=torch.bfloat16)}
    weights["w"].normal_(std=0.02, generator=rng)
    store = WeightStore(folder / "weights")
    publisher = Publisher(store, policy=SnapshotPolicy(max_deltas=1000))
    publisher.publish(weights, 0)
    with (
        _server("serve", str(store.root)) as origin,
        Link(origin, args.mbps * 1e6 / 8) as link,
        _site(link.url, folder / "relay", has_relay) as url,
        ThreadPoolExecutor(args.readers) as pool,
    ):
        readers = [
            WeightReader(open_source(url, folder / f"cache-{number}", _TOKEN), _like(weights))
            for number in range(args.readers)
        ]

        def follow(reader: WeightReader, version: int) -> None:
            while reader.source.head() != version:  # as of a moment ago, behind a relay
                time.sleep(0.05)
            reader.load(version)

        def load(version: int) -> float:
            began = time.perf_counter()
            list(pool.map(follow, readers, [version] * len(readers)))
            return time.perf_counter() - began

        common = {"relay": has_relay, "readers": args.readers, "mbps": args.mbps}
        snapshot_s, snapshot_mb = load(0), link.num_bytes / 1e6
        seconds = 0.0
        for version in range(1, args.versions + 1):
            _change(weights, 0.01, version)
            publisher.publish(weights, version)
            seconds += load(version)
        if any(reader.damaged() for reader in readers):
            raise SystemExit("a reader does not hold the last version")
        delta_mb = link.num_bytes / 1e6 - snapshot_mb
        return [
            {"what": "full snapshot", **common, "link_mb": snapshot_mb, "seconds": snapshot_s},
            {
                "what": f"{args.versions} versions",
                **common,
                "link_mb": delta_mb,
                "seconds": seconds,
            },
        ]


def _like(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


@contextmanager
def _site(url: str, folder: Path, has_relay: bool) -> Iterator[str]:
    if not has_relay:
        yield url
        return
    with _server("relay", url, "--cache-gb", "10", "--dir", str(folder)) as relay:
        yield relay


@contextmanager
def _server(*words: str) -> Iterator[str]:
    """Run a command of flowtrain.weights, and yield its address."""
    env = {**os.environ, "FLOWTRAIN_TOKEN": _TOKEN, "PYTHONUNBUFFERED": "1", "no_proxy": "*"}
    command = [sys.executable, "-m", "flowtrain.weights", *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout is not None
        while (found := re.search(r" at (http\S+)", process.stdout.readline())) is None:
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended")
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Link:
    """A proxy that sends answers at a limited speed, all connections together, and counts them."""

    def __init__(self, url: str, bytes_per_s: float) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port, self._speed = int(port), bytes_per_s
        self._free_at = 0.0
        self.num_bytes = 0
        self.url = ""

    def __enter__(self) -> Link:
        self._loop = asyncio.new_event_loop()
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, to_origin = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(
            _copy(reader, to_origin, lambda _: 0.0), _copy(upstream, writer, self._take)
        )

    def _take(self, num_bytes: int) -> float:
        """Take room on the link; returns the seconds until it is free."""
        now = time.monotonic()
        self._free_at = max(now, self._free_at) + num_bytes / self._speed
        self.num_bytes += num_bytes
        return self._free_at - now


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_for: Callable[[int], float]
) -> None:
    try:
        while data := await reader.read(_CHUNK):
            await asyncio.sleep(wait_for(len(data)))
            writer.write(data)
            await writer.drain()
    except OSError:  # a side hung up, which ends the other too
        pass
    finally:
        writer.close()


if __name__ == "__main__":
    main()
