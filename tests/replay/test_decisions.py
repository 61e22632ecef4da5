"""The groups of a run's log are those that its ledger served, or the first that is not is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.dataflow.codec import unpack_group
from flowtrain.dataflow.contract import BatchRequest, Progress
from flowtrain.dataflow.ledger import open_ledger
from flowtrain.replay.decisions import check_decisions
from flowtrain.types import Group
from tests.dataflow.fake_groups import joined, lease, options, planner, push

NUM_STEPS = 2
Log = dict[int, list[Group]]


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def served(database: Path) -> Log:
    """The groups of each step, as a run logs them."""
    flow, log = open_ledger(options(), str(database)), {}
    joined(flow)
    flow.register(planner())
    for step in range(1, NUM_STEPS + 1):
        for each in lease(flow, 4, versions={"planner": step - 1}):
            push(flow, each, version=step - 1)
        batch = flow.batch(BatchRequest("planner", step)).groups
        log[step] = [
            replace(unpack_group(each.payload), index=index) for index, each in enumerate(batch)
        ]
        flow.progress(Progress("planner", step, 0))
    flow.close()
    return log


def problems(database: Path, log: Log) -> tuple[str, ...]:
    recorded: Any = SimpleNamespace(
        life_of=lambda step: 0, config=lambda life: options(), groups=log.__getitem__
    )
    return check_decisions(recorded, range(1, NUM_STEPS + 1), str(database)).problems


def test_what_was_served_is_as_it_was(database: Path, served: Log) -> None:
    assert [len(groups) for groups in served.values()] == [4, 4]
    assert problems(database, served) == ()


def of_another_task(group: Group) -> Group:
    task = replace(group.trajectories[0].task, id="task-99")
    return replace(group, trajectories=tuple(replace(t, task=task) for t in group.trajectories))


def with_other_rewards(group: Group) -> Group:
    return replace(group, trajectories=tuple(replace(t, reward=1.0) for t in group.trajectories))


def at_another_place(group: Group) -> Group:
    return replace(group, index=7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (of_another_task, "step 2, group 1: it is of task 'task-99', the ledger served 'train-"),
        (with_other_rewards, "step 2, group 1: its rewards are [1.0, 1.0], those that the ledger"),
        (at_another_place, "step 2, group 7: the ledger served none"),
    ],
)
def test_the_first_group_that_is_another_is_named(
    database: Path, served: Log, change: Callable[[Group], Group], said: str
) -> None:
    served[2][1] = change(served[2][1])
    (problem,) = problems(database, served)
    assert problem.startswith(said)
