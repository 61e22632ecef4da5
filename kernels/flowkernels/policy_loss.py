"""Log-probabilities and policy losses from logits. T: target tokens, V: vocabulary.

Maths: z = logits / temperature, lse = log sum_j exp z_j, logp = z_y - lse, p = exp(z - lse), H = lse - sum_j p_j z_j, and the gradient of
`token_loss.py`, divided by the temperature. Bytes: a forward pass must read the logits once (2 B per element in bf16); with the gradient
written over them, 4 B. The torch path below reads and writes them several times in fp32; it is the oracle and the fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowkernels.token_loss import LossSpec, TokenLoss, token_loss


@dataclass(frozen=True, slots=True)
class LogProbs:
    """fp32 [T] each, without gradient."""

    logprob_T: Tensor
    entropy_T: Tensor
    """Exact, over the full vocabulary, in nats."""
    lse_T: Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What `policy_loss` returns. Only `loss` carries a gradient."""

    loss: Tensor
    """0-d fp32: sum_T weight * token loss."""
    logprob_T: Tensor
    entropy_T: Tensor
    stats: dict[str, Tensor]
    """0-d fp32 tensors over the tokens with weight != 0, left on the device: num_tokens_sum, entropy_sum, kl_sum, ratio_sum, ratio_max,
    ratio_min, clipped_sum, mismatch_sum (|logp - old|). `*_sum` add up over micro-batches and ranks, `*_max` and `*_min` reduce so; where
    no token counts these are -inf and inf."""


def logprobs(logits_TV: Tensor, target_ids_T: Tensor, *, temperature: float = 1.0, impl: str = "torch") -> LogProbs:
    """Log-probability of each target, the entropy and the log-sum-exp of its row, without gradient.

    Args:
        logits_TV: [T, V], any float dtype; read in fp32.
        target_ids_T: [T] int64 in [0, V).
        temperature: divides the logits; > 0.
        impl: "torch".

    Raises:
        ValueError: a shape, dtype, temperature or `impl` that does not fit, with its name and value.
    """
    _check(logits_TV, target_ids_T, temperature, impl)
    with torch.no_grad():
        z_TV = logits_TV.float() / temperature
        lse_T = z_TV.logsumexp(-1)
        # Not z - lse: that is off by the rounding of lse, which grows with the size of the logits.
        logp_TV = z_TV.log_softmax(-1)
        logprob_T = logp_TV.gather(1, target_ids_T[:, None])[:, 0]
        entropy_T = -(logp_TV.exp() * logp_TV).sum(-1)
    return LogProbs(logprob_T, entropy_T, lse_T)


def policy_loss(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    spec: LossSpec,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor | None = None,
    ref_logprob_T: Tensor | None = None,
    temperature: float = 1.0,
    impl: str = "torch",
) -> PolicyLoss:
    """sum_T weight * token_loss(spec), with the gradient formed in the forward pass.

    Args:
        logits_TV: [T, V], any float dtype. Its gradient has the same dtype; all arithmetic is fp32.
        target_ids_T: [T] int64 in [0, V).
        spec: the token loss.
        advantage_T: [T] fp32.
        weight_T: [T] fp32; it holds the whole averaging rule. Rows of weight 0 get a zero gradient and count in no statistic.
        old_logprob_T: [T] fp32, of the policy that the ratio is taken against; needed by spec.policy "clip".
        ref_logprob_T: [T] fp32, of the reference policy; needed when spec.kl_coef > 0.
        temperature: the one that sampled the tokens; > 0.
        impl: "torch".

    Raises:
        ValueError: a shape, dtype, temperature or `impl` that does not fit, with its name and value.

    Source: PPO (arXiv 1707.06347) eq. 7, GRPO (arXiv 2402.03300) eq. 3, Flow-GRPO (arXiv 2510.05592) eq. 5. T = 0 gives a zero loss.
    """
    _check(logits_TV, target_ids_T, temperature, impl)
    tokens = {"advantage_T": advantage_T, "weight_T": weight_T, "old_logprob_T": old_logprob_T, "ref_logprob_T": ref_logprob_T}
    for name, tensor in tokens.items():
        if tensor is not None and (tensor.shape != target_ids_T.shape or tensor.dtype != torch.float32):
            raise ValueError(f"{name} must be float32 [{len(target_ids_T)}], got {tensor.dtype} {tuple(tensor.shape)}")
    loss, logprob_T, entropy_T, *values = _PolicyLoss.apply(
        logits_TV, target_ids_T, spec, advantage_T, weight_T, old_logprob_T, ref_logprob_T, temperature
    )
    return PolicyLoss(loss, logprob_T, entropy_T, dict(zip(_STATS, values, strict=True)))


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        target_ids_T: Tensor,
        spec: LossSpec,
        advantage_T: Tensor,
        weight_T: Tensor,
        old_logprob_T: Tensor | None,
        ref_logprob_T: Tensor | None,
        temperature: float,
    ) -> tuple[Tensor, ...]:
        logp_TV = (logits_TV.float() / temperature).log_softmax(-1)
        p_TV = logp_TV.exp()
        logprob_T = logp_TV.gather(1, target_ids_T[:, None])[:, 0]
        entropy_T = -(p_TV * logp_TV).sum(-1)
        token = token_loss(spec, logprob_T, entropy_T, advantage_T, old_logprob_T, ref_logprob_T)
        # where, not a product: 0 * inf of a masked row must stay 0.
        loss = torch.where(weight_T != 0, weight_T * token.loss_T, 0.0).sum()
        ctx.save_for_backward(_gradient(p_TV, logp_TV, target_ids_T, entropy_T, token, weight_T / temperature, logits_TV.dtype))
        stats = _statistics(token, entropy_T, weight_T)
        ctx.mark_non_differentiable(logprob_T, entropy_T, *stats)
        return loss, logprob_T, entropy_T, *stats

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (dlogits_TV,) = ctx.saved_tensors
        return dlogits_TV * dloss.to(dlogits_TV.dtype), None, None, None, None, None, None, None


def _gradient(
    p_TV: Tensor, logp_TV: Tensor, target_ids_T: Tensor, entropy_T: Tensor, token: TokenLoss, weight_T: Tensor, dtype: torch.dtype
) -> Tensor:
    """dz = a p - a [j = y] + c p (log p + H), written over the two fp32 buffers of the forward pass."""
    is_row_T = weight_T != 0
    a_T = torch.where(is_row_T, -weight_T * token.dlogprob_T, 0.0)
    factor_TV: Tensor = a_T[:, None]
    if token.dentropy_T is not None:
        c_T = torch.where(is_row_T, -weight_T * token.dentropy_T, 0.0)
        factor_TV = logp_TV.add_(entropy_T[:, None]).mul_(c_T[:, None]).add_(factor_TV)
    gradient_TV = p_TV.mul_(factor_TV)
    gradient_TV.scatter_add_(1, target_ids_T[:, None], -a_T[:, None])
    gradient_TV.masked_fill_(~is_row_T[:, None], 0.0)  # a masked row may hold NaN
    return gradient_TV.to(dtype)


_STATS = ("num_tokens_sum", "entropy_sum", "kl_sum", "ratio_sum", "ratio_max", "ratio_min", "clipped_sum", "mismatch_sum")


def _statistics(token: TokenLoss, entropy_T: Tensor, weight_T: Tensor) -> tuple[Tensor, ...]:
    """In the order of `_STATS`; none of them synchronises with the host."""
    is_row_T = weight_T != 0
    ratio_T = token.log_ratio_T.exp()

    def total(value_T: Tensor) -> Tensor:
        return torch.where(is_row_T, value_T.float(), 0.0).sum()

    infinity = ratio_T.new_full((1,), torch.inf)  # keeps max and min defined where no token counts
    ratio_max = torch.cat([torch.where(is_row_T, ratio_T, -torch.inf), -infinity]).max()
    ratio_min = torch.cat([torch.where(is_row_T, ratio_T, torch.inf), infinity]).min()
    return (
        total(is_row_T),
        total(entropy_T),
        total(token.kl_T),
        total(ratio_T),
        ratio_max,
        ratio_min,
        total(token.is_clipped_T),
        total(token.log_ratio_T.abs()),
    )


def _check(logits_TV: Tensor, target_ids_T: Tensor, temperature: float, impl: str) -> None:
    if impl != "torch":
        raise ValueError(f"impl={impl!r} must be 'torch'")
    if logits_TV.dim() != 2 or not logits_TV.is_floating_point():
        raise ValueError(f"logits_TV must be a float tensor [T, V], got {logits_TV.dtype} {tuple(logits_TV.shape)}")
    if target_ids_T.shape != logits_TV.shape[:1] or target_ids_T.dtype != torch.int64:
        raise ValueError(f"target_ids_T must be int64 [{logits_TV.shape[0]}], got {target_ids_T.dtype} {tuple(target_ids_T.shape)}")
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0")
