"""A layer of experts by grouped products, which keeps its inputs and the products before the gate.

transformers' own way keeps each token once per expert that it chose, four times over: 3 to 5 times
the bytes. Here a token is gathered again in the backward pass, what comes out of the gate is
computed again, and the routers' weights are multiplied in where a token is F wide and not D. Their
gradient needs no output of the experts: it is <d out, down gated> = <down^T d out, gated>. Tokens
are sorted by expert and added up in a fixed order, without atomics: the same bits every time.

T: tokens, K: experts of a token, S: pairs of them (T * K), by expert; E: experts, D: hidden size,
F: width of an expert, G: that of its first product, gate and up (2 F).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

Gate = Callable[[Tensor], Tensor]
NAME = "flowtrain"
"""The way to compute experts, as transformers knows it (`experts_implementation`)."""


@torch.compiler.disable  # products of experts have no shapes but in bf16
def grouped_experts(
    module: nn.Module, hidden_TD: Tensor, chosen_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """The experts' function that transformers calls in every layer of a mixture; returns [T, D].

    `module` holds the weights of all experts, stacked, as transformers has them: with or without
    biases, transposed or not, and with a gate of any kind.
    """
    of: Any = module
    plan = _Plan.of(chosen_TK, of.num_experts, of.is_transposed)
    biases = (of.gate_up_proj_bias, of.down_proj_bias) if of.has_bias else (None, None)
    weights = (of.gate_up_proj, of.down_proj, *biases)
    out: Tensor = _Experts.apply(of._apply_gate, plan, hidden_TD, weight_TK, *weights)
    return out


@functools.cache
def skips_empty_groups(device: torch.device) -> bool:
    """Return whether torch leaves the weight gradient of an expert without tokens unwritten, as it
    does on AMD's GPUs and from Blackwell on (pytorch/pytorch #174314 and #172439).
    """
    if device.type != "cuda":
        return False
    return bool(torch.version.hip) or torch.cuda.get_device_capability(device)[0] >= 10


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which token goes where."""

    chosen_S: Tensor
    """Experts, ascending."""
    token_S: Tensor
    order_S: Tensor
    """Place of each pair in [T * K]."""
    back_S: Tensor
    """The inverse of that."""
    ends_E: Tensor
    """int32, one past the last pair of each expert."""
    is_transposed: bool
    """Weights are [E, in, out], not [E, out, in]."""

    @classmethod
    def of(cls, chosen_TK: Tensor, num_experts: int, is_transposed: bool) -> _Plan:
        chosen_S, order_S = chosen_TK.flatten().sort(stable=True)
        place_S = torch.arange(len(order_S), device=order_S.device)
        back_S = torch.empty_like(order_S).scatter_(0, order_S, place_S)
        expert_E = torch.arange(num_experts, device=order_S.device)
        ends_E = torch.searchsorted(chosen_S, expert_E, right=True, out_int32=True)
        token_S = order_S // chosen_TK.shape[1]
        return cls(chosen_S, token_S, order_S, back_S, ends_E, is_transposed)

    def forward(self, x_SI: Tensor, weight: Tensor) -> Tensor:
        """[S, in] -> [S, out]"""
        return F.grouped_mm(x_SI, weight if self.is_transposed else weight.mT, offs=self.ends_E)

    def backward(self, dout_SO: Tensor, weight: Tensor) -> Tensor:
        """[S, out] -> [S, in]"""
        return F.grouped_mm(dout_SO, weight.mT if self.is_transposed else weight, offs=self.ends_E)

    def of_weight(self, x_SI: Tensor, dout_SO: Tensor) -> Tensor:
        """The gradient of a weight, laid out as it is."""
        left, right = (x_SI, dout_SO) if self.is_transposed else (dout_SO, x_SI)
        out = F.grouped_mm(left.mT, right, offs=self.ends_E)
        if skips_empty_groups(out.device):
            out.masked_fill_((self.sizes() == 0)[:, None, None], 0)
        return out

    def of_bias(self, dout_SO: Tensor, dtype: torch.dtype) -> Tensor:
        """The gradient of a bias [E, out], summed in fp32."""
        sizes_E = self.sizes().long()
        sums = torch.segment_reduce(dout_SO.float(), "sum", lengths=sizes_E, axis=0, unsafe=True)
        return sums.to(dtype)

    def sizes(self) -> Tensor:
        """Return how many pairs each expert has, int32 [E]."""
        return self.ends_E.diff(prepend=self.ends_E.new_zeros(1))

    def by_token(self, x_SD: Tensor, num_tokens: int) -> Tensor:
        """Sum over the experts of each token, [T, D]; in fp32, rounded once."""
        x_TKD = x_SD[self.back_S].unflatten(0, (num_tokens, -1))
        return x_TKD.sum(1, dtype=torch.float32).to(x_SD.dtype)


class _Experts(torch.autograd.Function):
    """Its arguments: the gate, a plan, hidden_TD, weight_TK, the first and the second weight, and
    their biases or None.
    """

    @staticmethod
    def forward(ctx: Any, gate: Gate, plan: _Plan, hidden_TD: Tensor, *others: Any) -> Tensor:
        weight_TK, up, down, up_bias, down_bias = others
        before_SG = plan.forward(hidden_TD[plan.token_S], up)
        if up_bias is not None:
            before_SG += up_bias[plan.chosen_S]
        weight_S1 = weight_TK.flatten()[plan.order_S, None]
        weighted_SF = gate(before_SG).mul_(weight_S1)
        out_SD = plan.forward(weighted_SF, down)
        if down_bias is not None:
            out_SD += down_bias[plan.chosen_S] * weight_S1
        ctx.gate, ctx.plan = gate, plan
        ctx.save_for_backward(hidden_TD, weight_TK, before_SG, up, down, down_bias)
        return plan.by_token(out_SD, len(hidden_TD))

    @staticmethod
    def backward(ctx: Any, dout_TD: Tensor) -> Any:
        plan: _Plan = ctx.plan
        hidden_TD, weight_TK, before_SG, up, down, down_bias = ctx.saved_tensors
        _, _, _, _, needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad
        weight_S1 = weight_TK.flatten()[plan.order_S, None]
        dout_SD = dout_TD[plan.token_S]
        with torch.enable_grad():
            before_SG = before_SG.detach().requires_grad_()
            gated_SF = ctx.gate(before_SG)
        value_SF = gated_SF.detach()
        product_SF = torch.mul(value_SF, weight_S1, out=torch.empty_like(value_SF))
        ddown = plan.of_weight(product_SF, dout_SD) if needs_down else None
        dgated_SF = plan.backward(dout_SD, down)  # before the weights of the routers
        torch.mul(dgated_SF, value_SF, out=product_SF)
        dweight_S = product_SF.sum(1, dtype=torch.float32)
        if down_bias is not None:
            dweight_S += (dout_SD * down_bias[plan.chosen_S]).sum(1, dtype=torch.float32)
        ddown_bias = plan.of_bias(dout_SD * weight_S1, down.dtype) if needs_down_bias else None
        del dout_SD, product_SF
        (dbefore_SG,) = torch.autograd.grad(gated_SF, before_SG, dgated_SF.mul_(weight_S1))
        del dgated_SF, gated_SF, value_SF, before_SG  # each is as large as the layer's input
        return (
            None,
            None,
            plan.by_token(plan.backward(dbefore_SG, up), len(hidden_TD)),
            dweight_S[plan.back_S].view_as(weight_TK).to(weight_TK.dtype),
            plan.of_weight(hidden_TD[plan.token_S], dbefore_SG) if needs_up else None,
            ddown,
            plan.of_bias(dbefore_SG, up.dtype) if needs_up_bias else None,
            ddown_bias,
        )


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
