"""Likely causes why trainer and sampler disagree about tokens that the same weights sampled.

With d = trainer - sampler and s the sampler's log-prob of a token, each cause leaves a trace:

- Another temperature scales logits: d is about (r - 1) (s + H), with r the ratio of the
  temperatures and H the entropy at that place, so d is a line of s.
- Kept sets (top-k, top-p) that the trainer does not know take the same from every token of a place:
  all d have one sign, those of unlikely tokens too. With equal supports both signs occur.
- Penalties raise d where a token repeats an earlier one of the response, and nowhere else by much.
- Other weights than the trainer thinks: the versions say so, or the KL was small in the first step
  and has grown since.
- Another dtype or kernel: noise that is small everywhere.
- Ids that differ (chat template, tokenisation): d too large for noise, a few of a nat and more, or
  only some samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

BUCKETS = {"below_1e-5": 0.0} | {
    name: float(name) for name in ("1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1", "10")
}
"""Buckets of |d| in nats, from the least in one to the least in the next."""
UNLIKELY = -0.7
"""Log-prob, about ln 0.5, below which a token is unlikely."""
NUM_EARLY = 4
"""Tokens of a response that are its first ones."""
NOISE = 0.1
"""Root mean square of d up to which rounding explains it; that of bf16 is 0.01 to 0.07."""
HUGE = 1.0
"""Least |d| in nats that no rounding makes."""
_GROWTH = 100.0
"""Growth of the KL since the first step that speaks for wrong weights alone."""
_FEW = 20
"""Tokens below which a share of them says nothing."""


class Cause(NamedTuple):
    """A cause with what speaks for it."""

    name: str
    score: float
    """From 0 to 1."""
    text: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """Sums over the compared tokens by name, which add up over ranks."""

    sums: Mapping[str, float]

    def __getitem__(self, name: str) -> float:
        return self.sums.get(name, 0.0)

    def mean(self, name: str, number: str = "num") -> float:
        """Return a sum by the number of its tokens; 0 without any."""
        return self[name] / max(self[number], 1.0)

    @property
    def kl(self) -> float:
        """KL of the trainer's policy from the sampler's in nats per token, by the k3 estimator."""
        return self.mean("k3")

    @property
    def rms(self) -> float:
        """Root mean square of d."""
        return math.sqrt(self.mean("dd"))

    @property
    def line(self) -> tuple[float, float]:
        """Slope of d over s, and the share of d's variance that the line explains."""
        num, d, s = self["num"], self.mean("d"), self.mean("s")
        var_s, var_d = self.mean("ss") - s * s, self.mean("dd") - d * d
        if num < 3 or var_s <= 1e-9 or var_d <= 1e-15:
            return 0.0, 0.0
        covariance = self.mean("ds") - d * s
        return covariance / var_s, min(covariance**2 / (var_s * var_d), 1.0)

    @property
    def one_sidedness(self) -> float:
        """|sum of d| by sum of |d| over unlikely tokens; 0 where they are few."""
        if self["num_unlikely"] < _FEW or not self["unlikely_abs"]:
            return 0.0
        return abs(self["unlikely_d"]) / self["unlikely_abs"]

    @property
    def repetition(self) -> tuple[float, float]:
        """Mean d of tokens that repeat an earlier one less that of others, and the share of d's
        variance that this explains.
        """
        num, repeated = self["num"], self["num_repeated"]
        mean, var = self.mean("d"), self.mean("dd") - self.mean("d") ** 2
        if not 0 < repeated < num or var <= 1e-15:
            return 0.0, 0.0
        inside = self["repeated_d"] / repeated
        outside = (self["d"] - self["repeated_d"]) / (num - repeated)
        between = repeated * (inside - mean) ** 2 + (num - repeated) * (outside - mean) ** 2
        return inside - outside, between / num / var

    @property
    def agreeing_share(self) -> float:
        """Share of samples whose mean |d| is at least ten times below that of the worst bucket of
        samples that matters.
        """
        counts = [self[f"samples/{name}"] for name in BUCKETS]
        total = sum(counts)
        top = max((n for n, count in enumerate(counts) if count >= 0.02 * total), default=0)
        return sum(counts[: max(top - 1, 0)]) / max(total, 1.0)


def sums_of(
    trainer: Floats, sampler: Floats, is_compared: Bools, is_other: Bools, ids: Sequence[int]
) -> dict[str, float]:
    """Return the sums of a sample's compared tokens.

    Args:
        trainer, sampler: log-probs of the response's `ids`.
        is_other: the token was sampled by a version that the step does not begin with.
    """
    is_repeated = np.ones(len(ids), np.bool_)
    is_repeated[np.unique(ids, return_index=True)[1]] = False
    is_early = np.arange(len(ids)) < NUM_EARLY
    d, s = (trainer - sampler)[is_compared], sampler[is_compared]
    size, unlikely, repeated, early = (
        np.abs(d),
        s < UNLIKELY,
        is_repeated[is_compared],
        is_early[is_compared],
    )
    found = {
        "num": len(d),
        "num_other": is_other[is_compared].sum(),
        "d": d.sum(),
        "abs": size.sum(),
        "dd": (d * d).sum(),
        "huge_dd": (d * d)[size >= HUGE].sum(),
        "k3": (np.expm1(d) - d).sum(),
        "s": s.sum(),
        "ss": (s * s).sum(),
        "ds": (d * s).sum(),
        "num_unlikely": unlikely.sum(),
        "unlikely_d": d[unlikely].sum(),
        "unlikely_abs": size[unlikely].sum(),
        "num_repeated": repeated.sum(),
        "repeated_d": d[repeated].sum(),
        "num_early": early.sum(),
        "early_abs": size[early].sum(),
    }
    if len(d):
        found[f"samples/{bucket_of(float(size.mean()))}"] = 1
    return {name: float(value) for name, value in found.items()}


NAMES = (
    *("num", "num_other", "d", "abs", "dd", "huge_dd", "k3", "s", "ss", "ds"),
    *("num_unlikely", "unlikely_d", "unlikely_abs", "num_repeated", "repeated_d"),
    *("num_early", "early_abs"),
    *(f"samples/{name}" for name in BUCKETS),
)
"""Names of all sums, in the order in which ranks add them."""


def bucket_of(distance: float) -> str:
    """Return the name of the bucket of an |d|."""
    return [name for name, least in BUCKETS.items() if distance >= least][-1]


def causes(evidence: Evidence, first_kl: float | None) -> list[Cause]:
    """Order the causes by what speaks for them, the likeliest first.

    `first_kl`: of the first step that was compared, if that is another one.
    """
    sampling, version = _sampling(evidence), _version(evidence, first_kl)
    rest = 1 - max(sampling.score, version.score)
    calm = (1 - evidence.agreeing_share) * (1 - evidence["huge_dd"] / max(evidence["dd"], 1e-30))
    small = calm / (1 + (evidence.rms / NOISE) ** 2)
    dtype = Cause(
        "dtype",
        rest * small,
        f"engine and trainer compute in different dtypes or kernels (the differences have a root "
        f"mean square of {evidence.rms:.2g}, those of bf16 of 0.01 to 0.07)",
    )
    found = [sampling, version, dtype, _template(evidence, rest * (1 - small))]
    return sorted(found, key=lambda cause: -cause.score)


def _sampling(evidence: Evidence) -> Cause:
    """Whether the sampler's options are unknown to the trainer."""
    slope, explained = evidence.line
    raised, by_repetition = evidence.repetition
    one_sided = max(0.0, 10 * (evidence.one_sidedness - 0.9))
    ratio = f"{1 / (1 + slope):.2f}" if slope > -1 else "many"
    options = [
        Cause(
            "temperature",
            explained,
            f"trainer's temperature about {ratio} times the sampler's: differences follow the "
            f"log-probs (R2 {explained:.2f})",
        ),
        Cause(
            "mask",
            one_sided,
            "top-k or top-p that the trainer does not know: nearly all differences have one sign",
        ),
        Cause(
            "penalty",
            by_repetition if raised > 0 else 0.0,
            f"a penalty that the trainer does not know: repeated tokens differ by {raised:+.2g}",
        ),
    ]
    best = max(options, key=lambda option: option.score)
    text = best.text if best.score > 0.2 else "temperature, top-k, top-p or penalties: no trace"
    return Cause("sampling options", best.score, text)


def _version(evidence: Evidence, first_kl: float | None) -> Cause:
    """Whether other weights sampled than the trainer thinks."""
    name, share = "weight version", evidence.mean("num_other")
    if share > 0:
        text = f"{share:.0%} of the tokens say that other versions sampled them"
        return Cause(name, 1.0, text)
    if first_kl is None:
        return Cause(name, 0.0, "stale weights under a new version: nothing to compare with yet")
    growth = evidence.kl / max(first_kl, 1e-12)
    score = min(max(math.log(max(growth, 1e-9), _GROWTH), 0.0), 1.0)
    text = f"stale weights under a new version: the KL is {growth:.2g} times that of the first step"
    return Cause(name, score, text)


def _template(evidence: Evidence, score: float) -> Cause:
    """Whether the ids of training are others than those of sampling."""
    share, early = evidence.agreeing_share, evidence.mean("early_abs", "num_early")
    text = f"only some samples differ ({share:.0%} agree)" if share > 0.02 else "all samples differ"
    later = (evidence["abs"] - evidence["early_abs"]) / max(
        evidence["num"] - evidence["num_early"], 1.0
    )
    if later and early > 1.5 * later:
        text += f", first tokens of responses {early / later:.1f}x as much as later ones"
    return Cause(
        "chat template or tokenisation",
        score,
        f"trained ids are not those that were sampled: {text}",
    )
