"""Batches for `bench.step`: a model and samples.

AgentFlow's shape is a group of 8 rollouts of random tokens (`bench/agentflow_shape.py`). The main
job's batch is recorded from its own flow, with the rewards that its rollouts get. A model in a
folder answers sums itself (`bench/model_folder.py`).
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from bench.agentflow_shape import SHAPES, agentflow_samples, random_model
from bench.model_folder import ModelFolder
from flowtrain.agents.collect import collect
from flowtrain.algorithms import filter_samples, load_algorithm
from flowtrain.config.options import parse
from flowtrain.records import Sample
from flowtrain.rewards import score
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.learner import publish_start
from flowtrain.trainer.setup.placement import Placement
from flowtrain.weights.stores.folder import WeightStore


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one optimizer step."""

    name: str
    model: PreTrainedModel
    """fp32 on the CPU; each path chooses its attention."""
    samples: list[Sample]
    """In the order in which a loop over padded batches takes them."""


def agentflow(
    num_turns: int, shape: str, scale: float, group_size: int = 8, device: str = "cpu"
) -> Batch:
    """Random samples and weights; `device`: where the model is made. On "meta" it has no weights,
    which is enough to count.
    """
    samples = agentflow_samples(num_turns, scale, group_size)
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    with torch.device(device):
        model = random_model(shape, longest)
    name = f"AgentFlow shape, {num_turns} turns"
    return Batch(name if group_size == 8 else f"{name}, {group_size} rollouts", model, samples)


def chain(samples: Sequence[Sample], num_tokens: int) -> Sample:
    """One sample that trains as many tokens as these, of `num_tokens` that a pass reads."""
    rng, vocab_size = random.Random(0), SHAPES["small"][-1]
    num_targets = sum(len(s.response_ids) for s in samples)
    ids = tuple(rng.randrange(vocab_size) for _ in range(num_tokens + 1))
    at = max(1, len(ids) - num_targets)
    ones = (1.0,) * (len(ids) - at)
    return Sample(ids[:at], ids[at:], tuple(-7.6 for _ in ones), ones, ones)


def main_job(warm: str, num_questions: int = 16) -> Batch:
    """8 rollouts of each question by the quickstart's planner in the folder `warm`. Every sample
    counts alike, as TRL's loss has it.
    """
    world = World.join("cpu")
    options = {"config": "configs/quickstart.toml", "run.threads": "1", "model.path": warm}
    options |= {"algorithm.mode": "released", "algorithm.equal_groups": "keep"}
    options |= {"train.num_minibatches": "1"}
    config = parse([word for key, value in options.items() for word in (f"--{key}", value)])
    assert config is not None
    components = RunComponents.prepare(config, Placement.colocated(world))
    with tempfile.TemporaryDirectory() as folder:
        store = WeightStore(Path(folder))
        engines = components.make_policy_engines({"planner": store})
        publish_start(components, store)
        engines["planner"].load(0)
        agent = components.make_agent(engines, config.agent.max_turns)
        tasks = components.tasks.train[:num_questions]
        groups = score(collect(agent, tasks, group_size=8, seed=0))
    shape = components.model.config
    batch = filter_samples(
        load_algorithm(config).advantages(groups), shape.max_position_embeddings, shape.vocab_size
    )
    samples = [
        replace(s, loss_weights=(1 / len(s.response_ids),) * len(s.response_ids))
        for s in batch.samples
    ]
    random.Random(0).shuffle(samples)
    components.close()
    world.leave()
    return Batch("main job, recorded", components.model, samples)


def recorded(path: str, num_questions: int, max_new_tokens: int) -> Batch:
    """8 rollouts of a single turn of each question, by the model in the folder."""
    folder = ModelFolder.load(path)
    groups = folder.rollouts(num_questions, max_new_tokens=max_new_tokens)
    samples = [sample for group in groups for sample in group]
    random.Random(0).shuffle(samples)
    return Batch(f"{folder.name}, own rollouts", folder.model, samples)
