"""`linear_policy_loss` against the losses that Liger and TRL release: the same number and the same
gradients by hidden states, weight and bias, for every loss and setting that both sides know.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import rival_losses
from kernel_truth import device_of
from rival_losses import HEAD, LOSSES, RIVALS, Batch, Setting, difference, ours, setting_of

PACKAGES = {"liger": "liger_kernel.chunked_loss", "trl": "trl"}
LARGEST = 5e-6
"""Relative difference; roundings of fp32 in another order are a third of it at most."""


@pytest.mark.parametrize(("rival", "loss", "change"), rival_losses.cases())
def test_loss_and_gradients_are_those_of_a_rival(
    rival: str, loss: str, change: str, impl: str
) -> None:
    pytest.importorskip(PACKAGES[rival])
    setting, batch = setting_of(loss, change), Batch.make()
    theirs = RIVALS[rival](setting, batch)
    assert all(theirs[1][name].abs().max() > 1e-3 for name in HEAD)
    found = ours(setting, batch, device_of(impl), impl)
    assert max(difference(found, theirs)) < LARGEST


WRONG: list[tuple[str, str, dict[str, Any]]] = [
    *[(loss, "all", {"temperature": 1.0}) for loss in LOSSES],
    *[(loss, "all", {"beta": 0.31}) for loss in LOSSES],
    *[(loss, "all", {"tis": False}) for loss in LOSSES],
    *[(loss, "asymmetric", {"epsilon_high": 0.9}) for loss in ("grpo", "cispo", "gspo")],
    *[(loss, "asymmetric", {"epsilon": 0.6}) for loss in ("dapo", "gspo-luspo")],
    ("grpo", "delta", {"delta": 1.5}),
    ("grpo", "kl", {"bias_correction_kl": True}),
    ("grpo", "plain", {"is_sequence": True}),
    ("grpo", "plain", {"loss_type": "bnpo"}),
    ("dapo", "plain", {"loss_type": "dr_grpo"}),
    ("dapo", "plain", {"loss_type": "cispo"}),
    ("grpo", "plain", {"loss_type": "sapo"}),
]


@pytest.mark.parametrize(("loss", "change", "wrong"), WRONG)
def test_another_setting_on_our_side_is_seen(loss: str, change: str, wrong: dict[str, Any]) -> None:
    """Each setting has tokens that depend on it."""
    pytest.importorskip("trl")
    setting, batch = setting_of(loss, change), Batch.make()
    theirs = rival_losses.trl(setting, batch)
    assert max(difference(ours(replace(setting, **wrong), batch), theirs)) > 1e-3


def test_all_that_is_shared_is_compared() -> None:
    """As Liger documents its losses, with all but those of which a comment says why not."""
    names = {setting.loss_type for setting in LOSSES.values()}
    assert names == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}
    assert len(rival_losses.cases()) == len(set(rival_losses.cases())) == 125
    settings = [setting_of(loss, change) for _, loss, change in rival_losses.cases()]
    for field in ("is_sequence", "delta", "beta", "tis", "bias_correction_kl"):
        assert any(getattr(setting, field) for setting in settings)
    assert len({setting.temperature for setting in settings}) == 2
    assert Setting("cispo", epsilon_high=3.0).their_epsilon_high == 4.0
