"""The decisions of the dataflow that a run was trained from, made again from its ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from flowtrain.config import Config
from flowtrain.dataflow.ledger import audit_database, open_ledger, recheck
from flowtrain.dataflow.ledger.recheck import History
from flowtrain.replay.recorded import Recorded
from flowtrain.types import Group


@dataclass(frozen=True, slots=True)
class Decisions:
    """Decisions of the ledger about a run."""

    text: str
    """What was looked at."""
    problems: tuple[str, ...]


def check_decisions(recorded: Recorded, steps: range, database: str) -> Decisions:
    """Audit the ledger, make its decisions again, and compare the groups that it served for `steps`
    with those of the log.

    Raises UserError when the database is none, or that of another run.
    """
    if problems := audit_database(database).problems:
        return Decisions("the ledger does not add up", tuple(problems))
    config = recorded.config(recorded.life_of(steps.start))
    ledger = open_ledger(config, database)
    history = ledger.history()
    ledger.close()
    again = recheck(history)
    text = (
        f"{again.num_prompts:,} prompts, {again.num_groups:,} groups and {again.num_batches:,} "
        f"batches decided about again; groups of {len(steps)} steps compared"
    )
    served = next(_differences(recorded, config, steps, history), "")
    return Decisions(text, (*again.differences, *([served] if served else [])))


def _differences(
    recorded: Recorded, config: Config, steps: range, history: History
) -> Iterator[str]:
    """Yield where a batch of the log is not the one that the ledger served: tasks and rewards."""
    policy = config.train.policy
    shares = {share.work_item: share for share in history.shares if share.policy == policy}
    served: dict[tuple[int, int], int] = {
        (row.step, row.position): row.work_item
        for row in history.assignments
        if row.policy == policy
    }
    for step in steps:
        for group in recorded.groups(step):
            share = shares.get(served.get((step, group.index), -1))
            if share is None:
                yield f"step {step}, group {group.index}: the ledger served none"
            elif share.task_id != (own := group.trajectories[0].task.id):
                yield (
                    f"step {step}, group {group.index}: it is of task {own!r}, the ledger served "
                    f"{share.task_id!r}"
                )
            elif not config.algorithm.shuffle_rewards and _rewards(group) != json.loads(
                share.rewards
            ):
                yield (
                    f"step {step}, group {group.index}: its rewards are {_rewards(group)}, those "
                    f"that the ledger served {json.loads(share.rewards)}"
                )


def _rewards(group: Group) -> list[float | None]:
    return [trajectory.reward for trajectory in group.finished]
