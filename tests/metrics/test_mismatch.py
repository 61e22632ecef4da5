"""What the comparison of a step's tokens finds, against formulas written out."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import call, group, rollout, turn

from flowtrain.metrics.mismatch import Mismatch, compare, merge
from flowtrain.types import Group, Sample, SampleId, VersionSpan

START = 7
Logprobs = Mapping[SampleId, Sequence[float]]


def sample(
    index: int, sampler: Sequence[float], minibatch: int = 0, ids: Sequence[int] = ()
) -> Sample:
    num = len(sampler)
    return Sample(
        prompt_ids=(1, 2, 3),
        response_ids=tuple(ids or range(10, 10 + num)),
        logprobs=tuple(sampler),
        advantages=(1.0,) * num,
        loss_weights=(1.0,) * num,
        minibatch=minibatch,
        sample_id=SampleId(index, 0, 0),
    )


def group_of(one: Sample, spans: Sequence[VersionSpan] | None = None) -> Group:
    whole = (VersionSpan(0, len(one.response_ids), START),)
    spans = whole if spans is None else tuple(spans)
    said = call(one.response_ids, one.prompt_ids, one.logprobs, spans=tuple(spans))
    assert one.sample_id is not None
    return group(rollout(turn(said)), index=one.sample_id.group)


def part(
    samples: Sequence[Sample], logprobs: Logprobs, groups: Sequence[Group] | None = None, **how: Any
) -> Any:
    """Return what a rank finds, as the others read it."""
    options: dict[str, Any] = {"policy": "planner", "version": START, "allows_others": False} | how
    groups = [group_of(each) for each in samples] if groups is None else groups
    return json.loads(json.dumps(compare(groups, samples, logprobs, **options)))


def found(
    samples: Sequence[Sample], logprobs: Logprobs, groups: Sequence[Group] | None = None, **how: Any
) -> Mismatch:
    return merge([part(samples, logprobs, groups, **how)])


def test_kl_and_buckets_are_those_of_the_formulas() -> None:
    sampler = [-1.0, -0.5, -2.0, -3.0, -0.1, -4.0]
    apart = [0.0, 3e-4, -0.05, 0.7, -2.0, -20.0]
    one = sample(0, sampler)
    assert one.sample_id is not None
    trainer = [s + d for s, d in zip(sampler, apart, strict=True)]
    result = found([one], {one.sample_id: trainer})
    expected = sum(math.exp(d) - 1 - d for d in apart) / len(apart)
    assert result.kl == pytest.approx(expected, rel=1e-9)
    metrics = result.metrics()
    assert metrics["mismatch_kl"] == result.kl and metrics["mismatch_left_out"] == 0
    in_buckets = {name.partition("/")[2]: n for name, n in metrics.items() if "/" in name}
    assert in_buckets == {
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
    one = sample(0, [s for s, _ in tokens])
    assert one.sample_id is not None
    result = found([one], {one.sample_id: [s + d for s, d in tokens]})
    assert result.kl >= -1e-12 and result.num_tokens == len(tokens)


def test_only_the_first_optimizer_step_that_trained_is_compared() -> None:
    """The weights have moved in later ones; a mini-batch without a trained sample takes no step."""
    samples = [sample(n, [-1.0, -2.0], minibatch=n) for n in range(3)]
    ids = [each.sample_id for each in samples]
    trainer = {ids[1]: (-1.0, -2.0), ids[2]: (-5.0, -5.0)}
    result = found(samples, trainer)  # type: ignore[arg-type]
    assert result.num_tokens == 2 and result.kl == 0


def test_a_token_that_did_not_count_is_not_compared() -> None:
    one = sample(0, [-1.0, -2.0, -3.0])
    assert one.sample_id is not None
    result = found([one], {one.sample_id: (math.nan, -2.0, -3.5)})
    assert result.num_tokens == 2 and result.metrics()["mismatch_left_out"] == 0
    assert result.kl == pytest.approx((math.exp(-0.5) - 0.5) / 2)


def test_tokens_of_other_versions_are_left_out_where_nodes_sample() -> None:
    one = sample(0, [-1.0] * 6)
    assert one.sample_id is not None
    spans = [VersionSpan(0, 2, START - 1), VersionSpan(2, 5, START), VersionSpan(5, 6, START + 1)]
    trainer = {one.sample_id: (-9.0, -9.0, -1.5, -1.5, -1.5, -9.0)}
    groups = [group_of(one, spans)]
    result = found([one], trainer, groups, allows_others=True)
    assert (result.num_tokens, result.metrics()["mismatch_left_out"]) == (3, 3)
    assert result.kl == pytest.approx(math.exp(-0.5) - 0.5)
    everything = found([one], trainer, groups)
    assert (everything.num_tokens, everything.metrics()["mismatch_left_out"]) == (6, 0)


def test_nothing_is_said_of_a_step_in_which_nothing_was_compared() -> None:
    one = sample(0, [-1.0])
    assert one.sample_id is not None
    old = [group_of(one, [VersionSpan(0, 1, 0)])]
    result = found([one], {one.sample_id: (-2.0,)}, old, allows_others=True)
    assert result.num_tokens == 0 and "mismatch_kl" not in result.metrics()
    assert found([], {}, []).metrics()["mismatch_left_out"] == 0


def test_every_rank_finds_what_one_rank_would() -> None:
    """Of three ranks the last has nothing, and the second nothing of the first mini-batch."""
    rng = random.Random(1)
    samples = [
        sample(n, [-rng.random() - 0.1 for _ in range(6)], minibatch=int(n in (1, 4)))
        for n in range(6)
    ]
    trainer = {
        each.sample_id: [x + rng.gauss(0, 0.2) for x in each.logprobs]
        for each in samples
        if each.sample_id is not None
    }
    alone = found(samples, trainer)
    parts = [[samples[n] for n in (0, 2, 3, 5)], [samples[n] for n in (1, 4)], []]
    every = merge([part(mine, {s.sample_id: trainer[s.sample_id] for s in mine}) for mine in parts])  # type: ignore[misc,index]
    assert alone.num_tokens == 24
    assert every.sums == pytest.approx(alone.sums)
