"""The gate warns, ends a run, and names its numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.logging.mismatch import MismatchGate, expected_mismatch
from flowtrain.records import UserError

LIMIT = 0.01


def gate(limit: float = LIMIT, **sections: Any) -> MismatchGate:
    train = {"max_mismatch_kl": limit} | sections.pop("train", {})
    return MismatchGate(Config.model_validate({"train": train} | sections), is_main=True)


def mismatch(kl: float) -> dict[str, float]:
    return {
        "mismatch_kl": kl,
        "mismatch_slope": -0.5,
        "mismatch_one_sided": 0.9,
        "mismatch_agreeing": 0.75,
    }


def watched(one: MismatchGate, *kls: float) -> None:
    for step, kl in enumerate(kls, 1):
        one.watch(step, mismatch(kl))


def test_a_step_above_the_limit_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        watched(gate(), 0.001, LIMIT, 0.02, 0.001)
    (record,) = caplog.records
    assert "step 3: " in record.getMessage() and "0.02 nats" in record.getMessage()


def test_three_in_a_row_end_the_run() -> None:
    one = gate()
    watched(one, 0.02, 0.02, 0.001, 0.02, 0.02)
    with pytest.raises(UserError, match=r"step 6: .*3 steps in a row\. Their difference") as raised:
        one.watch(6, mismatch(0.02))
    text = str(raised.value)
    assert "\n" not in text and "newest checkpoint" in text


@pytest.mark.parametrize("kl", [1.01, float("inf"), float("nan")])
def test_one_step_far_above_ends_it_at_once(kl: float) -> None:
    watched(gate(), 0.99)
    with pytest.raises(UserError, match=r"step 1: "):
        watched(gate(), kl)


def test_a_step_without_tokens_neither_counts_nor_forgives() -> None:
    one = gate()
    watched(one, 0.02, 0.02)
    one.watch(3, {"mismatch_left_out": 8.0})
    with pytest.raises(UserError, match="3 steps in a row"):
        one.watch(4, mismatch(0.02))


def test_nothing_is_watched_where_it_is_off_or_differences_are_wanted() -> None:
    watched(gate(0), 5.0)
    penalty = {"rollout": {"frequency_penalty": 1.2}, "train": {"rescore": True}}
    one = gate(**penalty)
    assert expected_mismatch(one.config) == "rollout.frequency_penalty"
    watched(one, 5.0)
    assert expected_mismatch(Config()) == ""


def test_it_tells_the_numbers_and_the_growth_since_the_first_step() -> None:
    one = gate()
    watched(one, 0.0005)
    told = r"slope -0\.50 .* 90% one-sided, .* 1e\+04 times .* 75% of"
    with pytest.raises(UserError, match=told):
        one.watch(2, mismatch(5.0))
