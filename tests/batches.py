"""What algorithms make of groups that tests write by hand, and samples of no algorithm."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Sequence
from typing import Any

import torch

from flowtrain.algorithms import Algorithm, load_algorithm
from flowtrain.config import Config
from flowtrain.records import Call, Group, Sample, Sampling, TrainBatch


def batch(
    name: str,
    groups: Sequence[Group],
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: str = "planner",
    **sections: dict[str, Any],
) -> TrainBatch:
    """Make the samples of a step; by default it has no more groups than these."""
    num_questions = max(len(groups), num_minibatches) if num_groups is None else num_groups
    options = {
        **sections,
        "algorithm": {"name": name, **sections.get("algorithm", {})},
        "train": {"num_minibatches": num_minibatches, "policy": policy},
        "rollout": {"num_questions": num_questions},
        "roles": {} if policy == "planner" else {policy: "own"},
    }
    return _algorithm(json.dumps(options)).advantages(groups)


@functools.cache
def _algorithm(options: str) -> Algorithm:
    return load_algorithm(Config.model_validate_json(options))


def flow_grpo(
    groups: Sequence[Group],
    mode: str = "paper",
    num_minibatches: int = 1,
    num_groups: int | None = None,
    policy: str = "planner",
    equal_groups: str = "",
) -> TrainBatch:
    """Make the samples of Flow-GRPO; `equal_groups`: drop in mode paper, else keep."""
    own = {"mode": mode, "equal_groups": equal_groups or ("drop" if mode == "paper" else "keep")}
    return batch("flow_grpo", groups, num_minibatches, num_groups, policy, algorithm=own)


def random_samples(
    number: int, seed: int = 0, minibatch: int = 0, vocab: int = 280
) -> list[Sample]:
    """Samples of 1 to 9 prompt and 1 to 7 response tokens, as of a random policy."""
    rng = torch.Generator().manual_seed(seed)

    def ids(most: int) -> tuple[int, ...]:
        length = int(torch.randint(1, most + 1, (1,), generator=rng))
        return tuple(torch.randint(vocab, (length,), generator=rng).tolist())

    samples = []
    for _ in range(number):
        prompt, response = ids(9), ids(7)
        num = len(response)
        logprobs = tuple((-5.6 + torch.randn(num, generator=rng)).tolist())
        advantage, weight = torch.rand(2, generator=rng).tolist()
        of_tokens = logprobs, (2 * advantage - 1,) * num, (weight,) * num
        samples.append(Sample(prompt, response, *of_tokens, minibatch))
    return samples


def sampled(engine: Any, prompts: Sequence[tuple[int, ...]], more: int) -> list[Sample]:
    """A sample of each prompt, `more` tokens longer than the one before."""

    async def together() -> list[Call]:
        every = [Sampling(3 + more * n, seed=n, ignore_end=True) for n in range(len(prompts))]
        return await asyncio.gather(*map(engine.generate, prompts, every))

    return [Sample.of(call) for call in asyncio.run(together())]
