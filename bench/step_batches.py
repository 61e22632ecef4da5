"""Batches for `bench.step`: a model and samples.

AgentFlow's shape is a group of 8 rollouts of random tokens: a long prompt that is constant for the
question, a memory that grows with the turns, a response a tenth as long as its prompt. The main
job's batch is recorded from its own flow, with the rewards that its rollouts get: those of a
planner that is warmed up already, or else of the scripted expert that the quickstart warms up on.
A model in a folder answers questions of reasoning-gym itself (`bench/model_folder.py`).
"""

from __future__ import annotations

import copy
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from flowkernels import LossSpec
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from bench.model_folder import ModelFolder
from flowtrain.agents.collect import collect
from flowtrain.agents.expert import ScriptedPlanner
from flowtrain.agents.flow import Flow
from flowtrain.agents.planner import PolicyPlanner
from flowtrain.algorithms import filter_samples
from flowtrain.algorithms.branching import score_samples
from flowtrain.algorithms.flow_grpo import flow_grpo
from flowtrain.config.options import parse
from flowtrain.rewards import score
from flowtrain.run.components import RunComponents
from flowtrain.run.learner import publish_start
from flowtrain.training import attention
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.world import World
from flowtrain.types import Sample
from flowtrain.weights.store import WeightStore

SHAPES = {
    "small": (192, 512, 4, 3, 1, 2000),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
}
"""Width, width of the MLP, layers, heads, key heads, words; random weights. The larger two are
Qwen2.5's and want a GPU."""


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
    """Unscaled: 3,000 constant tokens (tools 2,300, template 300, question and analysis 400), 500
    of memory per turn, 20 that close the prompt, and responses of 200 to 400.

    `device`: where the model is; on "meta" it has no weights, which is enough to count.
    """
    rng = random.Random(0)

    def ids(number: float) -> tuple[int, ...]:
        return tuple(
            rng.randrange(SHAPES["small"][-1]) for _ in range(max(1, round(scale * number)))
        )

    constant, closing, samples = ids(3000), ids(20), []
    for _ in range(group_size):
        memory: tuple[int, ...] = ()
        advantage = rng.uniform(-1, 1)
        for _ in range(num_turns):
            response = ids(rng.uniform(200, 400))
            logprobs = tuple(-7.6 + rng.gauss(0, 0.1) for _ in response)
            samples.append(
                Sample(
                    constant + memory + closing,
                    response,
                    logprobs,
                    (advantage,) * len(response),
                    (1 / len(response),) * len(response),
                )
            )
            memory += ids(500)
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    with torch.device(device):
        model = _random_model(shape, longest)
    return Batch(f"AgentFlow shape, {num_turns} turns", model, samples)


def main_job(warm: str, num_questions: int = 16) -> Batch:
    """8 rollouts of each question, by the planner in the folder `warm` or, if that is empty, by the
    expert. Every sample counts alike, as TRL's loss has it.
    """
    world = World.join("cpu")
    config = parse(
        [
            "--config",
            "configs/quickstart.toml",
            "--run.threads",
            "1",
            *(["--model.path", warm] if warm else []),
        ]
    )
    assert config is not None
    components = RunComponents.prepare(config, world)
    with tempfile.TemporaryDirectory() as folder:
        flow = _policy(components, WeightStore(Path(folder))) if warm else _expert(components)
        groups = score(collect(flow, components.tasks.train[:num_questions], group_size=8, seed=0))
    shape = components.model.config
    batch = filter_samples(
        flow_grpo(groups, "released"), shape.max_position_embeddings, shape.vocab_size
    )
    samples = [
        replace(s, loss_weights=(1 / len(s.response_ids),) * len(s.response_ids))
        for s in batch.samples
    ]
    if not warm:
        samples = _as_if_sampled(samples, components)
    random.Random(0).shuffle(samples)
    components.close()
    world.leave()
    return Batch(f"main job, {'recorded' if warm else 'scripted'}", components.model, samples)


def recorded(path: str, num_questions: int, max_new_tokens: int) -> Batch:
    """8 rollouts of a single turn of each question, by the model in the folder."""
    folder = ModelFolder.load(path)
    groups = folder.rollouts(num_questions, max_new_tokens=max_new_tokens)
    samples = [sample for group in groups for sample in group]
    random.Random(0).shuffle(samples)
    return Batch(f"{folder.name}, own rollouts", folder.model, samples)


def _policy(components: RunComponents, store: WeightStore) -> Flow:
    engines = components.make_policy_engines({"planner": store})
    publish_start(components, store)
    engines["planner"].load(0)
    return components.make_flow(engines, components.config.agent.max_turns)


def _expert(components: RunComponents) -> Flow:
    flow = components.make_flow(components.make_no_engines(), components.config.agent.max_turns)
    assert isinstance(flow.planner, PolicyPlanner)
    return replace(
        flow,
        planner=ScriptedPlanner(
            flow.planner, components.config.rft.expert_error, components.tokenizer.eos_token_id
        ),
    )


def _as_if_sampled(samples: Sequence[Sample], components: RunComponents) -> list[Sample]:
    """Give the expert's samples the log-probs of the model."""
    trainer = Trainer(
        copy.deepcopy(components.model), components.world, LossSpec(), OptimSpec(lr=0.0)
    )
    logprob_T = score_samples(trainer, samples, 16384, against_reference=False).logprob_T
    each = logprob_T.split([len(s.response_ids) for s in samples])
    return [
        replace(s, logprobs=tuple(logprobs.tolist()))
        for s, logprobs in zip(samples, each, strict=True)
    ]


def _random_model(shape: str, max_positions: int) -> PreTrainedModel:
    width, mlp, layers, heads, key_heads, vocab = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
