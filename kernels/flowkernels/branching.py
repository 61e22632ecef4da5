"""The branching score: where in a rollout another choice would have mattered most (APPO, arXiv
2606.12384, eqs. 3 to 5).

Maths, over the generated tokens (m = 1; tool text has m = 0) of one sequence: S_i = m_i d_i + gamma
S_{i+1}, with d the log-ratio of two policies and position i included; Omega_i = clip(exp(clamp(S_i,
-20, 20)), 1 - eps, 1 + eps), FIPO's future-KL (arXiv 2603.19835); Z(x) = (x - mean) / (std + 1e-6),
the standard deviation that of the population; score_i = Z(H)_i Z(Omega)_i. A candidate needs both
above 0. Where Omega is flat (std < 1e-6: both policies are the same) the score is Z(H). Bytes: a
few per token; nothing beside the logits. T: tokens of all sequences, S: sequences, B: points of a
sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flowkernels.arguments import LOGPROB_DTYPES, check_sequences, check_tokens
from flowkernels.implementations import resolve_impl, with_launcher
from flowkernels.sequences import sequence_ids

LOG_LIMIT = 20.0
FLAT = 1e-6
EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class BranchingScore:
    """The scores of packed rollouts, one entry per token, in fp32 (fp64 where an argument is)."""

    score_T: Tensor
    """Branching score; 0 on tokens that were not generated."""
    omega_T: Tensor
    """The clipped future ratio, in [1 - eps, 1 + eps]."""
    is_candidate_T: Tensor
    """bool: the token was generated and both its z-scores are above 0."""


@with_launcher("flowkernels.branching_triton")
def scan(x_T: Tensor, cu_seqlens_S1: Tensor, mask_T: Tensor | None, gamma: float) -> Tensor:
    """Scan by doubling: after k rounds every position holds the sum over its next 2^k ones, in
    fp64; O(T log T).
    """
    sum_T = (x_T if mask_T is None else torch.where(mask_T, x_T, 0.0)).double()
    num_tokens, reach = len(x_T), 1
    end_T = (
        cu_seqlens_S1[1:][sequence_ids(cu_seqlens_S1, num_tokens)] if num_tokens else cu_seqlens_S1
    )
    position_T = torch.arange(num_tokens, device=x_T.device)
    longest = int(cu_seqlens_S1.diff().max()) if len(cu_seqlens_S1) > 1 else 0
    while reach < longest:
        later_T = position_T + reach
        later_sum_T = sum_T[later_T.clamp(max=num_tokens - 1)] * gamma**reach
        sum_T = sum_T + torch.where(later_T < end_T, later_sum_T, 0.0)
        reach *= 2
    return sum_T.to(x_T.dtype)


@with_launcher("flowkernels.branching_triton")
def score(
    log_ratio_T: Tensor,
    entropy_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_S1: Tensor,
    gamma: float,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (score, Omega, candidates), [T] each."""
    sequence_T = sequence_ids(cu_seqlens_S1, len(log_ratio_T))
    future_T = (
        scan("torch", log_ratio_T, cu_seqlens_S1, mask_T, gamma).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    )
    omega_T = future_T.clamp(1 - clip, 1 + clip)
    z_entropy_T, _ = _z_score(entropy_T, mask_T, sequence_T, len(cu_seqlens_S1) - 1)
    z_omega_T, std_S = _z_score(omega_T, mask_T, sequence_T, len(cu_seqlens_S1) - 1)
    z_omega_T = torch.where(std_S[sequence_T] < FLAT, 1.0, z_omega_T)
    is_candidate_T = mask_T & (z_entropy_T > 0) & (z_omega_T > 0)
    return torch.where(mask_T, z_entropy_T * z_omega_T, 0.0), omega_T, is_candidate_T


def _z_score(
    x_T: Tensor, mask_T: Tensor, sequence_T: Tensor, num_sequences: int
) -> tuple[Tensor, Tensor]:
    """Return each sequence's z-scores of generated tokens [T] and population std, fp64 [S]."""
    zeros_S = torch.zeros(num_sequences, dtype=torch.float64, device=x_T.device)
    num_S = zeros_S.index_add(0, sequence_T, mask_T.double()).clamp(min=1)
    mean_S = zeros_S.index_add(0, sequence_T, torch.where(mask_T, x_T, 0.0).double()) / num_S
    deviation_T = torch.where(mask_T, x_T.double() - mean_S[sequence_T], 0.0)
    std_S = (zeros_S.index_add(0, sequence_T, deviation_T.square()) / num_S).sqrt()
    return (deviation_T / (std_S[sequence_T] + EPSILON)).to(x_T.dtype), std_S


@torch.library.custom_op("flowkernels::discounted_reverse_scan", mutates_args=())
def _scan_op(x: Tensor, cu_seqlens: Tensor, mask: Tensor | None, gamma: float, impl: str) -> Tensor:
    return scan(impl, x, cu_seqlens, mask, gamma)


@_scan_op.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("flowkernels::branching_score", mutates_args=())
def _score_op(
    log_ratio: Tensor,
    entropy: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    gamma: float,
    clip: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return score(impl, log_ratio, entropy, mask, cu_seqlens, gamma, clip)


@_score_op.register_fake
def _(
    log_ratio: Tensor, entropy: Tensor, mask: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(entropy), torch.empty_like(entropy), torch.empty_like(mask)


def discounted_reverse_scan(
    x_T: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    gamma: float,
    mask_T: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return S_i = m_i x_i + gamma S_{i+1} within each sequence, [T], in O(T) for any length. No
    gradient.

    Args:
        x_T: [T] fp32, or fp64, in torch, which stays fp64.
        cu_seqlens_S1: [S + 1] int32 or int64: sequence s owns tokens cu_seqlens[s] to cu_seqlens[s
            + 1] - 1. It may be empty.
        gamma: decay per position, in [0, 1]; masked positions count as steps.
        mask_T: [T] bool; where it is false x counts as 0, whatever it holds.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    _check(x_T, "x_T", cu_seqlens_S1, gamma, mask_T)
    impl = resolve_impl(impl, x_T.device, x_T.dtype)
    scanned: Tensor = _scan_op(
        x_T.detach().contiguous(),
        cu_seqlens_S1.long().contiguous(),
        None if mask_T is None else mask_T.contiguous(),
        gamma,
        impl,
    )
    return scanned


def branching_score(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    entropy_T: Tensor,
    cu_seqlens_S1: Tensor,
    *,
    mask_T: Tensor | None = None,
    gamma: float = 1.0,
    clip: float = 0.2,
    impl: str = "auto",
) -> BranchingScore:
    """Score every generated token of packed rollouts. No gradient.

    Args:
        logprob_T: [T] fp32 or fp64, log-probs under the current policy. Values where `mask_T` is
            false are ignored, here and in `old_logprob_T`.
        old_logprob_T: [T] fp32 or fp64, the denominator: the sampler's own log-probs for a stale
            rollout, else the initial policy's.
        entropy_T: [T] fp32 or fp64, entropy in nats of the distribution that each token was sampled
            from.
        cu_seqlens_S1: [S + 1] int32 or int64, one sequence per rollout.
        mask_T: [T] bool, true on generated tokens; all by default.
        gamma: decay per position, in [0, 1].
        clip: eps, half the width of the clip range of Omega.
        impl: "triton", "torch", or "auto" by the device.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    _check(logprob_T, "logprob_T", cu_seqlens_S1, gamma, mask_T)
    for name, tensor in (("old_logprob_T", old_logprob_T), ("entropy_T", entropy_T)):
        check_tokens(name, tensor, (len(logprob_T),), LOGPROB_DTYPES, logprob_T.device)
    if not 0 < clip < 1:
        raise ValueError(f"clip={clip} must be in (0, 1)")
    mask_T = torch.ones_like(logprob_T, dtype=torch.bool) if mask_T is None else mask_T.contiguous()
    log_ratio_T, bounds_S1 = (logprob_T - old_logprob_T).detach(), cu_seqlens_S1.long().contiguous()
    dtype = torch.promote_types(log_ratio_T.dtype, entropy_T.dtype)
    log_ratio_T, entropy_T = (x.to(dtype) for x in (log_ratio_T, entropy_T.detach().contiguous()))
    impl = resolve_impl(impl, logprob_T.device, dtype)
    return BranchingScore(*_score_op(log_ratio_T, entropy_T, mask_T, bounds_S1, gamma, clip, impl))


def branch_points(
    scores: BranchingScore,
    cu_seqlens_S1: Tensor,
    *,
    num_points: int,
    spacing: int = 16,
    mask_T: Tensor | None = None,
    allowed_T: Tensor | None = None,
) -> Tensor:
    """Return the best branch points of each sequence, int64 [S, B], best first; -1 fills the rest.
    The host does not wait for the device.

    Args:
        num_points: B, the largest number of points per sequence.
        spacing: smallest distance in generated tokens between two points of a sequence.
        mask_T: [T] bool, true on generated tokens, as in `branching_score`; only these count
            towards `spacing`.
        allowed_T: [T] bool, tokens that may be chosen, for example all but white space.

    Raises:
        ValueError: an argument that does not fit, with its name and value.
    """
    score_T = scores.score_T
    check_sequences(cu_seqlens_S1, len(score_T), score_T.device)
    if num_points < 0 or spacing < 0:
        raise ValueError(f"num_points={num_points} and spacing={spacing} must be >= 0")
    for name, tensor in (("mask_T", mask_T), ("allowed_T", allowed_T)):
        if tensor is not None:
            check_tokens(name, tensor, (len(score_T),), (torch.bool,), score_T.device)
    num_sequences, num_tokens = len(cu_seqlens_S1) - 1, len(score_T)
    sequence_T = sequence_ids(cu_seqlens_S1, num_tokens)
    position_T = torch.arange(num_tokens, device=score_T.device)
    generated_T = position_T if mask_T is None else mask_T.cumsum(0)
    is_free_T = scores.is_candidate_T if allowed_T is None else scores.is_candidate_T & allowed_T
    points = torch.full((num_sequences, num_points), -1, dtype=torch.int64, device=score_T.device)
    for i in range(num_points if num_tokens else 0):
        free_score_T = torch.where(is_free_T, score_T, -torch.inf)
        best_S = free_score_T.new_full((num_sequences,), -torch.inf)
        best_S = best_S.scatter_reduce(0, sequence_T, free_score_T, "amax")
        # Of equal scores the first token wins.
        is_best_T = is_free_T & (free_score_T == best_S[sequence_T])
        first_S = position_T.new_full((num_sequences,), num_tokens)
        first_S = first_S.scatter_reduce(
            0, sequence_T, torch.where(is_best_T, position_T, num_tokens), "amin"
        )
        has_point_S = first_S < num_tokens
        points[:, i] = torch.where(has_point_S, first_S, -1)
        point_T = generated_T[first_S.clamp(max=num_tokens - 1)][sequence_T]
        is_near_T = (generated_T - point_T).abs() < max(spacing, 1)
        is_free_T = is_free_T & ~(is_near_T & has_point_S[sequence_T])
    return points


def _check(
    x_T: Tensor, name: str, cu_seqlens_S1: Tensor, gamma: float, mask_T: Tensor | None
) -> None:
    if x_T.dim() != 1 or x_T.dtype not in LOGPROB_DTYPES:
        form = f"{x_T.dtype} {tuple(x_T.shape)}".removeprefix("torch.")
        raise ValueError(f"{name} must be float32 [T] (or float64), got {form}")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma={gamma} must be in [0, 1]")
    check_sequences(cu_seqlens_S1, len(x_T), x_T.device)
    if mask_T is not None:
        check_tokens("mask_T", mask_T, (len(x_T),), (torch.bool,), x_T.device)
