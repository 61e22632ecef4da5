"""The system under evaluation: its agents, and the names of all models in it."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flowtrain.agents.base import Agent
from flowtrain.agents.build import make_chat_planner, make_flow, prompt_hashes
from flowtrain.agents.prompts import tools_text
from flowtrain.config import OWN, Config
from flowtrain.engines.chat_engines import POLICY, ChatEngines, make_chat_engines
from flowtrain.evaluation.evaluator import with_rules_of
from flowtrain.rewards import Judge
from flowtrain.rewards.judge import judge_prompt
from flowtrain.run.components import RunComponents, make_judge
from flowtrain.run.learner import publish_start
from flowtrain.tasks.sets import task_set
from flowtrain.tools import Tool
from flowtrain.tools.registry import make_tools
from flowtrain.training.world import World
from flowtrain.types import Task, UserError
from flowtrain.weights import WeightStore

Kind = tuple[str, int]
"""(family of tasks, by which modules choose their rules; budget of turns)."""


@dataclass(frozen=True, slots=True)
class System:
    """A system under evaluation."""

    agents: Mapping[Kind, Agent]
    judge: Judge | None
    pins: Mapping[str, Mapping[str, str]]
    """Names of engines with all their settings, the policy's with the hash of its weights; hashes
    of prompts."""
    decode: Callable[[Sequence[int]], str] | None
    """Decodes the planner's prompt ids; None for a planner that takes text."""
    tokenizer_json: str
    """The tokenizer that reads those ids; "" for a planner that takes text."""


@contextmanager
def open_system(
    config: Config, kinds: Sequence[Kind], planner: str, temperature: float, scratch: Path
) -> Iterator[System]:
    """Start what the config names; `planner` is the policy or an engine's name. Raises UserError
    for what is not there.

    The policy's weights go to its engine by way of a store in `scratch`, as in training.
    """
    check_planner(config, planner)
    with ExitStack() as cleanup:
        world = World.join(config.run.device, config.run.collective_timeout_s)
        cleanup.callback(world.leave)
        if planner == POLICY:
            components = RunComponents.prepare(config, world)
            cleanup.callback(components.close)
            yield _with_policy(components, kinds, temperature, scratch, cleanup)
        else:
            yield _without_policy(config, kinds, planner, world, cleanup)


def check_planner(config: Config, planner: str) -> None:
    """Raise UserError unless the config allows that planner."""
    if planner == POLICY:
        return
    if planner not in config.engines:
        raise UserError(
            f"--planner {planner!r} may be {POLICY!r} or a name in [engines], which holds "
            f"{', '.join(config.engines) or 'nothing'}"
        )
    if config.agent.name != "agentflow":
        raise UserError(
            f"--planner {planner!r} plans for agent.name='agentflow', which is "
            f"{config.agent.name!r}"
        )
    for role, name in config.roles:
        if name in (POLICY, OWN):
            raise UserError(
                f"--planner {planner!r}: roles.{role}={name!r} would need the policy too; give "
                "that role another engine"
            )


def _with_policy(
    components: RunComponents,
    kinds: Sequence[Kind],
    temperature: float,
    scratch: Path,
    cleanup: ExitStack,
) -> System:
    config = components.config
    shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
    cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
    store = WeightStore(scratch)
    engines = components.make_policy_engines({config.train.policy: store})
    for engine in engines.values():
        cleanup.callback(engine.close)
    publish_start(components, store)
    engines[config.train.policy].load(0)
    policy = (
        f"{config.model.path}, weights {store.manifest(0).root}, {config.rollout.engine}, "
        f"temperature {temperature:g}"
    )
    agents = {
        (name, limit): replace(components, config=with_rules_of(config, name)).make_agent(
            engines, limit, temperature
        )
        for name, limit in kinds
    }
    for agent in agents.values():
        cleanup.callback(agent.close)
    frozen = {
        f"policies.{name}": model.path
        for name, model in components.policies.items()
        if name != config.train.policy
    }
    pins = _pins({POLICY: policy, **frozen, **_names(components.chats)}, components.tools)
    tokenizer = components.policies["planner"].tokenizer
    return System(
        agents,
        components.make_judge(),
        pins,
        tokenizer.decode,
        tokenizer.backend_tokenizer.to_str(),
    )


def _without_policy(
    config: Config, kinds: Sequence[Kind], planner: str, world: World, cleanup: ExitStack
) -> System:
    """Build a system around a frozen planner; only the models in `[engines]` are loaded."""
    chats = make_chat_engines(config, None, world.device, {"planner": planner})
    cleanup.callback(chats.close)
    tools = make_tools(config, task_set(config), chats.roles.get("tools"), chats.roles)
    for tool in tools.values():
        cleanup.callback(tool.close)
    frozen = make_chat_planner(config, chats.roles["planner"], tools)
    agents = {
        (name, limit): make_flow(with_rules_of(config, name), frozen, tools, limit, chats.roles)
        for name, limit in kinds
    }
    return System(agents, make_judge(config, chats), _pins(_names(chats), tools), None, "")


def _pins(engines: Mapping[str, str], tools: Mapping[str, Tool]) -> dict[str, Mapping[str, str]]:
    """Build the pins of a system: its engines, and hashes of all prompts and tool texts."""
    texts = {"judge": judge_prompt(Task("", "", ()), ""), "tools": tools_text(tools.values())}
    return {
        "engines": engines,
        "prompts": {**prompt_hashes(), **{name: _digest(text) for name, text in texts.items()}},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _names(chats: ChatEngines) -> dict[str, str]:
    return {name: chat.name for name, chat in chats.started.items() if name != POLICY}
