"""The gate warns, ends a run, and names its numbers."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from flowtrain.config import Config
from flowtrain.metrics.mismatch import Mismatch, MismatchGate, expected_mismatch
from flowtrain.types import UserError

LIMIT = 0.01


def gate(limit: float = LIMIT, **sections: Any) -> MismatchGate:
    train = {"max_mismatch_kl": limit} | sections.pop("train", {})
    return MismatchGate(Config.model_validate({"train": train} | sections), is_main=True)


def mismatch(kl: float, num: int = 100) -> Mismatch:
    return Mismatch({"num": num, "k3": kl * num})


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
    one.watch(3, mismatch(0.0, num=0))
    with pytest.raises(UserError, match="3 steps in a row"):
        one.watch(4, mismatch(0.02))


def test_nothing_is_watched_where_it_is_off_or_differences_are_wanted() -> None:
    watched(gate(0), 5.0)
    penalty = {"rollout": {"frequency_penalty": 1.2}, "train": {"rescore": True}}
    one = gate(**penalty)
    assert expected_mismatch(one.config) == "rollout.frequency_penalty"
    watched(one, 5.0)
    assert expected_mismatch(Config()) == ""


def test_the_numbers_are_those_of_the_formulas() -> None:
    sums = {"num": 4.0, "k3": 0.2, "d": 2.0, "s": -4.0, "ss": 6.0, "ds": -3.0}
    sums |= {"unlikely_d": -0.9, "unlikely_abs": 1.0, "samples": 4.0, "samples_agreeing": 3.0}
    one, two = gate(), Mismatch(sums)
    watched(one, 0.0005)
    assert two.slope == (-3 / 4 - (2 / 4) * (-4 / 4)) / (6 / 4 - 1)
    told = r"slope -0\.50 .* 90% one-sided, .* 1e\+04 times .* 75% of"
    with pytest.raises(UserError, match=told):
        one.watch(2, Mismatch(sums | {"k3": 0.2 * 100}))
