"""Branch points: the tokens of finished rollouts at which another choice would have had the largest
effect (APPO, arXiv 2606.12384, eqs. 3 to 5).

A scoring pass over the roots computes exact entropies and log-probs of every generated token;
`flowkernels.branching_score` turns them into scores. Each rollout is one sequence here: the
responses of its turns, without prompts and tool results. Random branch points serve as a control.

Suffixes: T generated tokens of all roots, S roots.
"""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, islice
from typing import NamedTuple

import torch
from flowkernels import BranchingScore, branch_points, branching_score
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.algorithms.base import Algorithm, Branches, NodeSampler
from flowtrain.config import Appo as Options
from flowtrain.config import Config
from flowtrain.inference.protocol import Scorer
from flowtrain.records import BranchPoint, Call, Group, PolicyName, Sample, SampleId, Scored
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.trainer import Trainer
from flowtrain.utils.seeds import derive_seed, derive_uniform

_ROUNDING = 1e-5
"""Largest difference in nats between two ways of computing an fp32 log-prob."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ResponseScores:
    """The policy's scores of generated tokens, fp32 [T] each."""

    logprob_T: Tensor
    entropy_T: Tensor
    baseline_logprob_T: Tensor
    """Log-probs under the policy that the future ratio divides by: the reference, or the sampler.
    """


def branch(
    algorithm: Algorithm,
    step: int,
    groups: Sequence[Group],
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerFast,
    *,
    against_reference: bool,
) -> Branches:
    """Score the roots of a step and return the branch points; collective.

    `against_reference`: the future ratio divides by the reference policy, not by the sampler.
    """
    config = algorithm.config
    samples, entropies = root_samples(groups, config.train.policy)
    scores = score_samples(
        trainer,
        samples,
        against_reference=against_reference,
        entropies=entropies if algorithm.records_entropies else None,
    )
    points = find_points(
        groups,
        scores,
        config.appo,
        policy=config.train.policy,
        num_branches=config.rollout.group_size - config.appo.num_roots,
        seed=derive_seed(config.run.seed, "branch", step),
        is_blank_V=blank_tokens(tokenizer, trainer.model.config.vocab_size),
    )
    points = [stamped(group_points, "trainer", step - 1) for group_points in points]
    has_old, has_ref = algorithm.has_old_logprobs, algorithm.has_ref_logprobs
    return Branches(points, known_logprobs(samples, scores, has_old=has_old, has_ref=has_ref))


async def node_points(
    config: Config, roots: Group, seed: int, sampler: NodeSampler
) -> list[BranchPoint]:
    """Return the branch points of the roots of one group.

    A node has the rollouts of one question and no trainer. The engine records the entropies while
    sampling. The rule "score" asks one more policy for its log-probs of the same tokens: the node's
    newest weights, if the roots are older, or the initial policy. Raises EngineError if a scorer
    does not answer.
    """
    options = config.appo
    samples, entropies = root_samples([roots], config.train.policy)
    recorded_T = fp32([x for sample in samples for x in sample.logprobs], _CPU)
    assert len(entropies) == len(recorded_T), "the engine records entropies"
    versions = _versions(roots, config.train.policy)
    version = max(versions, default=0)
    logprob_T = baseline_T = recorded_T
    if options.node_scorer == "reference":
        assert sampler.reference is not None, "see Algorithm.needs_node_reference"
        _, baseline_T = await _score(sampler.reference, samples, config)
        logprob_T = without_rounding(recorded_T, baseline_T)
    elif options.node_scorer == "behavior" and versions != {sampler.engine.version}:
        version, logprob_T = await _score(sampler.engine, samples, config)
        logprob_T = without_rounding(logprob_T, recorded_T)
    scores = ResponseScores(logprob_T, fp32(entropies, _CPU), baseline_T)

    def choose() -> list[BranchPoint]:
        (points,) = find_points(
            [roots],
            scores,
            options,
            policy=config.train.policy,
            num_branches=config.rollout.group_size - options.num_roots,
            seed=seed,
            is_blank_V=blank_tokens(sampler.tokenizer, sampler.vocab_size),
        )
        return points

    points = await asyncio.to_thread(choose)  # the first time it decodes the whole vocabulary
    return stamped(points, options.node_scorer, version)


def _versions(roots: Group, policy: PolicyName) -> set[int]:
    """Return the weight versions that sampled a policy's tokens of the roots."""
    calls = [turn.calls.get(policy) for root in roots.trajectories for turn in root.turns]
    return {span.version for call in calls if call for span in call.spans}


async def _score(scorer: Scorer, samples: Sequence[Sample], config: Config) -> tuple[int, Tensor]:
    """Return the scorer's version, and its log-probs of all response tokens, [T]."""
    temperature = config.sampling_of(config.train.policy).temperature
    version, logprobs = await scorer.score(samples, temperature)
    return version, fp32([x for sample_logprobs in logprobs for x in sample_logprobs], _CPU)


def without_rounding(logprob_T: Tensor, baseline_T: Tensor) -> Tensor:
    """Return the log-probs with pairs that differ only by rounding made equal, because the score
    would amplify the difference.
    """
    is_equal_T = (logprob_T - baseline_T).abs() < _ROUNDING
    return torch.where(is_equal_T, baseline_T, logprob_T)


def stamped(points: Sequence[BranchPoint], scorer: str, version: int) -> list[BranchPoint]:
    """Return the points with `BranchPoint.scorer` and `version` filled in."""
    return [replace(point, scorer=scorer, version=version) for point in points]


def root_samples(
    groups: Sequence[Group], policy: PolicyName = "planner"
) -> tuple[list[Sample], list[float]]:
    """Return every turn that a policy began, with tokens, as a sample to score, and the sampler's
    entropies of its tokens.
    """
    _, calls = _root_calls(groups, policy)
    samples = [Sample.of(call, sample_id=sample_id) for _, sample_id, call in calls]
    return samples, [x for *_, call in calls for x in call.entropies]


def score_samples(
    trainer: Trainer,
    samples: Sequence[Sample],
    *,
    against_reference: bool,
    entropies: Sequence[float] | None = None,
) -> ResponseScores:
    """Score all response tokens under the policy, in the order of the samples; collective.

    If the sampler recorded `entropies`, its log-probs stand in for the policy's, which saves the
    policy's pass.
    """
    device = trainer.device
    sampler_T = fp32([x for sample in samples for x in sample.logprobs], device)
    baseline_T = sampler_T
    if against_reference:
        with trainer.reference() as reference:
            baseline_T, _ = _score_in_order(trainer, reference, samples)
    if entropies is None:
        scored = _score_in_order(trainer, trainer.model, samples)
        return ResponseScores(*scored, baseline_T)
    logprob_T = without_rounding(sampler_T, baseline_T)
    return ResponseScores(logprob_T, fp32(entropies, device), baseline_T)


def _score_in_order(
    trainer: Trainer, model: PreTrainedModel, samples: Sequence[Sample]
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of all response tokens in the order of the samples."""
    scores = trainer.score(model, [pack_row(samples)] if samples else [])
    none_T = fp32([], trainer.device)
    logprob_T = torch.cat([none_T, *(score.logprob_T for score in scores)])
    return logprob_T, torch.cat([none_T, *(score.entropy_T for score in scores)])


def fp32(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def known_logprobs(
    samples: Sequence[Sample], scores: ResponseScores, *, has_old: bool, has_ref: bool
) -> dict[SampleId, Scored]:
    """Return log-probs that the loss can reuse: the scores as old log-probs, the baseline's as the
    reference policy's.
    """
    if not has_old and not has_ref:
        return {}
    num_tokens = [len(sample.response_ids) for sample in samples]
    old = scores.logprob_T.split(num_tokens)
    ref = scores.baseline_logprob_T.split(num_tokens)
    return {
        sample.sample_id: (
            tuple(old_T.tolist()) if has_old else (),
            tuple(ref_T.tolist()) if has_ref else (),
        )
        for sample, old_T, ref_T in zip(samples, old, ref, strict=True)
        if sample.sample_id is not None
    }


@functools.lru_cache(maxsize=1)  # decodes the whole vocabulary
def blank_tokens(tokenizer: PreTrainedTokenizerFast, vocab_size: int) -> Tensor:
    """Return bool [V], true for ids of white space, of punctuation or without text, which are no
    decisions.
    """
    texts = tokenizer.batch_decode([[index] for index in range(min(len(tokenizer), vocab_size))])
    blank = [not any(c.isalnum() for c in text) for text in texts]
    return torch.tensor(blank + [True] * (vocab_size - len(blank)), dtype=torch.bool)


def find_points(
    groups: Sequence[Group],
    scores: ResponseScores,
    options: Options,
    *,
    num_branches: int,
    seed: int,
    is_blank_V: Tensor,
    policy: PolicyName = "planner",
) -> list[list[BranchPoint]]:
    """Return `num_branches` points per group, best first: candidates, then other tokens, then the
    same points again; fewer without tokens.

    Args:
        groups: the roots; failed roots get no branches.
        scores: of the tokens of `root_samples(groups, policy)`.
        is_blank_V: [V] bool, token ids that are no decision (white space, punctuation).
    """
    roots, calls = _root_calls(groups, policy)
    starts = [0, *accumulate(len(call.response_ids) for *_, call in calls)]
    ids = [token for *_, call in calls for token in call.response_ids]
    allowed_T = ~is_blank_V[torch.tensor(ids, dtype=torch.int64)]
    if options.keep_token:  # nothing could follow the last token of a turn
        allowed_T[torch.tensor(starts[1:]) - 1] = False
    root_sizes = [0] * len(roots)
    for root, _, call in calls:
        root_sizes[root] += len(call.response_ids)
    cu_S1 = torch.tensor([0, *accumulate(root_sizes)], device=scores.logprob_T.device)
    if options.rule == "random":
        branching = _at_random(calls, seed, cu_S1.device)
    else:
        branching = branching_score(
            scores.logprob_T,
            scores.logprob_T if options.rule == "entropy" else scores.baseline_logprob_T,
            scores.entropy_T,
            cu_S1,
            gamma=options.gamma,
            clip=options.clip,
        )
    places = _best(
        branching, allowed_T.to(cu_S1.device), cu_S1, calls, starts, num_branches, options.spacing
    )
    points: list[list[BranchPoint]] = []
    for g in range(len(groups)):
        best = sorted(place for place in places if roots[place.root][0] == g)[:num_branches]
        best = [*islice(cycle(best), num_branches)]
        shift = int(options.keep_token)
        points.append(
            [BranchPoint(roots[p.root][1], p.turn, p.token + shift, -p.cost) for p in best]
        )
    return points


class Place(NamedTuple):
    """A token at which a rollout may branch; in order, the best place is the first."""

    is_spare: bool
    """The token is no candidate and ranks behind the candidates of all roots."""
    rank: int
    """Rank among the places of its root: the best places of all roots come first, then the second
    best."""
    cost: float
    """The score with the sign turned."""
    root: int
    turn: int
    token: int


class _RootCall(NamedTuple):
    """The call that a turn of a root began with."""

    root: int
    sample_id: SampleId
    call: Call


def _root_calls(
    groups: Sequence[Group], policy: PolicyName
) -> tuple[list[tuple[int, int]], Sequence[_RootCall]]:
    """Return (group, trajectory) of each root, and the calls that began turns of a policy."""
    roots = [
        (g, member)
        for g, group in enumerate(groups)
        for member, root in enumerate(group.trajectories)
        if not root.error
    ]
    calls = [
        _RootCall(s, SampleId(groups[g].index, member, number), call)
        for s, (g, member) in enumerate(roots)
        for number, turn in enumerate(groups[g].trajectories[member].turns)
        if turn.policy == policy and (call := turn.call).response_ids
    ]
    return roots, calls


def _at_random(calls: Sequence[_RootCall], seed: int, device: torch.device) -> BranchingScore:
    """Return random scores that make every token an equally likely candidate."""
    draws = [
        derive_uniform(seed, *sample_id, token)
        for _, sample_id, call in calls
        for token in range(len(call.response_ids))
    ]
    score_T = fp32(draws, device)
    return BranchingScore(score_T, torch.ones_like(score_T), torch.ones_like(score_T) > 0)


def _best(
    branching: BranchingScore,
    allowed_T: Tensor,
    cu_S1: Tensor,
    calls: Sequence[_RootCall],
    starts: Sequence[int],
    num_points: int,
    spacing: int,
) -> list[Place]:
    """Return the best places of every root: candidates, and other allowed tokens behind them.

    `starts`: where the tokens of each call begin, and where all end.
    """
    score_T, is_candidate_T = branching.score_T, branching.is_candidate_T
    if not len(score_T):
        return []
    # Below every candidate, in their own order.
    demoted_T = score_T - (score_T.max() - score_T.min() + 1)
    all_tokens = replace(
        branching,
        score_T=torch.where(is_candidate_T, score_T, demoted_T),
        is_candidate_T=torch.ones_like(is_candidate_T),
    )
    points_SB = branch_points(
        all_tokens, cu_S1, num_points=num_points, spacing=spacing, allowed_T=allowed_T
    )
    at_SB = points_SB.clamp(min=0)
    rows = zip(
        points_SB.tolist(), is_candidate_T[at_SB].tolist(), score_T[at_SB].tolist(), strict=True
    )
    places = []
    for root, row in enumerate(rows):
        for rank, (index, is_candidate, score) in enumerate(zip(*row, strict=True)):
            if index >= 0:
                call_number = bisect_right(starts, index) - 1
                turn, token = calls[call_number].sample_id.turn, index - starts[call_number]
                places.append(Place(not is_candidate, rank, -score, root, turn, token))
    return places
