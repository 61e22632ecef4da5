"""The system under evaluation: its agents and its judge."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from flowtrain.agents.agentflow.build import make_flow
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.agents.base import Agent
from flowtrain.config import Config
from flowtrain.inference.chat_engines import POLICY
from flowtrain.rewards import Judge
from flowtrain.tasks.sets import task_set
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents, make_judge, start_tools
from flowtrain.trainer.setup.learner import publish_start
from flowtrain.trainer.setup.placement import Placement
from flowtrain.weights import WeightStore


@dataclass(frozen=True, slots=True)
class System:
    """A system under evaluation."""

    agents: Mapping[int, Agent]
    """By their budgets of turns."""
    judge: Judge | None
    weights: str = ""
    """The hash of the policy's weights; "" where a frozen model plans, as in what follows."""
    tokenizer_json: str = ""
    """The tokenizer that reads its ids."""


@contextmanager
def open_system(
    config: Config, max_turns: Sequence[int], planner: str, scratch: Path
) -> Iterator[System]:
    """Start what the config names; `planner` is the policy or an engine's name. Raises UserError
    for what is not there.

    The policy's weights go to its engine by way of a store in `scratch`, as in training.
    """
    # Nothing is trained, so no question is left out of training for a benchmark.
    tasks = config.tasks.model_copy(update={"benchmarks": ""})
    eval_options = config.eval.model_copy(update={"benchmarks": ()})
    config = config.model_copy(update={"tasks": tasks, "eval": eval_options})
    with ExitStack() as cleanup:
        world = World.join(config.run.device, config.run.collective_timeout_s)
        cleanup.callback(world.leave)
        if planner == POLICY:
            shutil.rmtree(scratch, ignore_errors=True)  # of a process that was killed
            cleanup.callback(shutil.rmtree, scratch, ignore_errors=True)
            components = RunComponents.prepare(config, Placement.sampling(world))
            cleanup.callback(components.close)
            yield _with_policy(components, max_turns, scratch, cleanup)
        else:
            yield _without_policy(config, max_turns, planner, world, cleanup)


def _with_policy(
    components: RunComponents, max_turns: Sequence[int], scratch: Path, cleanup: ExitStack
) -> System:
    temperature = components.config.eval.temperature
    trained = components.config.train.policy
    store = WeightStore(scratch)
    engines = components.make_policy_engines({trained: store})
    publish_start(components, store)
    engines[trained].load(0)
    agents = {limit: components.make_agent(engines, limit, temperature) for limit in max_turns}
    for agent in agents.values():
        cleanup.callback(agent.close)
    tokenizer = components.policies[components.config.first_policy].tokenizer
    return System(
        agents,
        components.judge,
        weights=store.manifest(0).root,
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
    )


def _without_policy(
    config: Config, max_turns: Sequence[int], planner: str, world: World, cleanup: ExitStack
) -> System:
    """Build a system around a frozen planner; only the models in `[engines]` are loaded."""
    planners = {"planner": planner}
    chats, tools = start_tools(config, task_set(config), None, world.device, planners, cleanup)
    frozen = ChatVoice(chats.roles["planner"], config.rollout.request_timeout_s)
    agents = {limit: make_flow(config, frozen, tools, limit, chats.roles) for limit in max_turns}
    return System(agents, make_judge(config, chats))
