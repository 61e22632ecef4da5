"""A model whose loader cuts, fuses, transposes and pads as engines do, on any of several ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Toy:
    """`load_weights` of a vLLM model, in small."""

    def __init__(self, rank: int = 0, size: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        self.rank, self.size, self.kv = rank, size, min(size, 2)
        shapes = {
            "qkv": (64 // size + 32 // self.kv, 80),
            "down": (24, 96 // size),
            "turned": (20, 40),
            "table": (64 // size, 32),
        }
        rng = torch.Generator().manual_seed(rank)
        self.held = {
            name: torch.randn(shape, generator=rng).to(dtype)
            for name, shape in {**shapes, "norm": (7,), "scalar": (1,)}.items()
        }

    def load_weights(self, found: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in found:
            getattr(self, f"load_{name}")(tensor)

    def load_q(self, tensor: Tensor) -> None:
        num = 64 // self.size
        self.held["qkv"][:num].copy_(tensor.narrow(0, self.rank * num, num))

    def load_k(self, tensor: Tensor) -> None:
        """Two heads; each of four ranks has one of them."""
        num, head = 32 // self.kv, self.rank * self.kv // self.size
        self.held["qkv"][64 // self.size :].copy_(tensor.narrow(0, head * num, num))

    def load_down(self, tensor: Tensor) -> None:
        num = 96 // self.size
        self.held["down"].copy_(tensor.narrow(1, self.rank * num, num))

    def load_turned(self, tensor: Tensor) -> None:
        self.held["turned"].copy_(tensor.t())

    def load_table(self, tensor: Tensor) -> None:
        """60 rows, padded to 64."""
        num = 64 // self.size
        rows = tensor[self.rank * num : (self.rank + 1) * num]
        self.held["table"][: len(rows)].copy_(rows)
        self.held["table"][len(rows) :].fill_(0)

    def load_norm(self, tensor: Tensor) -> None:
        self.held["norm"].copy_(tensor)

    def load_scalar(self, tensor: Tensor) -> None:
        self.held["scalar"].copy_(tensor.view(1))

    def load_head(self, tensor: Tensor) -> None:
        """Another name of the table."""


SHAPES = {
    "q": (64, 80),
    "k": (32, 80),
    "down": (24, 96),
    "turned": (40, 20),
    "table": (60, 32),
    "norm": (7,),
    "scalar": (),
}


def toy_weights(version: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Each version changes one word in fifty, to any bits."""
    rng = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in SHAPES.items()}
    for each in range(1, version + 1):
        rng = torch.Generator().manual_seed(each)
        for tensor in found.values():
            words = tensor.view(-1).view(torch.int16)
            at = torch.randint(0, len(words), (1 + len(words) // 50,), generator=rng)
            words[at] = torch.randint(-(2**15), 2**15, (len(at),), generator=rng, dtype=torch.int16)
    return found


def held_by(
    found: dict[str, Tensor], rank: int, size: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Load weights with the model's own loader."""
    toy = Toy(rank, size, dtype)
    toy.load_weights(found.items())
    return toy.held
