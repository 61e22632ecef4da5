"""Rivals of the token tree on the same samples: padded batches, one sample a row. Forward and
backward pass, clipping, AdamW.

`Transformers` is a plain loop: full logits, log_softmax, gather, clipped ratio. `Trl` calls
`GRPOTrainer._compute_loss` of TRL as it is, on the model with TRL's fused head, through an object
that holds what it reads of a trainer. B: samples of a batch, L: the longest's tokens.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from flowtrain.records import Sample


class Transformers:
    """Batches as they come, padded on the right."""

    scores_all: ClassVar = True
    """Its head runs on every token, not on those alone that are trained."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, batch_size: int, dtype: torch.dtype
    ) -> None:
        self.model = copy.deepcopy(model).to(device).train()
        self.model.set_attn_implementation("sdpa")
        self.device, self._batch_size, self._dtype = device, batch_size, dtype
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )

    def step(self, samples: Sequence[Sample]) -> None:
        self.backward(samples)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def backward(self, samples: Sequence[Sample]) -> None:
        """The gradient of the mean over samples of the mean over their tokens."""
        for batch in _batches(samples, self._batch_size):
            with self.autocast():
                loss = self.loss(batch)
            (loss * (len(batch) / len(samples))).backward()

    def loss(self, batch: Sequence[Sample]) -> Tensor:
        ids_BL = self._padded([s.prompt_ids + s.response_ids for s in batch])
        lengths_B = self._padded([(len(s.prompt_ids) + len(s.response_ids),) for s in batch])
        visible_BL = torch.arange(ids_BL.shape[1], device=self.device) < lengths_B
        logits = self.model(
            input_ids=ids_BL, attention_mask=visible_BL.long(), use_cache=False
        ).logits[:, :-1]
        logprob = logits.float().log_softmax(-1).gather(-1, ids_BL[:, 1:, None])[..., 0]
        before = [(0.0,) * (len(s.prompt_ids) - 1) for s in batch]
        old, weight = (
            self._padded(
                [zeros + values for zeros, values in zip(before, each, strict=True)], torch.float32
            )
            for each in (
                [s.logprobs for s in batch],
                [(1 / len(s.response_ids),) * len(s.response_ids) for s in batch],
            )
        )
        ratio, advantage_B1 = (
            (logprob - old).exp(),
            self._padded([s.advantages[:1] for s in batch], torch.float32),
        )
        loss = -torch.minimum(ratio * advantage_B1, ratio.clamp(0.8, 1.2) * advantage_B1)
        return torch.where(weight > 0, loss * weight, 0.0).sum() / len(batch)

    @classmethod
    def shapes(cls, samples: Sequence[Sample], batch_size: int) -> list[tuple[int, int]]:
        """(samples, tokens of each) of every padded batch."""
        return [(len(batch), cls._longest(batch)) for batch in _batches(samples, batch_size)]

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self._dtype, enabled=self._dtype != torch.float32)

    @classmethod
    def _longest(cls, batch: Sequence[Sample]) -> int:
        return max(len(s.prompt_ids) + len(s.response_ids) for s in batch)

    def _padded(
        self, rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.int64, side: str = "right"
    ) -> Tensor:
        return pad_sequence(
            [torch.tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_side=side
        ).to(self.device)


class Trl(Transformers):
    """Prompts padded on the left and responses on the right, as TRL makes its batches."""

    scores_all: ClassVar = False

    def __init__(
        self, model: PreTrainedModel, device: torch.device, batch_size: int, dtype: torch.dtype
    ) -> None:
        from trl.trainer import grpo_trainer

        super().__init__(model, device, batch_size, dtype)
        grpo_trainer.add_fused_lm_head(
            self.model, temperature=1.0, outputs=("log_probs", "entropy")
        )
        self._grpo = grpo_trainer.GRPOTrainer
        self._trainer = self._stand_in()

    def loss(self, batch: Sequence[Sample]) -> Tensor:
        ones = (
            [(1,) * len(s.prompt_ids) for s in batch],
            [(1,) * len(s.response_ids) for s in batch],
        )
        inputs = {
            "prompt_ids": self._padded([s.prompt_ids for s in batch], side="left"),
            "prompt_mask": self._padded(ones[0], side="left"),
            "completion_ids": self._padded([s.response_ids for s in batch]),
            "completion_mask": self._padded(ones[1]),
            "advantages": torch.tensor([s.advantages[0] for s in batch], device=self.device),
            "old_per_token_logps": self._padded([s.logprobs for s in batch], torch.float32),
        }
        loss: Tensor = self._grpo._compute_loss(self._trainer, self.model, inputs)
        return loss

    @classmethod
    def _longest(cls, batch: Sequence[Sample]) -> int:
        return max(len(s.prompt_ids) for s in batch) + max(len(s.response_ids) for s in batch)

    def _stand_in(self) -> Any:
        """Exactly what is read of a trainer; anything else is an AttributeError."""
        alone = SimpleNamespace(
            num_processes=1,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            autocast=self.autocast,
        )
        trainer = SimpleNamespace(
            loss_type="grpo",
            importance_sampling_level="token",
            epsilon_low=0.2,
            epsilon_high=0.2,
            beta=0.0,
            use_vllm=False,
            current_gradient_accumulation_steps=1,
            args=SimpleNamespace(delta=None),
            model=self.model,
            accelerator=alone,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            aux_loss_enabled=False,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
        )
        score: Any = self._grpo._get_per_token_logps_and_entropies
        trainer._get_per_token_logps_and_entropies = partial(
            score.__wrapped__, trainer
        )  # without TRL's profiling
        return trainer


def _batches(samples: Sequence[Sample], batch_size: int) -> Iterator[Sequence[Sample]]:
    return (samples[start : start + batch_size] for start in range(0, len(samples), batch_size))
