"""Log-probabilities and policy losses from logits: the public functions.

The maths is in `rows.py` (logits) and `token_loss.py` (tokens). A `LossSpec` without a sequence term runs as one kernel that reads a row,
takes its loss and writes its gradient: 4 B per element of bf16 when the second read comes from cache. GSPO and a loss of one's own see
all tokens before any gradient is known, so there the logits are read again: 6 B. T: target tokens, V: vocabulary, S: sequences.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from flowkernels import statistics
from flowkernels.arguments import check_rows, check_sequences, check_tokens, resolve_impl
from flowkernels.rows import KeptSet, Rows, backward_torch, forward_torch, make_rows, scores, write_gradient
from flowkernels.token_loss import LossSpec, TokenLoss, TokenLossFn, Tokens, check_inputs, correct_for_sampler, token_loss


@dataclass(frozen=True, slots=True)
class LogProbs:
    """fp32 [T] each; 0 in rows whose target is negative."""

    logprob_T: Tensor
    entropy_T: Tensor
    """Exact, over the full vocabulary, in nats."""
    lse_T: Tensor
    """Log-sum-exp of the row at the temperature. Never carries a gradient."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """What `policy_loss` returns. Only `loss` carries a gradient."""

    loss: Tensor
    """0-d fp32: sum_T weight * token loss."""
    logprob_T: Tensor
    """fp32; 0 in rows that do not count (weight 0 or a negative target), which are not read."""
    entropy_T: Tensor
    stats: dict[str, Tensor]
    """fp32, left on the device, over the tokens that count: the 0-d `num_tokens_sum`, `weight_sum`, `entropy_sum`, `kl_sum`,
    `ratio_sum`, `ratio_max`, `ratio_min` (all before clipping), `clipped_low_sum`, `clipped_high_sum` (by the side of 1 the ratio is on;
    the dual clip counts as high), `mismatch_sum` (|logp - old|), and `ratio_histogram_sum` [16], see `statistics.BIN_WIDTH`. `*_sum` add
    up over micro-batches and ranks, `*_max` and `*_min` reduce so; where no token counts these are -inf and inf."""


def logprobs(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    kept: KeptSet | None = None,
    differentiable: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """Log-probability of each target, the entropy and the log-sum-exp of its row, in one read of the logits.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride; accumulated in fp32. fp64 is accepted, in torch, and stays fp64.
        target_ids_T: [T] int64 in [0, V); a negative id marks a row that is not read.
        temperature: divides the logits; > 0, a number or fp32 [T].
        softcap: logits become softcap * tanh(logits / softcap) first.
        kept: take log-probs over these ids, as the sampler did; entropy and lse stay those of the full vocabulary.
        differentiable: let gradients of `logprob_T` and `entropy_T` reach the logits (a second read, in the backward pass).
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are checked on the CPU and with
            FLOWKERNELS_DEBUG=1; elsewhere a target above V and NaN logits give NaN.
    """
    rows = check_rows(logits_TV, target_ids_T, temperature, softcap, kept)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        score_3T, _ = scores(rows, resolve_impl(impl, logits_TV.device, logits_TV.dtype))
    logprob_T, entropy_T, lse_T = score_3T.unbind()
    return LogProbs(logprob_T, entropy_T, lse_T.detach())


def policy_loss(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    spec: LossSpec | TokenLossFn,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_logprob_T: Tensor | None = None,
    ref_logprob_T: Tensor | None = None,
    sampler_logprob_T: Tensor | None = None,
    cu_seqlens_S1: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    kept: KeptSet | None = None,
    inplace: bool = False,
    impl: str = "auto",
) -> PolicyLoss:
    """sum_T weight * token_loss(spec), with the gradient formed in the forward pass.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride. Its gradient has the same dtype; all arithmetic is fp32.
            fp64 is accepted, in torch, and stays fp64.
        target_ids_T: [T] int64 in [0, V); a negative id marks a row to leave out.
        spec: the token loss, or a function of all tokens (see `TokenLossFn`).
        advantage_T: [T] fp32.
        weight_T: [T] fp32; it holds the whole averaging rule. Rows of weight 0 are not read, get a zero gradient and count in no statistic.
        old_logprob_T: [T] fp32, of the policy that the ratio is taken against; needed by every policy but "nll".
        ref_logprob_T: [T] fp32, of the reference policy; needed when spec.kl_coef > 0.
        sampler_logprob_T: [T] fp32, as the sampler reported them; needed by spec.tis and spec.mis.
        cu_seqlens_S1: [S + 1] int, bounds of the sequences; needed by "gspo".
        temperature: the one that sampled the tokens; > 0, a number or fp32 [T].
        softcap: logits become softcap * tanh(logits / softcap) first.
        kept: the ids that top-k / top-p left the sampler; log-probs are taken over them and their gradient stays on them.
        inplace: write the gradient over the logits, which hold garbage afterwards. Ignored under torch.compile, which plans memory itself.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are checked on the CPU and with
            FLOWKERNELS_DEBUG=1; elsewhere a target above V and NaN logits give a NaN loss.
        RuntimeError: a second backward pass through one loss (the gradient is handed over, not kept).

    Source: PPO (arXiv 1707.06347) eq. 7, GRPO (arXiv 2402.03300) eq. 3, DAPO (arXiv 2503.14476) eq. 8, Flow-GRPO (arXiv 2510.05592) eq. 5;
    the others at `LossSpec.policy`. T = 0 gives a zero loss.
    """
    rows = check_rows(logits_TV, target_ids_T, temperature, softcap, kept)
    impl = resolve_impl(impl, logits_TV.device, logits_TV.dtype)
    num_rows, device = len(target_ids_T), logits_TV.device
    tensors = (advantage_T, weight_T, old_logprob_T, ref_logprob_T, sampler_logprob_T)
    names = ("advantage_T", "weight_T", "old_logprob_T", "ref_logprob_T", "sampler_logprob_T")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor is not None:
            check_tokens(name, tensor, num_rows, torch.float32, device)
    advantage_T, weight_T = advantage_T.detach().contiguous(), weight_T.detach().contiguous()
    old_T, ref_T, sampler_T = (None if x is None else x.detach().contiguous() for x in tensors[2:])
    if cu_seqlens_S1 is not None:
        check_sequences(cu_seqlens_S1, num_rows, device)
    if isinstance(spec, LossSpec):
        check_inputs(spec, Tokens(weight_T, weight_T, advantage_T, weight_T, old_T, ref_T, sampler_T, cu_seqlens_S1))
        advantage_T, weight_T = correct_for_sampler(spec, advantage_T, weight_T, old_T, sampler_T)
    inplace = inplace and not torch.compiler.is_compiling()
    if isinstance(spec, LossSpec) and spec.policy != "gspo":
        loss, column_6T, stats = _fused(rows, spec, advantage_T, weight_T, old_T, ref_T, impl, inplace)
    else:
        others = (old_T, ref_T, sampler_T, cu_seqlens_S1)
        loss, column_6T, stats = _two_passes(rows, spec, advantage_T, weight_T, others, impl, inplace)
    return PolicyLoss(loss, column_6T[1].detach(), column_6T[2].detach(), statistics.by_name(stats.detach()))


def _fused(
    rows: Rows, spec: LossSpec, advantage_T: Tensor, weight_T: Tensor, old_T: Tensor | None, ref_T: Tensor | None, impl: str, inplace: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics) by one kernel."""
    kept_ids, kept_offsets = (None, None) if rows.kept is None else (rows.kept.token_ids_K, rows.kept.offsets_T1)
    needs_gradient = rows.logits_TV.requires_grad and torch.is_grad_enabled()
    arguments = (rows.target_ids_T, advantage_T, weight_T, old_T, ref_T, rows.temperature_T, rows.softcap, kept_ids, kept_offsets)
    if inplace and needs_gradient:
        with torch.no_grad():
            loss, column_6T, stats = _policy_loss_inplace(rows.logits_TV, *arguments, _encode(spec), impl)
        return _Attach.apply(rows.logits_TV, loss), column_6T, stats
    loss, _, column_6T, stats = _policy_loss_op(rows.logits_TV, *arguments, _encode(spec), needs_gradient, impl)
    return loss, column_6T, stats


def _two_passes(
    rows: Rows,
    spec: LossSpec | TokenLossFn,
    advantage_T: Tensor,
    weight_T: Tensor,
    others: tuple[Tensor | None, ...],
    impl: str,
    inplace: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics): scores of all tokens, their loss in torch, then the gradient by a second read of the logits."""
    weight_T = torch.where(rows.target_ids_T >= 0, weight_T, 0.0)
    counts_T = weight_T != 0
    rows = Rows(rows.logits_TV, torch.where(counts_T, rows.target_ids_T, -1), rows.temperature_T, rows.softcap, rows.kept)
    needs_gradient = rows.logits_TV.requires_grad and torch.is_grad_enabled()
    with torch.set_grad_enabled(needs_gradient and not inplace):
        score_3T, state_4T = scores(rows, impl)
    logprob_T, entropy_T, _ = score_3T.detach().unbind()
    tokens = Tokens(logprob_T, entropy_T, advantage_T, weight_T, *others)
    token = token_loss(spec, tokens) if isinstance(spec, LossSpec) else spec(tokens)
    column_6T = _columns(token, tokens)
    loss, stats = statistics.reduce_torch(column_6T, weight_T, rows.target_ids_T)
    if not needs_gradient:
        return loss, column_6T, stats
    dlogprob_T = torch.where(counts_T, weight_T * token.dlogprob_T, 0.0)
    dentropy_T = None if token.dentropy_T is None else torch.where(counts_T, weight_T * token.dentropy_T, 0.0)
    if inplace:
        with torch.no_grad():
            write_gradient(rows, score_3T, state_4T, dlogprob_T, dentropy_T, impl, rows.logits_TV)
        return _Attach.apply(rows.logits_TV, loss), column_6T, stats
    # Adds a zero that has the gradient: x - x.detach() is 0 with slope 1.
    slope_2T = torch.stack([dlogprob_T, torch.zeros_like(dlogprob_T) if dentropy_T is None else dentropy_T])
    moved_2T = torch.where(slope_2T != 0, score_3T[:2] - score_3T[:2].detach(), 0.0)
    return loss + (slope_2T * moved_2T).sum(), column_6T, stats


def _columns(token: TokenLoss, tokens: Tokens) -> Tensor:
    """[6, T]: weighted loss, logp, entropy, log-ratio, KL, clipped."""
    weighted_T = torch.where(tokens.weight_T != 0, tokens.weight_T * token.loss_T, 0.0)
    clipped_T = token.is_clipped_T.float()
    return torch.stack([weighted_T, tokens.logprob_T, tokens.entropy_T, token.log_ratio_T, token.kl_T, clipped_T])


class _Attach(torch.autograd.Function):
    """Gives `loss` the gradient that was written over the logits."""

    @staticmethod
    def forward(ctx: Any, dlogits_TV: Tensor, loss: Tensor) -> Tensor:
        ctx.dlogits_TV = dlogits_TV.detach()
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.dlogits_TV is None:
            raise RuntimeError("the gradient of an in-place policy_loss was taken twice; it is handed over at the first backward pass")
        dlogits_TV, ctx.dlogits_TV = ctx.dlogits_TV, None
        _scale_op(dlogits_TV, dloss)
        return dlogits_TV, None


@lru_cache(maxsize=64)
def _encode(spec: LossSpec) -> str:
    """An operator's schema knows strings, not dataclasses."""
    return json.dumps(asdict(spec))


@lru_cache(maxsize=64)
def _decode(text: str) -> LossSpec:
    fields = json.loads(text)
    return LossSpec(**{**fields, "mis": None if fields["mis"] is None else tuple(fields["mis"])})


def _run(
    rows: Rows,
    spec: LossSpec,
    advantage_T: Tensor,
    weight_T: Tensor,
    old_T: Tensor | None,
    ref_T: Tensor | None,
    out_TV: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics); the gradient goes into `out_TV`, which may be the logits."""
    if impl == "torch":
        column_6T = _loss_torch(rows, spec, advantage_T, weight_T, old_T, ref_T, out_TV)
        loss, stats = statistics.reduce_torch(column_6T, weight_T, rows.target_ids_T)
        return loss, column_6T, stats
    from flowkernels import loss_triton

    column_6T = loss_triton.loss(rows, spec, advantage_T, weight_T, old_T, ref_T, out_TV)
    loss, stats = loss_triton.statistics(column_6T, weight_T, rows.target_ids_T)
    return loss, column_6T, stats


def _loss_torch(
    rows: Rows, spec: LossSpec, advantage_T: Tensor, weight_T: Tensor, old_T: Tensor | None, ref_T: Tensor | None, out_TV: Tensor | None
) -> Tensor:
    """The reference of the fused kernel: columns [6, T]."""
    column_6T = torch.zeros(6, len(weight_T), device=weight_T.device)
    counts_T = (weight_T != 0) & (rows.target_ids_T >= 0)
    for chunk in rows.chunks():
        forward = forward_torch(rows[chunk])
        old_C, ref_C = (None if x is None else x[chunk] for x in (old_T, ref_T))
        tokens = Tokens(forward.logprob_C, forward.entropy_C, advantage_T[chunk], weight_T[chunk], old_C, ref_C)
        token, counts_C = token_loss(spec, tokens), counts_T[chunk]
        column_6T[:, chunk] = torch.where(counts_C, _columns(token, tokens), 0.0)
        if out_TV is None:
            continue
        slope_C = tokens.weight_T / rows.temperature_T[chunk]
        a_C = torch.where(counts_C, -slope_C * token.dlogprob_T, 0.0)
        c_C = None if token.dentropy_T is None else torch.where(counts_C, -slope_C * token.dentropy_T, 0.0)
        backward_torch(forward, a_C, c_C, out_TV[chunk])
    return column_6T


@torch.library.custom_op("flowkernels::policy_loss", mutates_args=())
def _policy_loss_op(
    logits: Tensor,
    targets: Tensor,
    advantage: Tensor,
    weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    spec: str,
    needs_gradient: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, gradient or an empty tensor, columns, statistics)."""
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    dlogits_TV = logits.new_empty(logits.shape if needs_gradient else (0,))
    loss, column_6T, stats = _run(rows, _decode(spec), advantage, weight, old, ref, dlogits_TV if needs_gradient else None, impl)
    return loss, dlogits_TV, column_6T, stats


@_policy_loss_op.register_fake
def _(logits: Tensor, targets: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    needs_gradient = arguments[-2]
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty(logits.shape if needs_gradient else (0,)),
        logits.new_empty((6, targets.shape[0]), dtype=torch.float32),
        logits.new_empty((statistics.NUM_STATISTICS,), dtype=torch.float32),
    )


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # or autograd fills a zero gradient of [T, V] for the gradient itself
    ctx.save_for_backward(output[1])


def _policy_loss_backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    (dlogits_TV,) = ctx.saved_tensors
    _scale_op(dlogits_TV, dloss)
    return (dlogits_TV, *[None] * 12)


_policy_loss_op.register_autograd(_policy_loss_backward, setup_context=_save_gradient)


@torch.library.custom_op("flowkernels::policy_loss_", mutates_args=("logits",))
def _policy_loss_inplace(
    logits: Tensor,
    targets: Tensor,
    advantage: Tensor,
    weight: Tensor,
    old: Tensor | None,
    ref: Tensor | None,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    spec: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, columns, statistics); the gradient is written over the logits."""
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    return _run(rows, _decode(spec), advantage, weight, old, ref, logits, impl)


@_policy_loss_inplace.register_fake
def _(logits: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        logits.new_empty((), dtype=torch.float32),
        logits.new_empty((6, targets.shape[0]), dtype=torch.float32),
        logits.new_empty((statistics.NUM_STATISTICS,), dtype=torch.float32),
    )


@torch.library.custom_op("flowkernels::scale_", mutates_args=("gradient",))
def _scale_op(gradient: Tensor, factor: Tensor) -> None:
    """gradient *= factor. A factor of 1, as `loss.backward()` sends it, costs nothing."""
    if gradient.is_cuda and gradient.is_contiguous():
        from flowkernels import loss_triton

        loss_triton.scale_(gradient, factor)
    elif gradient.is_cuda or float(factor) != 1.0:
        gradient.mul_(factor.to(gradient.dtype))


@_scale_op.register_fake
def _(gradient: Tensor, factor: Tensor) -> None:
    return None
