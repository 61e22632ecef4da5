"""Records of training: samples with their advantages, and the batch of a step."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.records.rollout import Group
from flowtrain.records.sampling import Call, Likeliest, Routes, SamplingMask, VersionSpan


class SampleId(NamedTuple):
    """The call that a sample was made from, which identifies the sample within a batch."""

    group: int
    """`Group.index`"""
    trajectory: int
    """Number of the trajectory within its group."""
    turn: int
    """Number of the turn within its trajectory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A training sequence: the tokens of a call with the algorithm's advantages and weights."""

    prompt_ids: tuple[int, ...]
    """At least one token."""
    response_ids: tuple[int, ...]
    """At least one token; these tokens are trained."""
    logprobs: tuple[float, ...]
    """The sampler's log-prob of each response token, in nats."""
    advantages: tuple[float, ...]
    """Advantage per response token."""
    loss_weights: tuple[float, ...]
    """Weight per response token, before the division by their sum over the global mini-batch."""
    minibatch: int = 0
    """Index of the sample's mini-batch (optimizer step) within the batch."""
    sample_id: SampleId | None = None
    """None for samples whose log-probs are not reported, as in imitation."""
    sampling_mask: SamplingMask | None = None
    """The ids over which trainer and sampler normalise log-probs; None: all ids."""
    old_logprobs: tuple[float, ...] = ()
    """The trainer's log-probs, if already computed; else ()."""
    ref_logprobs: tuple[float, ...] = ()
    """The reference policy's log-probs, if already computed; else ()."""
    divisor: float | None = None
    """The sample's contribution to the divisor of its mini-batch's loss; None: the sum of its loss
    weights. Either all samples of a batch have a divisor or none has."""
    routes: Routes | None = None
    """The sampler's expert choices; None for a dense model and if unrecorded."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """The prompt for a teacher; (): the same prompt."""
    likeliest: Likeliest | None = None
    """The likeliest tokens of a teacher behind an endpoint, with distill.top_k."""
    spans: tuple[VersionSpan, ...] = ()
    """The weight versions that sampled the response; () if unknown."""

    @classmethod
    def of(
        cls,
        call: Call,
        advantage: float | Sequence[float] = 1.0,
        weight: float = 1.0,
        minibatch: int = 0,
        sample_id: SampleId | None = None,
        divisor: float | None = None,
    ) -> Sample:
        """Return the sample of a call. The advantage is one number for all tokens or one per token;
        every token gets `weight`.
        """
        num_tokens = len(call.response_ids)
        if isinstance(advantage, int | float):
            advantage = (advantage,) * num_tokens
        assert len(advantage) == num_tokens, f"{len(advantage)} advantages, {num_tokens} tokens"
        return cls(
            call.prompt_ids,
            call.response_ids,
            call.logprobs,
            tuple(advantage),
            (weight,) * num_tokens,
            minibatch,
            sample_id,
            call.sampling_mask,
            divisor=divisor,
            routes=call.routes,
            spans=call.spans,
        )


Scored = tuple[tuple[float, ...], tuple[float, ...]]
"""Log-probs of a sample under the policy and the reference policy; () if unknown."""


class Rollouts(NamedTuple):
    """A rank's scored rollouts of a step."""

    groups: Sequence[Group]
    logprobs: Mapping[SampleId, Scored]
    """Log-probs of turns, as far as the search for branch points has computed them."""
    metrics: Mapping[str, float]
    """Metrics of the rollouts' origin, for the log."""


class FilterReason(enum.StrEnum):
    """Reason for which a sample is excluded from a batch."""

    EMPTY = "empty"
    """The sample has no response token."""
    TOO_LONG = "too_long"
    """The sample has more tokens than the model has positions."""
    ADVANTAGE = "advantage"
    """An advantage is infinite or NaN."""
    LOGPROB = "logprob"
    """The sampler's log-prob of a trained token is impossible for a sampled token."""
    TOKEN = "token"
    """A token or expert is unknown to the model or outside of the mask, or the prompt is empty."""
    OVERLONG = "overlong"
    """The rollout reached a token limit, and algorithm.overlong = "mask"."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of a step's groups, with counts of excluded groups and samples."""

    samples: tuple[Sample, ...]
    num_groups_dropped: int = 0
    """Groups without a signal: all rollouts failed or, in mode "paper", have the same reward."""
    num_filtered: Mapping[FilterReason, int] = field(default_factory=dict)
    """Number of excluded samples by reason."""
    num_filtered_tokens: Mapping[FilterReason, int] = field(default_factory=dict)
    """Number of response tokens of the excluded samples by reason."""
    num_minibatches: int = 1
    """Number of optimizer steps for the batch, over all ranks."""
    divergence_sum: float | None = None
    """Sum over trained tokens of the sampler's log-prob minus that of a teacher behind an endpoint,
    in nats; None if the teacher was not asked for log-probs of sampled tokens."""
