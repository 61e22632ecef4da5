"""Build the engines, the flow and the judge of a node from the config of the run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from flowtrain.agents.base import Agent, BranchStart
from flowtrain.algorithms import load_algorithm
from flowtrain.config import Config
from flowtrain.dataflow.contract import PolicyState
from flowtrain.engines.protocol import Engine
from flowtrain.node.node import Branching, Rollout
from flowtrain.rewards import score_one
from flowtrain.run.components import RunComponents
from flowtrain.training.world import World
from flowtrain.types import BranchPoint, Group, Task, Trajectory, UserError
from flowtrain.weights import Source, open_source


@dataclass(frozen=True, slots=True)
class Sampler:
    """The parts of a node that make rollouts."""

    rollout: Rollout
    engines: Mapping[str, Engine]
    stores: Mapping[str, Source]
    """Weight stores of the policies that are trained."""
    layouts: Mapping[str, str]
    branching: Branching | None


def check(config: Config) -> None:
    """Raises UserError for a config that no node can serve."""
    load_algorithm(config).check_nodes()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a node is one process: start it without torchrun, once per GPU (CUDA_VISIBLE_DEVICES)"
        )


def store_of(
    policies: Mapping[str, PolicyState], given: Mapping[str, str], names: tuple[str, ...]
) -> dict[str, str]:
    """Return the weight stores of the trained policies: those of the command line, else those that
    their trainers named.
    """
    for name, location in given.items():
        if name not in names:
            known = ", ".join(names)
            raise UserError(f"--store {name}={location}: this run has the policies {known}")
    return {**{name: state.store for name, state in policies.items() if name in names}, **given}


@contextmanager
def make_sampler(config: Config, locations: Mapping[str, str], token: str) -> Iterator[Sampler]:
    """Build the sampler and close it at the end of the block. `locations`: folders or URLs of
    weight stores by policy, the other policies are frozen; `token`: for URLs.
    """
    with ExitStack() as cleanup:
        cache = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="flowtrain-node-")))
        stores = {
            policy: open_source(location, cache / policy, token)
            for policy, location in locations.items()
        }
        world = World.join(config.run.device)
        cleanup.callback(world.leave)
        components = RunComponents.for_node(config, world)
        cleanup.callback(components.close)
        layouts: dict[str, str] = {
            name: policy.layout(getattr(torch, config.model.dtype))
            for name, policy in components.policies.items()
        }
        branching = _make_branching(components)
        engines = components.make_policy_engines(stores, branches=branching is not None)
        for engine in engines.values():
            cleanup.callback(engine.close)
        agent = components.make_agent(engines, components.config.agent.max_turns)
        cleanup.callback(agent.close)
        rollout = _make_rollout(components, agent, engines)
        yield Sampler(rollout, engines, stores, layouts, branching)


def _make_rollout(
    components: RunComponents, agent: Agent, engines: Mapping[str, Engine]
) -> Rollout:
    judge, functions = components.make_judge(), components.reward_functions
    policy = components.config.train.policy

    async def rollout(task: Task, seed: int, start: BranchStart | None = None) -> Trajectory:
        hints = components.algorithm.hints(engines[policy].version + 1)
        trajectory = await agent.with_hints(hints).run(task, seed, start=start)
        return await score_one(trajectory, judge, functions)

    return rollout


def _make_branching(components: RunComponents) -> Branching | None:
    algorithm, config = components.algorithm, components.config
    if algorithm.num_roots == config.rollout.group_size:
        return None
    tokenizer, vocab_size = components.tokenizer, components.model.config.vocab_size

    def points(roots: Group, seed: int) -> list[BranchPoint]:
        return algorithm.node_points(roots, tokenizer, vocab_size, seed)

    return Branching(algorithm.num_roots, points)
