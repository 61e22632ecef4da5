"""An account of where every sampled token of a policy went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

TRAINED = "trained"
"""Tokens in the loss of an optimizer step that was taken, with a weight that is not 0."""
SKIPPED = "skipped"
"""Tokens in an optimizer step that was not taken, because its loss or gradient was not finite."""
FAILED, NO_SIGNAL, NO_WEIGHT = "failed", "no_signal", "no_weight"
"""Left out: tokens of rollouts that failed; those that the algorithm made no sample of, as of
groups of one reward; those whose loss weight is 0, also because
masked importance sampling drops them."""
LOST = "lost"
"""Tokens that were sampled and are in no rollout: their turn, lease or node ended before."""


@dataclass(frozen=True, slots=True)
class TokenAccount:
    """An equation in tokens: sampled + shared + replayed = the sum of `fates`."""

    sampled: int = 0
    """Tokens that engines have returned."""
    shared: int = 0
    """Tokens that branches have in common with the rollout they left, counted once per branch."""
    replayed: int = 0
    """Tokens of groups that were trained again, counted once per time."""
    fates: Mapping[str, int] = field(default_factory=dict)
    """Tokens by what became of them: `TRAINED`, or why they were not."""

    @property
    def difference(self) -> int:
        """Tokens that are unaccounted for: 0, or something has gone wrong."""
        return self.sampled + self.shared + self.replayed - sum(self.fates.values())

    def __add__(self, other: TokenAccount) -> TokenAccount:
        return TokenAccount(
            self.sampled + other.sampled,
            self.shared + other.shared,
            self.replayed + other.replayed,
            dict(Counter(self.fates) + Counter(other.fates)),
        )

    def text(self) -> str:
        """Write the equation in one line, without terms that are 0."""
        names = {"shared": "shared by branches", "replayed": "trained again"}
        sources = [f"{self.sampled:,} sampled"]
        sources += [f"{num:,} {x}" for name, x in names.items() if (num := getattr(self, name))]
        other_fates = {name: num for name, num in self.fates.items() if num and name != TRAINED}
        fates = [TRAINED, *sorted(other_fates, key=lambda name: (-other_fates[name], name))]
        ends = [f"{self.fates.get(name, 0):,} {name.replace('_', ' ')}" for name in fates]
        unaccounted = f" + {self.difference:,} UNACCOUNTED FOR" if self.difference else ""
        return f"{' + '.join(sources)} = {' + '.join(ends)}{unaccounted}"

    def metrics(self) -> dict[str, int]:
        """Name the terms for a log."""
        terms = {name: getattr(self, name) for name in ("sampled", "shared", "replayed")}
        fates = {f"tokens/to/{name}": num for name, num in self.fates.items()}
        return {f"tokens/{name}": num for name, num in terms.items() if num} | fates


def account_of(metrics: Mapping[str, float]) -> TokenAccount:
    """Read what `TokenAccount.metrics` named; other metrics are passed over."""
    fates = {
        key.removeprefix("tokens/to/"): int(value)
        for key, value in metrics.items()
        if key.startswith("tokens/to/")
    }
    names = ("sampled", "shared", "replayed")
    sampled, shared, replayed = (int(metrics.get(f"tokens/{name}", 0)) for name in names)
    return TokenAccount(sampled, shared, replayed, fates)
