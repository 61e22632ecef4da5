"""Statistics of sampling from the likeliest tokens alone."""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.agents.build import most_kept
from flowtrain.config import Config
from flowtrain.training.world import World
from flowtrain.types import Trajectory


def sampling_metrics(
    trajectories: Sequence[Trajectory], config: Config, world: World
) -> dict[str, float]:
    """Compute how many tokens the planner's were sampled from on average, and the share of its
    tokens for which these were as many as allowed; nothing without truncation. Collective.
    """
    most = most_kept(config)
    if not most:
        return {}
    calls = (turn.calls.get("planner") for each in trajectories for turn in each.turns)
    masks = [call.sampling_mask for call in calls if call and call.sampling_mask]
    counts = [count for mask in masks for count in mask.counts]
    own = [sum(counts), sum(count >= most for count in counts), len(counts)]
    kept, num_capped, num_tokens = world.sum(own)
    if not num_tokens:
        return {}
    return {"kept_tokens_mean": kept / num_tokens, "kept_at_cap_share": num_capped / num_tokens}
