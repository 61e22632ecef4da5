"""Small models whose versions differ in what they sample, and requests amid their responses."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.inference.vllm.engine import VllmEngine
from flowtrain.trainer import toy

T = TypeVar("T")
TEXTS = ("What is the capital of Chad?", "Sub-Goal: capital of Chad")


def loud_model(
    texts: Sequence[str] = TEXTS,
    vocab_size: int = 280,
    *,
    seed: int = 0,
    scale: float = 0.8,
    hidden_size: int = 64,
    num_heads: int = 2,
    max_positions: int = 256,
) -> tuple[PreTrainedTokenizerFast, PreTrainedModel]:
    """Make a model of two layers with large random weights, of heads that vLLM's CPU takes."""
    tokenizer = toy.new_tokenizer(texts, vocab_size=vocab_size)
    torch.manual_seed(seed)
    model = toy.new_model(
        tokenizer, hidden_size, num_layers=2, num_heads=num_heads, max_positions=max_positions
    )
    model.config.architectures = [type(model).__name__]
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:  # the embedding less so, or every token would repeat itself
                factor = 0.2 if "embed" in name else scale
                parameter.mul_(factor / model.config.initializer_range)
    return tokenizer, model


def run(coroutine: Coroutine[Any, Any, T], timeout_s: float = 100) -> T:
    """Wait for a coroutine: one that never ends fails the test."""

    async def bounded() -> T:
        async with asyncio.timeout(timeout_s):
            return await coroutine

    return asyncio.run(bounded())


async def under_way(engine: VllmEngine, number: int, num_tokens: int = 10) -> None:
    """Wait until so many requests to a real vLLM have so many tokens each."""
    states = engine.supervisor.runner.result()._llm.output_processor.request_states
    async with asyncio.timeout(60):
        while True:
            counts = [state.detokenizer.num_output_tokens() for state in list(states.values())]
            if sum(count >= num_tokens for count in counts) >= number:
                return
            await asyncio.sleep(0.002)
