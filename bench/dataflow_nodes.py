"""Simulated nodes and trainers of `bench.dataflow_scale`, and the groups that they push."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from bench.dataflow_growth import NUM_GROUPS, PER_LEASE, POLICIES
from bench.dataflow_service import GROUP_SIZE
from flowtrain.config import Checkpoint
from flowtrain.dataflow.client import Client
from flowtrain.dataflow.codec import pack_group
from flowtrain.dataflow.contract import (
    BatchRequest,
    Join,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Register,
    Renewal,
)
from flowtrain.types import (
    Action,
    Call,
    FinishReason,
    Group,
    Task,
    ToolResult,
    Trajectory,
    Turn,
    Verdict,
    VersionSpan,
)

NUM_TURNS, NUM_PROMPT, VOCAB_SIZE = 3, 800, 150_000
LEASE_S = 60.0
_LIFE, _BYTES_PER_TOKEN = "a", 9.2
_LOOK_S = 0.2
"""Between two looks of a trainer for a batch."""


@dataclass(frozen=True, slots=True)
class Load:
    num_nodes: int
    num_units: int
    """Work items that are leased at a time, about."""
    group_bytes: int
    rate: float
    """Groups a minute; 0: as many as are answered."""
    seconds: float
    num_replicas: int
    num_processes: int
    num_threads: int
    """In each process of nodes: requests under way at a time."""
    in_folder: bool
    """The service puts payloads into `dataflow.payloads`."""


@dataclass(slots=True)
class Node:
    name: str
    client: Client
    share: int
    times: dict[str, list[float]]
    held: list[Lease] = field(default_factory=list)
    renewed: float = 0.0
    num_asked: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def lease(self, num: int) -> None:
        self.num_asked += 1
        key = f"{self.name}-{self.num_asked}"
        versions = {str(policy): 0 for policy in POLICIES}
        request = LeaseRequest(self.name, _LIFE, num, versions, key=key)
        self.held += self._timed("lease", self.client.lease, request).leases

    def push(self, payload_of: Any) -> None:
        with self.lock:
            lease = self.held.pop(0)
            payload = payload_of(lease.task)
            request = Push(self.name, lease.work_item, lease.attempt, payload)
            pushed = self._timed("push", self.client.push, request)
            assert pushed.status == "committed", pushed
            if len(self.held) < self.share:
                self.lease(PER_LEASE)

    def renew(self) -> None:
        with self.lock:
            held = tuple((lease.work_item, lease.attempt) for lease in self.held)
            self._timed("renew", self.client.renew, Renewal(self.name, _LIFE, held))
            self.renewed = time.monotonic()

    def _timed(self, name: str, ask: Any, request: Any) -> Any:
        began = time.perf_counter()
        answer = ask(request)
        self.times[name].append(time.perf_counter() - began)
        return answer


def run_nodes(
    pipe: Connection, load: Load, places: Sequence[tuple[str, str]], process: int
) -> None:
    """A process of simulated nodes: each pushes in turn, and renews when a third of its lease's
    time is over.
    """
    times: dict[str, list[float]] = defaultdict(list)
    clients = [Client(url, token, wait_s=300.0) for url, token in places]
    share = load.num_units // load.num_nodes
    numbers = range(process, load.num_nodes, load.num_processes)
    nodes = [Node(f"node-{n}", clients[n % len(clients)], share, times) for n in numbers]
    order = random.Random(process)
    for node in nodes:
        node.client.join(Join(node.name, _LIFE))
        node.lease(share + order.randrange(PER_LEASE))  # as in the middle of a run
        node.renewed = time.monotonic() - order.random() * LEASE_S / 3
    payload_of = lru_cache(None)(lambda task: pack_group(group(task, load.group_bytes)))
    for lease in (lease for node in nodes for lease in node.held):
        payload_of(lease.task)
    times.clear()
    pipe.send("ready")
    end = pipe.recv()
    began, turns, lock = time.monotonic(), iter(range(1 << 62)), threading.Lock()
    pause_s = 60 * load.num_processes / load.rate if load.rate else 0.0

    def work() -> None:
        while (now := time.monotonic()) < end:
            with lock:
                turn = next(turns)
            if (wait := began + turn * pause_s - now) > 0:
                time.sleep(min(wait, max(0.0, end - now)))
                if time.monotonic() >= end:
                    return
            nodes[turn % len(nodes)].push(payload_of)

    def renew() -> None:
        while time.monotonic() < end:
            for node in nodes:
                if time.monotonic() - node.renewed > LEASE_S / 3:
                    node.renew()
            time.sleep(0.05)

    threads = [threading.Thread(target=work) for _ in range(load.num_threads)]
    threads.append(threading.Thread(target=renew))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(dict(times))
    pipe.recv()  # its CPU time has been read
    for client in clients:
        client.close()


class Trainer:
    def __init__(self, policy: str, url: str, token: str) -> None:
        self._policy, self._url, self._token = policy, url, token
        self.times: dict[str, list[float]] = defaultdict(list)
        with Client(url, token) as client:
            client.register(Register(policy, "", "", NUM_GROUPS, 10_000, VOCAB_SIZE, 1 << 20))

    def run(self, stop: threading.Event) -> None:
        with Client(self._url, self._token) as client:
            step = 1
            while not stop.is_set():
                began = time.perf_counter()
                batch = client.batch(BatchRequest(self._policy, step))
                if batch.num_missing:
                    stop.wait(_LOOK_S)
                    continue
                self.times["batch"].append(time.perf_counter() - began)
                checkpoint = step - step % Checkpoint().every
                client.progress(Progress(self._policy, step, checkpoint))
                step += 1


def group(task: Task, num_bytes: int) -> Group:
    """Make a group that has about so many bytes when it is packed: tokens of all policies, as hard
    to compress as sampled ones, with log-probabilities of 32 bits.
    """
    order = random.Random(num_bytes)
    num = max(1, round(num_bytes / _BYTES_PER_TOKEN / GROUP_SIZE / NUM_TURNS / len(POLICIES)))
    rollouts = (
        Trajectory(
            task,
            tuple(_turn(order, num, number == NUM_TURNS - 1) for number in range(NUM_TURNS)),
            "1284",
            0.7,
            rollout,
            reward=rollout % 2,
        )
        for rollout in range(GROUP_SIZE)
    )
    return Group(0, tuple(rollouts))


def _turn(order: random.Random, num: int, is_last: bool) -> Turn:
    prompt = tuple(order.randrange(VOCAB_SIZE) for _ in range(min(NUM_PROMPT, num)))
    calls = {
        policy: Call(
            prompt_ids=prompt,
            response_ids=tuple(order.randrange(VOCAB_SIZE) for _ in range(num)),
            logprobs=tuple(ctypes.c_float(-order.random()).value for _ in range(num)),
            spans=(VersionSpan(0, num, 0),),
            finish_reason=FinishReason.STOP,
            text="",
        )
        for policy in POLICIES
    }
    return Turn(
        calls=calls,
        action=Action("", "", "", "Search"),
        command="",
        result=ToolResult("1284"),
        verdict=Verdict.STOP if is_last else Verdict.CONTINUE,
        seconds=0.3,
    )
