"""The placement of a run: which ranks train and which sample, and the row length that fits the
memory of training ranks.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from flowtrain.algorithms import Algorithm
from flowtrain.config import Config
from flowtrain.inference.factory import ModelSpec, shared_policies
from flowtrain.records import PolicyName, UserError
from flowtrain.trainer.devices import memory_per_rank
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.memory_plan import MemoryPlan, plan_memory

_MIN_BUDGET, _MAX_BUDGET = 1024, 65536
"""Bounds of an automatic token budget. 8 rollouts of AgentFlow's 10 turns are 64,460 tokens."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The roles of the ranks: every rank trains and samples (colocated), or the last
    `rollout.num_engine_ranks` ranks sample and the others train.
    """

    world: World
    trainers: World
    samplers: World

    @classmethod
    def colocated(cls, world: World) -> Placement:
        return cls(world, world, world)

    @classmethod
    def sampling(cls, world: World) -> Placement:
        """Return the placement of a node or an evaluation, without training."""
        return cls(world, World(-1, 0, world.device), world)

    @classmethod
    def of(cls, config: Config, world: World) -> Placement:
        """Return the placement of the ranks; collective. Raises UserError if no rank is left to
        train, the questions of a step do not divide among sampling ranks, or GPUs of engines
        overlap.
        """
        num_engines, num_questions = config.rollout.num_engine_ranks, config.rollout.num_questions
        if num_engines >= world.size:
            raise UserError(
                f"rollout.num_engine_ranks={num_engines} leaves none of torchrun's {world.size} "
                "ranks for training: lower it"
            )
        if num_questions % (num_engines or world.size):
            factor = (
                f"rollout.num_engine_ranks={num_engines}"
                if num_engines
                else f"the {world.size} ranks that torchrun started"
            )
            raise UserError(f"rollout.num_questions={num_questions} must be a multiple of {factor}")
        tp_size = config.vllm.tensor_parallel_size
        if tp_size > 1 and (num_engines or world.size) > 1 and world.device.type == "cuda":
            raise UserError(
                f"vllm.tensor_parallel_size={tp_size} uses the GPUs after a rank's own, so only "
                "the last rank may sample: set rollout.num_engine_ranks = 1"
            )
        if not num_engines:
            return cls.colocated(world)
        ranks = range(world.size)
        return cls(
            world, world.subworld(ranks[:-num_engines]), world.subworld(ranks[-num_engines:])
        )

    @property
    def is_split(self) -> bool:
        return self.trainers is not self.world

    def wait(self) -> None:
        """Synchronise training and sampling ranks; does nothing when colocated."""
        if self.is_split:
            self.world.barrier()

    def of_first_sampler(self, metrics: dict[str, float]) -> dict[str, float]:
        """Return the first sampler's metrics on all ranks, or, colocated, each one's;
        collective.
        """
        if not self.is_split:
            return metrics
        sampler_metrics: dict[str, float] = json.loads(
            self.world.gather_text(json.dumps(metrics))[self.trainers.size]
        )
        return sampler_metrics


def memory_of(
    config: Config,
    algorithm: Algorithm,
    model: PreTrainedModel,
    policies: Mapping[PolicyName, ModelSpec],
    placement: Placement,
) -> MemoryPlan:
    """Return the predicted memory of a step on a rank that trains `model`, one of the
    `policies`.
    """
    device = placement.world.device
    is_gpu = device.type == "cuda"
    shared = shared_policies(config, policies)[1:]  # the first has the weights
    sizes = {name: spec.num_parameters() for name, spec in policies.items()}
    sampled = [size for name, size in sizes.items() if name not in shared]
    return plan_memory(
        config,
        model,
        sampled if config.samples_here else (),
        size_beside=sum(sizes.get(name, 0) for name in config.trained_beside),
        num_ranks=placement.trainers.size,
        gpu_bytes=torch.cuda.get_device_properties(device).total_memory if is_gpu else 0,
        has_reference=algorithm.needs_reference,
    )


def with_token_budget(
    algorithm: Algorithm,
    model: PreTrainedModel,
    policies: Mapping[PolicyName, ModelSpec],
    placement: Placement,
) -> Algorithm:
    """Return the algorithm with `train.token_budget = "auto"` resolved on training ranks: the
    resumed run's value, else the largest that fits every rank's memory. Collective, and equal on
    all ranks.
    """
    config, world, trainers = algorithm.config, placement.world, placement.trainers
    if config.train.token_budget != "auto" or not trainers.size:
        return algorithm

    def with_number(num_tokens: int) -> Config:
        train = config.train.model_copy(update={"token_budget": num_tokens})
        return config.model_copy(update={"train": train})

    def room(num_tokens: int) -> float:
        candidate = with_number(num_tokens)
        plan = memory_of(candidate, algorithm, model, policies, placement)
        return plan.room(candidate, memory_per_rank())

    run_budget, max_budget, config_path = 0, _MAX_BUDGET, Path(config.run.dir) / "config.toml"
    if world.is_main and config.run.resume == "auto" and config_path.exists():
        run_budget = tomllib.loads(config_path.read_text())["train"]["token_budget"]
    elif trainers.is_member:
        max_budget = largest_budget(room(_MIN_BUDGET), room(_MAX_BUDGET))
    # The least of all ranks' budgets, as a maximum: hence its sign.
    known_budget, negative_budget = map(int, world.max([run_budget, -max_budget]))
    return algorithm.with_config(with_number(known_budget or -negative_budget))


def largest_budget(few_room: float, most_room: float) -> int:
    """Return the tokens of a row that leave no room, in steps of 1,024, given the bytes that 1,024
    and 65,536 leave: memory grows in a line, but for a chunk of the head.
    """
    share = few_room / max(few_room - most_room, 1)
    num_tokens = int(_MIN_BUDGET + share * (_MAX_BUDGET - _MIN_BUDGET))
    return min(max(num_tokens, _MIN_BUDGET), _MAX_BUDGET) // _MIN_BUDGET * _MIN_BUDGET
