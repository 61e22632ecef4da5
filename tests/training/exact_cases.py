"""Random calls of a sampler and random packings of them."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flowkernels import LossSpec
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from flowtrain import toy
from flowtrain.engines.torch_engine import TorchEngine
from flowtrain.training import attention
from flowtrain.training.row_loss import row_loss
from flowtrain.training.sharding import ShardSpec, shard
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample, Sampling

_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
FAMILIES: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    # heads, key heads and width; heads of 8, 16 and 24
    "qwen2": (4, 2, 32, {}),
    "qwen3": (4, 4, 64, {"head_dim": 16}),
    "llama": (6, 2, 144, {}),
    "minicpm3": (4, 4, 32, {"v_head_dim": 8, **_LATENT}),  # keys of 12, values of 8
    "gemma3_text": (4, 2, 64, {"sliding_window": 3, **_WINDOWS}),  # shorter than responses
    "granite_swa": (4, 2, 64, {"sliding_window": 40, **_WINDOWS}),  # sinks; over two blocks of keys
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LENGTHS = (1, 5, 31, 32, 33, 64, 70, 97)
"""Of prompts, around the blocks of keys."""


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 260 tokens or so."""
    return toy.new_tokenizer(["What is the capital of Chad?"], 280)


def tiny_model(family: str, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A decoder of 2 layers with large random weights."""
    num_heads, num_key_heads, width, options = FAMILIES[family]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=2,
        num_attention_heads=num_heads,
        num_key_value_heads=num_key_heads,
        max_position_embeddings=512,
        tie_word_embeddings=family == "qwen3",
        initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


@dataclass(frozen=True)
class Pair:
    """A sampler and a trainer of one model."""

    engine: TorchEngine
    model: PreTrainedModel

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: torch.dtype, world: World, exact: bool) -> Pair:
        # As `make_engine` does it: in another dtype the rotary frequencies stay in fp32.
        config = copy.deepcopy(model.config)
        sampling = AutoModelForCausalLM.from_config(config, dtype=dtype)
        sampling.load_state_dict(model.state_dict())
        engine = TorchEngine(sampling, tiny_tokenizer(), None, exact=exact)
        return cls(engine, shard(model, world, ShardSpec(dtype, exact=exact)).train())


@dataclass(frozen=True)
class Difference:
    """Sampler against trainer."""

    num_tokens: int
    num_different: int
    largest: float
    """In nats."""


def draw_sampling(rng: random.Random) -> Sampling:
    """Draw a temperature and a truncation; 0 for greedy, whose log-probs are at temperature 1."""
    return Sampling(
        max_new_tokens=rng.randint(1, 9),
        temperature=rng.choice((1.0, 1.0, 0.7, 1.3, 0.0)),
        ignore_end=True,
        **rng.choice(({}, {"top_k": 5}, {"top_k": 40, "top_p": 0.9})),
    )


def draw_calls(engine: TorchEngine, sampling: Sampling, rng: random.Random) -> list[Sample]:
    """Sample groups of one or two turns, whose prompts share beginnings, in batches of any size."""
    trunk = [rng.randrange(256) for _ in range(max(_LENGTHS))]
    prompts = []
    for _ in range(rng.randint(1, 3)):
        own = [rng.randrange(256) for _ in range(rng.choice((0, 1, 20)))]
        prompts += [tuple(trunk[: rng.choice(_LENGTHS)] + own)] * rng.randint(1, 4)
    calls = _sampled(engine, prompts, sampling, rng)
    followed = [call for call in calls if rng.random() < 0.5]
    branches = []
    for call in followed:  # by another turn, or by a branch within the response
        kept = call.response_ids[: rng.randint(0, len(call.response_ids))]
        observed = tuple(rng.randrange(256) for _ in range(rng.choice((0, 1, 30))))
        branches += [call.prompt_ids + kept + observed] * rng.randint(1, 2)
    return calls + _sampled(engine, branches, sampling, rng)


def _sampled(
    engine: TorchEngine, prompts: Sequence[tuple[int, ...]], sampling: Sampling, rng: random.Random
) -> list[Sample]:
    prompts = rng.sample(prompts, len(prompts))
    samples: list[Sample] = []
    while len(samples) < len(prompts):
        first = len(samples)
        batch = prompts[first : first + rng.randint(1, 8)]
        requests = [(prompt, replace(sampling, seed=rng.getrandbits(32))) for prompt in batch]

        async def ask(requests: list[tuple[tuple[int, ...], Sampling]] = requests) -> list[Sample]:
            found = await asyncio.gather(*(engine.generate(*each) for each in requests))
            return [
                Sample(
                    prompt,
                    completion.ids,
                    completion.logprobs,
                    tuple(rng.choice((-1.0, 0.0, 1.0)) for _ in completion.ids),
                    tuple(rng.choice((0.0, 1.0, 1.0)) for _ in completion.ids),
                    sampling_mask=completion.sampling_mask,
                )
                for (prompt, _), completion in zip(requests, found, strict=True)
            ]

        samples += asyncio.run(ask())
    return samples


def compare(
    model: PreTrainedModel, samples: Sequence[Sample], sampling: Sampling, rng: random.Random
) -> Difference:
    """Pack the samples at random, and compare the log-probs that the loss takes with theirs."""
    samples = rng.sample(samples, len(samples))
    cut, budget = rng.randint(0, len(samples)), rng.choice((1, 60, 150, 4000))
    parts = [samples[:cut], samples[cut:]]
    rows = [row for part in parts for row in pack_rows(part, budget, share=rng.random() < 0.8)]
    trains = rng.random() < 0.3
    gaps = []
    for row in rows:
        with torch.set_grad_enabled(trains):
            out = row_loss(model, row, LossSpec(), 1.0, sampling.temperature or 1.0)
        if trains:
            out.loss.backward()
            model.zero_grad()
        gap_T = (out.logprob_T - row.sampler_logprob_T).abs()
        gaps.append(gap_T[row.loss_weight_T != 0])
    gap = torch.cat(gaps)
    return Difference(len(gap), int((gap != 0).sum()), float(gap.max()) if len(gap) else 0.0)
