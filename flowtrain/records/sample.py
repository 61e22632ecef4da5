"""Records of training: samples with their advantages, and the batch of a step."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from flowtrain.records.rollout import Group
from flowtrain.records.sampling import Call, Likeliest, Routes, SamplingMask, VersionSpan


class SampleId(NamedTuple):
    """The call that a sample was made of; within a batch it names the sample."""

    group: int
    """`Group.index`"""
    trajectory: int
    """Number of the trajectory within its group."""
    turn: int
    """Number of the turn within its trajectory."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One trained sequence: a call's tokens with what the algorithm decided about them."""

    prompt_ids: tuple[int, ...]
    """At least one token."""
    response_ids: tuple[int, ...]
    """At least one token; these are the trained ones."""
    logprobs: tuple[float, ...]
    """The sampler's, one per response token."""
    advantages: tuple[float, ...]
    """One per response token."""
    loss_weights: tuple[float, ...]
    """One per response token, before division by their sum over the global mini-batch."""
    minibatch: int = 0
    """Optimizer step of the batch that it belongs to."""
    sample_id: SampleId | None = None
    """None for a sample whose log-probs nobody asks for, as in imitation."""
    sampling_mask: SamplingMask | None = None
    """The ids that log-probs are taken among, the trainer's as the sampler's; None: all ids."""
    old_logprobs: tuple[float, ...] = ()
    """The trainer's own, where it has scored the sample before; else ()."""
    ref_logprobs: tuple[float, ...] = ()
    """The reference policy's, likewise."""
    divisor: float | None = None
    """Summand of the number that the loss of its mini-batch is divided by; None: the
    sum of its loss weights. All samples of a batch have one, or none has."""
    routes: Routes | None = None
    """The sampler's; None for a dense model, and where nobody recorded them."""
    teacher_prompt_ids: tuple[int, ...] = ()
    """What a teacher reads in the place of the prompt; (): the prompt."""
    likeliest: Likeliest | None = None
    """What a teacher behind an endpoint would have written, with distill.top_k."""
    spans: tuple[VersionSpan, ...] = ()
    """The versions of the weights that sampled the response; () where nobody says so."""

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
        """Return the sample of a call. An advantage is one of all tokens, or one per token; the
        weight is each token's.
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
"""Log-probs of a sample under the policy and under the reference, as `Sample` has them; () where
they are not known."""


class Rollouts(NamedTuple):
    """This rank's scored rollouts of a step."""

    groups: Sequence[Group]
    logprobs: Mapping[SampleId, Scored]
    """Log-probs of turns that the search for branch points has already computed."""
    metrics: Mapping[str, float]
    """About where they came from, for the log."""


class FilterReason(enum.StrEnum):
    """Why a sample is left out of a batch."""

    EMPTY = "empty"
    """It has no response token."""
    TOO_LONG = "too_long"
    """It has more tokens than the model has positions."""
    ADVANTAGE = "advantage"
    """An advantage is not finite."""
    LOGPROB = "logprob"
    """The sampler's log-prob of a trained token is none that sampling gives."""
    TOKEN = "token"
    """A token or an expert is none of the model's, or outside of its mask; or the prompt is empty.
    """
    OVERLONG = "overlong"
    """It is of a rollout that ran into a limit of tokens, with algorithm.overlong = "mask"."""


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples that an algorithm makes of a step's groups, and counts of what it left out."""

    samples: tuple[Sample, ...]
    num_groups_dropped: int = 0
    """Groups without a signal: all rollouts failed, or in mode "paper" all have one reward."""
    num_filtered: Mapping[FilterReason, int] = field(default_factory=dict)
    """Samples that could not be trained."""
    num_filtered_tokens: Mapping[FilterReason, int] = field(default_factory=dict)
    """Response tokens of these."""
    num_minibatches: int = 1
    """Optimizer steps that train the batch, over all ranks."""
    divergence_sum: float | None = None
    """By how much the sampler's log-probs of trained tokens are above those of a teacher behind an
    endpoint, in nats; None where it was not asked for these."""
