"""Batches mixed by kind of task, within a kind earliest deadline first.

A kind's share of the places is its weight among the kinds that wait; what a kind with too few
groups leaves goes to the others. Every kind gets the whole part of its share. The places that
remain are drawn with the remainders as probabilities (systematic sampling), and do not go to the
largest ones: so a kind with a small share gets a place in some batches rather than in none, and in
the mean what it should.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import ceil
from typing import Annotated

from pydantic import Field, validate_call

from flowtrain.dataflow.rules.base import Candidate
from flowtrain.dataflow.rules.deadline import earliest

Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Weighted:
    @validate_call
    def __init__(self, weights: dict[str, Weight]) -> None:
        """By kind of task; a kind that is not named weighs 1."""
        self._weights = weights

    def select(self, candidates: Sequence[Candidate], num: int, seed: int) -> list[int]:
        kinds: dict[str, list[Candidate]] = {}
        for candidate in earliest(candidates):
            kinds.setdefault(candidate.outcome.kind, []).append(candidate)
        sizes = {kind: len(waiting) for kind, waiting in kinds.items()}
        weights = {kind: Fraction(self._weights.get(kind, 1.0)) for kind in sizes}
        places = rounded(shares(sizes, weights, num), Fraction(random.Random(seed).random()))
        chosen = [candidate for kind, count in places.items() for candidate in kinds[kind][:count]]
        return [candidate.outcome.unit for candidate in earliest(chosen)]


def shares(
    sizes: Mapping[str, int], weights: Mapping[str, Fraction], num: int
) -> dict[str, Fraction]:
    """`num` places in proportion to the weights, though no kind gets more than its size."""
    open_kinds, found = dict(sizes), dict[str, Fraction]()
    while open_kinds:
        left = num - sum(found.values())
        total = sum(weights[kind] for kind in open_kinds)
        share = {kind: left * weights[kind] / total for kind in open_kinds}
        full = {kind: Fraction(size) for kind, size in open_kinds.items() if size <= share[kind]}
        found |= full or share
        open_kinds = {kind: size for kind, size in open_kinds.items() if kind not in found}
    return {kind: found[kind] for kind in sizes}


def rounded(share: Mapping[str, Fraction], offset: Fraction) -> dict[str, int]:
    """Each share down or up to a whole number, their sum as it was: of the ticks offset, offset +
    1, ... so many as fall into it.

    `offset` in [0, 1). Drawn uniformly, a share of 2.3 becomes 3 with probability 0.3.
    """
    places, end = {}, Fraction(0)
    for kind, size in share.items():
        start, end = end, end + size
        places[kind] = ceil(end - offset) - ceil(start - offset)
    return places
