"""Nodes without a model, over plain sockets on one event loop: they ask the service of the dataflow
as nodes do, and so cheaply that a thousand of them share a core.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

from bench.dataflow_service import LIFE, POLICY, Service
from flowtrain.rollouts.codec import pack, unpack
from flowtrain.rollouts.contract import (
    Lease,
    LeaseRequest,
    Leases,
    Push,
    Pushed,
    Renewal,
    Renewed,
)
from flowtrain.rollouts.wire import MAX_WAIT_S, PREFIX
from flowtrain.utils.net.retries import pause_s

T = TypeVar("T")


@dataclass
class Seen:
    """What all nodes saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    """Answers by HTTP status, 0: the connection failed; a request without an answer is none."""
    took_s: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By request, when each good answer came (of `time.monotonic`), and the seconds it took."""


@dataclass
class Node:
    name: str
    service: Service
    end: float
    """Of `time.monotonic`."""
    seen: Seen
    kept: list[Any] = field(default_factory=list)
    """Connections that wait for the next request."""

    async def waits(self) -> None:
        """Ask until the end for work that there is not."""
        await asyncio.sleep(random.random())
        wait_s = 0.0
        while time.monotonic() < self.end:
            own = (self.name, LIFE, 1, {POLICY: 0})
            key, heard = secrets.token_hex(8), {POLICY: 0}
            answer = await self._asked(
                LeaseRequest(*own, key=key, wait_s=wait_s, heard=heard), Leases
            )
            if answer is not None:
                assert answer.reason == "full", answer
                wait_s = MAX_WAIT_S * random.uniform(0.7, 1.0)

    async def works(self, pace_s: float, lease_s: float, groups: Mapping[int, bytes]) -> None:
        """Until the end, lease one work item at a time, renew the lease for some `pace_s`, and push
        its group.
        """
        version = 0
        await asyncio.sleep(random.uniform(0, pace_s))
        while time.monotonic() < self.end:
            own = (self.name, LIFE, 1, {POLICY: version})
            key, heard = secrets.token_hex(8), {POLICY: version}
            answer = await self._asked(
                LeaseRequest(*own, key=key, wait_s=20.0, heard=heard), Leases
            )
            if answer is None:
                return
            version = answer.policies[POLICY].version
            for lease in answer.leases:
                await self._rolled_out(lease, pace_s * random.uniform(0.5, 1.5), lease_s / 3)
                await self._asked(
                    Push(self.name, lease.work_item, lease.attempt, groups[lease.work_item]), Pushed
                )

    async def _rolled_out(self, lease: Lease, left_s: float, every_s: float) -> None:
        while left_s > 0:
            await asyncio.sleep(min(left_s, every_s))
            left_s -= every_s
            if left_s > 0:
                held = ((lease.work_item, lease.attempt),)
                await self._asked(Renewal(self.name, LIFE, held), Renewed)

    async def _asked(self, request: object, kind: type[T]) -> T | None:
        """Ask until there is a good answer; None: the end came before it."""
        name = {Leases: "lease", Renewed: "renew", Pushed: "push"}[kind]
        body, failures = pack(request), 0
        while (left_s := self.end - time.monotonic()) > 0:
            began = time.monotonic()
            try:
                async with asyncio.timeout(left_s):
                    status, content = await self._post(name, body)
            except TimeoutError:
                break
            except (OSError, asyncio.IncompleteReadError):
                status, content = 0, b""
            self.seen.statuses[status] += 1
            if status == 200:
                now = time.monotonic()
                self.seen.took_s.setdefault(name, []).append((now, now - began))
                return unpack(content, kind)
            assert status in (0, 503), (status, content)
            failures += 1
            await asyncio.sleep(max(1.0, pause_s(failures, 0.1, 10.0)))
        return None

    async def _post(self, method: str, body: bytes) -> tuple[int, bytes]:
        """Status and body; the service ends a connection with an answer that is an error."""
        url, token = self.service
        place = urlsplit(url)
        reader, writer = (
            self.kept.pop()
            if self.kept
            else await asyncio.open_connection(place.hostname, place.port)
        )
        head = (
            f"POST {PREFIX}{method} HTTP/1.1\r\nHost: service\r\n"
            f"Authorization: Bearer {token}\r\n"
            f"Content-Type: application/vnd.msgpack\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).lower()
        content = await reader.readexactly(int(lines.split(b"content-length:")[1].split()[0]))
        status = int(lines.split()[1])
        if status == 200:
            self.kept.append((reader, writer))
        else:
            writer.close()
        return status, content
