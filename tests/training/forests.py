"""Checks of the forest of a row by the ends of its subtrees."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor


def tree_bounds(subtree_end_N: Tensor) -> list[int]:
    """Edges of the trees of a row: [0, end of the first tree, ..., N]. Tokens of different trees
    never see each other.
    """
    ends = subtree_end_N.tolist()
    bounds = [0]
    while bounds[-1] < len(ends):
        bounds.append(ends[bounds[-1]])
    return bounds


def is_valid_tree(subtree_end_N: Tensor) -> bool:
    """Every subtree holds at least its own token and lies within its parent's: the condition for
    the array to describe a forest.
    """
    ends = subtree_end_N.tolist()
    open_ends: list[int] = []
    for i, end in enumerate(ends):
        while open_ends and open_ends[-1] <= i:
            open_ends.pop()
        if not i < end <= (open_ends[-1] if open_ends else len(ends)):
            return False
        open_ends.append(end)
    return all(a < b for a, b in pairwise(tree_bounds(subtree_end_N)))
