"""Experts by grouped products, beside transformers' loop over experts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.layers import saved_bytes
from flowtrain.trainer.model import grouped_experts
from flowtrain.trainer.model.grouped_experts import NAME

NUM_EXPERTS, SIZE = 6, 16
KINDS = ("plain", "transposed, with biases and a gate of its own")


def experts(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    how: dict[str, Any] = {"hidden_size": SIZE, "num_experts_per_tok": 2}
    if kind == "plain":
        made: nn.Module = Qwen3MoeExperts(
            Qwen3MoeConfig(**how, moe_intermediate_size=24, num_experts=NUM_EXPERTS)
        )
    else:
        made = GptOssExperts(
            GptOssConfig(**how, intermediate_size=24, num_local_experts=NUM_EXPERTS)
        )
    rng = torch.Generator().manual_seed(0)
    for weight in made.parameters():
        nn.init.normal_(weight, std=0.5, generator=rng)
    return made.to(dtype)


def inputs(chosen: list[list[int]], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Hidden states, experts, weights, and the gradient by the output."""
    rng = torch.Generator().manual_seed(1)
    hidden_TD, dout_TD = (torch.randn(len(chosen), SIZE, generator=rng) for _ in range(2))
    weight_TK = torch.rand(len(chosen), 2, generator=rng)
    return hidden_TD.to(dtype), torch.tensor(chosen), weight_TK.to(dtype), dout_TD.to(dtype)


def both(module: nn.Module, way: str, *given: Tensor, routers: torch.dtype) -> list[Tensor]:
    """The output, and the gradients by hidden states, the routers' weights and all parameters."""
    of: Any = module
    of.config._experts_implementation = way
    hidden_TD, chosen_TK, weight_TK, dout_TD = given
    hidden_TD, weight_TK = hidden_TD.requires_grad_(), weight_TK.to(routers).requires_grad_()
    out_TD = module(hidden_TD, chosen_TK, weight_TK)
    leaves = [hidden_TD, weight_TK, *module.parameters()]
    return [out_TD.detach(), *torch.autograd.grad(out_TD, leaves, dout_TD)]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(
        st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=2, max_size=2, unique=True),
        min_size=1,
        max_size=40,
    )
)
def test_values_and_all_gradients_are_those_of_the_loop(kind: str, chosen: list[list[int]]) -> None:
    """For routes of any kind, with experts that nobody chose."""
    module, given_ = experts(kind), inputs(chosen)
    found, expected = (both(module, way, *given_, routers=torch.float32) for way in (NAME, "eager"))
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max().clamp(min=1)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_nobody_chose_have_no_gradient_where_torch_leaves_it_unwritten(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FAKE of the GPUs on which it does: what is unwritten there is NaN here."""
    product = F.grouped_mm

    def unwritten(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left, right, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    module, given_ = experts(kind), inputs([[1, 4], [4, 1], [1, 2]])
    truth = both(module, NAME, *given_, routers=torch.float32)
    monkeypatch.setattr(grouped_experts, "skips_empty_groups", lambda _: True)
    monkeypatch.setattr(F, "grouped_mm", unwritten)
    for ours, true in zip(both(module, NAME, *given_, routers=torch.float32), truth, strict=True):
        assert torch.equal(ours, true)


@pytest.mark.parametrize("routers", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_it_is_as_near_to_the_truth_and_keeps_half(kind: str, routers: torch.dtype) -> None:
    """Beside transformers' grouped products; GLM's routers give weights in fp32."""
    rng = torch.Generator().manual_seed(2)
    chosen = torch.rand(256, NUM_EXPERTS, generator=rng).topk(2).indices.tolist()
    module, given_ = experts(kind, torch.bfloat16), inputs(chosen, torch.bfloat16)
    wide = experts(kind)
    wide.load_state_dict({name: x.float() for name, x in module.state_dict().items()})
    exact = [x.float() if x.is_floating_point() else x for x in given_]
    truth = both(wide, "eager", *exact, routers=torch.float32)
    ours, theirs = (both(module, way, *given_, routers=routers) for way in (NAME, "grouped_mm"))
    for own, other, true in zip(ours, theirs, truth, strict=True):
        assert (own - true).norm() <= 1.1 * (other - true).norm() + 1e-3 * true.norm()
    kept = {}
    for way in (NAME, "grouped_mm"):
        module.config._experts_implementation = way
        leaves = [given_[0].requires_grad_(), given_[1], given_[2].to(routers).requires_grad_()]
        kept[way] = saved_bytes(partial(module, *leaves), tuple(module.parameters()))
    assert kept[NAME] < 0.5 * kept["grouped_mm"]


def test_the_same_call_has_the_same_bits_and_frozen_weights_no_gradient() -> None:
    module, given_ = experts(KINDS[0]), inputs([[0, 1], [1, 4], [4, 0]] * 9)
    first, second = (both(module, NAME, *given_, routers=torch.float32) for _ in range(2))
    assert all(map(torch.equal, first, second))
    module.requires_grad_(False)
    out_TD = module(*given_[:3])
    out_TD.backward(given_[3])
    assert [weight.grad for weight in module.parameters()] == [None, None]
    assert given_[0].grad is not None and torch.equal(given_[0].grad, first[1])
