"""Environments with a state of their own: a shop, a file system, a game, a simulated user.

`agent.environment` names a callable that makes one for a task; the agent `tools` then plays each of
its rollouts in an environment of that rollout alone.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from flowtrain.agents.chat.template import Message
from flowtrain.agents.session import RolloutEnded, Session
from flowtrain.config import Config
from flowtrain.records import Task, ToolResult, UserError
from flowtrain.tools import Tool, ToolCard
from flowtrain.utils import plugins

_CLOSE_S = 10.0
_log = logging.getLogger(__name__)


class Environment(Protocol):
    """The world of one rollout.

    A maker whose environments do the same again when they are asked the same says so by an
    attribute `can_repeat = True`. Rollouts can then branch: a branch brings a new environment to
    where its parent was, by the same calls and replies.
    """

    @property
    def tools(self) -> Mapping[str, Tool]:
        """The tools of this rollout alone, besides those of `agent.tools`; read after `open`."""

    async def open(self) -> Sequence[Message]:
        """Begin; return the first messages, of the roles "system" and "user"."""

    async def reply(self, text: str) -> str | None:
        """Return what the user says to a message without tool calls; None: it was the last."""

    async def reward(self) -> float | Mapping[str, float]:
        """Return the reward, or its parts by name, for what has become of the world."""

    async def close(self) -> None:
        """Free what it holds; called once, however the rollout ends."""

    # An environment may have `async def turn_rewards(self) -> Sequence[float]` besides: what each
    # response of the rollout earned, which adds to `reward` (algorithm.turn_credit).
    # `over`: nothing more can happen, so that the rollout ends, after calls too.


Maker = Callable[[Task], Environment]


@dataclass(frozen=True, slots=True)
class EnvironmentTool(Tool):
    """A tool made of a coroutine function, such as a method of an environment."""

    card: ToolCard
    execute: Callable[..., Coroutine[Any, Any, str | ToolResult]]


def load_maker(config: Config) -> Maker | None:
    """Import what `agent.environment` names, with its options; None if unset. Raises UserError."""
    name = config.agent.environment
    if not name:
        return None
    origin = f"agent.environment={name!r}"
    attribute, factory = plugins.load_object(name, origin)
    if not callable(factory):
        raise UserError(
            f"{origin}: {attribute!r} cannot be called: it is a {type(factory).__name__}"
        )
    options = config.options_of(name)
    try:
        inspect.signature(factory).bind(None, **options)
    except (TypeError, ValueError) as error:
        raise UserError(f"plugins.{attribute}: {error}") from None
    maker: Any = partial(factory, **options)
    maker.can_repeat = getattr(factory, "can_repeat", False)
    return maker


@asynccontextmanager
async def opened(
    maker: Maker, session: Session
) -> AsyncIterator[tuple[Environment, Sequence[Message]]]:
    """Make the environment of a rollout, give the session its tools, and report its reward when the
    rollout is over or has come to a limit; yields the first messages too.
    """
    session.must_report = True
    environment = maker(session.task)
    try:
        messages = await environment.open()
        tools = environment.tools
        if duplicates := session.tools.keys() & tools.keys():
            raise UserError(
                f"agent.tools: {min(duplicates)!r} is also a tool of "
                "agent.environment; remove it from agent.tools"
            )
        session.tools = {**session.tools, **tools}
        session.repeats_tools = True
        try:
            yield environment, messages
        except RolloutEnded:
            await _report(environment, session)
            raise
        await _report(environment, session)
    finally:
        try:
            async with asyncio.timeout(_CLOSE_S):
                await environment.close()
        except TimeoutError:
            _log.warning("an environment did not close within %g s and is abandoned", _CLOSE_S)


async def _report(environment: Environment, session: Session) -> None:
    reward = await environment.reward()
    parts = reward if isinstance(reward, Mapping) else {"reward": reward}
    session.report(**{name: float(part) for name, part in parts.items()})
    if (turn_rewards := getattr(environment, "turn_rewards", None)) is not None:
        rewards = [float(reward) for reward in await turn_rewards()]
        if len(rewards) != len(session.turns):
            raise ValueError(f"turn_rewards: {len(rewards)} numbers for {len(session.turns)} turns")
        session.report_turns(rewards)
