"""The shape of a token tree: where subtrees end, its runs without a branch, the order of siblings.

Tokens lie depth first, and token i's subtree is those from i to before subtree_end[i].
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens start to end - 1 of the row, each the only child of the one before it."""

    start: int
    end: int
    ancestors: tuple[tuple[int, int], ...]
    """Token ranges from the root of the tree to the parent."""

    @property
    def num_queries(self) -> int:
        return self.end - self.start

    @property
    def num_keys(self) -> int:
        return self.num_queries + sum(end - start for start, end in self.ancestors)


def subtree_ends(position_ids: Sequence[int]) -> list[int]:
    """Depth first, a token's subtree ends at the next token that is not deeper than it."""
    ends = [len(position_ids)] * len(position_ids)
    still_open: list[int] = []
    for i, depth in enumerate(position_ids):
        while still_open and position_ids[still_open[-1]] >= depth:
            ends[still_open.pop()] = i
        still_open.append(i)
    return ends


def segments(subtree_end: Sequence[int]) -> list[Segment]:
    """The runs of tokens without a branch, in order: within one, all subtrees end at the same
    place.
    """
    found: list[Segment] = []
    path: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(subtree_end) + 1):
        if i < len(subtree_end) and subtree_end[i] == subtree_end[start]:
            continue
        while path and subtree_end[path[-1][0]] <= start:
            path.pop()
        found.append(Segment(start, i, tuple(path)))
        path.append((start, i))
        start = i
    return found


def heaviest_first(subtree_end: Sequence[int]) -> Tensor:
    """Return the tokens, int64 [N], with siblings laid out by the size of their subtrees, the
    largest first; it is a depth-first order again.

    FlexAttention has fewer blocks that are seen in part: at 10 turns of AgentFlow's shape 2,100
    instead of 4,973.
    """
    below: dict[int, list[Segment]] = defaultdict(list)  # by the end of their parent
    for run in segments(subtree_end):
        below[run.ancestors[-1][1] if run.ancestors else 0].append(run)

    def last_to_first(parent: int) -> list[Segment]:
        # Of equals the first stays first.
        size = {run.start: subtree_end[run.start] - run.start for run in below[parent]}
        return sorted(below[parent], key=lambda run: (size[run.start], -run.start))

    order: list[int] = []
    waiting = last_to_first(0)
    while waiting:
        run = waiting.pop()
        order += range(run.start, run.end)
        waiting += last_to_first(run.end)
    return torch.tensor(order, dtype=torch.int64)
