"""Branch points: the tokens of finished rollouts at which another choice would have mattered most
(APPO, arXiv 2606.12384, eqs. 3 to 5).

One scoring pass over the roots gives exact entropies and log-probs of every generated token;
`flowkernels.branching_score` turns them into scores. A rollout is one sequence here: its turns one
after the other, without prompts and tool results. ARPO's rule (arXiv 2507.19849), the rise of
entropy after a tool result, is there to compare with, and so are places drawn at random.

Suffixes: T generated tokens of all roots, S roots.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from flowkernels import BranchingScore, branch_points, branching_score
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.algorithms.advantages import make_sample
from flowtrain.algorithms.base import Algorithm, Branches
from flowtrain.config import Appo as Options
from flowtrain.training.token_scores import Scored
from flowtrain.training.trainer import Trainer
from flowtrain.training.tree import in_order, pack_rows
from flowtrain.types import BranchPoint, Call, Group, Sample, SampleId
from flowtrain.utils.seeds import derive_seed, derive_uniform

_ARPO_TOKENS = 20
_ARPO_BASE = 0.5
_ARPO_SLOPE = 0.2
_ROUNDING = 1e-5
"""Nats by which two ways to compute an fp32 log-prob may differ."""

Candidate = tuple[float, int, int, int]
"""(score, root, turn, token)"""


@dataclass(frozen=True, slots=True)
class ResponseScores:
    """fp32 [T] each: what the policy says of generated tokens."""

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
    """Score the roots of a step and choose where to branch from them; collective.

    `against_reference`: the future ratio divides by the reference policy, not by the sampler.
    """
    config = algorithm.config
    samples, entropies = root_samples(groups)
    scores = score_samples(
        trainer,
        samples,
        config.train.token_budget,
        against_reference=against_reference,
        entropies=entropies if algorithm.records_entropies else None,
    )
    points = find_points(
        groups,
        scores,
        config.appo,
        num_branches=config.rollout.group_size - config.appo.num_roots,
        seed=derive_seed(config.run.seed, "branch", step),
        is_blank_V=blank_tokens(tokenizer, trainer.model.config.vocab_size),
    )
    points = [stamped(each, "trainer", step - 1) for each in points]
    has_old, has_ref = algorithm.has_old_logprobs, algorithm.has_ref_logprobs
    return Branches(points, known_logprobs(samples, scores, has_old=has_old, has_ref=has_ref))


def without_rounding(logprob_T: Tensor, baseline_T: Tensor) -> Tensor:
    """Return the log-probs with those that are equal but for rounding made equal, because the score
    would make much of it.
    """
    is_equal_T = (logprob_T - baseline_T).abs() < _ROUNDING
    return torch.where(is_equal_T, baseline_T, logprob_T)


def stamped(points: Sequence[BranchPoint], scorer: str, version: int) -> list[BranchPoint]:
    """Return the points with what scored them, `BranchPoint.scorer` and `version`."""
    return [replace(point, scorer=scorer, version=version) for point in points]


def root_samples(groups: Sequence[Group]) -> tuple[list[Sample], list[float]]:
    """Return every turn with tokens as a sample to score, and the sampler's entropies of its
    tokens.
    """
    _, calls = root_calls(groups)
    samples = []
    for _, sample_id, call in calls:
        zeros = (0.0,) * len(call.response_ids)
        samples.append(make_sample(call, sample_id, advantages=zeros, loss_weights=zeros))
    return samples, [x for *_, call in calls for x in call.entropies]


def score_samples(
    trainer: Trainer,
    samples: Sequence[Sample],
    token_budget: int,
    *,
    against_reference: bool,
    entropies: Sequence[float] | None = None,
) -> ResponseScores:
    """Score all response tokens under the policy, in the order of the samples; collective.

    Where the sampler recorded `entropies`, its log-probs are taken for the policy's, which spares
    the pass of the policy.
    """
    device = trainer.device
    sampler_T = fp32([x for sample in samples for x in sample.logprobs], device)
    baseline_T = sampler_T
    if against_reference:
        with trainer.reference() as reference:
            baseline_T, _ = _score_in_order(trainer, reference, samples, token_budget)
    if entropies is None:
        scored = _score_in_order(trainer, trainer.model, samples, token_budget)
        return ResponseScores(*scored, baseline_T)
    logprob_T = without_rounding(sampler_T, baseline_T)
    return ResponseScores(logprob_T, fp32(entropies, device), baseline_T)


def _score_in_order(
    trainer: Trainer, model: PreTrainedModel, samples: Sequence[Sample], token_budget: int
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens; packing changes the order of the samples."""
    scores = trainer.score(model, pack_rows(samples, token_budget))

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat([fp32([], trainer.device), *in_order(samples, parts)])

    return joined([s.logprob_T for s in scores]), joined([s.entropy_T for s in scores])


def fp32(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def known_logprobs(
    samples: Sequence[Sample], scores: ResponseScores, *, has_old: bool, has_ref: bool
) -> dict[SampleId, Scored]:
    """Return what the loss need not compute again: the scores as old log-probs, the baseline's as
    those of the reference policy.
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
    """[V] bool: ids of white space and punctuation, which are no decision, and ids without text."""
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
) -> list[list[BranchPoint]]:
    """Return `num_branches` points per group, best first; fewer by ARPO's rule, or without tokens.

    Args:
        groups: the roots; nothing branches from one that failed.
        scores: of the tokens of `root_samples(groups)`.
        is_blank_V: [V] bool, token ids that are no decision (white space, punctuation).
    """
    roots, calls = root_calls(groups)
    positions = _TokenPositions.of(calls, len(roots), scores.logprob_T.device)
    if options.rule == "arpo":
        starts = _after_tools(positions, scores.entropy_T, random.Random(seed))
        by_group = [[p for p in starts if roots[p[1]][0] == g] for g in range(len(groups))]
        chosen = [sorted(each, reverse=True)[:num_branches] for each in by_group]
    else:
        ids = [token for *_, call in calls for token in call.response_ids]
        allowed_T = ~is_blank_V[torch.tensor(ids, dtype=torch.int64)]
        if options.keep_token:  # nothing could follow the last token of a turn
            allowed_T[torch.tensor(positions.turn_bounds[1:]) - 1] = False
        allowed_T = allowed_T.to(positions.device)
        if options.rule == "random":
            found = _at_random(calls, seed, positions.device)
        else:
            found = _by_score(positions, scores, options)
        strict, loose = _best(positions, found, options.spacing, num_branches, allowed_T)
        chosen = []
        for g in range(len(groups)):
            mine = [s for s, root in enumerate(roots) if root[0] == g]
            strict_here = [strict[s] for s in mine]
            loose_here = [loose[s] for s in mine]
            chosen.append(choose(strict_here, loose_here, num_branches))
    shift = int(options.keep_token)
    return [
        [BranchPoint(roots[s][1], turn, token + shift, value) for value, s, turn, token in each]
        for each in chosen
    ]


def root_calls(
    groups: Sequence[Group],
) -> tuple[list[tuple[int, int]], list[tuple[int, SampleId, Call]]]:
    """(group, trajectory) of each root, and (root, id, call) of each of their turns with tokens."""
    roots = [
        (g, member)
        for g, group in enumerate(groups)
        for member, root in enumerate(group.trajectories)
        if not root.error
    ]
    calls = [
        (s, SampleId(groups[g].index, member, number), call)
        for s, (g, member) in enumerate(roots)
        for number, turn in enumerate(groups[g].trajectories[member].turns)
        if (call := turn.calls["planner"]).response_ids
    ]
    return roots, calls


def choose(
    strict: Sequence[Sequence[Candidate]],
    loose: Sequence[Sequence[Candidate]],
    num_branches: int,
) -> list[Candidate]:
    """Choose exactly `num_branches` points of one question, if it has any: candidates first, then
    other tokens, then the same points again.

    Args:
        strict, loose: of each root, best first: candidates, and places where any token may be
            chosen.
    """
    found = _pooled(strict)[:num_branches]
    if len(found) < num_branches:
        had = {place[1:] for place in found}
        found += [place for place in _pooled(loose) if place[1:] not in had][
            : num_branches - len(found)
        ]
    return [found[i % len(found)] for i in range(num_branches)] if found else []


def _pooled(places: Sequence[Sequence[Candidate]]) -> list[Candidate]:
    """Order the points: every root's best, then the second best, and so on."""
    depth = max((len(root) for root in places), default=0)
    return [
        place
        for i in range(depth)
        for place in sorted((r[i] for r in places if i < len(r)), key=lambda place: -place[0])
    ]


@dataclass(frozen=True, slots=True)
class _TokenPositions:
    """The position of each generated token: its root, turn and index in the turn."""

    turn_bounds: list[int]
    """[turns + 1], in tokens."""
    turns: list[tuple[int, int]]
    """(root, turn) of each."""
    cu_seqlens_S1: Tensor

    @classmethod
    def of(
        cls, calls: Sequence[tuple[int, SampleId, Call]], num_roots: int, device: torch.device
    ) -> _TokenPositions:
        lengths = [len(call.response_ids) for *_, call in calls]
        per_root = [0] * num_roots
        for (root, *_), length in zip(calls, lengths, strict=True):
            per_root[root] += length
        bounds = torch.tensor([0, *accumulate(per_root)], dtype=torch.int64, device=device)
        turns = [(root, sample_id.turn) for root, sample_id, _ in calls]
        return cls([0, *accumulate(lengths)], turns, bounds)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens_S1.device


def _by_score(
    positions: _TokenPositions, scores: ResponseScores, options: Options
) -> BranchingScore:
    """APPO's score of every token, or its first factor."""
    return branching_score(
        scores.logprob_T,
        scores.logprob_T if options.rule == "entropy" else scores.baseline_logprob_T,
        scores.entropy_T,
        positions.cu_seqlens_S1,
        gamma=options.gamma,
        clip=options.clip,
    )


def _at_random(
    calls: Sequence[tuple[int, SampleId, Call]], seed: int, device: torch.device
) -> BranchingScore:
    """Uniform draws in place of scores: every token is as likely as any other, and a candidate."""
    draws = [
        derive_uniform(seed, *sample_id, token)
        for _, sample_id, call in calls
        for token in range(len(call.response_ids))
    ]
    score_T = fp32(draws, device)
    return BranchingScore(score_T, torch.ones_like(score_T), torch.ones_like(score_T) > 0)


def _best(
    positions: _TokenPositions,
    found: BranchingScore,
    spacing: int,
    num_points: int,
    allowed_T: Tensor,
) -> tuple[list[list[Candidate]], list[list[Candidate]]]:
    """Return the best candidates of every root, and the best of all its allowed tokens."""
    everything = replace(found, is_candidate_T=torch.ones_like(found.is_candidate_T))
    strict = _listed(positions, found, spacing, num_points, allowed_T)
    return strict, _listed(positions, everything, spacing, num_points, allowed_T)


def _listed(
    positions: _TokenPositions,
    scores: BranchingScore,
    spacing: int,
    num_points: int,
    allowed_T: Tensor,
) -> list[list[Candidate]]:
    if not len(scores.score_T):
        return [[] for _ in positions.cu_seqlens_S1[1:]]
    points_SB = branch_points(
        scores,
        positions.cu_seqlens_S1,
        num_points=num_points,
        spacing=spacing,
        allowed_T=allowed_T,
    )
    value_SB = scores.score_T[points_SB.clamp(min=0)]
    bounds = torch.tensor(positions.turn_bounds, device=points_SB.device)
    turn_SB = torch.searchsorted(bounds, points_SB, right=True) - 1
    rows = zip(points_SB.tolist(), value_SB.tolist(), turn_SB.tolist(), strict=True)
    return [
        [
            (value, *positions.turns[turn], point - positions.turn_bounds[turn])
            for point, value, turn in zip(*row, strict=True)
            if point >= 0
        ]
        for row in rows
    ]


def _after_tools(
    positions: _TokenPositions, entropy_T: Tensor, rng: random.Random
) -> list[Candidate]:
    """ARPO: the beginning of a turn that read a tool's result, with probability clip(0.5 + 0.2 dH),
    dH the rise of entropy since turn 1.
    """
    bounds = pairwise(positions.turn_bounds)
    starts = [entropy_T[start : min(end, start + _ARPO_TOKENS)].mean() for start, end in bounds]
    means = torch.stack(starts).tolist() if starts else []
    by_turn = list(zip(positions.turns, means, strict=True))
    first = {root: mean for (root, turn), mean in by_turn if turn == 0}
    found = []
    for (root, turn), mean in by_turn:
        rise = mean - first.get(root, mean)
        if turn > 0 and rng.random() < _ARPO_BASE + _ARPO_SLOPE * rise:
            found.append((rise, root, turn, 0))
    return found
