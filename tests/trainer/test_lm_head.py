"""The output layer as the place where the loss is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import random_samples
from flowkernels import LossSpec
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from flowtrain.records import Sample
from flowtrain.trainer import loss as losses
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.loss import forward_rows, row_loss, score_row
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.packing import pack_row

SPECS = [
    LossSpec(),
    LossSpec("gspo", clip_low=0.1, clip_high=0.1),
    LossSpec("cispo", entropy_coef=0.1),
]


@pytest.fixture
def model(tiny_path: str) -> PreTrainedModel:
    return models.load_model(tiny_path, torch.float64)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.loss_type)
def test_the_loss_within_the_model_is_the_loss_of_its_logits(
    model: PreTrainedModel, spec: LossSpec
) -> None:
    """Value, statistics and the gradient of every parameter, the tied embedding among them."""
    row = pack_row(random_samples(6))

    def take() -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
        out = row_loss(model, row, spec, 0.3, 0.8)
        out.loss.backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return out.loss.detach(), out.stats, gradients

    assert losses.fused_head(model) is None
    logits_loss, logits_stats, logits_gradients = take()
    losses.equip(model)
    assert losses.fused_head(model) is not None
    loss, stats, gradients = take()
    torch.testing.assert_close(loss, logits_loss, rtol=1e-6, atol=1e-7)
    found = {k: v.tolist() for k, v in stats.items()}
    assert found == {k: pytest.approx(v.tolist(), rel=1e-5) for k, v in logits_stats.items()}
    assert len(gradients) == len(logits_gradients) == len(list(model.parameters()))
    for ours, theirs in zip(gradients, logits_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-8)


def test_scores_within_the_model_are_those_of_its_logits(model: PreTrainedModel) -> None:
    row = pack_row(random_samples(6))
    with torch.no_grad():
        plain = score_row(model, row, 0.7)
        losses.equip(model)
        scored = score_row(model, row, 0.7)
    torch.testing.assert_close(scored.logprob_T, plain.logprob_T, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scored.entropy_T, plain.entropy_T, rtol=1e-6, atol=1e-6)


def test_without_a_task_the_layer_gives_logits(model: PreTrainedModel) -> None:
    row = pack_row(random_samples(3))
    before, names = forward_rows(model, row), list(model.state_dict())
    losses.equip(model)
    assert torch.equal(forward_rows(model, row), before)
    assert list(model.state_dict()) == names
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_task_that_fails_leaves_the_layer_as_it_was(model: PreTrainedModel) -> None:
    losses.equip(model)
    layer, row = losses.fused_head(model), pack_row(random_samples(2))
    assert layer is not None

    def fail(*_: object, **__: object) -> Any:
        raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        losses.compute(model, row, fail)
    assert layer.head_fn is None


def test_a_model_that_changes_its_logits_afterwards_keeps_its_layer() -> None:
    config = Gemma2Config(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        final_logit_softcapping=5.0, attn_logit_softcapping=None, layer_types=["full_attention"],
    )  # fmt: skip
    config._attn_implementation = attention.NAME
    capped = Gemma2ForCausalLM._from_config(config, attn_implementation=attention.NAME)
    losses.equip(capped)
    assert losses.fused_head(capped) is None and type(capped.get_output_embeddings()) is nn.Linear
    config.final_logit_softcapping = None
    plain = Gemma2ForCausalLM._from_config(config, attn_implementation=attention.NAME)
    losses.equip(plain)
    assert losses.fused_head(plain) is not None


@pytest.mark.parametrize(
    ("device", "weights", "spec", "compacts"),
    [
        ("meta", (0.5, 1.0), LossSpec(), False),
        ("meta", (0.5, 0.0), LossSpec(), True),
        ("meta", (0.5, 1.0), LossSpec(mis=(0.5, 2.0)), True),
        ("cpu", (0.5, 1.0), LossSpec(), True),
    ],
    ids=["all count", "one without weight", "some may be dropped", "on a CPU"],
)
def test_the_host_counts_targets_only_where_some_may_have_no_weight(
    model: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    weights: tuple[float, float],
    spec: LossSpec,
    compacts: bool,
) -> None:
    row = pack_row([Sample((1, 2), (3, 4), (-1.0, -2.0), (1.0, 1.0), weights)])
    found: list[bool] = []

    def stop(*_: object, compact: bool, **__: object) -> None:
        found.append(compact)
        raise InterruptedError

    monkeypatch.setattr(losses, "linear_policy_loss", stop)
    monkeypatch.setattr(losses, "compute", lambda model, row, loss, path: loss(None, None))
    losses.equip(model)
    row = row.to(torch.device(device))
    with pytest.raises(InterruptedError):
        row_loss(model, row, spec, 1.0, 1.0)
    assert found == [compacts]
