"""Samples through tiny models of any family, by transformers' own attention and on packed rows.

Each row of `bench.families.TRAINED`, from which the table in docs/models.md is made, is a case of
`test_families.py`: a family is added there, with the options that make its tiny config use all that
is its own. What a model needs on a row beyond the row itself (recorded routes) goes into `on_rows`,
what it needs alone into `alone`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from flowkernels import LossSpec
from hypothesis import strategies as st
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from bench.families import TRAINED, build, config_of
from flowtrain.records import Sample
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.attention.registration import RECURRENT as RECURRENT_KIND
from flowtrain.trainer.distributed import World
from flowtrain.trainer.loss import equip, row_loss
from flowtrain.trainer.model import delta_net
from flowtrain.trainer.model.fused_layers import fuse_layers
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer

CASES = {name: options for name, options in TRAINED.items() if name in CONFIG_MAPPING}

RECURRENT = [name for name, options in CASES.items() if RECURRENT_KIND in str(options)]
"""Families with recurrent layers."""

MECHANISMS = {
    "deepseek_v3": "latent attention; groups of experts, a dense layer first and a shared expert",
    "gemma3_text": "layers with windows and without; norms after layers too; a tied head",
    "gpt_oss": "windows and sinks; experts weighed among the chosen, with biases",
    "granite": "factors of embeddings, attention, residuals and logits",
    "nanochat": "capped logits; norms without weights",
    "phi": "attention and MLP side by side; heads of which a part turns; biases",
    "qwen2": "biases of queries and keys; windows in upper layers",
    "qwen3": "norms of queries and keys",
    "qwen3_next": "DeltaNet beside gated attention, in a mixture of experts",
    "smollm3": "a layer without positions",
}
"""What each of these families alone has; together they have all that others are made of."""


def families(names: Iterable[str]) -> list[Any]:
    """Those of `MECHANISMS` in every run, others with the slow tests."""
    return [
        pytest.param(name, marks=[] if name in MECHANISMS else pytest.mark.slow) for name in names
    ]


Found = tuple[float, dict[str, Tensor]]
"""Loss, and the gradient of every parameter."""


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """A model in fp32 with large random weights and sinks, and transformers' eager attention."""
    model = build(config_of(family, CASES[family] | options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def in_fp64_if_recurrent(model: PreTrainedModel) -> PreTrainedModel:
    """Their rule is too rough in fp32 to tell whether a row is right; see `fp64_rule`."""
    return model.double() if model.config.model_type in RECURRENT else model


@contextmanager
def fp64_rule() -> Iterator[None]:
    """Let recurrent layers run token by token in fp64 and outside of rows too."""
    with ExitStack() as stack:
        for name in RECURRENT:
            module = inspect.getmodule(type(model_of(name)))
            stack.enter_context(patch.object(module, delta_net._NAMES[1], by_token))
        yield


def by_token(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, equation 10 of arXiv:2412.06464: [S, L, H, V], and the last state."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    repeats = value.shape[2] // key.shape[2]
    query, key = (x.double().repeat_interleave(repeats, 2) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    shape = (*value[:, 0].shape[:2], key.shape[-1], value.shape[-1])
    state = query.new_zeros(shape) if initial_state is None else initial_state
    outs = []
    for q, k, v, decay, rate in zip(
        *(x.unbind(1) for x in (query, key, value, g.double().exp(), beta)), strict=True
    ):
        state = state * decay[..., None, None]
        correction = (v - (state * k[..., None]).sum(-2)) * rate[..., None]
        state = state + k[..., None] * correction[:, :, None]
        outs.append((state * q[..., None]).sum(-2))
    return torch.stack(outs, 1).to(value.dtype), state


def prepare(model: PreTrainedModel) -> None:
    """Give a model the attention, head and layers that a trainer gives it; in fp64, which our
    kernels do not know, no more than the way that its tokens go.
    """
    model.set_attn_implementation(attention.NAME)
    delta_net.equip(model)
    if model.dtype != torch.float64:
        equip(model)
        fuse_layers(model)


def alone(model: PreTrainedModel, samples: Sequence[Sample]) -> Found:
    """By transformers, sample by sample: the sum of -advantage logprob over the responses."""
    total = 0.0
    for each in samples:
        ids = torch.tensor(each.prompt_ids + each.response_ids)
        logprob_NV = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        first = len(each.prompt_ids)
        logprob_T = logprob_NV[first - 1 : -1].gather(1, ids[first:, None])[:, 0]
        loss = -(torch.tensor(each.advantages) * logprob_T).sum()
        loss.backward()
        total += loss.item()
    return total, _taken(model)


def on_rows(model: PreTrainedModel, rows: Sequence[PackedRow]) -> Found:
    """By a model that is prepared, as a trainer runs it."""
    total = 0.0
    for row in rows:
        loss = row_loss(model, row, LossSpec("nll"), 1.0, 1.0).loss
        loss.backward()
        total += loss.item()
    return total, _taken(model)


def on_walk(model: PreTrainedModel, rows: Sequence[PackedRow], budget: int) -> Found:
    """By a trainer that walks rows of more tokens than the budget."""
    world = World(0, 1, torch.device("cpu"))
    trainer = Trainer(model, world, LossSpec("nll"), OptimSpec(lr=1.0), token_budget=budget)
    loss = trainer.forward_backward(rows, 1.0, StepMetrics())
    return loss.item(), _taken(model)


def _taken(model: PreTrainedModel) -> dict[str, Tensor]:
    taken = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return taken


def check_equal(found: Found, truth: Found, rtol: float = 1e-5) -> None:
    """Compare losses, and gradients by the largest of each parameter; a gradient that is zero but
    for rounding, as that of a bias of keys, by the largest of all.
    """
    assert math.isclose(found[0], truth[0], rel_tol=rtol, abs_tol=10 * rtol)
    assert set(found[1]) == set(truth[1])
    largest = max(float(each.abs().max()) for each in truth[1].values())
    for name, expected in truth[1].items():
        atol = rtol * max(float(expected.abs().max()), 0.1 * largest)
        torch.testing.assert_close(
            found[1][name], expected, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


@st.composite
def sample_trees(draw: st.DrawFn) -> list[Sample]:
    """Samples each of which goes on from any token of one before, or begins anew."""
    sequences: list[tuple[int, ...]] = [()]
    samples = []
    for _ in range(draw(st.integers(1, 6))):
        before = draw(st.sampled_from(sequences))
        tail = draw(st.lists(st.integers(5, 40), min_size=2, max_size=14))
        ids = before[: draw(st.integers(0, len(before)))] + tuple(tail)
        sequences.append(ids)
        cut = draw(st.integers(1, len(ids) - 1))
        number = len(ids) - cut
        advantages = tuple(
            draw(st.lists(st.sampled_from((-1.0, 0.5, 1.0)), min_size=number, max_size=number))
        )
        samples.append(Sample(ids[:cut], ids[cut:], (-1.0,) * number, advantages, (1.0,) * number))
    return samples
