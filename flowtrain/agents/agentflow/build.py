"""Construction of agents from `[agent]`, `[rollout]` and `[roles]`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from flowtrain import config as cfg
from flowtrain.agents.agentflow import replies
from flowtrain.agents.agentflow.analyst import Analyst
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.flow import MODULE_TIMEOUT_S, Flow, FlowLimits
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.planner import ModelPlanner
from flowtrain.agents.agentflow.prompts import CompactPrompt, FullPrompt, tools_text
from flowtrain.agents.agentflow.refiner import (
    CompactRefinerPrompt,
    FullRefinerPrompt,
    ModelRefiner,
    Refiner,
    RuleRefiner,
)
from flowtrain.agents.agentflow.verifier import (
    CompactVerdictPrompt,
    FullVerdictPrompt,
    ModelVerifier,
    RuleVerifier,
    Verifier,
)
from flowtrain.agents.agentflow.voices import ChatVoice, Voice
from flowtrain.agents.base import AgentContext
from flowtrain.agents.policy import Policy, check_own_template, check_prompt
from flowtrain.agents.registry import AgentKind
from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.protocol import Engine
from flowtrain.inference.token_chat import ChatTokenizer
from flowtrain.records import PolicyName, UserError
from flowtrain.tools import Tool

MODULES = ("analyst", "executor", "verifier", "generator", "refiner")
"""The roles of a flow besides the planner."""


def make_policy(
    config: cfg.Config,
    name: PolicyName,
    engine: Engine,
    tokenizer: ChatTokenizer,
    temperature: float | None = None,
    sampled: Counter[PolicyName] | None = None,
) -> Policy:
    """Return a policy for agents; `temperature` None takes the config's. `sampled` counts its
    tokens.
    """
    check_room(config, name, engine.max_tokens)
    max_new_tokens, own_temperature = config.sampling_of(name)
    rollout = config.rollout
    return Policy(
        engine,
        tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=own_temperature if temperature is None else temperature,
        request_timeout_s=rollout.request_timeout_s,
        top_k=most_kept(config),
        top_p=rollout.top_p,
        frequency_penalty=rollout.frequency_penalty,
        name=name,
        sampled=Counter() if sampled is None else sampled,
    )


def check_room(config: cfg.Config, name: PolicyName, positions: int) -> None:
    """Raise UserError for a model with too few positions for a response."""
    max_new_tokens = config.sampling_of(name)[0]
    if max_new_tokens >= positions:
        has_own = name in config.policies and config.policies[name].max_new_tokens
        key = f"policies.{name}" if has_own else "rollout"
        raise UserError(
            f"{key}.max_new_tokens={max_new_tokens} must be below the model's {positions} "
            "positions; --config configs/quickstart.toml has the options of a small model"
        )


def most_kept(config: cfg.Config) -> int:
    """Return the largest number of tokens that top-k and top-p keep; 0: all."""
    return config.rollout.num_kept


def make_planner(config: cfg.Config, voice: Voice, tools: Mapping[str, Tool]) -> ModelPlanner:
    is_full = _is_full(config, "planner", voice)
    prompt = FullPrompt(tools.values(), config.agent.prompt_order) if is_full else CompactPrompt()
    spellings = replies.spellings(tool.card for tool in tools.values())
    return ModelPlanner(voice, prompt, tuple(tools), spellings)


def make_verifier(config: cfg.Config, voice: Voice, tools: Mapping[str, Tool]) -> ModelVerifier:
    is_full = _is_full(config, "verifier", voice)
    return ModelVerifier(
        voice, FullVerdictPrompt(tools.values()) if is_full else CompactVerdictPrompt()
    )


def make_refiner(config: cfg.Config, voice: Voice, tools: Mapping[str, Tool]) -> ModelRefiner:
    prompt = FullRefinerPrompt() if _is_full(config, "refiner", voice) else CompactRefinerPrompt()
    return ModelRefiner(voice, prompt, config.agent.max_result_chars)


def _is_full(config: cfg.Config, role: PolicyName, voice: Voice) -> bool:
    """Return whether a module has the full prompt. A frozen model always has, because only tiny
    policies understand the compact one. Raises UserError for a policy without the chat template
    that it needs.
    """
    is_full = config.agent.prompt == "full"
    if is_full and isinstance(voice, Policy):
        check_own_template(config, role, voice.tokenizer)
    return is_full or voice.is_frozen


def make_agentflow(context: AgentContext) -> Flow:
    """Return AgentFlow's flow with the policies of the context."""
    policies, chats = context.policies, context.chats
    return make_flow(
        context.config, policies["planner"], context.tools, context.max_turns, chats, policies
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
    planner: Voice,
    tools: Mapping[str, Tool],
    max_turns: int,
    chats: Mapping[str, ChatEngine] | None = None,
    policies: Mapping[PolicyName, Policy] | None = None,
) -> Flow:
    """Return the flow; a role without an engine uses rules, and the analyst is omitted.

    Args:
        chats: the engine of every role that has one.
        policies: those of their own, by role.
    """
    agent = config.agent
    chats = chats or {}
    voices: dict[str, Voice] = {role: ChatVoice(chat) for role, chat in chats.items()}
    voices.update((policies or {}).items())
    for role in MODULES:
        engine = getattr(config.roles, role)
        assert engine in cfg.NO_ENGINE or role in chats, f"no engine for {role}"
        assert engine != cfg.OWN or role in voices, f"no policy for {role}"
    verifier: Verifier = RuleVerifier()
    if voice := voices.get("verifier"):
        verifier = make_verifier(config, voice, tools)
    refine: Refiner | None = RuleRefiner() if config.roles.refiner == "rules" else None
    if voice := voices.get("refiner"):
        refine = make_refiner(config, voice, tools)
    analyse = None
    if chat := chats.get("analyst"):
        timeout_s = min(MODULE_TIMEOUT_S, agent.rollout_timeout_s)
        analyse = Analyst(chat, tools_text(tools.values()), timeout_s)
    return Flow(
        make_planner(config, planner, tools),
        executor=Executor(
            tools,
            agent.tool_timeout_s,
            agent.max_result_chars,
            engine=chats.get("executor"),
            ask_timeout_s=MODULE_TIMEOUT_S,
        ),
        verifier=verifier,
        generator=Generator(chats.get("generator")),
        limits=FlowLimits(
            max_turns, timeout_s=agent.rollout_timeout_s, memory_tokens=agent.memory_tokens
        ),
        analyst=analyse,
        refiner=refine,
        passage_tools=frozenset(name for name, tool in tools.items() if tool.card.finds_passages),
    )
