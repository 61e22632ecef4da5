"""The programs of `bench.gateway`: conversations with tools, by plain HTTP, all in one process of
their own, so that what they take is not counted as the gateway's.

Each rollout has a connection and a conversation, whose history grows: what the policy said comes
back word for word in the form of the wire, and then the results of the tools that it called.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any

from flowtrain.agents.gateway.rollout import Outcome, Rollout

Body = dict[str, Any]
TURNS = 4
MOST, LAST = 1024, 512
"""Tokens that a request asks for at most; those of the last turn are told by it."""
GROUP = 8
"""Rollouts that are asked the same question."""
_LETTERS = "etaoinshrdlu"
_WORDS = ["".join(random.Random(n).choices(_LETTERS, k=2 + n % 7)) for n in range(3000)]
_WEIGHTS = [1 / rank for rank in range(1, len(_WORDS) + 1)]


def text(seed: int, num_words: int) -> str:
    """Words that are as frequent as those of a language, drawn from a seed."""
    return " ".join(random.Random(seed).choices(_WORDS, _WEIGHTS, k=num_words))


SYSTEM = text(1, 170)
TOOLS = [
    {
        "name": name,
        "description": text(number, 12),
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "string", "description": text(number, 5)}
                for key in ("query", "path", "limit")
            },
            "required": ["query"],
        },
    }
    for number, name in enumerate(("search", "read", "write", "run", "list", "ask"))
]


@dataclass(frozen=True, slots=True)
class Wire:
    """A vendor's API, as its clients use it."""

    path: str
    first: Callable[[str], Body]
    grow: Callable[[Body, Body, str], None]
    """Add a reply to the history of the next request, and the results of its calls."""


def _chat(question: str) -> Body:
    asked = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    return {"messages": asked, "tools": [{"type": "function", "function": t} for t in TOOLS]}


def _grow_chat(body: Body, reply: Body, result: str) -> None:
    said = reply["choices"][0]["message"]
    told = {"role": "tool", "content": result}
    body["messages"] += [said, *({**told, "tool_call_id": c["id"]} for c in said["tool_calls"])]


def _messages(question: str) -> Body:
    tools = [{"input_schema": t["parameters"], **t} for t in TOOLS]
    for tool in tools:
        del tool["parameters"]
    asked = [{"role": "user", "content": question}]
    return {"system": SYSTEM, "messages": asked, "tools": tools}


def _grow_messages(body: Body, reply: Body, result: str) -> None:
    told = {"type": "tool_result", "content": result}
    uses = [block["id"] for block in reply["content"] if block["type"] == "tool_use"]
    results = [{**told, "tool_use_id": use} for use in uses]
    said = {"role": "assistant", "content": reply["content"]}
    body["messages"] += [said, {"role": "user", "content": results}]


WIRES: Mapping[str, Wire] = {
    "chat": Wire("/chat/completions", _chat, _grow_chat),
    "messages": Wire("/messages", _messages, _grow_messages),
}


@dataclass(frozen=True, slots=True)
class Order:
    """A rollout that a program is to play."""

    number: int
    wire: str
    base_url: str
    api_key: str


async def play(order: Order) -> list[float]:
    """Play the program of one rollout; return the seconds of its calls."""
    wire, seconds = WIRES[order.wire], []
    host, port = order.base_url.split("/")[2].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    body = {"model": "policy", **wire.first(text(order.number // GROUP, 40))}
    for turn in range(TURNS):
        is_last = turn == TURNS - 1
        data = json.dumps({**body, "max_tokens": LAST if is_last else MOST}).encode()
        head = (
            f"POST /v1{wire.path} HTTP/1.1\r\nHost: gateway\r\n"
            f"Authorization: Bearer {order.api_key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        began = time.monotonic()
        writer.write(head.encode() + data)
        answer = await _answer(reader)
        seconds.append(time.monotonic() - began)
        if not is_last:
            wire.grow(body, json.loads(answer), text(order.number + turn, 60))
    writer.close()
    return seconds


async def _answer(reader: asyncio.StreamReader) -> bytes:
    """The least of an HTTP client, so that the clients do not take the core that they measure."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    answer = await reader.readexactly(length)
    assert head.startswith(b"http/1.1 200"), f"the gateway refused a request: {answer!r}"
    return answer


class Clients:
    """The process of the programs, which the gateway's agent takes for its program."""

    is_bounded = False

    def __init__(self) -> None:
        """Start the process; inside the event loop of the rollouts."""
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.wire = ""
        self.seconds: list[float] = []
        """Of the rollouts that begin from now on, and of their calls so far."""
        self._waiting: dict[int, asyncio.Future[list[float]]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pipe.fileno(), self._read)

    async def solve(self, rollout: Rollout, base_url: str) -> Outcome:
        number = int(rollout.task.id)
        self._waiting[number] = self._loop.create_future()
        self._pipe.send(Order(number, self.wire, base_url, rollout.key))
        self.seconds += await self._waiting[number]
        return Outcome("done")

    def _read(self) -> None:
        try:
            number, found = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._loop.remove_reader(self._pipe.fileno())
            for future in self._waiting.values():
                future.set_exception(RuntimeError("the process of the clients has ended"))
            return
        future = self._waiting.pop(number)
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)

    def close(self) -> None:
        """End nothing: an agent that is closed is followed by another one."""

    def end(self) -> None:
        self._loop.remove_reader(self._pipe.fileno())
        self._pipe.close()
        self._process.join()


def _serve(pipe: Pipe) -> None:
    """Play until the other process closes the pipe."""
    gc.freeze()
    asyncio.run(_play_all(pipe))


async def _play_all(pipe: Pipe) -> None:
    loop, end = asyncio.get_running_loop(), asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def played(order: Order) -> None:
        try:
            found: object = await play(order)
        except Exception as error:  # noqa: BLE001  # it is raised where the rollout is
            found = error
        pipe.send((order.number, found))

    def read() -> None:
        try:
            order = pipe.recv()
        except (EOFError, ConnectionError):
            end.set()
            loop.remove_reader(pipe.fileno())
            return
        tasks.add(task := loop.create_task(played(order)))
        task.add_done_callback(tasks.discard)

    loop.add_reader(pipe.fileno(), read)
    await end.wait()
