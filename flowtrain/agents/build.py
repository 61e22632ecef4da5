"""Put the flow together as `[agent]` and `[rollout]` say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flowtrain import config as cfg
from flowtrain.agents import roles
from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.generator import RuleGenerator, last_expression, last_result
from flowtrain.agents.planner import Planner, PolicyPlanner
from flowtrain.agents.prompts import CompactPrompt, FullPrompt, PlannerPrompt
from flowtrain.agents.verdicts import CompactVerdictPrompt, FullVerdictPrompt, VerdictPrompt
from flowtrain.agents.verifier import (
    PolicyVerifier,
    RuleVerifier,
    Verifier,
    any_result_enough,
    facts_enough,
    gameof24_enough,
)
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import Engine
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.tools import Tool, registry
from flowtrain.types import PolicyName, UserError

if TYPE_CHECKING:
    from flowtrain.tasks.sets import TaskSet

_RULES = {
    "facts": (facts_enough, last_result),
    "gameof24": (gameof24_enough, last_expression),
    "file": (any_result_enough, last_result),
}
"""What the rule-based verifier and generator of a family of tasks go by."""


def make_tools(
    config: cfg.Config, tasks: TaskSet, chat: ChatEngine | None = None
) -> dict[str, Tool]:
    """The tools that `agent.tools` names, by name; close them when done. `chat` is the model inside
    those that want one.
    """
    return registry.make_tools(
        config.agent.tools, registry.ToolContext(config, tasks.passages, tasks.guesses, chat)
    )


def make_prompt(
    config: cfg.Config, tools: Mapping[str, Tool], tokenizer: ChatTokenizer
) -> PlannerPrompt:
    if config.agent.prompt == "compact":
        return CompactPrompt()
    _check_template(config, "planner", tokenizer)
    return FullPrompt(list(tools.values()), tokenizer, config.agent.prompt_order)


def make_verifier(
    config: cfg.Config,
    engine: Engine,
    tokenizer: ChatTokenizer,
    tools: Mapping[str, Tool],
    temperature: float | None = None,
) -> PolicyVerifier:
    """Where it is a policy of its own. `temperature`: None: as the config says."""
    max_new_tokens, own = config.sampling_of("verifier")
    temperature = own if temperature is None else temperature
    if max_new_tokens >= engine.max_tokens:
        raise UserError(
            f"policies.verifier.max_new_tokens={max_new_tokens} must be below the model's "
            f"{engine.max_tokens} positions"
        )
    prompt: VerdictPrompt = CompactVerdictPrompt()
    if config.agent.prompt == "full":
        _check_template(config, "verifier", tokenizer)
        prompt = FullVerdictPrompt(roles.tools_text(tools), tokenizer)
    return PolicyVerifier(
        engine, tokenizer, prompt, max_new_tokens, temperature, config.rollout.request_timeout_s
    )


def _check_template(config: cfg.Config, policy: PolicyName, tokenizer: ChatTokenizer) -> None:
    if not tokenizer.chat_template:
        key, path = config.path_of(policy)
        raise UserError(
            f"{key}={path!r} has no chat template, which agent.prompt='full' needs; use "
            "agent.prompt='compact'"
        )


def make_planner(
    config: cfg.Config,
    engine: Engine,
    tokenizer: ChatTokenizer,
    prompt: PlannerPrompt,
    temperature: float | None = None,
) -> PolicyPlanner:
    """`temperature`: None: as the config says."""
    rollout = config.rollout
    temperature = rollout.temperature if temperature is None else temperature
    if rollout.max_new_tokens >= engine.max_tokens:
        raise UserError(
            f"rollout.max_new_tokens={rollout.max_new_tokens} must be below the model's "
            f"{engine.max_tokens} positions"
        )
    limits = rollout.max_new_tokens, temperature, rollout.request_timeout_s
    return PolicyPlanner(
        engine, tokenizer, prompt, config.agent.tools, *limits, rollout.top_k, rollout.top_p
    )


def rule_verifier(config: cfg.Config) -> RuleVerifier:
    """What the family of the tasks goes by."""
    return RuleVerifier(_RULES[config.tasks.name][0])


def make_flow(
    config: cfg.Config,
    planner: Planner,
    tools: Mapping[str, Tool],
    max_turns: int,
    chats: Mapping[str, ChatEngine] | None = None,
    verifier: Verifier | None = None,
) -> Flow:
    """`chats`: the engine of every role that has one; `verifier`: where that is a policy of its
    own.
    """
    agent, chats = config.agent, chats or {}
    assert (verifier is not None) == ("verifier" in config.policy_names), (
        "a verifier of its own is made before the flow"
    )
    assert not (unfilled := roles.unfilled(config.roles, chats)), f"no engine for {unfilled}"
    _, extract = _RULES[config.tasks.name]
    return Flow(
        planner,
        roles.make_executor(agent, tools, chats),
        verifier or roles.make_verifier(rule_verifier(config), tools, chats),
        roles.make_generator(RuleGenerator(extract), chats),
        FlowLimits(max_turns, agent.rollout_timeout_s, agent.module_timeout_s, agent.memory_tokens),
        roles.make_analyst(agent, tools, chats),
        refiner=roles.make_refiner(config, chats),
        passage_tools=frozenset(name for name, tool in tools.items() if tool.card.finds_passages),
    )
