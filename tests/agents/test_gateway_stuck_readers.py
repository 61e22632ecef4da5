"""Programs that stop reading a stream, or leave amid it: it costs their own rollout alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from gateway_runs import TASK, logging_engine, make_agent

from flowtrain.agents.deadlines import Cutoff
from flowtrain.agents.gateway import agent as agent_module
from flowtrain.agents.gateway.agent import GatewayAgent
from flowtrain.agents.gateway.rollout import Outcome, Rollout
from flowtrain.records import Trajectory

HI = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "messages": {"messages": HI, "max_tokens": 100_000},
    "responses": {"input": HI},
}
LONG = "It is 1284. " * 10_000
"""More than the buffers of both sockets hold."""
Solve = Callable[[Rollout, str], Awaitable[str]]


class Programs:
    """Programs of the test itself, by the ids of their tasks."""

    is_bounded = False

    def __init__(self, **solve: Solve) -> None:
        self.solve_with = solve

    async def solve(self, rollout: Rollout, base_url: str) -> Outcome:
        return Outcome(await self.solve_with[rollout.task.id](rollout, base_url))

    def close(self) -> None: ...


@contextlib.contextmanager
def agent_of(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Iterator[GatewayAgent]:
    """An agent whose policy says long texts, behind a server with small buffers."""
    monkeypatch.setattr(agent_module, "_program", lambda options: Programs())
    engine = logging_engine(
        reply=lambda prompt: LONG,
        spell=lambda tokenizer, text: tuple(tokenizer.encode(text, add_special_tokens=False)),
        max_tokens=1 << 20,
    )
    agent = make_agent(engine, agent=options)
    policy = agent.context.policies["planner"]
    monkeypatch.setitem(agent.context.policies, "planner", replace(policy, max_new_tokens=1 << 19))
    # Connections inherit it, and the time of a rollout does not begin with what the server imports.
    agent.gateway._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    with contextlib.closing(agent):
        yield agent


def play(agent: GatewayAgent, **solve: Solve) -> None:
    agent._program = Programs(**solve)


async def roll_out(agent: GatewayAgent, name: str, cutoff: Cutoff | None = None) -> Trajectory:
    return await agent.run(replace(TASK, id=name), 0, cutoff)


@contextlib.asynccontextmanager
async def streaming(
    rollout: Rollout, base_url: str, wire: str, buffer: int = 1
) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A stream whose head alone was read, and the rest; the client's buffer is small."""
    host, port = base_url.split("/")[2].split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=client, limit=1 << 10)
    try:
        data = json.dumps({"model": "policy", "stream": True, **BODIES[wire]}).encode()
        head = f"POST /v1/{wire} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {rollout.key}\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answered = await reader.readuntil(b"\r\n\r\n")
        assert answered.startswith(b"HTTP/1.1 200 OK\r\n") and b"text/event-stream" in answered
        yield reader, int(answered.partition(b"content-length: ")[2].split()[0])
    finally:
        writer.transport.abort()


async def asked(rollout: Rollout, base_url: str, wire: str) -> str:
    """Read a stream to its end, and say whether it holds all that the policy said."""
    async with streaming(rollout, base_url, wire, 1 << 16) as (reader, length):
        return str(LONG in (await reader.readexactly(length)).decode())


async def is_left(agent: GatewayAgent, num_rollouts: int = 0) -> None:
    """Wait until the server has neither connections nor requests, and count the keys."""
    state = agent.gateway._server.server_state
    while state.connections or state.tasks:
        await asyncio.sleep(0)
    assert len(agent.gateway._rollouts) == num_rollouts


@pytest.mark.parametrize("wire", BODIES)
def test_a_reader_that_stops_holds_up_nobody_else(
    monkeypatch: pytest.MonkeyPatch, wire: str
) -> None:
    async def run(agent: GatewayAgent) -> None:
        is_stuck, cutoff = asyncio.Event(), Cutoff()

        async def stop(rollout: Rollout, base_url: str) -> str:
            async with streaming(rollout, base_url, wire):
                is_stuck.set()
                await asyncio.Event().wait()
            raise AssertionError

        async def go_on(rollout: Rollout, base_url: str) -> str:
            return await asked(rollout, base_url, wire)

        play(agent, stuck=stop, other=go_on)
        stuck = asyncio.create_task(roll_out(agent, "stuck", cutoff))
        await is_stuck.wait()
        others = await asyncio.gather(*(roll_out(agent, "other") for _ in range(4)))
        found = [(each.answer, each.error, len(each.turns)) for each in others]
        assert found == [("True", "", 1)] * 4
        assert not stuck.done(), "the others did not wait for it"
        cutoff.set(asyncio.get_running_loop().time())
        ended = await stuck
        assert (ended.truncated, ended.error, len(ended.turns)) == ("straggler", "", 1)
        await is_left(agent)

    with agent_of(monkeypatch) as agent:
        asyncio.run(run(agent))


def test_the_rollout_of_a_reader_that_stops_ends_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stop(rollout: Rollout, base_url: str) -> str:
        async with streaming(rollout, base_url, "chat/completions"):
            await asyncio.Event().wait()
        raise AssertionError

    async def run(agent: GatewayAgent) -> None:
        play(agent, stuck=stop)
        ended = await roll_out(agent, "stuck")
        assert (ended.truncated, ended.error) == ("time", "")
        await is_left(agent)

    with agent_of(monkeypatch, rollout_timeout_s=2.0) as agent:
        asyncio.run(run(agent))


def test_a_reader_that_leaves_amid_a_stream_may_ask_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(rollout: Rollout, base_url: str) -> str:
        async with streaming(rollout, base_url, "chat/completions") as (reader, _):
            await reader.readexactly(1000)
        return await asked(rollout, base_url, "chat/completions")

    async def run(agent: GatewayAgent) -> Trajectory:
        play(agent, left=leave)
        trajectory = await roll_out(agent, "left")
        await is_left(agent)
        return trajectory

    with agent_of(monkeypatch) as agent:
        trajectory = asyncio.run(run(agent))
    assert (trajectory.answer, trajectory.error, len(trajectory.turns)) == ("True", "", 2)
