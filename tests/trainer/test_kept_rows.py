"""Top-k and top-p from the sampler to the gradient: log-probs among what was sampled from."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from batches import random_samples
from flowkernels import LossSpec
from gradients import FULL_LOSS, TOLERANCE, Plain, distance, gradient_of, reference_of

from flowtrain.inference.torch_engine import TorchEngine
from flowtrain.records import Call, Sample, Sampling, SamplingMask
from flowtrain.trainer.loss import fused_head
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import empty_row, pack_row, pack_rows
from flowtrain.trainer.trainer import Trainer
from flowtrain.weights import WeightStore

MakeTrainer = Callable[..., Trainer]
PROMPTS = [(5,), (9, 8, 7), (9, 8, 7, 6), (250, 3, 250)]


def truncated(samples: list[Sample]) -> list[Sample]:
    """Every third stays; of the others each token was one of 1 to 9, about as likely."""
    rng = torch.Generator().manual_seed(1)

    def some(target: int) -> list[int]:
        others = torch.randperm(280, generator=rng)[
            : int(torch.randint(9, (1,), generator=rng))
        ].tolist()
        return [*(i for i in others if i != target), target]

    def truncate(sample: Sample) -> Sample:
        sets = [some(target) for target in sample.response_ids]
        logprobs = [
            -math.log(len(each)) + 0.3 * float(torch.randn((), generator=rng)) for each in sets
        ]
        return replace(sample, sampling_mask=SamplingMask.of(sets), logprobs=tuple(logprobs))

    return [sample if index % 3 == 0 else truncate(sample) for index, sample in enumerate(samples)]


def test_nothing_is_kept_where_all_tokens_could_be_sampled() -> None:
    row = pack_row(random_samples(4))
    assert row.sampling_mask is None
    assert row.mask_ids_K is None
    assert row.mask_offsets_T1 is None
    assert empty_row().sampling_mask is None


def test_the_example_of_a_row() -> None:
    """Sets stay with their targets, in the order of the samples."""
    one = Sample(
        (7,),
        (8, 9),
        (0.0,) * 2,
        (0.0,) * 2,
        (1.0,) * 2,
        sampling_mask=SamplingMask(array("i", [8, 1, 9]), array("i", [2, 1])),
    )
    two = Sample((1,), (2,), (0.0,), (0.0,), (1.0,), sampling_mask=SamplingMask.of([(2, 4, 6)]))
    free = Sample((3,), (4, 4), (0.0,) * 2, (0.0,) * 2, (1.0,) * 2)
    for samples, ids, offsets in (
        ([one, free, two], [8, 1, 9, 2, 4, 6], [0, 2, 3, 3, 3, 6]),
        ([two, one, free], [2, 4, 6, 8, 1, 9], [0, 3, 5, 6, 6, 6]),
    ):
        kept = pack_row(samples).to(torch.device("cpu")).sampling_mask
        assert kept is not None and (kept.token_ids_K.tolist(), kept.offsets_T1.tolist()) == (
            ids,
            offsets,
        )


@pytest.mark.parametrize("has_head", [True, False], ids=["within the head", "from logits"])
@pytest.mark.parametrize(
    ("spec", "temperature"), [(LossSpec(), 1.0), (FULL_LOSS, 0.7)], ids=["clip", "all terms"]
)
def test_the_gradient_is_that_of_dense_masks(
    tiny_path: str,
    make_trainer: MakeTrainer,
    spec: LossSpec,
    temperature: float,
    has_head: bool,
) -> None:
    """-inf where a token could not be sampled, by transformers and autograd."""
    samples = truncated(random_samples(12))
    reference = reference_of(tiny_path) if spec.kl_coef else None
    loss, truth = Plain(tiny_path, spec, temperature, reference).gradient([samples])
    trainer = make_trainer(spec, temperature, reference, grad_clip=0.0)
    if not has_head:
        trainer.model.get_output_embeddings().__class__ = torch.nn.Linear
    assert (fused_head(trainer.model) is not None) == has_head
    for num_rows in (1, 4):
        assert distance(gradient_of(trainer, pack_rows(samples, num_rows)), truth) < TOLERANCE
    whole = [replace(sample, sampling_mask=None) for sample in samples]
    found = distance(gradient_of(trainer, pack_rows(whole, 1)), truth)
    assert found > 0.1, "or the sets would not matter"
    assert trainer.step([pack_rows(samples, 4)])["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"),
    [(5, 1.0, 1.0), (20, 0.6, 0.6), (280, 0.8, 1.0), (1, 1.0, 1.0)],
)
def test_the_trainer_computes_the_logprobs_of_the_torch_engine(
    tiny_path: str,
    make_trainer: MakeTrainer,
    tmp_path: Path,
    top_k: int,
    top_p: float,
    temperature: float,
) -> None:
    """Requests with and without bounds share batches and rows."""
    model = models.load_model(tiny_path, torch.float32, attn="sdpa")
    engine = TorchEngine(model, models.load_tokenizer(tiny_path), WeightStore(tmp_path / "weights"))
    bounded = Sampling(12, temperature, top_k, top_p, ignore_end=True)
    free = Sampling(12, temperature, ignore_end=True)
    requests = [
        (p, replace(free if i % 4 == 3 else bounded, seed=i)) for i, p in enumerate(PROMPTS * 3)
    ]

    async def sample() -> list[Call]:
        return await asyncio.gather(*(engine.generate(*request) for request in requests))

    done = asyncio.run(sample())
    assert [c.sampling_mask is None for c in done] == [i % 4 == 3 for i in range(12)]
    samples = [Sample.of(call) for call in done]
    counts = [
        count for s in samples if s.sampling_mask is not None for count in s.sampling_mask.counts
    ]
    assert max(counts) <= top_k and (top_p < 1 or min(counts) == top_k)
    for rescore in (False, True):
        stats = make_trainer(LossSpec(), temperature, rescore=rescore).step([pack_rows(samples, 4)])
        assert stats["logprob_mismatch"] < 1e-5
        assert stats["ratio_min"] == pytest.approx(1, abs=2e-5)
        assert stats["ratio_max"] == pytest.approx(1, abs=2e-5)
    whole = [replace(sample, sampling_mask=None) for sample in samples]
    found = make_trainer(LossSpec(), temperature).step([pack_rows(whole, 4)])["logprob_mismatch"]
    assert found > 0.05, "or the sets would not matter"
