"""Branch points on a rollout node, which has the rollouts of one question and no trainer.

Entropies are those that the engine recorded while it sampled. The rule "score" asks one more policy
for its log-probs of the same tokens: the node's newest weights, where the roots are older, or the
policy that training started from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch
from torch import Tensor

from flowtrain.algorithms.base import NodeSampler
from flowtrain.algorithms.branching import (
    ResponseScores,
    blank_tokens,
    find_points,
    fp32,
    root_samples,
    stamped,
    without_rounding,
)
from flowtrain.config import Config
from flowtrain.engines.protocol import Scorer
from flowtrain.types import BranchPoint, Group, Sample

_CPU = torch.device("cpu")


async def node_points(
    config: Config, roots: Group, seed: int, sampler: NodeSampler
) -> list[BranchPoint]:
    """Choose where to branch from the roots of one group.

    `seed` is of the draws of ARPO's rule and of random places. Raises EngineError when a scorer
    does not answer.
    """
    options = config.appo
    samples, entropies = root_samples([roots])
    recorded_T = fp32([x for sample in samples for x in sample.logprobs], _CPU)
    assert len(entropies) == len(recorded_T), "the engine records entropies"
    versions = _versions(roots)
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
            num_branches=config.rollout.group_size - options.num_roots,
            seed=seed,
            is_blank_V=blank_tokens(sampler.tokenizer, sampler.vocab_size),
        )
        return points

    points = await asyncio.to_thread(choose)  # the first time it decodes the whole vocabulary
    return stamped(points, options.node_scorer, version)


def _versions(roots: Group) -> set[int]:
    """Return the weight versions that sampled tokens of the roots."""
    calls = [turn.calls["planner"] for root in roots.trajectories for turn in root.turns]
    return {span.version for call in calls for span in call.spans}


async def _score(scorer: Scorer, samples: Sequence[Sample], config: Config) -> tuple[int, Tensor]:
    """Return the scorer's version, and its log-probs of all response tokens, [T]."""
    version, found = await scorer.score(samples, config.rollout.temperature)
    return version, fp32([x for logprobs in found for x in logprobs], _CPU)
