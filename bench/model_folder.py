"""A model in a Hugging Face folder, and its own rollouts on sums.

The questions go through the folder's chat template, the torch engine samples single turns, token F1
scores them, which tells most answers of a group apart, and rewards are normalised over a question's
group as GRPO does. A question whose rollouts all get the same reward is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.algorithms.advantages import normalise
from flowtrain.inference.token_chat import encode_chat
from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Call, Sample, Sampling, Task, UserError
from flowtrain.rewards.squad import token_f1
from flowtrain.trainer.model.loading import load_model, load_tokenizer
from flowtrain.utils.text import final_answer

_MOST_TRIES = 10
"""Questions asked for each group that is wanted, at most."""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="",
        metavar="FOLDER",
        help="measure on this Hugging Face folder, e.g. models/SmolLM2-135M-Instruct, and its own "
        "rollouts on sums",
    )


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A causal language model with its tokenizer, in fp32 on the CPU."""

    path: str
    model: PreTrainedModel
    """With the attention of packed rows, as the trainer takes it."""
    tokenizer: PreTrainedTokenizerFast

    @classmethod
    def load(cls, path: str) -> ModelFolder:
        tokenizer = load_tokenizer(path, "--model")
        if tokenizer.chat_template is None:
            raise UserError(f"--model={path!r} has no chat template")
        return cls(path, load_model(path, torch.float32, key="--model"), tokenizer)

    @property
    def name(self) -> str:
        return Path(self.path).name

    def prompts(self, tasks: Sequence[Task]) -> list[tuple[int, ...]]:
        """The ids of each question as a chat, up to where the reply begins."""
        return [tuple(encode_chat(self.tokenizer, task.question)) for task in tasks]

    def engine(self) -> TorchEngine:
        """Sample with a copy of the model, which has an attention of its own."""
        return TorchEngine(copy.deepcopy(self.model), self.tokenizer, None)

    def rollouts(
        self, num_groups: int, group_size: int = 8, max_new_tokens: int = 24
    ) -> list[list[Sample]]:
        """Sample at temperature 1 until `num_groups` questions have rewards that differ.

        Every sample has the same weight, as in TRL's loss. Raises UserError when ten questions per
        group do not suffice.
        """
        tasks = questions(_MOST_TRIES * num_groups)
        engine = self.engine()
        groups: list[list[Sample]] = []
        for start in range(0, len(tasks), num_groups):
            asked = tasks[start : start + num_groups]
            for task, prompt in zip(asked, self.prompts(asked), strict=True):
                completions = sample(engine, [prompt] * group_size, max_new_tokens, seed=start)
                rewards = self._rewards(task, completions)
                if min(rewards) < max(rewards):
                    groups.append(_samples(completions, rewards))
                if len(groups) == num_groups:
                    engine.close()
                    return groups
        raise UserError(
            f"--model={self.path!r}: {len(groups)} of {len(tasks)} questions have rollouts with "
            f"different rewards, and {num_groups} are needed"
        )

    def _rewards(self, task: Task, completions: Sequence[Call]) -> list[float]:
        texts = [
            self.tokenizer.decode(c.response_ids, skip_special_tokens=True) for c in completions
        ]
        return [token_f1(task, final_answer(text)) for text in texts]


def questions(number: int) -> list[Task]:
    """Draw sums of two digits; some may be equal."""
    order = random.Random(0)
    drawn = [(order.randint(1, 9), order.randint(1, 9)) for _ in range(number)]
    return [
        Task(f"sum-{n}", f"State the final answer to {a} + {b} =", (str(a + b),))
        for n, (a, b) in enumerate(drawn)
    ]


def sample(
    engine: TorchEngine, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, seed: int = 0
) -> list[Call]:
    """One completion of each prompt, in one batch."""

    async def together() -> list[Call]:
        options = [
            Sampling(max_new_tokens, seed=seed + index, deadline_s=600.0)
            for index in range(len(prompts))
        ]
        return await asyncio.gather(*map(engine.generate, prompts, options))

    return asyncio.run(together())


def _samples(completions: Sequence[Call], rewards: Sequence[float]) -> list[Sample]:
    return [
        Sample.of(each, advantage, 1 / len(each.response_ids))
        for each, advantage in zip(completions, normalise(rewards), strict=True)
    ]
