"""Network namespaces joined by links of a given delay, loss and rate, which can be cut.

The kernel's TCP meets real delays and real losses: each namespace has a TUN device, and a thread
here passes the IP packets between them, holding them back and dropping some. It stands in for `tc
netem`, which many kernels lack, and needs root and /dev/net/tun.

    hub 10.77.0.1 <-- a lane each way, for every node --> nodes 10.77.0.2, 10.77.0.3, ...
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 1500
_PER_LOOK = 64
"""Packets taken from one device before the others have their turn."""
_LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Shape:
    """How one direction of a link treats packets."""

    delay_s: float = 0.0
    """Half the round trip."""
    loss: float = 0.0
    """Share of the packets, each drawn by itself."""
    bytes_per_s: float = 0.0
    """0: no limit."""
    queue_s: float = 0.3
    """How long a packet may wait for its turn; one that would wait longer is dropped."""


class Lane:
    """One direction of a link: a queue before a wire, and the way that follows it."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape = shape
        self.is_cut = False
        self.counts: Counter[str] = Counter()
        """Packets by what became of them: passed, lost, no room, cut; and the bytes that passed."""
        self._random = random.Random(seed)
        self._free_at = 0.0
        self._under_way: deque[tuple[float, bytes]] = deque()

    def send(self, packet: bytes, now: float) -> None:
        fate = self._fate(now)
        self.counts[fate] += 1
        if fate == "passed":
            self.counts["bytes"] += len(packet)
            rate = self.shape.bytes_per_s
            self._free_at = max(now, self._free_at) + (len(packet) / rate if rate else 0.0)
            self._under_way.append((self._free_at + self.shape.delay_s, packet))

    def _fate(self, now: float) -> str:
        if self.is_cut:
            return "cut"
        if self._random.random() < self.shape.loss:
            return "lost"
        return "no room" if self._free_at - now > self.shape.queue_s else "passed"

    def arrived(self, now: float) -> Iterator[tuple[bytes, float]]:
        """Packets that are there by now, each with the seconds by which it is late. A link that is
        cut loses those on the way too.
        """
        while self._under_way and self._under_way[0][0] <= now:
            due, packet = self._under_way.popleft()
            if self.is_cut:
                self.counts["cut"] += 1
            else:
                yield packet, now - due

    @property
    def next_s(self) -> float:
        """When the next packet arrives."""
        return self._under_way[0][0] if self._under_way else float("inf")


@dataclass(frozen=True, slots=True)
class Namespace:
    """A network namespace, there as long as its two descriptors are open."""

    address: str
    handle: int
    tun: int

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread is in the namespace meanwhile, and so are the processes that it starts."""
        home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _call(_LIBC.setns, self.handle, _CLONE_NEWNET)
            yield
        finally:
            _call(_LIBC.setns, home, _CLONE_NEWNET)
            os.close(home)


@dataclass(slots=True)
class Network:
    """A hub and nodes, each behind a link of its own; close it."""

    hub: Namespace
    nodes: list[Namespace]
    up: list[Lane]
    """From each node to the hub."""
    down: list[Lane]
    worst_s: float = 0.0
    """The most by which the forwarder was late: what a shape is off by at worst."""
    _ended: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @classmethod
    def open(cls, shape: Shape, num_nodes: int, seed: int = 0, congestion: str = "") -> Network:
        """`congestion`: the TCP congestion control of all namespaces; "": the kernel's choice."""
        hub, *nodes = [_make(number + 1, congestion) for number in range(num_nodes + 1)]
        up, down = ([Lane(shape, seed + 2 * n + k) for n in range(num_nodes)] for k in (0, 1))
        network = cls(hub, nodes, up, down)
        network._thread = threading.Thread(target=network._forward, name="links", daemon=True)
        network._thread.start()
        return network

    def cut(self, nodes: Iterable[int], is_cut: bool) -> None:
        """Begin or end a partition of some nodes from the hub."""
        for node in nodes:
            self.up[node].is_cut = self.down[node].is_cut = is_cut

    @property
    def counts(self) -> Counter[str]:
        """Of all lanes."""
        return sum((lane.counts for lane in self.up + self.down), Counter())

    def close(self) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join(10)
        for each in (self.hub, *self.nodes):
            os.close(each.tun)
            os.close(each.handle)

    def _forward(self) -> None:
        with contextlib.suppress(PermissionError):  # late packets would make a link worse
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -15)
        from_node = {node.tun: lane for node, lane in zip(self.nodes, self.up, strict=True)}
        to_node = {
            bytes(map(int, node.address.split("."))): lane
            for node, lane in zip(self.nodes, self.down, strict=True)
        }
        ends = [(lane, self.hub.tun) for lane in self.up]
        ends += [(lane, node.tun) for lane, node in zip(self.down, self.nodes, strict=True)]
        poll = select.epoll()
        for tun in (self.hub.tun, *from_node):
            poll.register(tun, select.EPOLLIN)
        while not self._ended.is_set():
            wait_s = min(lane.next_s for lane, _ in ends) - time.monotonic()
            for tun, _ in poll.poll(min(max(wait_s, 0.0), _LONGEST_WAIT_S)):
                for packet in _packets(tun):
                    lane = from_node.get(tun) or to_node.get(packet[16:20])
                    if lane is not None:
                        lane.send(packet, time.monotonic())
            now = time.monotonic()
            for lane, tun in ends:
                for packet, late_s in lane.arrived(now):
                    self.worst_s = max(self.worst_s, late_s)
                    os.write(tun, packet)
        poll.close()


def obstacle() -> str:
    """Why there can be no such network here; "" if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    try:
        made = _make(1)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespace with a TUN device: {error}"
    os.close(made.tun)
    os.close(made.handle)
    return ""


def _make(number: int, congestion: str = "") -> Namespace:
    """On a thread of its own, which leaves for the new namespace and ends there."""
    found: list[Namespace | Exception] = []

    def run() -> None:
        try:
            _call(_LIBC.unshare, _CLONE_NEWNET)
            found.append(_furnished(f"10.77.0.{number}", congestion))
        except (OSError, subprocess.CalledProcessError) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _furnished(address: str, congestion: str) -> Namespace:
    """The namespace that this thread is in, with a device, and with Linux's usual windows."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wire", _IFF_TUN | _IFF_NO_PI))
    settings = {"tcp_rmem": "4096 131072 6291456", "tcp_wmem": "4096 16384 4194304"}
    if congestion:
        settings["tcp_congestion_control"] = congestion
    for name, value in settings.items():
        Path(f"/proc/sys/net/ipv4/{name}").write_text(value)
    for words in (
        "link set lo up",
        f"link set wire mtu {_MTU} txqueuelen 10000 up",
        f"addr add {address}/24 dev wire",
    ):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True)
    return Namespace(address, os.open("/proc/thread-self/ns/net", os.O_RDONLY), tun)


def _packets(tun: int) -> Iterator[bytes]:
    """Some of the IPv4 packets that wait at a device."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(_PER_LOOK):
            packet = os.read(tun, _MTU)
            if packet[0] >> 4 == 4:
                yield packet


def _call(function: Callable[..., int], *arguments: Any) -> None:
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
