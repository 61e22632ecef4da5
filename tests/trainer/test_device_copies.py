"""Rows lie on the host, and a pass is copied to the device of the model when it is its turn.

The device is torch's "meta", whose tensors have no values: what is computed is not looked at, but
where, and how often the host waits for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, PolicyLoss
from flowkernels.statistics import NAMES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from flowtrain.records import Likeliest, Sample, SampleId, SamplingMask
from flowtrain.trainer import distillation, loss
from flowtrain.trainer.attention import registration
from flowtrain.trainer.distillation import DistillSpec
from flowtrain.trainer.distributed import World
from flowtrain.trainer.minibatch_factor import MinibatchFactor
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.optimizers import ShardOptimizer
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.trainer.walk import Kind

BUDGET = 8
META = torch.device("meta")
OPTIM = OptimSpec(lr=1e-2)


class Gpu(TorchDispatchMode):
    """Stands in for a GPU: what the host reads of it is zeros. Refuses operators that are given
    tensors of two devices, but for copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        devices = {x.device for x in tensors if x.dim()}
        if not is_copy and len(devices) > 1:
            raise AssertionError(f"{func}: {[(x.device, tuple(x.shape)) for x in tensors]}")
        if is_copy and kwargs.get("device", META) != META and devices == {META}:
            self.num_reads += 1
            return torch.zeros_like(func(args[0], **{**kwargs, "device": META}), device="cpu")
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device == META:
            self.num_reads += 1
            return 0.0
        return func(*args, **kwargs)


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


def any_divergence(hidden_TD: Tensor, weight_VD: Tensor, *said: Tensor, **given: Any) -> Any:
    """A FAKE of a divergence from a teacher that reads all it is given."""
    divergence_T = (hidden_TD @ weight_VD.T).sum(1)
    for each in (*said, *given.values()):
        if isinstance(each, Tensor):
            divergence_T = divergence_T + each.flatten()[:1]
    return SimpleNamespace(loss=divergence_T.sum(), divergence_T=divergence_T.detach())


@pytest.fixture
def samples() -> list[Sample]:
    """Two questions of three turns, each with a sampling mask; no pass holds one whole."""
    return [
        Sample(
            (*range(first, first + 9), *range(100, 100 + 3 * turn)),
            (7, 60 + turn),
            (-1.0, -2.0),
            (1.0, 1.0),
            (1.0, 1.0),
            sample_id=SampleId(first, 0, turn),
            sampling_mask=SamplingMask(ids=(7, 8, 9), counts=(3, 0)),
            teacher_prompt_ids=(5, *range(first, first + 9)),
            likeliest=Likeliest(array("i", (7, 8, 60, 61)), array("f", (-1.0, -2.0) * 2)),
        )
        for first in (10, 40)
        for turn in range(3)
    ]


@pytest.fixture
def make_trainer(tiny_path: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """A trainer whose model is on the device."""
    monkeypatch.setattr(registration, "structure_of", lambda *_: AnyTree())
    monkeypatch.setattr(loss, "linear_policy_loss", any_loss)
    for name in ("linear_distillation", "linear_topk_distillation"):
        monkeypatch.setattr(distillation, name, any_divergence)
    monkeypatch.setattr(ShardOptimizer, "step", lambda _: None)  # torch's, which knows the device

    def on_device() -> PreTrainedModel:
        model = models.load_model(tiny_path, torch.float32)
        loss.equip(model)
        return model.to(META)

    def make(
        spec: LossSpec, optim: OptimSpec = OPTIM, factor: MinibatchFactor | None = None
    ) -> Trainer:
        reference = on_device() if spec.kl_coef else None
        trainer_of = partial(Trainer, reference=reference, token_budget=BUDGET, factor=factor)
        return trainer_of(on_device(), World(0, 1, META), spec, optim)

    return make


CASES: dict[str, tuple[Any, ...]] = {
    "KL": (LossSpec(kl_coef=0.1),),
    "whole sequences": (LossSpec("gspo"),),
    "rescored, M2PO": (LossSpec(), replace(OPTIM, rescore=True, m2po=0.1)),
    "a factor of the mini-batch": (
        LossSpec(),
        OPTIM,
        MinibatchFactor(lambda ratio_T, *_: ratio_T.exp(), joins_turns=True),
    ),
    "a hinted teacher": (
        LossSpec(),
        replace(OPTIM, distill=DistillSpec("reverse_kl", 0.5, "policy")),
    ),
    "a teacher's likeliest tokens": (
        LossSpec(),
        replace(OPTIM, distill=DistillSpec("reverse_kl", 0.5, "endpoint")),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_of_any_kind_computes_on_one_device(
    make_trainer: Callable[..., Trainer], samples: list[Sample], case: str
) -> None:
    trainer = make_trainer(*CASES[case])
    with Gpu():
        metrics = trainer.step([[pack_row(samples)]])
    assert metrics["num_optim_steps"] == 1


def test_passes_are_copied_one_by_one_and_none_is_waited_for(
    make_trainer: Callable[..., Trainer], samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    copy = PackedRow.to

    def counted(row: PackedRow, device: torch.device) -> PackedRow:
        sizes.append(len(row.input_ids_N))
        return copy(row, device)

    monkeypatch.setattr(PackedRow, "to", counted)
    row, trainer = pack_row(samples), make_trainer(LossSpec())
    assert row.mask_ids_K is not None and row.mask_ids_K.dtype == torch.int32
    walk = trainer._reader.walk(row)
    assert any(not step.learns for step in walk), "there are trunks, too"
    with Gpu() as gpu:
        trainer.forward_backward(trainer._prepare([row]), 1.0, StepMetrics())
        (scores,) = trainer.score(trainer.model, [row])
    assert scores.logprob_T.device == META and len(scores.logprob_T) == len(row.target_ids_T)
    num_passes = len(walk) + sum(step.kind is not Kind.LEAVE for step in walk)
    assert max(sizes) <= BUDGET and len(sizes) == num_passes
    assert gpu.num_reads == 0


def test_the_host_waits_once_for_each_optimizer_step_and_twice_for_all_statistics(
    make_trainer: Callable[..., Trainer], samples: list[Sample]
) -> None:
    trainer = make_trainer(LossSpec())
    with Gpu() as gpu:
        trainer.step([[pack_row(samples[:3])], [pack_row(samples[3:])]])
    assert gpu.num_reads == 2 + 2
