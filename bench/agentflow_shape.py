"""Samples and model shapes of AgentFlow, random: a group of 8 rollouts, each turn a sample.

A long prompt is constant for the question, a memory grows with the turns, a response is a tenth as
long as its prompt. The model alone needs transformers.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from flowtrain.records import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHAPES = {
    "small": (192, 512, 4, 3, 1, 2000),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1.5b": (1536, 8960, 28, 12, 2, 151936),
    "hybrid": (768, 2048, 12, 12, 2, 32000),
    "small hybrid": (96, 256, 4, 3, 1, 2000),
}
"""Width, width of the MLP, layers, heads, key heads, words; random weights. Those with a size are
Qwen2.5's and want a GPU; a hybrid has Gated DeltaNet as Qwen3.5, and 100 M parameters unless it is
small."""

HYBRID = {
    "head_dim": 64,
    **{f"linear_num_{name}_heads": 6 for name in ("key", "value")},
    **{f"linear_{name}_head_dim": 128 for name in ("key", "value")},
}
"""What its config has besides."""


def agentflow_samples(num_turns: int, scale: float, group_size: int = 8) -> list[Sample]:
    """Unscaled: 3,000 constant tokens (tools 2,300, template 300, question and analysis 400), 500
    of memory per turn, 20 that close the prompt, and responses of 200 to 400.
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
            samples.append(
                Sample(
                    constant + memory + closing,
                    response,
                    tuple(-7.6 + rng.gauss(0, 0.1) for _ in response),
                    (advantage,) * len(response),
                    (1 / len(response),) * len(response),
                )
            )
            memory += ids(500)
    return samples


def random_model(shape: str, max_positions: int) -> PreTrainedModel:
    """Qwen2's or Qwen3.5's layers with random weights, on torch's device of the moment."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from flowtrain.trainer.attention import registration as attention

    width, mlp, layers, heads, key_heads, vocab = SHAPES[shape]
    torch.manual_seed(0)
    family, options = ("qwen3_5_text", HYBRID) if "hybrid" in shape else ("qwen2", {})
    config = CONFIG_MAPPING[family](
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        **options,
        max_position_embeddings=max_positions,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
