"""Compare the trainer's log-probs of a step's tokens with the sampler's: a histogram, a KL, and a
gate that ends a run in which they stay apart.

Compared are the tokens of the first optimizer step of a batch, whose forward pass knows the weights
that the step begins with. The same weights sampled them, so trainer and sampler should agree up to
rounding.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowtrain.config import Config
from flowtrain.types import Group, PolicyName, Sample, SampleId, UserError

_log = logging.getLogger(__name__)
Floats = NDArray[np.float64]

BUCKETS = {"below_1e-5": 0.0} | {
    name: float(name) for name in ("1e-5", "1e-4", "1e-3", "1e-2", "1e-1", "1", "10")
}
"""Buckets of |d| in nats, from the least in one to the least in the next."""
UNLIKELY = -0.7
"""Log-prob, about ln 0.5, below which a token is unlikely."""
AGREES = 0.1
"""Mean |d| of a sample up to which rounding explains it; that of bf16 is 0.01 to 0.07."""
MOST_ABOVE = 3
"""Steps in a row above `train.max_mismatch_kl` after which a run ends, or"""
FAR_ABOVE = 100.0
"""so many times the limit, which ends it at once."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The outcome of a step's comparison, the same on every rank."""

    sums: Mapping[str, float]
    """Sums over the compared tokens, with d = trainer - sampler and s = sampler."""

    @property
    def num_tokens(self) -> int:
        """Tokens that were compared."""
        return int(self.sums.get("num", 0))

    @property
    def kl(self) -> float:
        """KL of the trainer's policy from the sampler's in nats per token, by the k3 estimator:
        the mean of exp(d) - 1 - d.
        """
        return self._mean("k3")

    @property
    def slope(self) -> float:
        """Slope of d over s: 1/r - 1 where the trainer's temperature is r times the sampler's."""
        variance = self._mean("ss") - self._mean("s") ** 2
        covariance = self._mean("ds") - self._mean("d") * self._mean("s")
        return covariance / variance if variance > 1e-9 else 0.0

    @property
    def one_sidedness(self) -> float:
        """|sum of d| by sum of |d| over unlikely tokens: 1 where the trainer does not know that
        some tokens were kept from the sampler.
        """
        return abs(self.sums.get("unlikely_d", 0)) / (self.sums.get("unlikely_abs", 0) or 1.0)

    @property
    def agreeing_share(self) -> float:
        """Share of samples whose mean |d| rounding explains."""
        return self.sums.get("samples_agreeing", 0) / max(self.sums.get("samples", 0), 1.0)

    def _mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(self.num_tokens, 1)

    def metrics(self) -> dict[str, float]:
        """Return metrics for the log; the KL only where something was compared."""
        found: dict[str, float] = {"mismatch_left_out": self.sums.get("left_out", 0)}
        if self.num_tokens:
            found["mismatch_kl"] = self.kl
        counts = {name: int(self.sums.get(f"tokens/{name}", 0)) for name in BUCKETS}
        return found | {f"mismatch_tokens/{name}": count for name, count in counts.items()}


def compare(
    groups: Sequence[Group],
    samples: Sequence[Sample],
    logprobs: Mapping[SampleId, Sequence[float]],
    *,
    policy: PolicyName,
    version: int,
    allows_others: bool,
) -> dict[str, Any] | None:
    """Compare log-probs of this rank's tokens; returns JSON values for `merge`, None for no tokens.

    Args:
        groups: this rank's rollouts, which say what version sampled each token.
        samples: those that were made of them.
        logprobs: the trainer's, NaN where a token did not count.
        version: of the weights that the step began with.
        allows_others: tokens of other versions, as nodes sample them, are left out; else they are
            compared too, because there should be none.
    """
    # Rows of a mini-batch without a weight on any rank are not trained, and have no log-probs.
    trained = [
        (sample, sample.sample_id)
        for sample in samples
        if sample.sample_id is not None and sample.sample_id in logprobs
    ]
    if not trained:
        return None
    first = min(sample.minibatch for sample, _ in trained)
    by_index = {group.index: group for group in groups}
    sums = Counter[str]()
    for sample, sample_id in trained:
        if sample.minibatch != first:
            continue
        trainer, sampler = np.array(logprobs[sample_id]), np.array(sample.logprobs)
        is_other = _versions(sample, by_index[sample_id.group], sample_id, policy) != version
        is_trained = np.isfinite(trainer)
        is_compared = is_trained & ~is_other if allows_others else is_trained
        sums["left_out"] += int((is_trained & ~is_compared).sum())
        sums.update(_sums_of(trainer[is_compared], sampler[is_compared]))
    return {"minibatch": first, "sums": dict(sums)}


def merge(found: Sequence[Mapping[str, Any] | None]) -> Mismatch:
    """Put together what the ranks have compared: of all mini-batches, the first that any has."""
    compared = [each for each in found if each is not None]
    first = min((each["minibatch"] for each in compared), default=0)
    sums = Counter[str]()
    for each in compared:
        if each["minibatch"] == first:
            sums.update(each["sums"])
    return Mismatch(dict(sums))


def _sums_of(trainer: Floats, sampler: Floats) -> dict[str, float]:
    """The sums of a sample's compared tokens."""
    if not len(trainer):
        return {}
    d, s = trainer - sampler, sampler
    size, is_unlikely = np.abs(d), s < UNLIKELY
    found = {
        "num": len(d),
        "d": d.sum(),
        "k3": (np.expm1(d) - d).sum(),
        "s": s.sum(),
        "ss": (s * s).sum(),
        "ds": (d * s).sum(),
        "unlikely_d": d[is_unlikely].sum(),
        "unlikely_abs": size[is_unlikely].sum(),
        "samples": 1,
        "samples_agreeing": size.mean() < AGREES,
    }
    counts = np.bincount(np.digitize(size, [*BUCKETS.values()]) - 1, minlength=len(BUCKETS))
    in_buckets = {f"tokens/{name}": n for name, n in zip(BUCKETS, counts, strict=True) if n}
    return {name: float(value) for name, value in (found | in_buckets).items()}


def _versions(
    sample: Sample, group: Group, sample_id: SampleId, policy: PolicyName
) -> NDArray[np.int64]:
    """The version that sampled each token; -1 where nothing says so."""
    call = group.trajectories[sample_id.trajectory].turns[sample_id.turn].calls[policy]
    found = np.full(len(sample.response_ids), -1)
    for span in call.spans:
        found[span.start : span.end] = span.version
    return found


@dataclass(slots=True)
class MismatchGate:
    """Counts the steps in a row whose tokens trainer and sampler disagree about."""

    config: Config
    is_main: bool
    num_above: int = field(default=0, init=False)
    first_kl: float | None = field(default=None, init=False)
    """The KL of the first step that this process compared."""

    def watch(self, step: int, mismatch: Mismatch) -> None:
        """Look at a step, of which every rank knows the same.

        Raises UserError when the KL stays above `train.max_mismatch_kl` or is far above it.
        """
        if not mismatch.num_tokens:
            return
        limit, kl = self.config.train.max_mismatch_kl, mismatch.kl
        self.first_kl = kl if self.first_kl is None else self.first_kl
        if not limit or expected_mismatch(self.config):
            return
        # A KL that is no number is above every limit.
        self.num_above = 0 if kl <= limit else self.num_above + 1
        if not self.num_above:
            return
        in_a_row = f", {self.num_above} steps in a row" if self.num_above > 1 else ""
        text = (
            f"step {step}: the log-probs of trainer and sampler are {kl:.2g} nats per token apart "
            f"(KL; train.max_mismatch_kl={limit:g}){in_a_row}. Their difference has slope "
            f"{mismatch.slope:+.2f} over the log-prob and is {mismatch.one_sidedness:.0%} "
            f"one-sided, the KL is {kl / max(self.first_kl, 1e-12):.2g} times that of the first "
            f"step, and {mismatch.agreeing_share:.0%} of the samples agree up to rounding; "
            "docs/watching.md says what each speaks for"
        )
        if self.num_above >= MOST_ABOVE or not kl <= FAR_ABOVE * limit:
            raise UserError(
                f"{text}. The viewer colours tokens by their difference; once that is mended, the "
                "same command with run.resume = 'auto' goes on from the newest checkpoint"
            )
        if self.is_main:
            _log.warning("%s", text)


def expected_mismatch(config: Config) -> str:
    """Return the key of an option by which the two differ on purpose; "" where none does."""
    if config.rollout.frequency_penalty and config.train.policy == "planner":
        return "rollout.frequency_penalty"
    return ""
