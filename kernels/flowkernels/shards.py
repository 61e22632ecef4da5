"""A head whose vocabulary is spread over a process group: log-probs and entropy of the whole from
those of the parts.

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

from flowkernels.rows import Rows


@dataclass(frozen=True, slots=True)
class VocabParallel:
    """The part of the vocabulary that this rank holds. Example: VocabParallel(group, start=rank *
    75968, num_vocab=151936) on two ranks.
    """

    group: dist.ProcessGroup
    start: int
    num_vocab: int
    """Of all parts together."""

    def local_ids(self, target_ids_C: Tensor, size: int) -> Tensor:
        """Ids within this part; at or above `size` for targets that others hold; ignored rows stay
        negative.
        """
        local_C = target_ids_C - self.start
        is_here_C = (local_C >= 0) & (local_C < size)
        # An id beyond the whole vocabulary stays beyond it: 2 * num_vocab marks it.
        elsewhere_C = torch.where(target_ids_C < self.num_vocab, self.num_vocab, 2 * self.num_vocab)
        return torch.where(
            target_ids_C < 0, target_ids_C, torch.where(is_here_C, local_C, elsewhere_C)
        )


def merge_scores(
    shard: VocabParallel, rows: Rows, score_3C: Tensor, state_4C: Tensor
) -> tuple[Tensor, Tensor]:
    """Collective. Scores of the whole vocabulary, and this part's state with the whole sum in it;
    `rows` have this part's target ids.
    """
    logprob_C, entropy_C, lse_C = score_3C
    targets_C = rows.target_ids_T
    top_C = lse_C.clone()
    dist.all_reduce(top_C, dist.ReduceOp.MAX, shard.group)
    base_C = torch.where(top_C == -torch.inf, 0.0, top_C)
    share_C = (lse_C - base_C).exp()
    # A part with no probability at all has an entropy of NaN and a share of 0.
    moment_C = torch.where(share_C == 0, 0.0, share_C * (entropy_C + base_C - lse_C))
    target_C = torch.where(targets_C < rows.logits_TV.shape[1], logprob_C + lse_C - base_C, 0.0)
    target_C = torch.where(
        targets_C < 2 * shard.num_vocab, target_C, torch.nan
    )  # as from a head in one piece
    sums_3C = torch.stack([share_C, moment_C, target_C])
    dist.all_reduce(sums_3C, dist.ReduceOp.SUM, shard.group)
    total_C, moment_C, target_C = sums_3C
    log_total_C = total_C.log()
    merged_3C = torch.stack(
        [target_C - log_total_C, moment_C / total_C + log_total_C, base_C + log_total_C]
    )
    state_4C = state_4C.clone()
    # Where this part has no probability at all, any finite sum will do.
    state_4C[1] = torch.where(lse_C == -torch.inf, 0.0, state_4C[1] + base_C - lse_C + log_total_C)
    state_4C[2:] = state_4C[:2]
    return torch.where(targets_C >= 0, merged_3C, 0.0), state_4C
