"""Small weights of every kind, and a chain of versions that differ a little."""

from __future__ import annotations

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def weights(seed: int = 0) -> Weights:
    """fp32 and bf16 with special values, a transposed, an empty one and a scalar."""
    rng = torch.Generator().manual_seed(seed)
    special = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, 3.4e38, 1e-40]
    )
    any_bits = torch.randint(-(2**15), 2**15, (500,), generator=rng, dtype=torch.int16).view(
        torch.bfloat16
    )
    return {
        "fp32": torch.cat([special, torch.randn(100, generator=rng)]),
        "bf16": torch.cat([special.bfloat16(), any_bits]),
        "transposed": torch.randn(5, 7, generator=rng).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(float(seed)),
    }


def chain(version: int) -> Weights:
    """Weights of 72,000 words of which each version changes up to 200; "still" never changes."""
    found = {
        "matrix": torch.randn(200, 350, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "vector": torch.randn(1000, generator=torch.Generator().manual_seed(2)).bfloat16(),
        "still": torch.arange(500, dtype=torch.float32),
    }
    for each in range(1, version + 1):
        rng = torch.Generator().manual_seed(each)
        for name, number in (("matrix", 190), ("vector", 10)):
            flat = found[name].view(torch.int16).view(-1)
            at = torch.randint(0, len(flat), (number,), generator=rng)
            flat[at] += torch.randint(-2, 3, (number,), generator=rng, dtype=torch.int16)
    return found


def same_bits(ours: Weights, theirs: Weights) -> bool:
    """Type, shape and bits; NaN equals NaN of the same bits only, and 0 is not -0."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().view(-1).view(torch.int16)

    same = [
        (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))
        for a, b in ((ours[k], theirs[k]) for k in ours)
    ]
    return ours.keys() == theirs.keys() and all(same)


def empty_like(found: Weights) -> Weights:
    """Zeros to load into."""
    return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in found.items()}
