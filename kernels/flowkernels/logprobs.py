"""Log-probabilities, entropies and their gradient, from rows of logits.

Maths, for a row x [V] with target y: z = softcap(x) / temperature, lse = log sum_j exp z_j, p =
exp(z - lse), H = -sum_j p_j log p_j, logp = z_y - lse, or z_y - lse over the ids of the sampling
mask where the sampler renormalised over them. For upstream gradients of logp and H,

    dz_j = a p^S_j - a [j = y] + c p_j (log p_j + H) + d p_j,

    a = -dL/dlogp,  c = -dL/dH,  d = dL/dlse,

with p^S = p, or the distribution over the mask's ids (0 outside them). Bytes, in bf16: 2 per
element for the statistics; 4 with the gradient, if the second read of a row comes from cache, else
6. The torch reference goes through the rows in chunks that fit a CPU cache, in fp32. T: target
   tokens, V: vocabulary, C: rows of a chunk, K: ids of all sampling masks together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from flowkernels.arguments import check_logits, check_targets, dtype_of_results
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.plain_tensors import flat_rows
from flowkernels.targets import TARGETS, SamplingMask, Slopes, Targets, unflatten

CHUNK_ELEMENTS = 2**19
"""Elements of a chunk of the torch reference; two fp32 buffers fit a core's share of cache."""
_MIN_EXPONENT = -1000.0  # exp of it is 0, and 0 times it is 0, which 0 times -inf is not


class Score:
    """Rows of `score_3T`; the kernels index by them too."""

    LOGPROB = 0
    ENTROPY = 1
    LSE = 2
    NUM = 3


class State:
    """Rows of `state_4T`, which the gradient kernel needs; the torch reference does not."""

    TOP = 0
    """The largest logit."""
    LOG_TOTAL = 1
    """log sum exp (z - z of the largest)."""
    MASKED_TOP = 2
    MASKED_LOG_TOTAL = 3
    """TOP and LOG_TOTAL over the ids of the sampling mask."""
    NUM = 4


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Scores of the targets, fp32 each (fp64 for fp64 logits), in the shape of the targets; 0 in
    rows with a negative target.
    """

    logprob_T: Tensor
    entropy_T: Tensor
    """Exact, over the full vocabulary, in nats."""
    lse_T: Tensor
    """Log-sum-exp of the row at the temperature."""

    def view(self, shape: Sequence[int]) -> LogProbs:
        """Return the results in the shape of the targets."""
        return LogProbs(*(getattr(self, f.name).view(shape) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Forward:
    """A chunk after its forward pass, fp32 (fp64 for fp64 logits); t = z - max z."""

    targets: Targets
    t_CV: Tensor
    e_CV: Tensor
    """exp t."""
    t_target_C: Tensor
    t_mask_K: Tensor | None
    """t of the mask's ids."""
    log_total_C: Tensor
    """log sum exp t."""
    masked_log_total_C: Tensor
    """log sum exp t over the mask's ids and the target."""
    logprob_C: Tensor
    entropy_C: Tensor
    lse_C: Tensor


def empty_rows(logits_TV: Tensor) -> Tensor:
    """Return an empty tensor like the logits whose rows have the logits' alignment modulo 16 bytes,
    so that kernels read and write both tensors 16 bytes at a time.
    """
    num_rows, num_vocab = logits_TV.shape
    width = 16 // logits_TV.element_size()
    stride = num_vocab + (logits_TV.stride(0) - num_vocab) % width
    return logits_TV.new_empty_strided((num_rows, num_vocab), (stride, 1))


def row_chunks(logits_TV: Tensor) -> Iterator[slice]:
    """Yield chunks of rows that fit a CPU cache."""
    num_rows, num_vocab = logits_TV.shape
    size = max(1, CHUNK_ELEMENTS // max(num_vocab, 1))
    return (slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size))


def forward_torch(logits_CV: Tensor, targets: Targets) -> Forward:
    t_CV = torch.div(_capped(logits_CV, targets.softcap), targets.temperature_T[:, None])
    top_C = t_CV.amax(-1)
    # Not z - lse: that is off by the rounding of lse, which grows with the size of the logits.
    t_CV.sub_(torch.where(top_C == -torch.inf, 0.0, top_C)[:, None])
    num_vocab = t_CV.shape[1]
    t_target_C = t_CV.gather(1, targets.ids_T.clamp(0, num_vocab - 1)[:, None])[:, 0]
    # NaN for a target outside the vocabulary, so that a wrong id cannot go unseen.
    t_target_C = torch.where(targets.ids_T < num_vocab, t_target_C, torch.nan)
    mask = None if targets.mask is None else targets.mask.trimmed()
    t_mask_K = None if mask is None else t_CV[mask.row_of_ids(), mask.token_ids_K]
    e_CV = t_CV.clamp_(min=_MIN_EXPONENT).exp()  # clamped: no 0 * -inf further down
    total_C = _row_sums(e_CV)
    log_total_C = total_C.log()
    moment_C = _row_sums(e_CV * t_CV)
    masked_log_total_C = log_total_C
    if mask is not None and t_mask_K is not None:
        masked_C = _masked_log_total(mask, targets.ids_T, t_mask_K, t_target_C)
        masked_log_total_C = torch.where(mask.is_truncated(), masked_C, log_total_C)
    is_row_C = targets.ids_T >= 0
    return Forward(
        targets=replace(targets, mask=mask),
        t_CV=t_CV,
        e_CV=e_CV,
        t_target_C=t_target_C,
        t_mask_K=t_mask_K,
        log_total_C=log_total_C,
        masked_log_total_C=masked_log_total_C,
        logprob_C=torch.where(is_row_C, t_target_C - masked_log_total_C, 0.0),
        entropy_C=torch.where(is_row_C, log_total_C - moment_C / total_C, 0.0),
        lse_C=torch.where(is_row_C, top_C + log_total_C, 0.0),
    )


def backward_torch(
    forward: Forward,
    logits_CV: Tensor,
    a_C: Tensor,
    c_C: Tensor | None,
    out_CV: Tensor,
    d_C: Tensor | None = None,
) -> None:
    """Write the gradient by the logits into `out_CV`, which may be the logits; the buffers of
    `forward` are used up. `a`, `c` and `d` as above.
    """
    softcap, mask = forward.targets.softcap, forward.targets.mask
    p_C = forward.log_total_C.neg().exp_()
    slope_CV = 1 - (_capped(logits_CV, softcap) / softcap).square_() if softcap else None
    # The target and the mask's ids differ from the rest of the row: their gradients are worked out
    # apart, in fp32, and put in place at the end; the target's last, which a mask may name too.
    a_row_C = a_C if mask is None else torch.where(mask.is_truncated(), 0.0, a_C)
    a_row_C = a_row_C if d_C is None else a_row_C + d_C
    overwrites = []
    if mask is not None and forward.t_mask_K is not None:
        row_K = mask.row_of_ids()
        gradient_K = _gradient_at(forward, row_K, forward.t_mask_K, a_C, c_C, d_C)
        overwrites.append((row_K, mask.token_ids_K, gradient_K))
    ids_C = forward.targets.ids_T
    row_K = ((ids_C >= 0) & (ids_C < logits_CV.shape[1])).nonzero()[:, 0]
    gradient_K = _gradient_at(forward, row_K, forward.t_target_C[row_K], a_C, c_C, d_C)
    gradient_K -= a_C[row_K]
    overwrites.append((row_K, ids_C[row_K], gradient_K))
    factor_CV = (a_row_C * p_C)[:, None]
    if c_C is not None:
        log_p_CV = forward.t_CV.add_((forward.entropy_C - forward.log_total_C)[:, None])
        factor_CV = log_p_CV.mul_((c_C * p_C)[:, None]).add_(factor_CV)
    if slope_CV is not None:
        factor_CV = slope_CV * factor_CV
    if out_CV.dtype == forward.e_CV.dtype:
        torch.mul(forward.e_CV, factor_CV, out=out_CV)
    else:
        out_CV.copy_(forward.e_CV.mul_(factor_CV))
    for row_K, ids_K, gradient_K in overwrites:
        slope_K = 1.0 if slope_CV is None else slope_CV[row_K, ids_K]
        out_CV.index_put_((row_K, ids_K), (gradient_K * slope_K).to(out_CV.dtype))
    is_zero_C = a_C == 0
    for slope_C in (c_C, d_C):
        is_zero_C = is_zero_C if slope_C is None else is_zero_C & (slope_C == 0)
    out_CV.index_fill_(0, is_zero_C.nonzero()[:, 0], 0.0)  # a row without a gradient may hold NaN


def _capped(logits_CV: Tensor, softcap: float | None) -> Tensor:
    """Return read-only logits in fp32 (fp64 in fp64), not yet divided by the temperature."""
    x_CV = logits_CV if logits_CV.dtype == torch.float64 else logits_CV.float()
    return (x_CV / softcap).tanh_().mul_(softcap) if softcap else x_CV


def _row_sums(x_CV: Tensor) -> Tensor:
    """Return the sums of rows, with the same bits for a row alone as among others. Torch would
    split a single row over threads and sum in another order.
    """
    return x_CV.sum(-1) if len(x_CV) != 1 else x_CV.expand(2, -1).sum(-1)[:1]


def _gradient_at(
    forward: Forward,
    row_K: Tensor,
    t_K: Tensor,
    a_C: Tensor,
    c_C: Tensor | None,
    d_C: Tensor | None,
) -> Tensor:
    """Return a p^S + c p (log p + H) + d p at single elements; without the target's own term."""
    g_K = a_C[row_K] * (t_K - forward.masked_log_total_C[row_K]).exp()
    log_p_K = t_K.clamp(min=_MIN_EXPONENT) - forward.log_total_C[row_K]
    if c_C is not None:
        g_K += c_C[row_K] * log_p_K.exp() * (log_p_K + forward.entropy_C[row_K])
    return g_K if d_C is None else g_K + d_C[row_K] * log_p_K.exp()


def _masked_log_total(
    mask: SamplingMask, ids_C: Tensor, t_mask_K: Tensor, t_target_C: Tensor
) -> Tensor:
    """Return log sum exp t over the mask's ids and the target, which is counted once."""
    row_K = mask.row_of_ids()
    is_target_K = (mask.token_ids_K == ids_C[row_K]).to(torch.int64)
    is_missing_C = torch.zeros_like(ids_C).index_add_(0, row_K, is_target_K) == 0
    top_C = t_target_C.scatter_reduce(0, row_K, t_mask_K, "amax")
    target_term_C = torch.where(is_missing_C, (t_target_C - top_C).exp(), 0.0)
    return top_C + target_term_C.index_add(0, row_K, (t_mask_K - top_C[row_K]).exp()).log()


@with_launcher("flowkernels.logprobs_triton")
def compute_scores(logits_TV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Return (`Score` rows [3, T], `State` rows [4, T])."""
    score_3T = targets.temperature_T.new_empty(Score.NUM, len(targets))
    state_4T = targets.temperature_T.new_zeros(State.NUM, len(targets))
    for chunk in row_chunks(logits_TV):
        forward = forward_torch(logits_TV[chunk], targets[chunk])
        score_3T[Score.LOGPROB, chunk] = forward.logprob_C
        score_3T[Score.ENTROPY, chunk] = forward.entropy_C
        score_3T[Score.LSE, chunk] = forward.lse_C
    return score_3T, state_4T


@with_launcher("flowkernels.logprobs_triton")
def write_gradient(
    logits_TV: Tensor,
    targets: Targets,
    scored: tuple[Tensor, Tensor],
    slopes: Slopes,
    out_TV: Tensor,
) -> None:
    """Write the gradient by the logits into `out_TV`, which may be the logits themselves; `scored`
    is what `compute_scores` returned, which spares the kernels a read and the reference nothing.
    """
    for chunk in row_chunks(logits_TV):
        logits_CV, chunk_targets, slope = logits_TV[chunk], targets[chunk], slopes[chunk]
        is_row_C, temperature_C = chunk_targets.ids_T >= 0, chunk_targets.temperature_T
        a_C, c_C, d_C = (
            None if x is None else torch.where(is_row_C, sign * x / temperature_C, 0.0)
            for sign, x in ((-1, slope.logprob_T), (-1, slope.entropy_T), (1, slope.lse_T))
        )
        assert a_C is not None
        forward = forward_torch(logits_CV, chunk_targets)
        backward_torch(forward, logits_CV, a_C, c_C, out_TV[chunk], d_C)


@torch.library.custom_op(
    "flowkernels::scores",
    mutates_args=(),
    schema=f"(Tensor logits, {TARGETS}, str impl) -> (Tensor, Tensor)",
)
def _scores_op(logits: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    *flat, impl = arguments
    return compute_scores(impl, logits, unflatten(*flat))


@_scores_op.register_fake
def _(logits: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    size, dtype = targets.shape[0], dtype_of_results(logits.dtype)
    return (
        logits.new_empty((Score.NUM, size), dtype=dtype),
        logits.new_empty((State.NUM, size), dtype=dtype),
    )


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, temperature, ctx.softcap, mask_ids, mask_offsets, ctx.impl = inputs
    ctx.save_for_backward(logits, targets, temperature, mask_ids, mask_offsets, *output)


def _scores_backward(ctx: Any, dscore_3T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, temperature, mask_ids, mask_offsets, score_3T, state_4T = ctx.saved_tensors
    flat = (targets, temperature, ctx.softcap, mask_ids, mask_offsets)
    dlogits: Tensor = _gradient_op(
        logits, *flat, score_3T, state_4T, dscore_3T.contiguous(), ctx.impl
    )
    return dlogits, *[None] * 6


_scores_op.register_autograd(_scores_backward, setup_context=_save_scores)


@torch.library.custom_op(
    "flowkernels::gradient",
    mutates_args=(),
    schema=f"(Tensor logits, {TARGETS}, Tensor score, Tensor state, Tensor dscore, str impl)"
    " -> Tensor",
)
def _gradient_op(logits: Tensor, *arguments: Any) -> Tensor:
    *flat, score, state, dscore, impl = arguments
    out_TV = empty_rows(logits)
    slopes = Slopes(*dscore.unbind())
    write_gradient(impl, logits, unflatten(*flat), (score, state), slopes=slopes, out_TV=out_TV)
    return out_TV


@_gradient_op.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return empty_rows(logits)


def scores(logits_TV: Tensor, targets: Targets, impl: str) -> tuple[Tensor, Tensor]:
    """Call `compute_scores` as an operator, differentiable by a second read of the logits."""
    result: tuple[Tensor, Tensor] = _scores_op(logits_TV, *targets.flat(), impl)
    return result


def logprobs(
    logits_TV: Tensor,
    target_ids_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    sampling_mask: SamplingMask | None = None,
    differentiable: bool = False,
    impl: str = "auto",
) -> LogProbs:
    """Return the log-probability of each target with the entropy and the log-sum-exp of its row, in
    one read of the logits.

    Args:
        logits_TV: [T, V] fp32, bf16 or fp16, rows of any stride; accumulated in fp32. fp64 is
            accepted (torch computes it) and gives fp64 results. A batch [B, L, V], or one of more
            dimensions, takes [B, L] for every [T] here and returns [B, L]; it is copied if its rows
            are not evenly spaced in memory, as in logits[:, :-1].
        target_ids_T: [T] int64 or int32 in [0, V); rows with a negative id are not read.
        temperature: divides the logits; > 0, a number or [T] of any float dtype.
        softcap: logits become softcap * tanh(logits / softcap) first.
        sampling_mask: take log-probs over these ids, as the sampler did; entropy and lse still
            cover the full vocabulary. The rows of a batch are numbered in order.
        differentiable: allow gradients of the results with respect to the logits (a second read, in
            the backward pass).
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value. Values of tensors are
            checked only on the CPU and with FLOWKERNELS_DEBUG=1; otherwise a target above V and NaN
            logits give NaN.
    """
    flat_TV = flat_rows("logits_TV", logits_TV)
    check_logits(flat_TV)
    targets = check_targets(
        logits_TV, flat_TV.shape[1], target_ids_T, temperature, softcap, sampling_mask
    )
    impl = resolve_impl(impl, flat_TV.device, flat_TV.dtype)
    with torch.set_grad_enabled(differentiable and torch.is_grad_enabled()):
        score_3T, _ = scores(flat_TV, targets, impl)
    return to_logprobs(score_3T).view(target_ids_T.shape)


def to_logprobs(score_3T: Tensor) -> LogProbs:
    return LogProbs(*score_3T.unbind())
