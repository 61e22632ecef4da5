"""Benchmark of the gateway:  python -m bench.gateway [--json F]

It measures what the gateway adds to a call of the policy's engine: the HTTP server, the protocol,
the crossing to the loop of the rollouts, the chat template and the record. The engine only waits,
for --latency milliseconds on average, by half of it more or less; --in-flight rollouts ask it at a
time, each in a conversation of some turns. They sample through their sessions with ids that are at
hand; through the gateway by plain HTTP from a process of its own, as programs do; and, between the
two, the same clients ask the same server ("transport") for an application that only parses the
JSON, waits as long and returns the same bytes. So gateway less transport is the gateway's own, and
transport is HTTP and the clients.
A time is how long the caller waits, less what the engine was to take; the CPU time is that of the
process of the server, without the clients. The first round is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bench.measure import print_table, write_json
from flowtrain.agents.base import AgentContext
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.agents.gateway.requests import read_chat
from flowtrain.agents.gateway.responses import Reply, chat_body
from flowtrain.agents.gateway.server import new_key
from flowtrain.agents.policy import Policy
from flowtrain.agents.session import Session
from flowtrain.config import Config
from flowtrain.net import serving
from flowtrain.training.model import new_tokenizer
from flowtrain.types import Completion, FinishReason, Sampling, Task, VersionSpan

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
_QUESTION = "What is the area of the country with the ISO code MZ, in square kilometres? " * 4
_REPLY = "The area of Mozambique is 801590 square kilometres, as far as I know. " * 3


@dataclass(slots=True)
class WaitingEngine:
    """Gives one answer after as many microseconds as it may sample tokens."""

    ids: tuple[int, ...]
    version: int = 0
    max_tokens: int = 1 << 30

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(sampling.max_new_tokens / 1e6)
        spans = (VersionSpan(0, len(self.ids), 0),)
        return Completion(self.ids, (-1.0,) * len(self.ids), spans, FinishReason.STOP)

    def load(self, version: int) -> None:
        """The weights never change."""

    def sleep(self) -> None:
        """It holds nothing."""

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """It holds nothing."""


@dataclass(frozen=True, slots=True)
class Load:
    """The calls that are made."""

    in_flight: int
    num_turns: int
    num_rounds: int
    """The first is not counted."""
    latency_ms: float

    def draw_us(self) -> int:
        return int(1e3 * self.latency_ms * random.uniform(0.5, 1.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--json", metavar="F", help="write the rows to this file")
    add("--in-flight", type=int, default=64, help="rollouts at a time (default: 64)")
    add("--turns", type=int, default=8, help="calls of a rollout (default: 8)")
    add("--rounds", type=int, default=3, help="rollouts one after another (default: 3)")
    add("--latency", type=float, default=500.0, help="ms of the engine (default: 500)")
    args = parser.parse_args()
    load = Load(args.in_flight, args.turns, args.rounds + 1, args.latency)
    context = make_context(args.turns)
    alone = asyncio.run(engine_alone(context, load))
    over_http, http_cpu_s = through_http_alone(context, load)
    through, cpu_s = through_gateway(context, load)
    rows = [
        _row("engine alone", args, alone),
        _row("transport", args, over_http) | {"cpu_ms": 1e3 * http_cpu_s},
        _row("gateway", args, through) | {"cpu_ms": 1e3 * cpu_s},
    ]
    rows += [_difference(rows[2], rows[0]), _difference(rows[2], rows[1])]
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def make_context(num_turns: int) -> AgentContext:
    tokenizer = new_tokenizer([_QUESTION, _REPLY], 512)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = _CHATML
    ids = tuple(tokenizer.encode(f"{_REPLY}<|im_end|>", add_special_tokens=False))
    config = Config.model_validate(
        {
            "agent": {"name": "gateway", "max_turns": num_turns, "tool_format": "hermes"},
            "gateway": {"columns": ["answers"]},
        }
    )
    engine: Any = WaitingEngine(ids)
    policy = Policy(engine, tokenizer, 1 << 29, temperature=1.0, request_timeout_s=60.0)
    return AgentContext(config, {"planner": policy}, {}, {}, num_turns)


def tasks(number: int) -> list[Task]:
    return [Task(f"t-{n}", _QUESTION, ("801590",)) for n in range(number)]


async def engine_alone(context: AgentContext, load: Load) -> list[float]:
    """Seconds of each call through sessions alone, less the engine's."""
    prompt_ids = context.policies["planner"].encode(_QUESTION)
    seconds: list[float] = []

    async def rollout(task: Task) -> None:
        session = Session(task, 0, context)
        for _ in range(load.num_turns):
            latency_us = load.draw_us()
            started = time.perf_counter()
            await session.sample(prompt_ids, max_new_tokens=latency_us)
            seconds.append(time.perf_counter() - started - latency_us / 1e6)

    for number in range(load.num_rounds):
        await asyncio.gather(*map(rollout, tasks(load.in_flight)))
        if number == 0:
            seconds.clear()
    return seconds


def through_gateway(context: AgentContext, load: Load) -> tuple[list[float], float]:
    """Seconds of each call by HTTP, likewise, and CPU seconds of this process per call."""
    os.environ["FLOWTRAIN_GATEWAY_TOKEN"] = "bench"
    agent = GatewayAgent(context)
    spawn = multiprocessing.get_context("spawn")
    cpu_s = []

    async def rollouts() -> None:
        for _ in range(load.num_rounds):
            started = time.process_time()
            await asyncio.gather(*(agent.run(task, 0) for task in tasks(load.in_flight)))
            cpu_s.append(time.process_time() - started)

    with spawn.Pool(1) as pool:
        done = pool.apply_async(work, (agent.gateway.base_url, load))
        asyncio.run(rollouts())
        seconds: list[float] = done.get(60)
    agent.close()
    return seconds, sum(cpu_s[1:]) / len(seconds)


def through_http_alone(context: AgentContext, load: Load) -> tuple[list[float], float]:
    """Likewise, of an application that waits as long and returns the same bytes."""
    hello = {"model": "policy", "messages": [{"role": "user", "content": _QUESTION}]}
    ids = context.policies["planner"].encode(_REPLY)
    reply = Reply("chatcmpl-012345678", _REPLY, (), "stop", len(ids), len(ids))
    answer = chat_body(read_chat(json.dumps(hello).encode()).options, reply)
    told = {"task": {"id": "t-0", "question": _QUESTION}, "api_key": new_key()}
    answers = {"/v1/rollouts/next": json.dumps(told).encode(), "/v1/rollouts/done": b"{}"}
    cpu_s = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body = json.loads(await serving.read_body(Request(scope, receive), 1 << 20))
        scope["admit"]()
        if "max_tokens" in body:
            await asyncio.sleep(body["max_tokens"] / 1e6)
        found = answers.get(scope["path"], answer)
        await Response(found, media_type="application/json")(scope, receive, send)
        cpu_s.append(time.process_time())

    server, listener = serving.make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seconds: list[float] = pool.apply(work, (serving.address(listener), load))
    server.should_exit = True
    thread.join()
    listener.close()
    first = len(cpu_s) // load.num_rounds - 1
    return seconds, (cpu_s[-1] - cpu_s[first]) / len(seconds)


def work(url: str, load: Load) -> list[float]:
    """The clients, in a process of their own: each a worker with a connection of its own."""
    seconds: list[float] = []

    async def solve() -> None:
        connection = await Connection.open(url)
        found = await connection.post("/v1/rollouts/next", "bench", {"wait_s": 30})
        messages: list[Any] = [{"role": "user", "content": found["task"]["question"]}]
        for _ in range(load.num_turns):
            latency_us = load.draw_us()
            body = {"model": "policy", "messages": messages, "max_tokens": latency_us}
            started = time.perf_counter()
            reply = await connection.post("/v1/chat/completions", found["api_key"], body)
            seconds.append(time.perf_counter() - started - latency_us / 1e6)
            again = {"role": "user", "content": "Are you sure?"}
            messages += [reply["choices"][0]["message"], again]
        await connection.post("/v1/rollouts/done", found["api_key"], {"answer": "801590"})
        connection.close()

    async def everybody() -> None:
        for number in range(load.num_rounds):
            await asyncio.gather(*(solve() for _ in range(load.in_flight)))
            if number == 0:
                seconds.clear()

    asyncio.run(everybody())
    return seconds


@dataclass(frozen=True, slots=True)
class Connection:
    """The least of an HTTP client, so that the clients do not take the cores that they measure."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, url: str) -> Connection:
        host, port = url.split("/")[2].rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port)))

    async def post(self, path: str, token: str, body: Any) -> Any:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self.writer.write(head.encode() + data)
        answer = await self.reader.readuntil(b"\r\n\r\n")
        fields = dict(
            line.split(b": ", 1) for line in answer.lower().split(b"\r\n") if b": " in line
        )
        found = json.loads(await self.reader.readexactly(int(fields[b"content-length"])))
        if not answer.startswith(b"HTTP/1.1 200"):
            sys.exit(f"the gateway refused a request: {found}")
        return found

    def close(self) -> None:
        self.writer.close()


def _difference(of: dict[str, Any], to: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in ("mean_ms", "p50_ms", "p99_ms", "cpu_ms") if key in to]
    return {"path": f"{of['path']} - {to['path']}"} | {key: of[key] - to[key] for key in keys}


def _row(path: str, args: argparse.Namespace, seconds: Sequence[float]) -> dict[str, Any]:
    ranked = sorted(seconds)
    return {
        "path": path,
        "calls": len(seconds),
        "in_flight": args.in_flight,
        "mean_ms": 1e3 * statistics.mean(seconds),
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * ranked[int(0.99 * len(ranked))],
    }


if __name__ == "__main__":
    main()
