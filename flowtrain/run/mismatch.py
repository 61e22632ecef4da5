"""How far the trainer's log-probs of a step's tokens are from the sampler's: a histogram, a KL, and
the worst tokens.

Compared are the tokens of the first optimizer step of a batch, whose forward pass knows the weights
that the step begins with. The same weights sampled them, so trainer and sampler should agree up to
rounding.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtrain.run.mismatch_causes import BUCKETS, NAMES, Bools, Evidence, Floats, sums_of
from flowtrain.training.world import World
from flowtrain.types import Group, PolicyName, Sample, SampleId

NUM_WORST = 8
"""Tokens of a step that are written down, those that are so many nats apart:"""
LEAST_WORST = 1e-3
_NUM_BEFORE, _NUM_AFTER = 24, 8
"""Tokens around each of them."""


class WorstToken(NamedTuple):
    """A token whose log-probs are far apart, with what stands around it."""

    sample_id: SampleId
    token: int
    """Place in the response."""
    sampler: float
    trainer: float
    before: tuple[int, ...]
    """Ids, of the prompt too."""
    id: int
    after: tuple[int, ...]

    @property
    def distance(self) -> float:
        return abs(self.trainer - self.sampler)

    def record(self) -> dict[str, Any]:
        """Convert it to plain JSON values, for worst_tokens.jsonl."""
        group_index, member, turn = self.sample_id
        place = {"group_index": group_index, "member": member, "turn": turn, "token": self.token}
        logprobs = {"sampler": round(self.sampler, 6), "trainer": round(self.trainer, 6)}
        ids = {"before": list(self.before), "id": self.id, "after": list(self.after)}
        return {**place, **logprobs, **ids}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """What the comparison of a step's tokens found, the same on every rank."""

    evidence: Evidence
    counts: tuple[int, ...]
    """Compared tokens by bucket."""
    num_left_out: int
    """Tokens that older or newer weights sampled, as nodes do: those may differ."""
    worst: tuple[WorstToken, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that were compared."""
        return sum(self.counts)

    @property
    def kl(self) -> float:
        """KL of the trainer's policy from the sampler's in nats per token, by the k3 estimator:
        the mean of exp(d) - 1 - d with d = trainer - sampler.
        """
        return self.evidence.kl

    def metrics(self) -> dict[str, float]:
        """Return metrics for the log; the KL only where something was compared."""
        found: dict[str, float] = {"mismatch_left_out": self.num_left_out}
        if self.num_tokens:
            found["mismatch_kl"] = self.kl
        sizes = zip(BUCKETS, self.counts, strict=True)
        return found | {f"mismatch_tokens/{name}": count for name, count in sizes}

    def records(self, step: int) -> list[dict[str, Any]]:
        """Return the worst tokens as lines of worst_tokens.jsonl."""
        return [{"step": step, **each.record()} for each in self.worst]


def compare(
    groups: Sequence[Group],
    samples: Sequence[Sample],
    logprobs: Mapping[SampleId, Sequence[float]],
    *,
    policy: PolicyName,
    version: int,
    allows_others: bool,
    world: World,
) -> Mismatch:
    """Compare log-probs of all ranks' tokens; collective.

    Args:
        groups: this rank's rollouts, which say what version sampled each token.
        samples: those that were made of them.
        logprobs: the trainer's, NaN where a token did not count.
        version: of the weights that the step began with.
        allows_others: tokens of other versions are left out; else they are compared too, because
            there should be none.
    """
    chosen = _first_step(samples, logprobs, world)
    by_index = {group.index: group for group in groups}
    sums, counts = Counter[str](), np.zeros(len(BUCKETS), np.int64)
    num_left_out, worst = 0, list[WorstToken]()
    for sample, sample_id in chosen:
        trainer, sampler = np.array(logprobs[sample_id]), np.array(sample.logprobs)
        is_other = _versions(sample, by_index[sample_id.group], sample_id, policy) != version
        is_trained = np.isfinite(trainer)
        is_compared = is_trained & ~is_other if allows_others else is_trained
        num_left_out += int((is_trained & ~is_compared).sum())
        distance = np.abs(trainer - sampler)[is_compared]
        places = np.digitize(distance, [*BUCKETS.values()]) - 1
        counts += np.bincount(places, minlength=len(BUCKETS))
        sums.update(sums_of(trainer, sampler, is_compared, is_other, sample.response_ids))
        worst = heapq.nlargest(
            NUM_WORST,
            [*worst, *_worst(sample, sample_id, trainer, is_compared)],
            key=lambda each: each.distance,
        )
    total = world.sum([num_left_out, *counts.tolist(), *(sums[name] for name in NAMES)])
    return Mismatch(
        Evidence(dict(zip(NAMES, total[1 + len(BUCKETS) :], strict=True))),
        tuple(map(int, total[1 : 1 + len(BUCKETS)])),
        int(total[0]),
        _worst_of_all(worst, world),
    )


def _first_step(
    samples: Sequence[Sample], logprobs: Mapping[SampleId, Sequence[float]], world: World
) -> list[tuple[Sample, SampleId]]:
    """This rank's samples of the first mini-batch in which some rank trained a token."""
    trained = [
        (sample, sample.sample_id)
        for sample in samples
        if sample.sample_id is not None and sample.sample_id in logprobs
    ]
    # Rows of a mini-batch without a weight on any rank are not trained, and have no log-probs.
    first = -world.max([-min((sample.minibatch for sample, _ in trained), default=1 << 40)])[0]
    return [(sample, sample_id) for sample, sample_id in trained if sample.minibatch == first]


def _versions(
    sample: Sample, group: Group, sample_id: SampleId, policy: PolicyName
) -> NDArray[np.int64]:
    """The version that sampled each token; -1 where nothing says so."""
    call = group.trajectories[sample_id.trajectory].turns[sample_id.turn].calls[policy]
    found = np.full(len(sample.response_ids), -1)
    for span in call.spans:
        found[span.start : span.end] = span.version
    return found


def _worst(
    sample: Sample, sample_id: SampleId, trainer: Floats, is_compared: Bools
) -> Iterator[WorstToken]:
    """The tokens of a sample that are farthest apart."""
    distance = np.where(is_compared, np.abs(trainer - np.array(sample.logprobs)), -1.0)
    ids, start = (*sample.prompt_ids, *sample.response_ids), len(sample.prompt_ids)
    for token in map(int, np.argsort(-distance, kind="stable")[:NUM_WORST]):
        if distance[token] < LEAST_WORST:
            return
        place = start + token
        yield WorstToken(
            sample_id=sample_id,
            token=token,
            sampler=sample.logprobs[token],
            trainer=float(trainer[token]),
            before=ids[max(0, place - _NUM_BEFORE) : place],
            id=ids[place],
            after=ids[place + 1 : place + 1 + _NUM_AFTER],
        )


def _worst_of_all(mine: Sequence[WorstToken], world: World) -> tuple[WorstToken, ...]:
    """The worst tokens of all ranks; collective."""
    found = [
        WorstToken(SampleId(*place), token, sampler, trainer, tuple(before), id, tuple(after))
        for text in world.gather_text(json.dumps(mine))
        for place, token, sampler, trainer, before, id, after in json.loads(text)
    ]
    return tuple(heapq.nlargest(NUM_WORST, found, key=lambda each: each.distance))
