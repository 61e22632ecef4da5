"""Where to branch: the places in finished rollouts at which another choice would have mattered most
(APPO, arXiv 2606.12384, eqs. 3 to 5).

One scoring pass over the roots gives exact entropies and log-probs of every generated token;
`flowkernels.branching_score` makes scores of them. A rollout is one sequence here: its turns one
after the other, prompts and tool results left out. ARPO's rule (arXiv 2507.19849), the rise of
entropy after a tool result, is there to compare with.

Suffixes: T generated tokens of all roots, S roots.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from flowkernels import BranchingScore, branch_points, branching_score
from torch import Tensor

from flowtrain.training.trainer import ResponseScores
from flowtrain.types import BranchPoint, Call, Group, Sample, SampleId

_ARPO_TOKENS = 20
_ARPO_BASE, _ARPO_SLOPE = 0.5, 0.2

Place = tuple[float, int, int, int]
"""(score, root, turn, token)"""


@dataclass(frozen=True, slots=True)
class BranchRule:
    """How places are chosen."""

    kind: Literal["score", "entropy", "arpo"] = "score"
    spread: Literal["root", "question"] = "root"
    """Share the branches of a question out evenly to its roots, or take its best places wherever
    they are."""
    spacing: int = 16
    gamma: float = 1.0
    clip: float = 0.2
    keeps_token: bool = False
    """The branch keeps the token that was chosen and goes on after it, as the released code does.
    """


ScoreTokens = Callable[[Sequence[Sample], Sequence[float]], ResponseScores]
"""(samples, the entropies that the sampler told of their responses) -> scores of the responses, one
after the other; collective."""


def find_points(
    groups: Sequence[Group],
    score: ScoreTokens,
    rule: BranchRule,
    num_branches: int,
    seed: int,
    is_blank_V: Tensor,
) -> list[list[BranchPoint]]:
    """`num_branches` places for each group, best first; fewer by ARPO's rule, or where a group has
    no token at all.

    Args:
        groups: the roots; nothing branches from one that failed.
        is_blank_V: [V] bool, token ids that are no decision (white space, punctuation).
    """
    roots = [
        (g, n, root)
        for g, group in enumerate(groups)
        for n, root in enumerate(group.trajectories)
        if not root.error
    ]
    calls = [
        (s, number, turn.calls["planner"])
        for s, (_, _, root) in enumerate(roots)
        for number, turn in enumerate(root.turns)
        if turn.calls["planner"].response_ids
    ]
    samples = [
        _sample(call, SampleId(groups[roots[s][0]].index, roots[s][1], number))
        for s, number, call in calls
    ]
    scored = score(samples, [x for *_, call in calls for x in call.entropies])
    places = _Places.of(calls, len(roots), scored.logprob_T.device)
    if rule.kind == "arpo":
        found = _after_tools(places, scored.entropy_T, random.Random(seed))
        choices = [[p for p in found if roots[p[1]][0] == g] for g in range(len(groups))]
        chosen = [sorted(options, reverse=True)[:num_branches] for options in choices]
    else:
        allowed_T = ~is_blank_V[
            torch.tensor([x for s in samples for x in s.response_ids], dtype=torch.int64)
        ]
        if rule.keeps_token:
            allowed_T[torch.tensor(places.turn_bounds[1:]) - 1] = False  # nothing could follow
        allowed_T = allowed_T.to(places.device)
        strict, loose = _best(places, scored, rule, num_branches, allowed_T)
        chosen = []
        for g in range(len(groups)):
            mine = [s for s, root in enumerate(roots) if root[0] == g]
            chosen.append(
                choose(
                    [strict[s] for s in mine], [loose[s] for s in mine], num_branches, rule.spread
                )
            )
    shift = int(rule.keeps_token)
    return [
        [BranchPoint(roots[s][1], turn, token + shift, value) for value, s, turn, token in places]
        for places in chosen
    ]


def _sample(call: Call, sample_id: SampleId) -> Sample:
    num_tokens = len(call.response_ids)
    return Sample(
        prompt_ids=call.prompt_ids,
        response_ids=call.response_ids,
        logprobs=call.logprobs,
        advantages=(0.0,) * num_tokens,
        loss_weights=(1.0,) * num_tokens,
        sample_id=sample_id,
        sampling_mask=call.sampling_mask,
    )


def choose(
    strict: Sequence[Sequence[Place]],
    loose: Sequence[Sequence[Place]],
    num_branches: int,
    spread: str,
) -> list[Place]:
    """Exactly `num_branches` of one question's places, if there is any: candidates first, then
    other tokens, then the same ones again.

    Args:
        strict, loose: of each root, best first: candidates, and places where any token may be
            chosen.
    """
    found = _pooled(strict, spread)[:num_branches]
    if len(found) < num_branches:
        had = {place[1:] for place in found}
        found += [place for place in _pooled(loose, spread) if place[1:] not in had][
            : num_branches - len(found)
        ]
    return [found[i % len(found)] for i in range(num_branches)] if found else []


def _pooled(places: Sequence[Sequence[Place]], spread: str) -> list[Place]:
    """In the order in which they are taken: the best of every root, then the second best, ...; or
    by score alone.
    """
    if spread == "question":
        return sorted((place for root in places for place in root), key=lambda place: -place[0])
    depth = max((len(root) for root in places), default=0)
    return [
        place
        for i in range(depth)
        for place in sorted((r[i] for r in places if i < len(r)), key=lambda place: -place[0])
    ]


@dataclass(frozen=True, slots=True)
class _Places:
    """Which token of which turn of which root each generated token is."""

    turn_bounds: list[int]
    """[turns + 1]"""
    turns: list[tuple[int, int]]
    """(root, turn) of each."""
    cu_seqlens_S1: Tensor

    @classmethod
    def of(
        cls, calls: Sequence[tuple[int, int, Call]], num_roots: int, device: torch.device
    ) -> _Places:
        lengths = [len(call.response_ids) for _, _, call in calls]
        per_root = [0] * num_roots
        for (root, _, _), length in zip(calls, lengths, strict=True):
            per_root[root] += length
        bounds = torch.tensor([0, *accumulate(per_root)], dtype=torch.int64, device=device)
        return cls([0, *accumulate(lengths)], [(root, turn) for root, turn, _ in calls], bounds)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens_S1.device


def _best(
    places: _Places, scored: ResponseScores, rule: BranchRule, num: int, allowed_T: Tensor
) -> tuple[list[list[Place]], list[list[Place]]]:
    """The best candidates of every root, and the best of all its tokens that may be chosen."""
    old_T = scored.logprob_T if rule.kind == "entropy" else scored.old_logprob_T
    bounds = places.cu_seqlens_S1
    scores = branching_score(
        scored.logprob_T, old_T, scored.entropy_T, bounds, gamma=rule.gamma, clip=rule.clip
    )
    everything = replace(scores, is_candidate_T=torch.ones_like(scores.is_candidate_T))
    return _listed(places, scores, rule, num, allowed_T), _listed(
        places, everything, rule, num, allowed_T
    )


def _listed(
    places: _Places, scores: BranchingScore, rule: BranchRule, num: int, allowed_T: Tensor
) -> list[list[Place]]:
    points_SB = branch_points(
        scores, places.cu_seqlens_S1, num_points=num, spacing=rule.spacing, allowed_T=allowed_T
    )
    value_SB = (
        scores.score_T[points_SB.clamp(min=0)]
        if len(scores.score_T)
        else torch.zeros_like(points_SB, dtype=torch.float32)
    )
    turn_SB = (
        torch.searchsorted(
            torch.tensor(places.turn_bounds, device=points_SB.device), points_SB, right=True
        )
        - 1
    )
    rows = zip(points_SB.tolist(), value_SB.tolist(), turn_SB.tolist(), strict=True)
    return [
        [_place(places, *place) for place in zip(*row, strict=True) if place[0] >= 0]
        for row in rows
    ]


def _place(places: _Places, point: int, value: float, index: int) -> Place:
    root, turn = places.turns[index]
    return value, root, turn, point - places.turn_bounds[index]


def _after_tools(places: _Places, entropy_T: Tensor, rng: random.Random) -> list[Place]:
    """ARPO: the beginning of a turn that read a tool's result, with probability clip(0.5 + 0.2 dH),
    dH the rise of entropy since turn 1.
    """
    bounds = places.turn_bounds
    starts = [entropy_T[a : min(b, a + _ARPO_TOKENS)].mean() for a, b in pairwise(bounds)]
    means = torch.stack(starts).tolist() if starts else []
    first = {
        root: mean for (root, turn), mean in zip(places.turns, means, strict=True) if turn == 0
    }
    found = []
    for (root, turn), mean in zip(places.turns, means, strict=True):
        rise = mean - first.get(root, mean)
        if turn > 0 and rng.random() < _ARPO_BASE + _ARPO_SLOPE * rise:
            found.append((rise, root, turn, 0))
    return found
