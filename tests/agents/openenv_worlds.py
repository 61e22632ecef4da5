"""Worlds of the package `openenv`, and a server of them on loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)

EVENTS: list[str] = []
"""What has become of all worlds."""


class Guess(Action):
    """Guesses the number."""

    number: int
    why: str = ""


class Hint(Observation):
    hint: str = ""


class Numbers(Environment[Guess, Hint, State]):
    """A number from 1 to 100 by the seed, which is to be guessed."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **row: Any) -> Hint:
        EVENTS.append(f"reset {seed} {row}")
        self.wanted = (seed or 0) % 100 + 1
        return Hint(hint=f"It is {'even' if self.wanted % 2 == 0 else 'odd'}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        EVENTS.append(f"guess {action.number} {action.metadata}")
        if action.number > 100:
            raise ValueError("it is at most 100")
        if action.number == self.wanted:
            return Hint(hint="Yes.", reward=0.75, done=True)
        hint = "Too low." if action.number < self.wanted else "Too high."
        return Hint(hint=hint, reward=0.125)

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        EVENTS.append("closed")


class Bench(MCPEnvironment):
    """Tools by MCP, whose calls are rewarded."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("bench")

        @server.tool
        def add(a: int, b: int) -> int:
            """Adds two
            numbers."""
            return a + b

        @server.tool
        def table(of: str) -> dict[str, Any]:
            """Finds a row."""
            if of == "nothing":
                raise ValueError("there is no such row")
            return {"of": of, "rank": 3}

        super().__init__(server)

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        return Observation(metadata={"status": "ready"})

    async def step_async(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        seen = await super().step_async(action, timeout_s)
        if isinstance(action, CallToolAction):
            seen.reward = 0.25
        return seen

    def _step_impl(self, action: Any, timeout_s: float | None = None, **_: Any) -> Observation:
        raise ValueError("calls of tools alone")

    @property
    def state(self) -> State:
        return State()

    def close(self) -> None:
        EVENTS.append("closed")
        super().close()


@dataclass
class Served:
    url: str
    server: uvicorn.Server
    thread: threading.Thread = field(repr=False)

    def die(self) -> None:
        """End with all connections."""
        self.server.should_exit = self.server.force_exit = True
        self.thread.join(30)


@contextlib.contextmanager
def serving(world: type = Numbers) -> Iterator[Served]:
    types = (CallToolAction, CallToolObservation) if world is Bench else (Guess, Hint)
    app = create_fastapi_app(world, *types, max_concurrent_envs=16)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    served = Served(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
    try:
        yield served
    finally:
        served.die()
        listener.close()
