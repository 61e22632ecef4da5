"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): questions whose rollouts all have the
same reward give no gradient, so other questions replace them.
"""

from __future__ import annotations

import json
from dataclasses import replace

from flowtrain.algorithms.advantages import are_equal, reward_of
from flowtrain.records import Group, PolicyName, Rollouts
from flowtrain.trainer.distributed import World


def joined(rollouts: Rollouts, next_rollouts: Rollouts, num_asked: int) -> Rollouts:
    """Return this rank's groups of two rounds; `num_asked` questions were in the rounds before."""
    renumbered = [replace(group, index=group.index + num_asked) for group in next_rollouts.groups]
    return Rollouts([*rollouts.groups, *renumbered], next_rollouts.logprobs, {})


def mixed_first(rollouts: Rollouts, world: World, policy: PolicyName) -> tuple[Rollouts, int]:
    """Return the groups of all ranks renumbered, with the number of mixed ones; collective. Groups
    whose rewards differ for the policy come first, which spreads them evenly over the mini-batches.
    """
    flags = [[group.index, _has_one_reward(group.of_policy(policy))] for group in rollouts.groups]
    texts = world.gather_text(json.dumps(flags))
    ordered = sorted((is_equal, index) for text in texts for index, is_equal in json.loads(text))
    new_index = {index: place for place, (_, index) in enumerate(ordered)}
    groups = [replace(group, index=new_index[group.index]) for group in rollouts.groups]
    num_mixed = sum(not is_equal for is_equal, _ in ordered)
    metrics = {"num_questions_sampled": float(len(ordered))}
    return Rollouts(groups, rollouts.logprobs, metrics), num_mixed


def _has_one_reward(group: Group) -> bool:
    rewards = [reward_of(trajectory) for trajectory in group.finished]
    return not rewards or are_equal(rewards)
