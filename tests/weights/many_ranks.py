"""Several publishers of one model in one process: threads that cut plain tensors by rows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

from torch import Tensor
from weight_samples import chain

from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.format.tensor_shards import TensorShard, spec_of
from flowtrain.weights.publish import publisher as module


@dataclass
class Meeting:
    """A place where the ranks exchange their texts."""

    size: int
    texts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [""] * self.size
        self.barrier = threading.Barrier(self.size, timeout=60)


@dataclass(frozen=True)
class ThreadRank:
    """See `Ranks`."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def gather_text(self, text: str) -> list[str]:
        self.meeting.texts[self.rank] = text
        self.meeting.barrier.wait()
        found = list(self.meeting.texts)
        self.meeting.barrier.wait()
        return found


def rows_of(tensors: dict[str, Tensor], _: object, rank: int, num_ranks: int) -> list[TensorShard]:
    """As torch.chunk cuts; a rank may get none of a short tensor."""
    found = []
    for name, tensor in sorted(tensors.items()):
        chunks = tensor.chunk(num_ranks)
        first = sum(chunk.numel() for chunk in chunks[:rank]) * tensor.element_size() // 2
        if rank < len(chunks):
            found.append(TensorShard(name, spec_of(name, tensor), first, chunks[rank]))
    return found


def publish_together(
    store: WeightStore, num_ranks: int, versions: range, resume: bool = False, level: int = 1
) -> None:
    """Publish the chain's versions by so many ranks; the first exception of a rank is raised."""
    meeting = Meeting(num_ranks)

    def run(rank: int) -> None:
        publisher = Publisher(store, PublishOptions(level=level), ThreadRank(rank, meeting))
        if resume:
            assert publisher.resume(chain(versions[0] - 1), versions[0] - 1)
        for version in versions:
            publisher.publish(chain(version), version)

    with mock.patch.object(module, "local_shards", rows_of), ThreadPoolExecutor(num_ranks) as pool:
        for done in [pool.submit(run, rank) for rank in range(num_ranks)]:
            done.result()
