"""Mixtures of experts: a tree is its samples one by one, in loss and gradients, whoever chose the
experts; routes are recorded, packed and replayed.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec, policy_loss
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bench.families import build, config_of
from flowtrain.training import attention, experts, lm_head, sharding
from flowtrain.training.row_loss import row_loss, score_row
from flowtrain.training.tree import PackedRow, pack_row, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Routes, Sample

_FEW = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_FEW, "norm_topk_prob": True},
    "olmoe": {**_FEW, "num_experts_per_tok": 3},
    "glm4_moe": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "head_dim": 8,
    },
}
"""Tiny configs; all have two layers with a router."""
LAYERS = 2


def config(family: str, **more: Any) -> PreTrainedConfig:
    return config_of(family, FAMILIES[family] | more)


def trained(config: PreTrainedConfig) -> PreTrainedModel:
    """The model as it is trained, with attention over trees, and routers that replay."""
    model = _biased(build(config))
    model.set_attn_implementation(attention.NAME)
    lm_head.equip(model)
    experts.equip(model)
    return model.train()


def _biased(model: PreTrainedModel) -> PreTrainedModel:
    rng = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=rng))
    return model


def sample(prompt: Sequence[int], response: Sequence[int], seed: int = 0) -> Sample:
    rng = torch.Generator().manual_seed(seed)
    num = len(response)
    logprobs = (-4.6 + 0.2 * torch.randn(num, generator=rng)).tolist()
    advantages = torch.randn(num, generator=rng).tolist()
    return Sample(
        tuple(prompt), tuple(response), tuple(logprobs), tuple(advantages), (0.5 + seed,) * num
    )


def routed(samples: Sequence[Sample], num_experts: int, num_chosen: int) -> list[Sample]:
    """Give samples experts at random, the same where they begin alike."""

    def experts_of(path: tuple[int, ...]) -> list[int]:
        seed = int.from_bytes(hashlib.sha256(repr(path).encode()).digest()[:4])
        rng = torch.Generator().manual_seed(seed)
        layers = [torch.randperm(num_experts, generator=rng)[:num_chosen] for _ in range(LAYERS)]
        return torch.cat(layers).tolist()

    found = []
    for each in samples:
        ids = each.prompt_ids + each.response_ids[:-1]
        words = [x for end in range(1, len(ids) + 1) for x in experts_of(ids[:end])]
        found.append(replace(each, routes=Routes(bytes(words), LAYERS, num_chosen)))
    return found


ids = st.lists(st.integers(3, 5), min_size=1, max_size=6)
trees = st.lists(st.tuples(ids, ids), min_size=1, max_size=5)


# ---- the truth: transformers' eager experts and attention, a sample at a time


def alone(
    model: PreTrainedModel, samples: Sequence[Sample], form: experts.Form
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients; samples with routes are read along them, with weights from the routers'
    own scores.
    """
    given: list[Tensor] = []

    def follow(router: Any, inputs: Any, out: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not given:
            return out
        chosen = given.pop(0)
        scores = out[0].float()
        if form.score == "softmax of chosen":
            weights = scores.gather(1, chosen).softmax(-1)
        else:
            scores = scores.softmax(-1) if form.score == "softmax" else scores.sigmoid()
            weights = scores.gather(1, chosen)
            if router.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            weights = weights * getattr(router, "routed_scaling_factor", 1.0)
        return out[0], weights, chosen

    hooks = [r.register_forward_hook(follow) for r in experts.find_routers(model)]
    total = torch.zeros(())
    for each in samples:
        row = pack_row([each])
        if each.routes is not None:
            words = torch.tensor(list(each.routes.experts)).view(-1, LAYERS, each.routes.num_chosen)
            given[:] = words.unbind(1)
        logits = model(input_ids=row.input_ids_N[None], use_cache=False).logits[0]
        total = total + policy_loss(
            logits[row.target_row_T],
            row.target_ids_T,
            spec=LossSpec(),
            advantage_T=row.advantage_T,
            weight_T=row.loss_weight_T,
            old_logprob_T=row.old_logprob_T,
        ).loss
    total.backward()
    for hook in hooks:
        hook.remove()
    return total.item(), gradients(model)


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def in_rows(
    model: PreTrainedModel, rows: Sequence[PackedRow]
) -> tuple[float, dict[str, Tensor]]:
    total = 0.0
    for row in rows:
        with experts.replaying(model, row.routes_NLC):
            loss = row_loss(model, row, LossSpec(), 1.0, 1.0).loss
            loss.backward()
        total += loss.item()
    return total, gradients(model)


def assert_equal(ours: tuple[float, dict], truth: tuple[float, dict]) -> None:
    assert ours[0] == pytest.approx(truth[0], rel=1e-5, abs=1e-5)
    assert ours[1].keys() == truth[1].keys()
    largest = max(float(g.abs().max()) for g in truth[1].values())
    for name, gradient in truth[1].items():
        difference = float((ours[1][name] - gradient).abs().max())
        assert difference <= 1e-5 * max(1.0, largest), name


MODELS: dict[str, tuple[PreTrainedModel, PreTrainedModel]] = {}


def both(family: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(ours, transformers')"""
    if family not in MODELS:
        MODELS[family] = trained(config(family)), _biased(build(config(family)))
        MODELS[family][1].set_experts_implementation("eager")
    return MODELS[family]


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shapes=trees)
def test_a_tree_is_its_samples_one_by_one(
    family: str, is_replayed: bool, shapes: list[tuple[list[int], list[int]]]
) -> None:
    """Loss and all gradients; replayed routes are none that a router would choose."""
    ours, plain = both(family)
    form = experts.routers(ours)[0].form
    samples = [sample(*shape, seed) for seed, shape in enumerate(shapes)]
    if is_replayed:
        samples = routed(samples, form.num_experts, form.num_chosen)
    truth = alone(plain, samples, form)
    assert_equal(in_rows(ours, [pack_row(samples)]), truth)
    assert_equal(in_rows(ours, pack_rows(samples, 7)), truth)
    assert_equal(in_rows(ours, [pack_row(samples, share=False)]), truth)
