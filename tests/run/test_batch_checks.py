"""Checks of a batch: a single word that differs is named with what it was; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.run.batch_checks import checks_of, difference, left_out, missing
from flowtrain.types import FilterReason, Sample, SampleId, SamplingMask, TrainBatch

FIELDS = ("prompt_ids", "response_ids", "logprobs", "advantages", "loss_weights", "old_logprobs")


def sample(number: int = 0, num_tokens: int = 5) -> Sample:
    floats = tuple(-0.25 * (n + 1) for n in range(num_tokens))
    return Sample(
        prompt_ids=tuple(range(10, 20)),
        response_ids=tuple(range(num_tokens)),
        logprobs=floats,
        advantages=(1.5,) * num_tokens,
        loss_weights=(1.0,) * num_tokens,
        sample_id=SampleId(number, 1, 2),
        sampling_mask=SamplingMask.of([(n, n + 1) for n in range(num_tokens)]),
        old_logprobs=floats,
    )


def checks(*samples: Sample) -> dict[str, Any]:
    return checks_of(TrainBatch(samples))["samples"]


def test_equal_batches_do_not_differ() -> None:
    batch = TrainBatch((sample(0), sample(1)))
    assert difference(batch, checks_of(batch)["samples"]) is None
    assert missing({SampleId(0, 1, 2), SampleId(1, 1, 2)}, checks(*batch.samples)) is None


@given(st.sampled_from(FIELDS), st.data())
def test_a_changed_word_is_named_with_both_values(field: str, data: st.DataObject) -> None:
    before = sample()
    values = list(getattr(before, field))
    place = data.draw(st.integers(0, len(values) - 1))
    is_id = field.endswith("ids")
    new = data.draw(st.integers(0, 10**6) if is_id else st.floats(-100, 100))
    old, values[place] = values[place], new
    after = replace(before, **{field: tuple(values)})
    found = difference(TrainBatch((after,)), checks(before))
    if repr(old) == repr(new):
        assert found is None
        return
    name = field.replace("_", " ")
    assert found == (
        before.sample_id,
        f"group 0, rollout 1, turn 2: {name}: word {place} is {new}, was {old}",
    )


@given(st.permutations(range(5)))
def test_words_in_another_order_are_found(order: list[int]) -> None:
    before = sample()
    after = replace(before, response_ids=tuple(order))
    found = difference(TrainBatch((after,)), checks(before))
    if tuple(order) == before.response_ids:
        assert found is None
    else:
        assert found is not None and "response ids: several of 5 words" in found[1]


def test_all_else_that_decides_is_found() -> None:
    before = sample()
    mask = before.sampling_mask
    assert mask is not None
    for after, text in (
        (replace(before, minibatch=1), "mini-batch 1, was 0"),
        (replace(before, prompt_ids=before.prompt_ids[1:]), "prompt ids: 9 words, there were 10"),
        (replace(before, old_logprobs=()), "old logprobs: 0 words, there were 5"),
        (replace(before, ref_logprobs=(0.5,)), "ref logprobs: 1 words, there were 0"),
        (replace(before, sampling_mask=None), "mask ids: 0 words, there were 10"),
    ):
        found = difference(TrainBatch((after,)), checks(before))
        assert found is not None and text in found[1]


def test_samples_that_came_or_went_are_found() -> None:
    assert difference(TrainBatch((sample(1),)), checks(sample(0))) == (
        SampleId(1, 1, 2),
        "group 1, rollout 1, turn 2 is trained, it was not",
    )
    assert missing({SampleId(0, 1, 2)}, checks(sample(0), sample(3))) == (
        SampleId(3, 1, 2),
        "group 3, rollout 1, turn 2 is not trained, it was",
    )


def test_counts_of_what_was_left_out_are_kept() -> None:
    batch = TrainBatch((), 3, {FilterReason.EMPTY: 2})
    assert left_out(batch) == {"num_groups_dropped": 3, "empty": 2}
