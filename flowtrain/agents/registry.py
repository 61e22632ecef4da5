"""The registry of agents: built-in ones, entry points `flowtrain.agents` of other packages, and
classes in user files, `agent.name = "my_agent.py:MyAgent"`.

Each name stands for a class or another callable that makes an agent from an `AgentContext`;
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
    """Accept every config and tokenizer."""


@dataclass(frozen=True, slots=True)
class AgentKind:
    """A kind of agent: its constructor, and the abilities of its rollouts.

    The class of an agent declares these fields as attributes; a missing attribute means a missing
    ability.
    """

    make: Callable[[AgentContext], Agent]
    can_branch: bool = False
    """A rollout can start within another one (`start`), as APPO requires."""
    takes_hints: bool = False
    """The agent passes hints to stuck rollouts, as InfoFlow requires."""
    trains: tuple[PolicyName, ...] | None = None
    """Policies that the agent samples from. (): one, of any name; None: all of the config's."""
    check: Callable[[Config, ChatTokenizer], None] = _any
    """Raises UserError, before any engine starts, for a config or a planner's tokenizer that does
    not suit the agent."""

    @classmethod
    def of(cls, make: Callable[[AgentContext], Agent]) -> AgentKind:
        """Return the kind that the attributes of a class declare."""
        return cls(
            make,
            can_branch=getattr(make, "can_branch", False),
            takes_hints=getattr(make, "takes_hints", False),
            trains=getattr(make, "trains", None),
            check=getattr(make, "check", _any),
        )


def load_kind(config: Config) -> AgentKind:
    """Return the kind of agent that `agent.name` selects.

    Raises UserError for an unknown name, for code that fails to import, and for a policy that the
    agent does not sample from.
    """
    name = config.agent.name
    kind = _load(name)
    names = config.policy_names
    if kind.trains == () and len(names) > 1:
        raise UserError(
            f"policies.{names[1]} cannot be combined with agent.name={name!r}, which samples from "
            f"{names[0]} alone"
        )
    if kind.trains and (untrained := [policy for policy in names if policy not in kind.trains]):
        raise UserError(
            f"policies.{untrained[0]} cannot be combined with agent.name={name!r}, which samples "
            f"from {' and '.join(kind.trains)} alone"
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
        raise UserError(f"{origin} is a {type(maker).__name__}, not an agent class")
    return AgentKind.of(maker)
