"""Digests of weights as a publisher would record them, without a store."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flowkernels import digest_words
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.format.layout import Digest, add
from flowtrain.weights.format.tensor_shards import TensorShard, local_shards, to_digest
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
    own = {shard.name: _digest(shard, num_threads) for shard in shards}
    every = gather(ranks, own)
    return {
        name: add(*((each[name][0], each[name][1]) for each in every if name in each))
        for name in sorted(tensors)
    }


def _digest(shard: TensorShard, num_threads: int) -> Digest:
    if shard.source.device.type == "cpu":
        return _delta.digest(shard.u16(), first=shard.first, num_threads=num_threads)
    return to_digest(digest_words(shard.rows().view(torch.int16), shard.first))
