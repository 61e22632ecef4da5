"""Batches mixed by kind of task; within a kind, earliest deadline first.

A kind's share of the batch is its weight among the waiting kinds; a kind with too few groups leaves
the rest of its share to the others. Every kind gets the whole part of its share. The remaining
groups are drawn with the remainders as probabilities (systematic sampling) and do not simply go to
the largest remainders: so a kind with a small share is in some batches rather than in none, and its
mean share is exact.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Annotated

from pydantic import Field, validate_call

from flowtrain.rollouts.rules.base import Candidate
from flowtrain.rollouts.rules.builtin import by_deadline

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Weighted:
    @validate_call
    def __init__(self, weights: dict[str, Weight]) -> None:
        """`weights` are by kind of task; a kind without one weighs 1."""
        self._weights = weights

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        kinds: dict[str, list[Candidate]] = {}
        for candidate in by_deadline(candidates):
            kinds.setdefault(candidate.outcome.kind, []).append(candidate)
        sizes = {kind: len(waiting) for kind, waiting in kinds.items()}
        weights = {kind: Fraction(self._weights.get(kind, 1.0)) for kind in sizes}
        counts = rounded(shares(sizes, weights, num), Fraction(random.Random(seed).random()))
        batch = [candidate for kind, count in counts.items() for candidate in kinds[kind][:count]]
        return [candidate.outcome.work_item for candidate in by_deadline(batch)]


def shares(
    sizes: Mapping[str, int], weights: Mapping[str, Fraction], num: int
) -> dict[str, Fraction]:
    """Divide `num` in proportion to the weights, where no kind gets more than its size."""
    open_kinds, quotas = dict(sizes), dict[str, Fraction]()
    while open_kinds:
        remainder = num - sum(quotas.values())
        total = sum(weights[kind] for kind in open_kinds)
        share = {kind: remainder * weights[kind] / total for kind in open_kinds}
        capped = {kind: Fraction(size) for kind, size in open_kinds.items() if size <= share[kind]}
        quotas |= capped or share
        open_kinds = {kind: size for kind, size in open_kinds.items() if kind not in quotas}
    return {kind: quotas[kind] for kind in sizes}


def rounded(share: Mapping[str, Fraction], offset: Fraction) -> dict[str, int]:
    """Round each share down or up and keep their sum: lay the shares end to end and count the ticks
    offset, offset + 1, ... that fall into each.

    `offset` is in [0, 1). Drawn uniformly, it rounds a share of 2.3 to 3 with probability 0.3.
    """
    counts, end = {}, Fraction(0)
    for kind, size in share.items():
        start, end = end, end + size
        counts[kind] = ceil(end - offset) - ceil(start - offset)
    return counts
