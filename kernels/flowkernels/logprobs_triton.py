"""The kernels of `logprobs.py` in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowkernels.logprobs import Score, Slopes, State
from flowkernels.rows_triton import (
    GRADIENT_LAUNCH,
    LN2,
    LOG2E,
    SCORE_LAUNCH,
    backward_row,
    grid,
    mask_statistics,
    row_arguments,
    row_statistics,
    target_logit,
)
from flowkernels.targets import Targets

LOGPROB = tl.constexpr(Score.LOGPROB)
ENTROPY = tl.constexpr(Score.ENTROPY)
LSE = tl.constexpr(Score.LSE)
NUM_SCORES = tl.constexpr(Score.NUM)
TOP = tl.constexpr(State.TOP)
LOG_TOTAL = tl.constexpr(State.LOG_TOTAL)
MASKED_TOP = tl.constexpr(State.MASKED_TOP)
MASKED_LOG_TOTAL = tl.constexpr(State.MASKED_LOG_TOTAL)
NUM_STATES = tl.constexpr(State.NUM)


@triton.jit
def score_kernel(
    logits_ptr, targets_ptr, temperature_ptr, mask_ids_ptr, mask_offsets_ptr, mask_copy_ptr,
    score_ptr, state_ptr, num_rows, num_vocab, row_stride, temperature_stride, softcap,
    IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Writes score [3, T] and state [4, T] of every row."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        target = tl.load(targets_ptr + row)
        if target >= 0:
            row_ptr = logits_ptr + row * tl.cast(row_stride, tl.int64)
            temperature = tl.load(temperature_ptr + row * temperature_stride)
            scale = 1.0 / temperature * LOG2E
            top, log2_total, entropy = row_statistics(
                row_ptr, num_vocab, scale, softcap=softcap, IS_ALIGNED=IS_ALIGNED, LANES=LANES,
                WIDTH=WIDTH, EVICTION="evict_first",
            )  # fmt: skip
            x_target = target_logit(row_ptr, target, num_vocab, softcap)
            masked_top, masked_log2_total = top, log2_total
            if mask_ids_ptr is not None:
                begin = tl.load(mask_offsets_ptr + row)
                end = tl.load(mask_offsets_ptr + row + 1)
                if end > begin:
                    mask = (mask_ids_ptr, mask_copy_ptr, begin, end)
                    masked_top, masked_log2_total = mask_statistics(
                        row_ptr, mask, target, x_target=x_target, num_vocab=num_vocab, scale=scale,
                        softcap=softcap, BLOCK=LANES,
                    )  # fmt: skip
            logp = ((x_target * scale - masked_top) - masked_log2_total) * LN2
            tl.store(score_ptr + LOGPROB * num_rows + row, logp)
            tl.store(score_ptr + ENTROPY * num_rows + row, entropy)
            tl.store(score_ptr + LSE * num_rows + row, (top + log2_total) * LN2)
            tl.store(state_ptr + TOP * num_rows + row, top)
            tl.store(state_ptr + LOG_TOTAL * num_rows + row, log2_total * LN2)
            tl.store(state_ptr + MASKED_TOP * num_rows + row, masked_top)
            tl.store(state_ptr + MASKED_LOG_TOTAL * num_rows + row, masked_log2_total * LN2)
        else:
            for i in tl.static_range(NUM_SCORES):
                tl.store(score_ptr + i * num_rows + row, 0.0)
            for i in tl.static_range(NUM_STATES):
                tl.store(state_ptr + i * num_rows + row, 0.0)


@triton.jit
def gradient_kernel(
    logits_ptr, out_ptr, targets_ptr, temperature_ptr, mask_ids_ptr, mask_offsets_ptr,
    mask_copy_ptr, score_ptr, state_ptr, dlogprob_ptr, dentropy_ptr, num_rows, num_vocab,
    row_stride, out_stride, temperature_stride, softcap,
    IS_ALIGNED: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """The gradient with respect to the logits for any upstream gradient of logp and entropy; `out`
    may be the logits.
    """
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = logits_ptr + row * tl.cast(row_stride, tl.int64)
        row_out_ptr = out_ptr + row * tl.cast(out_stride, tl.int64)
        target = tl.load(targets_ptr + row)
        temperature = tl.load(temperature_ptr + row * temperature_stride)
        scale = 1.0 / temperature * LOG2E
        a = tl.where(target >= 0, -tl.load(dlogprob_ptr + row) / temperature, 0.0)
        c = 0.0
        if dentropy_ptr is not None:
            c = tl.where(target >= 0, -tl.load(dentropy_ptr + row) / temperature, 0.0)
        begin, end = tl.to_tensor(0).to(tl.int64), tl.to_tensor(0).to(tl.int64)
        x_target = target_logit(row_ptr, target, num_vocab, softcap)
        top = tl.load(state_ptr + TOP * num_rows + row)
        log2_total = tl.load(state_ptr + LOG_TOTAL * num_rows + row) * LOG2E
        masked_top = tl.load(state_ptr + MASKED_TOP * num_rows + row)
        masked_log2_total = tl.load(state_ptr + MASKED_LOG_TOTAL * num_rows + row) * LOG2E
        if mask_ids_ptr is not None:
            begin = tl.load(mask_offsets_ptr + row)
            end = tl.load(mask_offsets_ptr + row + 1)
            if end > begin:  # for the copy of the logits
                mask_statistics(
                    row_ptr, (mask_ids_ptr, mask_copy_ptr, begin, end), target, x_target=x_target,
                    num_vocab=num_vocab, scale=scale, softcap=softcap, BLOCK=LANES,
                )  # fmt: skip
        entropy = tl.load(score_ptr + ENTROPY * num_rows + row)
        backward_row(
            row_ptr, row_out_ptr, num_vocab, mask=(mask_ids_ptr, mask_copy_ptr, begin, end),
            target=target, x_target=x_target, full=(top, log2_total, entropy),
            masked=(masked_top, masked_log2_total), a=a, c=c, scale=scale, softcap=softcap,
            HAS_ENTROPY=dentropy_ptr is not None, IS_ALIGNED=IS_ALIGNED, LANES=LANES, WIDTH=WIDTH,
        )  # fmt: skip


def scores(logits_TV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Launcher: (`Score` rows [3, T], `State` rows [4, T])."""
    score_3T = torch.empty(Score.NUM, len(targets), device=logits_TV.device)
    state_4T = torch.empty(State.NUM, len(targets), device=logits_TV.device)
    if len(targets):
        score_kernel[grid(SCORE_LAUNCH, logits_TV)](
            **row_arguments(logits_TV, targets, SCORE_LAUNCH),
            score_ptr=score_3T,
            state_ptr=state_4T,
        )
    return score_3T, state_4T


def gradient(
    logits_TV: Tensor,
    targets: Targets,
    scored: tuple[Tensor, Tensor],
    slopes: Slopes,
    out_TV: Tensor,
) -> None:
    """Launcher; `out_TV` may be the logits."""
    score_3T, state_4T = scored
    dlogprob_T, dentropy_T = slopes
    assert out_TV.stride(1) == 1
    assert all(x.is_contiguous() for x in (score_3T, state_4T, dlogprob_T))
    if len(targets):
        gradient_kernel[grid(GRADIENT_LAUNCH, logits_TV)](
            **row_arguments(logits_TV, targets, GRADIENT_LAUNCH, out_TV),
            out_ptr=out_TV,
            out_stride=out_TV.stride(0),
            score_ptr=score_3T,
            state_ptr=state_4T,
            dlogprob_ptr=dlogprob_T,
            dentropy_ptr=dentropy_T,
        )
