"""Put agents together as `[agent]`, `[rollout]` and `[roles]` say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flowtrain import config as cfg
from flowtrain.agents import lenient
from flowtrain.agents.analyst import Analyst
from flowtrain.agents.base import AgentContext
from flowtrain.agents.chat_planner import ChatPlanner
from flowtrain.agents.executor import Executor, LLMExecutor, RuleExecutor
from flowtrain.agents.flow import Flow, FlowLimits
from flowtrain.agents.generator import Generator, LLMGenerator, RuleGenerator
from flowtrain.agents.planner import Planner, PolicyPlanner
from flowtrain.agents.policy import Policy, check_prompt, check_template
from flowtrain.agents.prompts import CompactPrompt, FullPrompt, PlannerPrompt, tools_text
from flowtrain.agents.refiner import (
    CompactRefinerPrompt,
    FullRefinerPrompt,
    LLMRefiner,
    PolicyRefiner,
    Refiner,
    RefinerPrompt,
    RuleRefiner,
)
from flowtrain.agents.registry import AgentKind
from flowtrain.agents.verdicts import CompactVerdictPrompt, FullVerdictPrompt, VerdictPrompt
from flowtrain.agents.verifier import LLMVerifier, PolicyVerifier, RuleVerifier, Verifier
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import Engine
from flowtrain.engines.token_chat import ChatTokenizer
from flowtrain.tools import StatefulTool, Tool
from flowtrain.types import PolicyName, UserError

MODULES = ("analyst", "executor", "verifier", "generator", "refiner")
"""The roles of a flow besides the planner."""


def make_prompt(
    config: cfg.Config, tools: Mapping[str, Tool], tokenizer: ChatTokenizer
) -> PlannerPrompt:
    if config.agent.prompt == "compact":
        return CompactPrompt()
    check_prompt(config, tokenizer)
    return FullPrompt(tools.values(), tokenizer, config.agent.prompt_order)


def make_policy(
    config: cfg.Config,
    name: PolicyName,
    engine: Engine,
    tokenizer: ChatTokenizer,
    temperature: float | None = None,
) -> Policy:
    """Make a policy as agents see it; `temperature` None takes the config's."""
    check_room(config, name, engine.max_tokens)
    max_new_tokens, own_temperature = config.sampling_of(name)
    rollout = config.rollout
    policy = Policy(
        engine,
        tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=own_temperature if temperature is None else temperature,
        request_timeout_s=rollout.request_timeout_s,
    )
    if name != "planner":
        return policy
    return replace(
        policy,
        top_k=most_kept(config),
        top_p=rollout.top_p,
        frequency_penalty=rollout.frequency_penalty,
    )


def check_room(config: cfg.Config, name: PolicyName, positions: int) -> None:
    """Raise UserError for a model that has not the positions of a response."""
    max_new_tokens = config.sampling_of(name)[0]
    if max_new_tokens >= positions:
        key = "rollout" if name == "planner" else f"policies.{name}"
        raise UserError(
            f"{key}.max_new_tokens={max_new_tokens} must be below the model's {positions} "
            "positions; --config configs/quickstart.toml has the options of a small model"
        )


def most_kept(config: cfg.Config) -> int:
    """Return the number of tokens that top-k and top-p leave the planner at most; 0: all."""
    rollout = config.rollout
    return rollout.top_k or (rollout.top_p_cap if rollout.top_p < 1 else 0)


def make_verifier(config: cfg.Config, policy: Policy, tools: Mapping[str, Tool]) -> PolicyVerifier:
    """Make the verifier that is a policy of its own."""
    prompt: VerdictPrompt = CompactVerdictPrompt()
    if config.agent.prompt == "full":
        check_template(config, "verifier", policy.tokenizer)
        prompt = FullVerdictPrompt(tools_text(tools.values()), policy.tokenizer)
    return PolicyVerifier(policy, prompt)


def make_refiner(config: cfg.Config, policy: Policy) -> PolicyRefiner:
    """Make the refiner that is a policy of its own."""
    prompt: RefinerPrompt = CompactRefinerPrompt()
    if config.agent.prompt == "full":
        check_template(config, "refiner", policy.tokenizer)
        prompt = FullRefinerPrompt(policy.tokenizer)
    return PolicyRefiner(policy, prompt, config.agent.max_result_chars)


def make_planner(config: cfg.Config, policy: Policy, tools: Mapping[str, Tool]) -> PolicyPlanner:
    """Make the planner."""
    prompt = make_prompt(config, tools, policy.tokenizer)
    spellings = lenient.spellings(tool.card for tool in tools.values())
    return PolicyPlanner(policy, prompt, tuple(tools), spellings)


def make_chat_planner(
    config: cfg.Config, engine: ChatEngine, tools: Mapping[str, Tool]
) -> ChatPlanner:
    """Make a frozen planner of a chat engine."""
    return ChatPlanner(
        engine,
        FullPrompt(tools.values(), None, config.agent.prompt_order),
        tuple(tools),
        config.rollout.request_timeout_s,
        lenient.spellings(tool.card for tool in tools.values()),
    )


def make_agentflow(context: AgentContext) -> Flow:
    """Make AgentFlow's flow around the policies of the context."""
    config, tools, policies = context.config, context.tools, context.policies
    verifier = refine = None
    if "verifier" in policies:
        verifier = make_verifier(config, policies["verifier"], tools)
    if "refiner" in policies:
        refine = make_refiner(config, policies["refiner"])
    return make_flow(
        config,
        make_planner(config, policies["planner"], tools),
        tools,
        max_turns=context.max_turns,
        chats=context.chats,
        verifier=verifier,
        refine=refine,
    )


AGENTFLOW = AgentKind(
    make_agentflow,
    can_branch=True,
    takes_hints=True,
    trains=("planner", *cfg.OWN_ROLES),
    check=check_prompt,
)


def make_flow(
    config: cfg.Config,
    planner: Planner,
    tools: Mapping[str, Tool],
    max_turns: int,
    chats: Mapping[str, ChatEngine] | None = None,
    verifier: Verifier | None = None,
    refine: Refiner | None = None,
) -> Flow:
    """Make the flow; rules play a role without an engine, and there is no analyst without one.

    Args:
        chats: the engine of every role that has one.
        verifier, refine: given iff they are policies of their own.
    """
    agent = config.agent
    chats = chats or {}
    own = {"verifier": verifier, "refiner": refine}
    assert {role for role, made in own.items() if made} == {*config.policy_names} - {"planner"}, (
        "policies of their own are made before the flow"
    )
    for role in MODULES:
        engine = getattr(config.roles, role)
        assert engine in cfg.NO_ENGINE or role in chats, f"no engine for {role}"
    run_executor: Executor = RuleExecutor(tools, agent.tool_timeout_s, agent.max_result_chars)
    if chat := chats.get("executor"):
        run_executor = LLMExecutor(
            tools,
            agent.tool_timeout_s,
            agent.max_result_chars,
            engine=chat,
            ask_timeout_s=agent.module_timeout_s,
        )
    if chat := chats.get("verifier"):
        verifier = verifier or LLMVerifier(chat, tools_text(tools.values()))
    answer: Generator = RuleGenerator()
    if chat := chats.get("generator"):
        answer = LLMGenerator(chat)
    if config.roles.refiner == "rules":
        refine = RuleRefiner()
    if chat := chats.get("refiner"):
        refine = LLMRefiner(chat, agent.max_result_chars)
    analyse = None
    if chat := chats.get("analyst"):
        timeout_s = min(agent.module_timeout_s, agent.rollout_timeout_s)
        analyse = Analyst(chat, tools_text(tools.values()), timeout_s)
    return Flow(
        planner,
        executor=run_executor,
        verifier=verifier or RuleVerifier(),
        generator=answer,
        limits=FlowLimits(
            max_turns,
            timeout_s=agent.rollout_timeout_s,
            module_timeout_s=agent.module_timeout_s,
            memory_tokens=agent.memory_tokens,
            memory_fields=agent.memory_fields,
        ),
        analyst=analyse,
        refiner=refine,
        passage_tools=frozenset(name for name, tool in tools.items() if tool.card.finds_passages),
        stateful_tools={n: tool for n, tool in tools.items() if isinstance(tool, StatefulTool)},
    )
