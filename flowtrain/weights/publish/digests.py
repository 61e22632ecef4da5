"""Digests of weights as a publisher would record them, without a store."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flowtrain.weights.format.layout import Digest, add_up
from flowtrain.weights.format.tensor_shards import digest_of, local_shards
from flowtrain.weights.ranks import Alone, Ranks, gather


def digests_of(
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    ranks: Ranks | None = None,
    num_threads: int = 1,
) -> dict[str, Digest]:
    """Compute the digest of every whole tensor; collective over `ranks`.

    Args:
        tensors: plain, or DTensors sharded by rows over the ranks, as for `Publisher.publish`.
        dtype: the dtype that they are cast to; None: their own.
    """
    ranks = ranks or Alone()
    shards = local_shards(tensors, dtype, ranks.rank, num_ranks=ranks.size)
    own = {each.name: digest_of(each.rows(), each.first, num_threads) for each in shards}
    return add_up(sorted(tensors), gather(ranks, own))
