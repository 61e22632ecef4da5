"""Digests of a batch: the sample and the field that differ are named; nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import FilterReason, Routes, Sample, SampleId, SamplingMask, TrainBatch
from flowtrain.replay.batch_digests import difference, digests_of, left_out, missing

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


def digests(*samples: Sample) -> dict[str, Any]:
    return digests_of(TrainBatch(samples))["samples"]


def test_equal_batches_do_not_differ() -> None:
    batch = TrainBatch((sample(0), sample(1)))
    assert difference(batch, digests_of(batch)["samples"]) is None
    assert missing({SampleId(0, 1, 2), SampleId(1, 1, 2)}, digests(*batch.samples)) is None


@given(st.sampled_from(FIELDS), st.data())
def test_a_changed_word_is_found_with_its_field(field: str, data: st.DataObject) -> None:
    before = sample()
    values = list(getattr(before, field))
    place = data.draw(st.integers(0, len(values) - 1))
    is_id = field.endswith("ids")
    new = data.draw(st.integers(0, 10**6) if is_id else st.floats(-100, 100))
    old, values[place] = values[place], new
    after = replace(before, **{field: tuple(values)})
    found = difference(TrainBatch((after,)), digests(before))
    if repr(old) == repr(new):
        assert found is None
        return
    name = field.replace("_", " ")
    assert found == (before.sample_id, f"group 0, rollout 1, turn 2 differs in its {name}")


def test_all_else_that_decides_is_found() -> None:
    before = sample()
    for after, text in (
        (replace(before, minibatch=1), "mini-batch"),
        (replace(before, prompt_ids=before.prompt_ids[1:]), "prompt ids"),
        (replace(before, old_logprobs=()), "old logprobs"),
        (replace(before, ref_logprobs=(0.5,)), "ref logprobs"),
        (replace(before, sampling_mask=None), "mask ids"),
        (replace(before, routes=Routes(bytes(14), 1, 1)), "routes"),
    ):
        found = difference(TrainBatch((after,)), digests(before))
        assert found is not None and found[1].endswith(f"differs in its {text}")


def test_a_log_that_knows_no_routes_is_compared_without() -> None:
    older = digests(sample())
    for fields in older.values():
        del fields["routes"]
    assert difference(TrainBatch((sample(),)), older) is None


def test_samples_that_came_or_went_are_found() -> None:
    found = difference(TrainBatch((sample(1),)), digests(sample(0)))
    assert found == (SampleId(1, 1, 2), "group 1, rollout 1, turn 2 is trained, it was not")
    found = missing({SampleId(0, 1, 2)}, digests(sample(0), sample(3)))
    assert found == (SampleId(3, 1, 2), "group 3, rollout 1, turn 2 is not trained, it was")


def test_counts_of_what_was_left_out_are_kept() -> None:
    batch = TrainBatch((), 3, {FilterReason.EMPTY: 2})
    assert left_out(batch) == {"num_groups_dropped": 3, "empty": 2}
