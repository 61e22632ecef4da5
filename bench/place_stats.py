"""How well scores of tokens find the places that are worth a branch, within each rollout.

Flips and change (`bench/branch_value.py`) by decile of each score; its rank correlation with both;
"AUC", how often of two branches the one that flipped stands at the higher score; flips and change
at the place of the highest score, where APPO would leave that rollout. Intervals are of 95 % and
resample rollouts (bootstrap). An oracle chooses by half of the branches, and is measured by the
other half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_DECILES = 10
NUM_RESAMPLES = 2000
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Root:
    """The tokens of a rollout that may be branch points."""

    reward: float
    scores: Mapping[str, Floats]
    """By name, one per token."""
    flips: Floats
    change: Floats
    oracles: Root | None = None
    """The same by half of the branches each: what the first half found, as scores of the second."""


def summary(roots: Sequence[Root], rng: np.random.Generator) -> list[dict[str, Any]]:
    """One row per score."""
    rows = []
    for name in roots[0].scores:
        columns = {
            "AUC": [auc(r.scores[name], r.flips) for r in roots],
            "rank corr. flips": [rank_correlation(r.scores[name], r.flips) for r in roots],
            "rank corr. change": [rank_correlation(r.scores[name], r.change) for r in roots],
            "flips there": [(r.flips[r.scores[name].argmax()], 1.0) for r in roots],
            "change there": [(r.change[r.scores[name].argmax()], 1.0) for r in roots],
        }
        row: dict[str, Any] = {"score": name}
        for column, parts in columns.items():
            row[column], row[f"{column} low"], row[f"{column} high"] = ratio(parts, rng)
        rows.append(row)
    return rows


def by_decile(roots: Sequence[Root], rng: np.random.Generator) -> list[dict[str, Any]]:
    """One row per score and decile of its tokens within a rollout; 1 has the lowest scores."""
    rows = []
    for name in roots[0].scores:
        for decile in range(NUM_DECILES):
            row: dict[str, Any] = {"score": name, "decile": decile + 1}
            for column in ("flips", "change"):
                parts = []
                for r in roots:
                    mine = getattr(r, column)[deciles_of(r.scores[name]) == decile]
                    parts.append((float(mine.sum()), float(len(mine))))
                row[column], row[f"{column} low"], row[f"{column} high"] = ratio(parts, rng)
            rows.append(row)
    return rows


def ratio(
    parts: Sequence[tuple[float, float]], rng: np.random.Generator
) -> tuple[float | None, float | None, float | None]:
    """A ratio of sums over rollouts, and its 95 % interval (bootstrap over rollouts); None where
    there is nothing to divide by.
    """
    above, below = np.array(parts).T
    weights = rng.multinomial(len(parts), np.full(len(parts), 1 / len(parts)), NUM_RESAMPLES)
    drawn = weights @ np.stack([above, below], 1)
    drawn = drawn[drawn[:, 1] > 0]  # a sample may have no rollout that says anything
    if not len(drawn):
        return None, None, None
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.025, 0.975))
    return float(above.sum() / below.sum()), float(low), float(high)


def ranks(values: Floats) -> Floats:
    """From 0; equal values share their mean rank."""
    _, index, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts + 1) / 2)[index]


def deciles_of(scores: Floats) -> NDArray[np.int64]:
    """0 to 9; of equal scores the earlier token has the lower decile."""
    order = np.argsort(np.argsort(scores, kind="stable"), kind="stable")
    return order * NUM_DECILES // len(scores)


def rank_correlation(scores: Floats, values: Floats) -> tuple[float, float]:
    """(Spearman's, 1); (0, 0) where either is constant."""
    a, b = ranks(scores), ranks(values)
    if a.std() == 0 or b.std() == 0:
        return 0.0, 0.0
    return float(np.corrcoef(a, b)[0, 1]), 1.0


def auc(scores: Floats, flips: Floats) -> tuple[float, float]:
    """(pairs of a branch that flipped and one that did not, of which the first has the higher
    score; all such pairs)
    """
    weight = flips[:, None] * (1 - flips)[None, :]
    difference = scores[:, None] - scores[None, :]
    return float((weight * (np.sign(difference) + 1) / 2).sum()), float(weight.sum())
