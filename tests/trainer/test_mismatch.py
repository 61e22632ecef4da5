"""What the comparison of a batch's tokens finds, against formulas written out."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Sample, VersionSpan
from flowtrain.trainer.distributed import World
from flowtrain.trainer.mismatch import mismatch_metrics, mismatch_sums
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.step_metrics import StepMetrics

START = 7
STATS = ("num_tokens", "entropy", "kl", "ratio", "clipped_low", "clipped_high")


def sample(sampler: Sequence[float], spans: Sequence[VersionSpan] | None = None) -> Sample:
    num = len(sampler)
    whole = (VersionSpan(0, num, START),)
    return Sample(
        prompt_ids=(1, 2, 3),
        response_ids=tuple(range(10, 10 + num)),
        logprobs=tuple(sampler),
        advantages=(1.0,) * num,
        loss_weights=(1.0,) * num,
        spans=whole if spans is None else tuple(spans),
    )


def found(row: PackedRow, trainer: Sequence[float], version: int | None = None) -> dict[str, float]:
    sums = mismatch_sums(torch.tensor(trainer, dtype=torch.float64), row, version)
    return mismatch_metrics(sums.tolist())


def num_in_buckets(metrics: dict[str, float]) -> dict[str, float]:
    return {name.partition("/")[2]: num for name, num in metrics.items() if "/" in name}


def test_kl_and_buckets_are_those_of_the_formulas() -> None:
    sampler = [-1.0, -0.5, -2.0, -3.0, -0.125, -4.0]
    apart = [0.0, 3e-4, -0.05, 0.7, -2.0, -20.0]
    trainer = [s + d for s, d in zip(sampler, apart, strict=True)]
    metrics = found(pack_row([sample(sampler)]), trainer)
    expected = sum(math.exp(d) - 1 - d for d in apart) / len(apart)
    assert metrics["mismatch_kl"] == pytest.approx(expected, rel=1e-9)
    assert metrics["logprob_mismatch"] == pytest.approx(sum(map(abs, apart)) / len(apart))
    assert metrics["mismatch_left_out"] == 0
    assert num_in_buckets(metrics) == {
        "below_1e-5": 1,
        "1e-5": 0,
        "1e-4": 1,
        "1e-3": 0,
        "1e-2": 1,
        "1e-1": 1,
        "1": 1,
        "10": 1,
    }


@given(st.lists(st.tuples(st.floats(-8, -1e-3), st.floats(-3, 3)), min_size=1, max_size=40))
def test_no_kl_is_negative_and_every_token_has_a_bucket(tokens: list[tuple[float, float]]) -> None:
    metrics = found(pack_row([sample([s for s, _ in tokens])]), [s + d for s, d in tokens])
    assert metrics["mismatch_kl"] >= -1e-12
    assert sum(num_in_buckets(metrics).values()) == len(tokens)


def test_slope_sides_and_agreement_are_those_of_the_formulas() -> None:
    """Two samples: one agrees, of the other all unlikely tokens are less likely to the trainer."""
    sampler, apart = ([-0.5, -1.0], [-0.25, -2.0, -4.0]), ([0.0, 0.0], [0.5, -1.0, -3.0])
    trainer = [
        s + d for pair in zip(sampler, apart, strict=True) for s, d in zip(*pair, strict=True)
    ]
    metrics = found(pack_row(list(map(sample, sampler))), trainer)
    s, d = ([x for part in each for x in part] for each in (sampler, apart))
    mean_s, mean_d = sum(s) / 5, sum(d) / 5
    covariance = sum((x - mean_s) * (y - mean_d) for x, y in zip(s, d, strict=True))
    slope = covariance / sum((x - mean_s) ** 2 for x in s)
    assert metrics["mismatch_slope"] == pytest.approx(slope)
    assert metrics["mismatch_one_sided"] == 1 and metrics["mismatch_agreeing"] == 0.5


def test_a_token_that_did_not_count_is_not_compared() -> None:
    row = pack_row([replace(sample([-1.0, -2.0, -3.0]), loss_weights=(0.0, 1.0, 1.0))])
    metrics = found(row, [0.0, -2.0, -3.5])
    assert sum(num_in_buckets(metrics).values()) == 2 and metrics["mismatch_left_out"] == 0
    assert metrics["mismatch_kl"] == pytest.approx((math.exp(-0.5) - 0.5) / 2)


def test_tokens_of_other_versions_are_left_out_where_nodes_sample() -> None:
    spans = [VersionSpan(0, 2, START - 1), VersionSpan(2, 5, START), VersionSpan(5, 6, START + 1)]
    row, trainer = pack_row([sample([-1.0] * 6, spans)]), [-9.0, -9.0, -1.5, -1.5, -1.5, -9.0]
    metrics = found(row, trainer, START)
    assert (sum(num_in_buckets(metrics).values()), metrics["mismatch_left_out"]) == (3, 3)
    assert metrics["mismatch_kl"] == pytest.approx(math.exp(-0.5) - 0.5)
    assert metrics["logprob_mismatch"] == pytest.approx((3 * 8 + 3 * 0.5) / 6), "of all tokens"
    everything = found(row, trainer)
    assert (sum(num_in_buckets(everything).values()), everything["mismatch_left_out"]) == (6, 0)


def test_nothing_is_said_of_a_step_in_which_nothing_was_compared() -> None:
    old = pack_row([sample([-1.0], [VersionSpan(0, 1, 0)])])
    metrics = found(old, [-2.0], START)
    assert "mismatch_kl" not in metrics and metrics["mismatch_left_out"] == 1
    unknown = pack_row([sample([-1.0], ())])
    assert found(unknown, [-2.0]) == {"logprob_mismatch": 1.0}


def test_only_the_first_optimizer_step_that_was_taken_is_compared() -> None:
    """The weights have moved in later ones; one that is skipped moves nothing."""
    row, zero = pack_row([sample([-1.0, -2.0])]), torch.zeros(())
    stats = {f"{name}_sum": zero for name in STATS} | {"ratio_max": zero, "ratio_min": zero}
    metrics = StepMetrics()
    for apart, norm in ((9.0, None), (0.5, 1.0), (5.0, 1.0)):
        metrics.add(stats, zero, row.sampler_logprob_T + apart, row)
        metrics.close_step(norm)
    told = metrics.reduce(World(0, 1, torch.device("cpu")), 0.0)
    assert told["logprob_mismatch"] == 0.5 and sum(num_in_buckets(told).values()) == 2


def test_rows_find_together_what_one_row_does() -> None:
    rng = random.Random(1)
    samples = [sample([-rng.random() - 0.1 for _ in range(6)]) for _ in range(6)]
    trainer = [[x + rng.gauss(0, 0.2) for x in each.logprobs] for each in samples]
    whole = found(pack_row(samples), [x for each in trainer for x in each])
    parts = [
        mismatch_sums(torch.tensor(t, dtype=torch.float64), pack_row([s]), None)
        for s, t in zip(samples, trainer, strict=True)
    ]
    assert mismatch_metrics(torch.stack(parts).sum(0).tolist()) == pytest.approx(whole)
