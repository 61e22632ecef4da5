"""The discounted reverse scan and the branching score in Triton: one program per sequence, blocks
from its end to its beginning.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels import branching
from flowkernels.implementations import warps
from flowkernels.rows_triton import clamp

LIMIT, FLAT = tl.constexpr(branching.LOG_LIMIT), tl.constexpr(branching.FLAT)
EPSILON = tl.constexpr(branching.EPSILON)
LAUNCH = {"BLOCK": 512, "num_warps": warps(512)}
"""A token a thread: with more of them, their loads would wait for one another."""


@triton.jit
def _combine(x_right, decay_right, x_left, decay_left) -> tuple[tl.tensor, tl.tensor]:
    """Combine parts of S_i = x_i + gamma S_{i+1}, read from the right: the later operand lies to
    the left.
    """
    return x_left + decay_left * x_right, decay_left * decay_right


@triton.jit
def _scan_block(x, gamma, carry) -> tl.tensor:
    """Return S of a block, given S of the token after it. Positions past the end hold x = 0, so
    that they leave the carry as it is but for its decay, which is why the first block read must
    have carry 0.
    """
    decay = tl.zeros_like(x) + gamma
    inner, decays = tl.associative_scan((x, decay), 0, _combine, reverse=True)
    return inner + decays * carry


@triton.jit
def _first_element(x) -> tl.tensor:
    return tl.sum(tl.where(tl.arange(0, x.shape[0]) == 0, x, 0.0), axis=0)


@triton.jit
def _std(squares, mean_error, total) -> tl.tensor:
    """Return the standard deviation of the population, from squared deviations from a mean that is
    off by `mean_error`.
    """
    mean = tl.sum(squares, axis=0) / total - mean_error * mean_error
    return tl.sqrt(tl.maximum(mean, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _bounds(cu_seqlens_ptr, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (begin, end, number of blocks) of this program's sequence."""
    sequence = tl.program_id(0)
    begin = tl.load(cu_seqlens_ptr + sequence).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1).to(tl.int64)
    return begin, end, (end - begin + BLOCK - 1) // BLOCK


@triton.jit
def _tokens(start, end, mask_ptr, BLOCK: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return (positions, which of them are in the sequence, which of these count) of a block."""
    position = start + tl.arange(0, BLOCK)
    is_in = position < end
    is_token = is_in
    if mask_ptr is not None:
        is_token = is_in & (tl.load(mask_ptr + position, mask=is_in, other=0) != 0)
    return position, is_in, is_token


@triton.jit
def _load(ptr, is_in, is_token) -> tl.tensor:
    """Load x, 0 where no token counts; it is read there too, so as not to wait for the mask."""
    return tl.where(is_token, tl.load(ptr, mask=is_in, other=0.0), 0.0)


@triton.jit
def scan_kernel(x_ptr, mask_ptr, out_ptr, cu_seqlens_ptr, gamma, BLOCK: tl.constexpr) -> None:
    """Write out_i = m_i x_i + gamma out_{i+1} within each sequence."""
    begin, end, num_blocks = _bounds(cu_seqlens_ptr, BLOCK)
    carry = 0.0
    for back in range(num_blocks):
        start = begin + (num_blocks - 1 - back) * BLOCK
        position, is_in, is_token = _tokens(start, end, mask_ptr, BLOCK)
        scanned = _scan_block(_load(x_ptr + position, is_in, is_token), gamma, carry)
        tl.store(out_ptr + position, scanned, mask=is_in)
        carry = _first_element(scanned)


@triton.jit
def score_kernel(
    log_ratio_ptr, entropy_ptr, mask_ptr, omega_ptr, score_ptr, is_candidate_ptr, cu_seqlens_ptr,
    gamma, clip, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write Omega, the two z-scores and the candidates of a sequence; see `branching.py`."""
    begin, end, num_blocks = _bounds(cu_seqlens_ptr, BLOCK)
    carry = 0.0
    zeros = tl.zeros([BLOCK], tl.float32)
    num, omegas, entropies = zeros, zeros, zeros
    for back in range(num_blocks):
        start = begin + (num_blocks - 1 - back) * BLOCK
        position, is_in, is_token = _tokens(start, end, mask_ptr, BLOCK)
        scanned = _scan_block(_load(log_ratio_ptr + position, is_in, is_token), gamma, carry)
        entropies += _load(entropy_ptr + position, is_in, is_token)
        carry = _first_element(scanned)
        omega = clamp(tl.exp(clamp(scanned, -LIMIT, LIMIT)), 1.0 - clip, 1.0 + clip)
        tl.store(omega_ptr + position, omega, mask=is_in)
        num += is_token.to(tl.float32)
        omegas += tl.where(is_token, omega - 1.0, 0.0)
    tl.debug_barrier()  # omega is read back below, perhaps by other threads
    total = tl.maximum(tl.sum(num, axis=0), 1.0)
    omega_mean = 1.0 + tl.sum(omegas, axis=0) / total
    entropy_mean = tl.sum(entropies, axis=0) / total
    # Squares of deviations in a pass of their own: E[x^2] - E[x]^2 has no digits left where Omega
    # is nearly flat.
    omegas, entropies, omega_squares, entropy_squares = zeros, zeros, zeros, zeros
    for block in range(num_blocks):
        position, is_in, is_token = _tokens(begin + block * BLOCK, end, mask_ptr, BLOCK)
        d_omega = _load(omega_ptr + position, is_in, is_token) - omega_mean
        d_entropy = _load(entropy_ptr + position, is_in, is_token) - entropy_mean
        omegas += tl.where(is_token, d_omega, 0.0)
        entropies += tl.where(is_token, d_entropy, 0.0)
        omega_squares += tl.where(is_token, d_omega * d_omega, 0.0)
        entropy_squares += tl.where(is_token, d_entropy * d_entropy, 0.0)
    # The means above are rounded: what they are off by is the mean of the deviations.
    omega_error, entropy_error = tl.sum(omegas, axis=0) / total, tl.sum(entropies, axis=0) / total
    omega_std = _std(omega_squares, omega_error, total)
    entropy_std = _std(entropy_squares, entropy_error, total)
    omega_mean += omega_error
    entropy_mean += entropy_error
    is_flat = omega_std < FLAT
    for block in range(num_blocks):
        position, is_in, is_token = _tokens(begin + block * BLOCK, end, mask_ptr, BLOCK)
        omega = _load(omega_ptr + position, is_in, is_token)
        entropy = _load(entropy_ptr + position, is_in, is_token)
        z_omega = tl.where(is_flat, 1.0, (omega - omega_mean) / (omega_std + EPSILON))
        z_entropy = (entropy - entropy_mean) / (entropy_std + EPSILON)
        score = tl.where(is_token, z_entropy * z_omega, 0.0)
        tl.store(score_ptr + position, score, mask=is_in)
        is_candidate = is_token & (z_entropy > 0) & (z_omega > 0)
        tl.store(is_candidate_ptr + position, is_candidate, mask=is_in)


def scan(x_T: Tensor, cu_seqlens_S1: Tensor, mask_T: Tensor | None, gamma: float) -> Tensor:
    """Launcher, see `branching.discounted_reverse_scan`."""
    out_T = torch.zeros_like(x_T)
    if len(cu_seqlens_S1) > 1:
        scan_kernel[(len(cu_seqlens_S1) - 1,)](x_T, mask_T, out_T, cu_seqlens_S1, gamma, **LAUNCH)
    return out_T


def score(
    log_ratio_T: Tensor,
    entropy_T: Tensor,
    mask_T: Tensor,
    cu_seqlens_S1: Tensor,
    gamma: float,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launcher, see `branching.branching_score`."""
    score_T = torch.zeros_like(entropy_T)
    omega_T = torch.ones_like(entropy_T)
    is_candidate_T = torch.zeros_like(mask_T)
    if len(cu_seqlens_S1) > 1:
        score_kernel[(len(cu_seqlens_S1) - 1,)](
            log_ratio_ptr=log_ratio_T,
            entropy_ptr=entropy_T,
            mask_ptr=mask_T,
            omega_ptr=omega_T,
            score_ptr=score_T,
            is_candidate_ptr=is_candidate_T,
            cu_seqlens_ptr=cu_seqlens_S1,
            gamma=gamma,
            clip=clip,
            **LAUNCH,
        )
    return score_T, omega_T, is_candidate_T
