"""A head whose vocabulary is spread over a process group: the log-probs and the entropy of the
whole, from those of the parts.

Each rank holds rows [start, start + len) of the head's weight and all hidden states. Two
collectives of [C] and [3, C] numbers per chunk: with lse_l and H_l those of a part, M = max lse_l
and e_l = exp(lse_l - M),

    lse = M + log sum e_l,   H = sum e_l (H_l + M - lse_l) / sum e_l + log sum e_l,   logp = logp_l
    + lse_l - M - log sum e_l

with the part l that holds the target. All terms of H are positive, so nothing cancels. C: rows of a
chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from flowkernels.logprobs import Score, State
from flowkernels.targets import Targets


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """The part of the vocabulary that this rank holds.

    Example: VocabParallel(group, start=rank * 75968, num_vocab=151936) on two ranks.
    """

    group: dist.ProcessGroup
    start: int
    num_vocab: int
    """The size of the whole vocabulary."""

    def local_ids(self, target_ids_C: Tensor, size: int) -> Tensor:
        """Return ids within this part: at or above `size` for targets that other ranks hold, and
        still negative for ignored rows.
        """
        local_C = target_ids_C - self.start
        is_here_C = (local_C >= 0) & (local_C < size)
        # An id beyond the whole vocabulary stays beyond it: 2 * num_vocab marks it.
        elsewhere_C = torch.where(target_ids_C < self.num_vocab, self.num_vocab, 2 * self.num_vocab)
        return torch.where(
            target_ids_C < 0, target_ids_C, torch.where(is_here_C, local_C, elsewhere_C)
        )


def merge_scores(
    shard: VocabParallel, num_local: int, targets: Targets, score_3C: Tensor, state_4C: Tensor
) -> tuple[Tensor, Tensor]:
    """Collective. Return the scores of the whole vocabulary, and this part's state with the whole
    sum in it; `targets` have the ids of this part, which holds `num_local` of them.
    """
    logprob_C, entropy_C, lse_C = score_3C
    top_C = lse_C.clone()
    dist.all_reduce(top_C, dist.ReduceOp.MAX, shard.group)
    base_C = torch.where(top_C == -torch.inf, 0.0, top_C)
    share_C = (lse_C - base_C).exp()
    # A part with no probability at all has an entropy of NaN and a share of 0.
    moment_C = torch.where(share_C == 0, 0.0, share_C * (entropy_C + base_C - lse_C))
    target_C = torch.where(targets.ids_T < num_local, logprob_C + lse_C - base_C, 0.0)
    # An id beyond the whole vocabulary gives NaN, as from a head in one piece.
    target_C = torch.where(targets.ids_T < 2 * shard.num_vocab, target_C, torch.nan)
    sums_3C = torch.stack([share_C, moment_C, target_C])
    dist.all_reduce(sums_3C, dist.ReduceOp.SUM, shard.group)
    total_C, moment_C, target_C = sums_3C
    log_total_C = total_C.log()
    merged_3C = torch.empty_like(score_3C)
    merged_3C[Score.LOGPROB] = target_C - log_total_C
    merged_3C[Score.ENTROPY] = moment_C / total_C + log_total_C
    merged_3C[Score.LSE] = base_C + log_total_C
    local_C = state_4C[State.LOG_TOTAL]
    # Where this part has no probability at all, any finite sum will do.
    whole_C = torch.where(lse_C == -torch.inf, 0.0, local_C + base_C - lse_C + log_total_C)
    state_4C = state_4C.clone()
    state_4C[State.LOG_TOTAL] = state_4C[State.MASKED_LOG_TOTAL] = whole_C
    state_4C[State.MASKED_TOP] = state_4C[State.TOP]
    return torch.where(targets.ids_T >= 0, merged_3C, 0.0), state_4C
