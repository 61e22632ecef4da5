"""Digests without a store are those that a publisher records."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.format.tensor_shards import digests_of


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_digests_are_the_publishers(tmp_path: Path, dtype: torch.dtype | None) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "b": torch.randn(7, 3, generator=generator),
        "a": torch.randn(4, 2, generator=generator),
        "none": torch.zeros(0, 4),
    }
    store = WeightStore(tmp_path)
    publisher = Publisher(store, PublishOptions(dtype))
    publisher.publish(tensors, 0)
    assert digests_of(tensors, dtype) == store.manifest(0).digests
    tensors["a"][1, 1] += 1
    assert digests_of(tensors, dtype) != store.manifest(0).digests
    publisher.publish(tensors, 1)
    assert digests_of(tensors, dtype) == store.manifest(1).digests
