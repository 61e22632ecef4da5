"""A policy loss's results per token and its statistics, reduced without a host sync."""

from __future__ import annotations

import torch
from torch import Tensor

from flowkernels.implementations import with_launcher
from flowkernels.token_loss import TokenLoss, Tokens


class Column:
    """Rows of `column_7T`, results per token; the kernels index by them too."""

    LOSS = 0
    """Times the weight."""
    LOGPROB = 1
    ENTROPY = 2
    LOG_RATIO = 3
    KL = 4
    IS_CLIPPED = 5
    HAS_GRADIENT = 6
    NUM = 7


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


def to_columns(token: TokenLoss, tokens: Tokens) -> Tensor:
    """Return the columns [7, T], see `Column`."""
    counts_T = tokens.weight_T != 0
    has_gradient_T = token.dlogprob_T != 0
    for slope_T in (token.dentropy_T, token.dlse_T, token.dsequence_T):
        has_gradient_T = has_gradient_T if slope_T is None else has_gradient_T | (slope_T != 0)
    columns = {
        Column.LOSS: torch.where(counts_T, tokens.weight_T * token.loss_T, 0.0),
        Column.LOGPROB: tokens.logprob_T,
        Column.ENTROPY: tokens.entropy_T,
        Column.LOG_RATIO: token.log_ratio_T,
        Column.KL: token.kl_T,
        Column.IS_CLIPPED: token.is_clipped_T.to(token.loss_T.dtype),
        Column.HAS_GRADIENT: (counts_T & has_gradient_T).to(token.loss_T.dtype),
    }
    return torch.stack([columns[i] for i in range(Column.NUM)])


@with_launcher("flowkernels.policy_loss_triton")
def reduce(column_7T: Tensor, weight_T: Tensor, target_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss, statistics [10]) over the tokens that count."""
    counts_T = (weight_T != 0) & (target_ids_T >= 0)
    # where, not a product: 0 * inf of a masked row must stay 0.
    column_7T = torch.where(counts_T, column_7T, 0.0)
    log_ratio_T = column_7T[Column.LOG_RATIO]
    clipped_T = column_7T[Column.IS_CLIPPED]
    ratio_T = log_ratio_T.exp()
    infinity = ratio_T.new_full((1,), torch.inf)  # keeps max and min defined where no token counts
    is_low_T = log_ratio_T < 0
    values = {
        "num_tokens_sum": counts_T.sum(),
        "weight_sum": torch.where(counts_T, weight_T, 0.0).sum(),
        "entropy_sum": column_7T[Column.ENTROPY].sum(),
        "kl_sum": column_7T[Column.KL].sum(),
        "ratio_sum": torch.where(counts_T, ratio_T, 0.0).sum(),
        "ratio_max": torch.cat([torch.where(counts_T, ratio_T, -torch.inf), -infinity]).max(),
        "ratio_min": torch.cat([torch.where(counts_T, ratio_T, torch.inf), infinity]).min(),
        "clipped_low_sum": torch.where(is_low_T, clipped_T, 0.0).sum(),
        "clipped_high_sum": torch.where(is_low_T, 0.0, clipped_T).sum(),
        "mismatch_sum": log_ratio_T.abs().sum(),
    }
    statistics = torch.stack([values[name].to(column_7T.dtype) for name in NAMES])
    return column_7T[Column.LOSS].sum(), statistics


def by_name(statistics: Tensor) -> dict[str, Tensor]:
    """Return views of the statistics, 0-d, by name."""
    return dict(zip(NAMES, statistics.unbind(), strict=True))
