"""When the gate warns, when it ends a run, and what it names first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from flowtrain.config import Config
from flowtrain.run.mismatch import Mismatch
from flowtrain.run.mismatch_causes import Evidence, causes
from flowtrain.run.mismatch_gate import MismatchGate, expected_mismatch
from flowtrain.training.world import World
from flowtrain.types import UserError

WORLD = World(0, 1, torch.device("cpu"))
LIMIT = 0.01


def gate(limit: float = LIMIT, **sections: Any) -> MismatchGate:
    train = {"max_mismatch_kl": limit} | sections.pop("train", {})
    return MismatchGate(Config.model_validate({"train": train} | sections), WORLD)


def mismatch(kl: float, num: int = 100) -> Mismatch:
    sums = {"num": num, "k3": kl * num, "dd": 2 * kl * num}
    return Mismatch(Evidence(sums), (num, *(0,) * 7), 0, ())


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
    with pytest.raises(UserError, match=r"step 6: .*3 steps in a row\. Likely causes") as raised:
        one.watch(6, mismatch(0.02))
    text = str(raised.value)
    assert "\n" not in text and "worst_tokens.jsonl" in text and "newest checkpoint" in text


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


def evidence(**sums: float) -> Evidence:
    """Of 1000 tokens whose differences are noise of 0.3."""
    return Evidence({"num": 1000.0, "k3": 45.0, "dd": 90.0, "s": -1000.0, "ss": 2000.0} | sums)


def test_growth_since_the_first_step_is_needed_for_stale_weights() -> None:
    assert causes(evidence(), first_kl=1e-9)[0].name == "weight version"
    assert causes(evidence(), first_kl=0.04)[0].name == "chat template or tokenisation"
    assert causes(evidence(), first_kl=None)[0].name == "chat template or tokenisation"
    assert causes(evidence(num_other=1.0), first_kl=None)[0].name == "weight version"


def test_the_size_tells_rounding_from_other_ids() -> None:
    assert causes(evidence(dd=0.1), None)[0].name == "dtype"
    assert causes(evidence(dd=4.0), None)[0].name == "dtype", "as of a small model in bf16"
    outliers = causes(evidence(dd=4.0, huge_dd=3.0), None)[0]
    assert outliers.name == "chat template or tokenisation", "a few tokens are off by a nat"
    two_kinds = {"samples/below_1e-5": 50.0, "samples/1e-2": 50.0}
    first = causes(evidence(dd=0.1, **two_kinds), None)[0]
    assert first.name == "chat template or tokenisation" and "50% agree" in first.text


def test_every_cause_is_named_once() -> None:
    names = [cause.name for cause in causes(evidence(ds=300.0), 1e-9)]
    assert sorted(names) == sorted(
        ["sampling options", "weight version", "dtype", "chat template or tokenisation"]
    )
