"""The kernels of `logprobs.py` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.logprobs import Score, State
from flowkernels.row_gradients_triton import backward_row
from flowkernels.rows_triton import (
    LN2,
    LOG2E,
    Mask,
    Row,
    RowSlopes,
    ScoredRow,
    Statistics,
    add_mask,
    one_pass,
    row_arguments,
    score_row,
    store_all,
)
from flowkernels.targets import UNSPECIALISED, Slopes, Targets

ENTROPY = tl.constexpr(Score.ENTROPY)
NUM_SCORES = tl.constexpr(Score.NUM)
TOP = tl.constexpr(State.TOP)
LOG_TOTAL = tl.constexpr(State.LOG_TOTAL)
MASKED_TOP = tl.constexpr(State.MASKED_TOP)
MASKED_LOG_TOTAL = tl.constexpr(State.MASKED_LOG_TOTAL)
NUM_STATES = tl.constexpr(State.NUM)


@triton.jit(do_not_specialize=UNSPECIALISED)
def score_kernel(
    logits_ptr, targets_ptr, temperature_ptr, mask_ids_ptr, mask_offsets_ptr, mask_copy_ptr,
    score_ptr, state_ptr, num_rows, num_vocab, row_stride, temperature_stride, softcap,
    ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write score [3, T] and state [4, T] of every row."""
    mask = Mask(mask_ids_ptr, mask_offsets_ptr, mask_copy_ptr)
    index = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + index)
    if target >= 0:
        row_ptr = logits_ptr + index * row_stride
        temperature = tl.load(temperature_ptr + index * temperature_stride)
        row = Row(row_ptr, num_vocab, 1.0 / temperature * LOG2E, softcap)
        logp, scored, _ = score_row(
            row, index, target, mask=mask, ALIGNMENT=ALIGNMENT,
            POLICY="evict_first", LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip
        top, log2_total, entropy = scored.full
        lse = (top + log2_total) * LN2
        # In the order of `Score` and `State`.
        store_all(score_ptr + index, num_rows, (logp, entropy, lse), NUM_SCORES)
        masked = scored.masked
        state = (top, log2_total * LN2, masked.top, masked.log2_total * LN2)
        store_all(state_ptr + index, num_rows, state, NUM_STATES)
    else:
        for i in tl.static_range(NUM_SCORES):
            tl.store(score_ptr + i * num_rows + index, 0.0)
        for i in tl.static_range(NUM_STATES):
            tl.store(state_ptr + i * num_rows + index, 0.0)


@triton.jit(do_not_specialize=UNSPECIALISED)
def gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, temperature_ptr, mask_ids_ptr, mask_offsets_ptr,
    mask_copy_ptr, score_ptr, state_ptr, dlogprob_ptr, dentropy_ptr, dlse_ptr, num_rows, num_vocab,
    row_stride, out_stride, temperature_stride, softcap, ALIGNMENT: tl.constexpr,
    LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradient by the logits for any upstream gradient of the scores; `out` may be the
    logits.
    """
    mask = Mask(mask_ids_ptr, mask_offsets_ptr, mask_copy_ptr)
    index = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + index)
    temperature = tl.load(temperature_ptr + index * temperature_stride)
    row_ptr = logits_ptr + index * row_stride
    row = Row(row_ptr, num_vocab, 1.0 / temperature * LOG2E, softcap)
    a = tl.where(target >= 0, -tl.load(dlogprob_ptr + index) / temperature, 0.0)
    c, d = None, None
    if dentropy_ptr is not None:
        c = tl.where(target >= 0, -tl.load(dentropy_ptr + index) / temperature, 0.0)
    if dlse_ptr is not None:
        d = tl.where(target >= 0, tl.load(dlse_ptr + index) / temperature, 0.0)
    top = tl.load(state_ptr + TOP * num_rows + index)
    log2_total = tl.load(state_ptr + LOG_TOTAL * num_rows + index) * LOG2E
    full = Statistics(top, log2_total, tl.load(score_ptr + ENTROPY * num_rows + index))
    masked_top = tl.load(state_ptr + MASKED_TOP * num_rows + index)
    masked_log2_total = tl.load(state_ptr + MASKED_LOG_TOTAL * num_rows + index) * LOG2E
    # For the copy of the mask's logits alone: the statistics are those of the forward pass.
    copied = add_mask(row, index, target, mask=mask, full=full, BLOCK=LANES)
    masked = Statistics(masked_top, masked_log2_total, None)
    scored = ScoredRow(copied.x_target, full, masked, copied.begin, copied.end)
    row_out_ptr = out_ptr + index * out_stride
    backward_row(
        row, row_out_ptr, target, scored=scored, mask=mask, slopes=RowSlopes(a, c, d),
        last_block=None, ALIGNMENT=ALIGNMENT, LANES=LANES, WIDTH=WIDTH,
    )  # fmt: skip


def compute_scores(logits_TV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Launcher: (`Score` rows [3, T], `State` rows [4, T])."""
    score_3T = torch.empty(Score.NUM, len(targets), device=logits_TV.device)
    state_4T = torch.empty(State.NUM, len(targets), device=logits_TV.device)
    if len(targets):
        score_kernel[(len(targets),)](
            **row_arguments(one_pass(targets.softcap), logits_TV, targets),
            score_ptr=score_3T,
            state_ptr=state_4T,
        )
    return score_3T, state_4T


def write_gradient(
    logits_TV: Tensor,
    targets: Targets,
    scored: tuple[Tensor, Tensor],
    slopes: Slopes,
    out_TV: Tensor,
) -> None:
    """Launcher; `out_TV` may be the logits."""
    score_3T, state_4T = scored
    inputs = (score_3T, state_4T, slopes.logprob_T, slopes.entropy_T, slopes.lse_T)
    assert out_TV.stride(1) == 1
    assert all(x is None or x.is_contiguous() for x in inputs)
    if len(targets):
        gradient_kernel[(len(targets),)](
            **row_arguments(one_pass(targets.softcap), logits_TV, targets, out_TV),
            out_ptr=out_TV,
            out_stride=out_TV.stride(0),
            score_ptr=score_3T,
            state_ptr=state_4T,
            dlogprob_ptr=slopes.logprob_T,
            dentropy_ptr=slopes.entropy_T,
            dlse_ptr=slopes.lse_T,
        )
