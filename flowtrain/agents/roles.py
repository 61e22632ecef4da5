"""Who does what: the modules around the planner as `[roles]` says. A role without an engine is done
by rules, the analyst's by nobody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from flowtrain import config as cfg
from flowtrain.agents import analyst, executor, generator, prompts, refiner, verdicts
from flowtrain.agents.analyst import Analyst, LLMAnalyst
from flowtrain.agents.executor import Executor, LLMExecutor, RuleExecutor
from flowtrain.agents.generator import Generator, LLMGenerator
from flowtrain.agents.prompts import tool_text
from flowtrain.agents.refiner import LLMRefiner, Refiner, RuleRefiner
from flowtrain.agents.verifier import LLMVerifier, Verifier
from flowtrain.engines.chat import ChatEngine
from flowtrain.tools import Tool

Chats = Mapping[str, ChatEngine]
"""The engine of every role that has one."""
MODULES = ("analyst", "executor", "verifier", "generator", "refiner")
"""The roles that a flow is made of, beside the planner."""


def make_analyst(agent: cfg.Agent, tools: Mapping[str, Tool], chats: Chats) -> Analyst | None:
    timeout_s = min(agent.module_timeout_s, agent.rollout_timeout_s)
    return (
        LLMAnalyst(chats["analyst"], tools_text(tools), timeout_s) if "analyst" in chats else None
    )


def make_executor(agent: cfg.Agent, tools: Mapping[str, Tool], chats: Chats) -> Executor:
    if "executor" not in chats:
        return RuleExecutor(tools, agent.tool_timeout_s, agent.max_result_chars)
    return LLMExecutor(
        chats["executor"],
        tools,
        agent.tool_timeout_s,
        agent.module_timeout_s,
        agent.max_result_chars,
    )


def make_verifier(rules: Verifier, tools: Mapping[str, Tool], chats: Chats) -> Verifier:
    return LLMVerifier(chats["verifier"], tools_text(tools)) if "verifier" in chats else rules


def make_generator(rules: Generator, chats: Chats) -> Generator:
    return LLMGenerator(chats["generator"]) if "generator" in chats else rules


def make_refiner(config: cfg.Config, chats: Chats) -> Refiner | None:
    if "refiner" in chats:
        return LLMRefiner(chats["refiner"], config.agent.max_result_chars)
    return RuleRefiner() if config.roles.refiner == "rules" else None


def unfilled(roles: cfg.Roles, chats: Chats) -> Sequence[str]:
    """Modules that are to be done by a language model which nobody has started."""
    return [
        role for role in MODULES if getattr(roles, role) not in cfg.NO_ENGINE and role not in chats
    ]


def tools_text(tools: Mapping[str, Tool]) -> str:
    return "\n".join(tool_text(tool.card) for tool in tools.values())


def prompt_hashes() -> dict[str, str]:
    """A short digest of every prompt template by its role, for the manifest of a run: the same
    texts, the same digests.
    """
    templates = {
        **{f"planner/{order}": template for order, template in prompts.TEMPLATES.items()},
        "analyst": analyst.PROMPT,
        "executor": executor.PROMPT,
        "verifier": verdicts.PROMPT,
        "generator": generator.PROMPT,
        "refiner": refiner.PROMPT,
    }
    return {
        name: hashlib.sha256(template.encode()).hexdigest()[:16]
        for name, template in templates.items()
    }
