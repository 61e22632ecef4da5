"""Rows lie on the host, and a pass is copied to the device of the model when it is its turn.

The device is torch's "meta", whose tensors have no values: whatever waits for one fails here, and
so does an operator that is given tensors of two devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, PolicyLoss
from flowkernels.statistics import NAMES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowtrain.records import Sample, SamplingMask
from flowtrain.trainer import loss
from flowtrain.trainer.attention import registration
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.trainer.walk import Kind

BUDGET = 8
META = torch.device("meta")


class OneDevice(TorchDispatchMode):
    """Refuses operators, but for copies, that are given tensors of several devices."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()]
        if func is not torch.ops.aten._to_copy.default and len({x.device for x in tensors}) > 1:
            raise AssertionError(f"{func}: {[(x.device, tuple(x.shape)) for x in tensors]}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class AnyTree:
    """A FAKE of a tree's attention, that has no values to look for its structure in."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, before: Sequence[Any] = (), **_: object
    ) -> Tensor:
        for pair in [(key, value), *before]:
            for each in pair:
                query = query + each.mean(2, keepdim=True).mean(1, keepdim=True)
        return query.transpose(1, 2)


def any_loss(hidden_TD: Tensor, weight_VD: Tensor, **given: Any) -> PolicyLoss:
    """A FAKE of a policy's loss that reads all it is given."""
    logit_T = (hidden_TD @ weight_VD.T).sum(1)
    for each in given.values():
        if isinstance(each, Tensor) and each.shape == logit_T.shape:
            logit_T = logit_T + each
    value = logit_T.sum() + given["sampling_mask"].token_ids_K.sum()
    stats = {name: value.detach() for name in NAMES}
    return PolicyLoss(value, logit_T.detach(), logit_T.detach(), stats)


@pytest.fixture
def samples() -> list[Sample]:
    """Two questions of three turns, each with a sampling mask; no pass holds one whole."""
    questions = [[*range(first, first + 9)] for first in (10, 40)]
    made = []
    for ids in questions:
        for turn in range(3):
            mask = SamplingMask(ids=(7, 8, 9), counts=(3, 0))
            prompt = (*ids, *range(100, 100 + 3 * turn))
            made.append(
                Sample(
                    prompt,
                    (7, 60 + turn),
                    (-1.0, -2.0),
                    (1.0, 1.0),
                    (1.0, 1.0),
                    sampling_mask=mask,
                )
            )
    return made


@pytest.fixture
def trainer(tiny_path: str, monkeypatch: pytest.MonkeyPatch) -> Trainer:
    monkeypatch.setattr(registration, "structure_of", lambda *_: AnyTree())
    monkeypatch.setattr(loss, "linear_policy_loss", any_loss)
    model = models.load_model(tiny_path, torch.float32)
    loss.equip(model)
    model.to(META)
    return Trainer(model, World(0, 1, META), LossSpec(), OptimSpec(lr=1e-2), token_budget=BUDGET)


def test_a_pass_is_on_the_device_and_its_row_is_not(
    trainer: Trainer, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    copy = PackedRow.to

    def counted(row: PackedRow, device: torch.device) -> PackedRow:
        sizes.append(len(row.input_ids_N))
        return copy(row, device)

    monkeypatch.setattr(PackedRow, "to", counted)
    row = pack_row(samples)
    assert row.mask_ids_K is not None and row.mask_ids_K.dtype == torch.int32
    walk = trainer._reader.walk(row)
    assert any(not step.learns for step in walk), "there are trunks, too"
    with OneDevice():
        trainer.forward_backward(trainer._prepare([row]), 1.0, StepMetrics())
        (scores,) = trainer.score(trainer.model, [row])
    assert scores.logprob_T.device == META and len(scores.logprob_T) == len(row.target_ids_T)
    num_read = len(walk) + sum(step.kind is not Kind.LEAVE for step in walk)
    assert max(sizes) <= BUDGET and len(sizes) == num_read
