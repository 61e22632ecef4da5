"""The agents by name: our own, those of other packages by entry point `flowtrain.agents`, and those
of users' files, `agent.name = "my_agent.py:MyAgent"`.

Each name stands for a class, or another callable, that makes the agent from an `AgentContext`;
docs/agents/custom.md shows one from end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flowtrain.agents.base import Agent, AgentContext
from flowtrain.agents.chat.environment import load_maker
from flowtrain.config import Config
from flowtrain.inference.token_chat import ChatTokenizer
from flowtrain.records import PolicyName, UserError
from flowtrain.utils import plugins

GROUP = "flowtrain.agents"
BUILT_IN = plugins.built_in(
    GROUP,
    "flowtrain.agents",
    {
        "agentflow": "agentflow.build:AGENTFLOW",
        "gateway": "gateway.agent:GatewayAgent",
        "single": "chat.single_turn:SingleTurn",
        "tools": "chat.tool_calling:ToolCallingAgent",
    },
)
"""The agents of this package by name; imported only when a run uses them."""


def _any(config: Config, tokenizer: ChatTokenizer) -> None:
    """Take every config and tokenizer."""


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A kind of agent: how one is made, and what its rollouts can do besides running through.

    A class that makes agents has these as attributes; what it lacks, it cannot do.
    """

    make: Callable[[AgentContext], Agent]
    can_branch: bool = False
    """A rollout can begin within another one (`start`), as APPO's do."""
    takes_hints: bool = False
    """It hands hints to stuck rollouts, as InfoFlow does."""
    trains: tuple[PolicyName, ...] | None = None
    """The policies that it samples from. (): one, whatever the config calls it; None: those that
    the config names."""
    check: Callable[[Config, ChatTokenizer], None] = _any
    """Raises UserError, before any engine starts, for a config or a tokenizer of the planner that
    it cannot work with."""

    @classmethod
    def of(cls, make: Callable[[AgentContext], Agent]) -> AgentKind:
        """Read what the agents of a class can do off its attributes."""
        return cls(
            make,
            can_branch=getattr(make, "can_branch", False),
            takes_hints=getattr(make, "takes_hints", False),
            trains=getattr(make, "trains", None),
            check=getattr(make, "check", _any),
        )


def load_kind(config: Config) -> AgentKind:
    """Load what `agent.name` names.

    Raises UserError for an unknown name, for code that cannot be imported, and for a policy that
    the agent does not sample from.
    """
    name = config.agent.name
    kind = _load(name)
    names = config.policy_names
    if kind.trains == () and len(names) > 1:
        raise UserError(
            f"policies.{names[1]} does not go with agent.name={name!r}, which samples from "
            f"{names[0]} alone"
        )
    if kind.trains and (untrained := [policy for policy in names if policy not in kind.trains]):
        raise UserError(
            f"policies.{untrained[0]} does not go with agent.name={name!r}, which samples from "
            f"{' and '.join(kind.trains)} alone"
        )
    maker = load_maker(config)
    if maker is not None and not getattr(maker, "can_repeat", False):
        return replace(kind, can_branch=False)
    return kind


def _load(name: str) -> AgentKind:
    origin = f"agent.name={name!r}"
    maker = plugins.load(name, origin, "agent", GROUP, BUILT_IN)
    if isinstance(maker, AgentKind):
        return maker
    if not callable(maker):
        raise UserError(f"{origin} is a {type(maker).__name__}, not a class that makes agents")
    return AgentKind.of(maker)
