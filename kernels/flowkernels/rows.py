"""Rows of logits: statistics and gradients, as torch references and as `torch.library` operators
over both implementations.

Maths, for a row x [V] with target y: z = softcap(x) / temperature, lse = log sum_j exp z_j, p =
exp(z - lse), H = -sum_j p_j log p_j, logp = z_y - lse, or z_y - lse over the kept set where the
sampler renormalised over one. For upstream gradients of logp and H,

    dz_j = a p^S_j - a [j = y] + c p_j (log p_j + H),   a = -dL/dlogp,  c = -dL/dH,

with p^S = p, or the distribution over the kept set (0 outside it). Bytes, in bf16: 2 per element
for the statistics; 4 with the gradient, if the second read of a row comes from cache, else 6. The
torch reference goes through the rows in chunks that fit a CPU cache, in fp32. T: target tokens, V:
vocabulary, C: rows of a chunk, K: kept ids of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = 2**19
"""Elements of a chunk of the torch reference; two fp32 buffers of them stay in a core's share of
the cache."""
_FAR = -1000.0  # exp of it is 0, and 0 times it is 0, which 0 times -inf is not


@dataclass(frozen=True, slots=True)
class SamplingMask:
    """The ids that top-k / top-p left to sample from, row after row, as vLLM's `SamplingMask` has
    them (arXiv 2512.02556, 3.1).

    A row without ids was not truncated. A target is always counted in; ids of a row must differ
    from one another.

    Example: SamplingMask(token_ids_K=tensor([5, 9, 2]), offsets_T1=tensor([0, 2, 2, 3])): rows 0 and 2
    were truncated, row 1 was not.
    """

    token_ids_K: Tensor
    """int64, on the device of the logits."""
    offsets_T1: Tensor
    """int64 [T + 1], ascending from 0 to K."""

    def __getitem__(self, rows: slice) -> SamplingMask:
        """Of consecutive rows."""
        begin, end = (int(self.offsets_T1[i]) for i in (rows.start, rows.stop))
        return SamplingMask(
            self.token_ids_K[begin:end], self.offsets_T1[rows.start : rows.stop + 1] - begin
        )

    def at(self, index_A: Tensor) -> SamplingMask:
        """Of any rows, in this order."""
        counts_A = self.offsets_T1.diff()[index_A]
        offsets_A1 = torch.cat([counts_A.new_zeros(1), counts_A.cumsum(0)])
        shift_K = torch.repeat_interleave(self.offsets_T1[index_A] - offsets_A1[:-1], counts_A)
        return SamplingMask(
            self.token_ids_K[shift_K + torch.arange(len(shift_K), device=shift_K.device)],
            offsets_A1,
        )


@dataclass(frozen=True, slots=True)
class Rows:
    """The arguments that every operator on logits takes, checked."""

    logits_TV: Tensor
    """Or `hidden_TD`, where the product with the head is still to come."""
    target_ids_T: Tensor
    """int64; a negative id marks a row that is not read and whose results are 0."""
    temperature_T: Tensor
    """fp32; its stride may be 0."""
    softcap: float = 0.0
    """0: none."""
    sampling_mask: SamplingMask | None = None

    def __getitem__(self, rows: slice) -> Rows:
        """A chunk of consecutive rows."""
        sampling_mask = None if self.sampling_mask is None else self.sampling_mask[rows]
        return Rows(
            self.logits_TV[rows],
            self.target_ids_T[rows],
            self.temperature_T[rows],
            self.softcap,
            sampling_mask,
        )

    @property
    def hidden_TD(self) -> Tensor:
        return self.logits_TV

    def at(self, index_A: Tensor) -> Rows:
        """Any rows, in this order."""
        sampling_mask = None if self.sampling_mask is None else self.sampling_mask.at(index_A)
        return Rows(
            self.logits_TV[index_A],
            self.target_ids_T[index_A],
            self.temperature_T[index_A],
            self.softcap,
            sampling_mask,
        )

    def chunks(self) -> Iterator[slice]:
        num_rows, num_vocab = self.logits_TV.shape
        size = max(1, CHUNK_ELEMENTS // max(num_vocab, 1))
        return (slice(i, min(i + size, num_rows)) for i in range(0, num_rows, size))


@dataclass(frozen=True, slots=True)
class Forward:
    """A chunk after its forward pass, fp32 (fp64 for fp64 logits); t = z - max z."""

    rows: Rows
    t_CV: Tensor
    e_CV: Tensor
    """exp t."""
    t_target_C: Tensor
    t_kept_K: Tensor | None
    """Of the targets and the kept ids."""
    log_total_C: Tensor
    """log sum exp t."""
    kept_log_total_C: Tensor
    """The same over the kept set."""
    logprob_C: Tensor
    entropy_C: Tensor
    lse_C: Tensor


def forward_torch(rows: Rows) -> Forward:
    t_CV = torch.div(_capped(rows), rows.temperature_T[:, None])
    top_C = t_CV.amax(-1)
    # Not z - lse: that is off by the rounding of lse, which grows with the size of the logits.
    t_CV.sub_(torch.where(top_C == -torch.inf, 0.0, top_C)[:, None])
    t_target_C = _at_targets(t_CV, rows.target_ids_T)
    t_kept_K = (
        None
        if rows.sampling_mask is None
        else t_CV[_kept_rows(rows), rows.sampling_mask.token_ids_K]
    )
    e_CV = t_CV.clamp_(min=_FAR).exp()  # clamped: no 0 * -inf further down
    total_C = _row_sums(e_CV)
    log_total_C = total_C.log()
    moment_C = _row_sums(e_CV * t_CV)
    kept_log_total_C = (
        log_total_C
        if t_kept_K is None
        else _kept_log_total(rows, t_kept_K, t_target_C, log_total_C)
    )
    is_row_C = rows.target_ids_T >= 0
    logprob_C, entropy_C, lse_C = (
        torch.where(is_row_C, x_C, 0.0)
        for x_C in (
            t_target_C - kept_log_total_C,
            log_total_C - moment_C / total_C,
            top_C + log_total_C,
        )
    )
    return Forward(
        rows,
        t_CV,
        e_CV,
        t_target_C,
        t_kept_K,
        log_total_C,
        kept_log_total_C,
        logprob_C,
        entropy_C,
        lse_C,
    )


def backward_torch(forward: Forward, a_C: Tensor, c_C: Tensor | None, out_CV: Tensor) -> None:
    """The gradient by the logits into `out_CV`, which may be the logits; the buffers of `forward`
    are used up. `a` and `c` as above.
    """
    rows, p_C = forward.rows, forward.log_total_C.neg().exp_()
    slope_CV = 1 - (_capped(rows) / rows.softcap).square_() if rows.softcap else None
    is_truncated_C = (
        None if rows.sampling_mask is None else rows.sampling_mask.offsets_T1.diff() > 0
    )
    # What is not the same all over the row is worked out apart, in fp32, and put in place at the
    # end.
    a_row_C = a_C if is_truncated_C is None else torch.where(is_truncated_C, 0.0, a_C)
    spots = [_target_gradient(forward, a_C, c_C)]
    if rows.sampling_mask is not None:
        spots.insert(0, _kept_gradient(forward, a_C, c_C))
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
    for row_K, ids_K, gradient_K in spots:
        slope_K = 1.0 if slope_CV is None else slope_CV[row_K, ids_K]
        out_CV.index_put_((row_K, ids_K), (gradient_K * slope_K).to(out_CV.dtype))
    is_zero_C = a_C == 0 if c_C is None else (a_C == 0) & (c_C == 0)
    out_CV.index_fill_(0, is_zero_C.nonzero()[:, 0], 0.0)  # a row without a gradient may hold NaN


def _capped(rows: Rows) -> Tensor:
    """The logits in fp32 (fp64 stays fp64), not yet divided by the temperature; the caller must not
    write to them.
    """
    x_CV = rows.logits_TV if rows.logits_TV.dtype == torch.float64 else rows.logits_TV.float()
    return (x_CV / rows.softcap).tanh_().mul_(rows.softcap) if rows.softcap else x_CV


def _row_sums(x_CV: Tensor) -> Tensor:
    """A row alone is summed as it is among others: torch would spread it over threads, in an order
    of its own.
    """
    return x_CV.sum(-1) if len(x_CV) != 1 else x_CV.expand(2, -1).sum(-1)[:1]


def _gradient_at(
    forward: Forward, row_K: Tensor, t_K: Tensor, a_C: Tensor, c_C: Tensor | None
) -> Tensor:
    """a p^S + c p (log p + H) at some places."""
    g_K = a_C[row_K] * (t_K - forward.kept_log_total_C[row_K]).exp()
    if c_C is None:
        return g_K
    log_p_K = t_K.clamp(min=_FAR) - forward.log_total_C[row_K]
    return g_K + c_C[row_K] * log_p_K.exp() * (log_p_K + forward.entropy_C[row_K])


def _target_gradient(
    forward: Forward, a_C: Tensor, c_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(row, id, gradient) of each target that these rows hold."""
    targets_C = forward.rows.target_ids_T
    row_K = ((targets_C >= 0) & (targets_C < forward.t_CV.shape[1])).nonzero()[:, 0]
    return (
        row_K,
        targets_C[row_K],
        _gradient_at(forward, row_K, forward.t_target_C[row_K], a_C, c_C) - a_C[row_K],
    )


def _kept_gradient(
    forward: Forward, a_C: Tensor, c_C: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(row, id, gradient) of each kept id; right for all but the targets."""
    assert forward.rows.sampling_mask is not None and forward.t_kept_K is not None
    row_K = _kept_rows(forward.rows)
    return (
        row_K,
        forward.rows.sampling_mask.token_ids_K,
        _gradient_at(forward, row_K, forward.t_kept_K, a_C, c_C),
    )


def _valid(target_ids_C: Tensor, num_vocab: int) -> Tensor:
    return target_ids_C.clamp(0, num_vocab - 1)


def _at_targets(t_CV: Tensor, target_ids_C: Tensor) -> Tensor:
    """NaN for a target outside the vocabulary, so that a wrong id cannot go unseen."""
    num_vocab = t_CV.shape[1]
    t_C = t_CV.gather(1, _valid(target_ids_C, num_vocab)[:, None])[:, 0]
    return torch.where(target_ids_C < num_vocab, t_C, torch.nan)


def _kept_rows(rows: Rows) -> Tensor:
    """int64 [K]: the row of each kept id."""
    assert rows.sampling_mask is not None
    counts_C = rows.sampling_mask.offsets_T1.diff()
    return torch.repeat_interleave(torch.arange(len(counts_C), device=counts_C.device), counts_C)


def _is_missing(rows: Rows) -> Tensor:
    """bool [C]: the target is not among its row's kept ids."""
    assert rows.sampling_mask is not None
    row_K = _kept_rows(rows)
    is_target_K = (rows.sampling_mask.token_ids_K == rows.target_ids_T[row_K]).to(torch.int64)
    return torch.zeros_like(rows.target_ids_T).index_add_(0, row_K, is_target_K) == 0


def _kept_log_total(rows: Rows, t_K: Tensor, t_target_C: Tensor, log_total_C: Tensor) -> Tensor:
    """log sum exp t over the kept ids and the target; over the whole row where no id is given."""
    assert rows.sampling_mask is not None
    row_K = _kept_rows(rows)
    top_C = t_target_C.scatter_reduce(0, row_K, t_K, "amax")
    own_C = torch.where(_is_missing(rows), (t_target_C - top_C).exp(), 0.0)
    kept_C = top_C + own_C.index_add(0, row_K, (t_K - top_C[row_K]).exp()).log()
    return torch.where(rows.sampling_mask.offsets_T1.diff() > 0, kept_C, log_total_C)


def _scores_torch(rows: Rows) -> tuple[Tensor, Tensor]:
    num_rows, device = len(rows.target_ids_T), rows.logits_TV.device
    score_3T, state_4T = (
        torch.empty(3, num_rows, device=device),
        torch.zeros(4, num_rows, device=device),
    )
    for chunk in rows.chunks():
        forward = forward_torch(rows[chunk])
        for i, x_C in enumerate((forward.logprob_C, forward.entropy_C, forward.lse_C)):
            score_3T[i, chunk] = x_C
        state_4T[1, chunk] = torch.where(rows.target_ids_T[chunk] >= 0, forward.log_total_C, 0.0)
    return score_3T, state_4T


def _gradient_torch(
    rows: Rows,
    score_3T: Tensor,
    state_4T: Tensor,
    dlogprob_T: Tensor,
    dentropy_T: Tensor | None,
    out_TV: Tensor,
) -> None:
    for chunk in rows.chunks():
        part = rows[chunk]
        is_row_C = part.target_ids_T >= 0
        a_C = torch.where(is_row_C, -dlogprob_T[chunk] / part.temperature_T, 0.0)
        c_C = (
            None
            if dentropy_T is None
            else torch.where(is_row_C, -dentropy_T[chunk] / part.temperature_T, 0.0)
        )
        forward = forward_torch(part)
        # The sum that was handed in may be that of more vocabulary than these rows hold.
        log_total_C = state_4T[1, chunk]
        kept_C = log_total_C if rows.sampling_mask is None else forward.kept_log_total_C
        forward = replace(
            forward, log_total_C=log_total_C, kept_log_total_C=kept_C, entropy_C=score_3T[1, chunk]
        )
        backward_torch(forward, a_C, c_C, out_TV[chunk])


def scores(rows: Rows, impl: str) -> tuple[Tensor, Tensor]:
    """([3, T] fp32: logp, entropy, lse; [4, T]: the state that `write_gradient` takes).
    Differentiable by the logits in the first two, by a second read of the logits. State: the
    largest logit, log sum exp of z - its z, and both for the kept set; the torch reference uses the
    second alone.
    """
    kept_ids, kept_offsets = (
        (None, None)
        if rows.sampling_mask is None
        else (rows.sampling_mask.token_ids_K, rows.sampling_mask.offsets_T1)
    )
    result: tuple[Tensor, Tensor] = _scores_op(
        rows.logits_TV,
        rows.target_ids_T,
        rows.temperature_T,
        rows.softcap,
        kept_ids,
        kept_offsets,
        impl,
    )
    return result


def compute_scores(rows: Rows, impl: str) -> tuple[Tensor, Tensor]:
    """`scores` without the operator around it."""
    if impl == "torch":
        return _scores_torch(rows)
    from flowkernels import rows_triton

    return rows_triton.scores(rows)


def write_gradient(
    rows: Rows,
    score_3T: Tensor,
    state_4T: Tensor,
    dlogprob_T: Tensor,
    dentropy_T: Tensor | None,
    impl: str,
    out_TV: Tensor,
) -> None:
    """The gradient by the logits, into `out_TV`, which may be the logits themselves."""
    if impl == "torch":
        _gradient_torch(rows, score_3T, state_4T, dlogprob_T, dentropy_T, out_TV)
    else:
        from flowkernels import rows_triton

        rows_triton.gradient(rows, score_3T[1], state_4T, dlogprob_T, dentropy_T, out_TV)


@torch.library.custom_op("flowkernels::scores", mutates_args=())
def _scores_op(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    return compute_scores(rows, impl)


@_scores_op.register_fake
def _(logits: Tensor, targets: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    size = targets.shape[0]
    return logits.new_empty((3, size), dtype=torch.float32), logits.new_empty(
        (4, size), dtype=torch.float32
    )


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, targets, temperature, ctx.softcap, kept_ids, kept_offsets, ctx.impl = inputs
    ctx.save_for_backward(logits, targets, temperature, kept_ids, kept_offsets, *output)


def _scores_backward(ctx: Any, dscore_3T: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    logits, targets, temperature, kept_ids, kept_offsets, score_3T, state_4T = ctx.saved_tensors
    dlogits: Tensor = _gradient_op(
        logits,
        targets,
        temperature,
        ctx.softcap,
        kept_ids,
        kept_offsets,
        score_3T,
        state_4T,
        dscore_3T.contiguous(),
        ctx.impl,
    )
    return dlogits, None, None, None, None, None, None


_scores_op.register_autograd(_scores_backward, setup_context=_save_scores)


@torch.library.custom_op("flowkernels::gradient", mutates_args=())
def _gradient_op(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
    score: Tensor,
    state: Tensor,
    dscore: Tensor,
    impl: str,
) -> Tensor:
    out_TV = logits.new_empty(logits.shape)
    rows = make_rows(logits, targets, temperature, softcap, kept_ids, kept_offsets)
    write_gradient(rows, score, state, dscore[0], dscore[1], impl, out_TV)
    return out_TV


@_gradient_op.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape)


def make_rows(
    logits: Tensor,
    targets: Tensor,
    temperature: Tensor,
    softcap: float,
    kept_ids: Tensor | None,
    kept_offsets: Tensor | None,
) -> Rows:
    sampling_mask = (
        None if kept_ids is None or kept_offsets is None else SamplingMask(kept_ids, kept_offsets)
    )
    return Rows(logits, targets, temperature, softcap, sampling_mask)
