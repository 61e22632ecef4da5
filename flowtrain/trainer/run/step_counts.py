"""Count a step on all ranks, and put it together in one exchange."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flowtrain.config import Config
from flowtrain.logging.learning_signal import count_signal
from flowtrain.logging.rollout_parts import count_parts, part_metrics
from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.logging.tally import Tally
from flowtrain.logging.token_counts import account, count_tokens
from flowtrain.records import Rollouts, TokenAccount, TrainBatch
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.learner import Rows


class Counted(NamedTuple):
    """A step in numbers, the same on every rank."""

    total: Tally
    tokens: TokenAccount
    mismatch: Mapping[str, float]
    """Metrics of trainer and sampler."""
    metrics: Mapping[str, float]
    """All of it for the log."""


def count_step(
    step: int,
    rollouts: Rollouts,
    batch: TrainBatch,
    packed: Rows,
    trained: Mapping[str, float],
    *,
    config: Config,
    sampled: int | None,
    spent: Mapping[str, float],
    peak_bytes: float,
    world: World,
) -> Counted:
    """Count this rank's part of a step, and put it together with the others'; collective.

    Args:
        batch, packed: what is trained of the rollouts, before and after packing.
        trained: statistics of the optimizer steps; empty on a rank that does not train.
        sampled: tokens that this rank's engine has returned for the rollouts; None: nodes did.
        spent: counts of this rank's requests to other models.
        peak_bytes: most memory that this rank has taken.
    """
    groups, policy = rollouts.groups, config.train.policy
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tally = Tally()
    tally.add(count_rollouts(trajectories, config.agent.tools))
    tally.add({"num_groups_dropped": batch.num_groups_dropped})
    tally.add({f"num_excluded/{reason}": number for reason, number in batch.num_filtered.items()})
    count_parts(tally, trajectories, config)
    of_policy = [group.of_policy(policy) for group in groups]
    count_signal(tally, of_policy, batch, config.reward.low)
    count_tokens(tally, groups, batch, packed, policy=policy, sampled=sampled)
    tally.add(spent)
    tally.highest("peak_bytes", peak_bytes)
    for name in ("num_tokens", "num_tokens_skipped"):  # which only ranks that train know
        tally.highest(name, trained.get(name, 0))
    if trained:
        mismatch = {name: x for name, x in trained.items() if name.startswith("mismatch_")}
        tally.say("mismatch", mismatch)
    total = tally.of_all(world)
    tokens = account(
        total, int(total.maxima["num_tokens"]), int(total.maxima["num_tokens_skipped"])
    )
    left_out = {name: num for name, num in total.sums.items() if name.startswith("num_")}
    metrics = {
        **RolloutStats.of_counts(total.sums, config.agent.tools).metrics(),
        **part_metrics(total),
        **left_out,
        **{name: total.sums[name] for name in spent},
        "peak_memory_gb": total.maxima["peak_bytes"] / 1e9,
        **tokens.metrics(),
    }
    return Counted(total, tokens, total.said["mismatch"][0], metrics)
