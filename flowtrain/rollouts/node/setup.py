"""Build the engines, the flow and the judge of a node from the config of the run."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flowtrain.agents.base import Agent
from flowtrain.algorithms import load_algorithm
from flowtrain.algorithms.base import NodeSampler
from flowtrain.config import Config
from flowtrain.inference.endpoint import Endpoint
from flowtrain.inference.endpoint_scorer import EndpointScorer
from flowtrain.inference.factory import make_engine
from flowtrain.inference.protocol import Engine, Scorer
from flowtrain.records import BranchPoint, BranchStart, Group, Task, Trajectory, UserError
from flowtrain.rewards import score_one
from flowtrain.rollouts.contract import EvalSettings, PolicyState
from flowtrain.rollouts.node.node import Answer, Branching, Rollout
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from flowtrain.utils.lock import Lock
from flowtrain.weights import Source, open_source


@dataclass(frozen=True, slots=True)
class Sampler:
    """The parts of a node that make rollouts."""

    rollout: Rollout
    answer: Answer
    engines: Mapping[str, Engine]
    sampled: Counter[str]
    """Tokens that `rollout` has sampled, by policy."""
    stores: Mapping[str, Source]
    """Weight stores of the policies that are trained."""
    layouts: Mapping[str, str]
    branching: Branching | None


def check(config: Config) -> None:
    """Raises UserError for a config that no node can serve."""
    load_algorithm(config).check_nodes()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "a node runs in one process: start it without torchrun, once per GPU "
            "(CUDA_VISIBLE_DEVICES)"
        )


def store_of(
    policies: Mapping[str, PolicyState], locations: Mapping[str, str], names: tuple[str, ...]
) -> dict[str, str]:
    """Return the weight stores of the trained policies: those of the command line, else those that
    their trainers named. A store given for "" belongs to the first of `names`.
    """
    locations = {name or names[0]: location for name, location in locations.items()}
    for name, location in locations.items():
        if name not in names:
            choices = ", ".join(names)
            raise UserError(f"--store {name}={location}: the policies of this run are {choices}")
    return {**{name: state.store for name, state in policies.items() if name in names}, **locations}


@contextmanager
def make_sampler(
    config: Config, locations: Mapping[str, str], token: str, cache: Path | None
) -> Iterator[Sampler]:
    """Build the sampler and close it at the end of the block. `locations`: folders or URLs of
    weight stores by policy, the other policies are frozen; `token`: for URLs; `cache`: a folder for
    downloads, which stay there when the node ends, or None.
    """
    with ExitStack() as cleanup:
        if cache is None:
            temporary = tempfile.TemporaryDirectory(prefix="flowtrain-node-")
            cache = Path(cleanup.enter_context(temporary))
        cleanup.callback(Lock.of_folder(cache, "give each node a --cache of its own").release)
        stores = {
            policy: open_source(location, cache / policy, token)
            for policy, location in locations.items()
        }
        world = World.join(config.run.device)
        cleanup.callback(world.leave)
        components = RunComponents.prepare(config, Placement.sampling(world), is_node=True)
        cleanup.callback(components.close)
        layouts: dict[str, str] = {
            name: policy.layout(getattr(torch, config.model.dtype), config.lora)
            for name, policy in components.policies.items()
        }
        engines = components.make_policy_engines(stores, branches=_branches(components))
        branching = _make_branching(components, engines[components.config.train.policy], cleanup)
        max_turns = components.config.agent.max_turns
        sampled = Counter(dict.fromkeys(engines, 0))
        agent = components.make_agent(engines, max_turns, sampled=sampled)
        cleanup.callback(agent.close)
        rollout = _make_rollout(components, agent, engines)
        answer = _make_answer(components, engines, cleanup)
        yield Sampler(rollout, answer, engines, sampled, stores, layouts, branching)


def _make_rollout(
    components: RunComponents, agent: Agent, engines: Mapping[str, Engine]
) -> Rollout:
    policy = components.config.train.policy

    async def rollout(task: Task, seed: int, start: BranchStart | None = None) -> Trajectory:
        hints = components.algorithm.hints(engines[policy].version + 1)
        trajectory = await agent.with_hints(hints).run(task, seed, start=start)
        return await score_one(trajectory, *components.scoring())

    return rollout


def _make_answer(
    components: RunComponents, engines: Mapping[str, Engine], cleanup: ExitStack
) -> Answer:
    """Make an agent for the first question that has its settings; `cleanup` closes it."""
    agents: dict[EvalSettings, Agent] = {}
    making = asyncio.Lock()

    async def answer(task: Task, seed: int, settings: EvalSettings) -> Trajectory:
        async with making:  # or two questions at once would make the same agent twice
            if settings not in agents:
                limits = settings.max_turns, settings.temperature
                agent = await asyncio.to_thread(components.make_agent, engines, *limits)
                cleanup.callback(agent.close)
                agents[settings] = agent
        trajectory = await agents[settings].run(task, seed)
        return await score_one(trajectory, *components.scoring(settings.is_benchmark))

    return answer


def _branches(components: RunComponents) -> bool:
    """Return whether some rollouts of a group leave others of it."""
    return components.algorithm.num_roots != components.config.rollout.group_size


def _make_branching(
    components: RunComponents, engine: Engine, cleanup: ExitStack
) -> Branching | None:
    """Build what chooses branch points; None where every rollout begins with its task."""
    algorithm, config = components.algorithm, components.config
    if not _branches(components):
        return None
    reference: Scorer | None = None
    if algorithm.needs_node_reference and (name := config.appo.scorer):
        options = config.engines[name]
        endpoint = Endpoint(name, options)
        cleanup.callback(endpoint.close)
        timeout_s = config.rollout.request_timeout_s
        reference = EndpointScorer(endpoint, options.model, timeout_s)
    elif algorithm.needs_node_reference:
        copy = make_engine(
            config, components.policies[config.train.policy], components.world.device
        )
        cleanup.callback(copy.close)
        reference = copy
    vocab_size = components.model.config.vocab_size
    sampler = NodeSampler(components.tokenizer, vocab_size, engine, reference)

    def points(roots: Group, seed: int) -> Awaitable[list[BranchPoint]]:
        return algorithm.node_points(roots, seed, sampler)

    return Branching(algorithm.num_roots, points)
