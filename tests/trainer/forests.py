"""Forests of rows by the ends of their subtrees."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def tree_bounds(subtree_end_N: Tensor) -> list[int]:
    """Edges of the trees of a row, whose tokens never see each other."""
    ends = subtree_end_N.tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return bounds


def is_valid_tree(subtree_end_N: Tensor) -> bool:
    """Every subtree holds its own token and lies within its parent's: a forest."""
    ends = subtree_end_N.tolist()
    open_ends: list[int] = []
    for i, end in enumerate(ends):
        while open_ends and open_ends[-1] <= i:
            open_ends.pop()
        if not i < end <= (open_ends[-1] if open_ends else len(ends)):
            return False
        open_ends.append(end)
    return all(a < b for a, b in pairwise(tree_bounds(subtree_end_N)))


def random_forest(num_tokens: int, seed: int, deep: float = 0.5) -> Tensor:
    """Any valid `subtree_end`: each token's subtree ends anywhere within its parent's; the
    smaller `deep`, the longer the branches.
    """
    rng = torch.Generator().manual_seed(seed)
    ends: list[int] = []
    still_open = [num_tokens]
    for i in range(num_tokens):
        while len(still_open) > 1 and still_open[-1] <= i:
            still_open.pop()
        most = still_open[-1]
        share = float(torch.rand(1, generator=rng)) ** deep
        still_open.append(i + 1 + int(share * (most - i - 1) + 0.5))
        ends.append(still_open[-1])
    return torch.tensor(ends)
