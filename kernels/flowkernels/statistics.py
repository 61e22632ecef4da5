"""What people log of a policy loss, reduced on the device: no value is read by the host."""

from __future__ import annotations

import torch
from torch import Tensor

NAMES = (
    "num_tokens_sum",
    "weight_sum",
    "entropy_sum",
    "kl_sum",
    "ratio_sum",
    "ratio_max",
    "ratio_min",
    "clipped_low_sum",
    "clipped_high_sum",
    "mismatch_sum",
)
NUM_BINS = 16
BIN_WIDTH = 0.05
"""Bin i of the histogram holds the ratios in [exp(0.05 (i - 8)), exp(0.05 (i - 7))); the first and
the last are open to their side."""
NUM_STATISTICS = len(NAMES) + NUM_BINS


def reduce(
    column_7T: Tensor, weight_T: Tensor, target_ids_T: Tensor, impl: str
) -> tuple[Tensor, Tensor]:
    """(loss, statistics [26]) of the columns of `row_loss` over the rows that count."""
    if impl == "torch":
        return reduce_torch(column_7T, weight_T, target_ids_T)
    from flowkernels import loss_triton

    return loss_triton.statistics(column_7T, weight_T, target_ids_T)


def reduce_torch(
    column_7T: Tensor, weight_T: Tensor, target_ids_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Reference of the kernel."""
    counts_T = (weight_T != 0) & (target_ids_T >= 0)
    # where, not a product: 0 * inf of a masked row must stay 0.
    loss_T, _, entropy_T, log_ratio_T, kl_T, clipped_T = torch.where(counts_T, column_7T[:6], 0.0)
    ratio_T = log_ratio_T.exp()
    infinity = ratio_T.new_full((1,), torch.inf)  # keeps max and min defined where no token counts
    bins_T = (log_ratio_T / BIN_WIDTH).clamp(
        -NUM_BINS / 2, NUM_BINS / 2 - 1
    ).floor() + NUM_BINS // 2
    histogram = (
        (bins_T[:, None] == torch.arange(NUM_BINS, device=bins_T.device)) & counts_T[:, None]
    ).sum(0)
    is_low_T = log_ratio_T < 0
    values = (
        counts_T.sum(),
        torch.where(counts_T, weight_T, 0.0).sum(),
        entropy_T.sum(),
        kl_T.sum(),
        torch.where(counts_T, ratio_T, 0.0).sum(),
        torch.cat([torch.where(counts_T, ratio_T, -torch.inf), -infinity]).max(),
        torch.cat([torch.where(counts_T, ratio_T, torch.inf), infinity]).min(),
        torch.where(is_low_T, clipped_T, 0.0).sum(),
        torch.where(is_low_T, 0.0, clipped_T).sum(),
        log_ratio_T.abs().sum(),
    )
    return loss_T.sum(), torch.cat(
        [torch.stack([value.float() for value in values]), histogram.float()]
    )


def by_name(statistics: Tensor) -> dict[str, Tensor]:
    """Views: 0-d by name, and `ratio_histogram_sum` [16]."""
    named = dict(zip(NAMES, statistics[: len(NAMES)].unbind(), strict=True))
    return {**named, "ratio_histogram_sum": statistics[len(NAMES) :]}
