"""Decisions made again: the same from an honest ledger, and the first that differs from one that
was tampered with.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_groups import joined, lease, ledger, options, planner, push

from flowtrain.config.options import parse
from flowtrain.dataflow.__main__ import main
from flowtrain.dataflow.contract import BatchRequest, Progress
from flowtrain.dataflow.ledger import Ledger, open_ledger, recheck
from flowtrain.dataflow.rules import Rules, load

RULES = {
    "prompt_filter": "greso",
    "prompt_filter_options": {"step": 0.1, "floor_easy": 0.3, "floor_hard": 0.2},
    "group_filter": "mixed",
    "selector": "weighted",
    "selector_options": {"weights": {"odd": 3.0}},
    "replay_share": 0.25,
}
NUM_STEPS = 8


def trained(flow: Ledger, num_steps: int = NUM_STEPS) -> Ledger:
    """A run of so many steps, in which rewards are drawn, some groups go stale, some are left over
    and the trainer resumes once.
    """
    order = random.Random(0)
    joined(flow)
    flow.register(planner(num_groups=4, max_staleness=1))
    for step in range(1, num_steps + 1):
        while flow.batch(BatchRequest("planner", step)).num_missing:
            for each in lease(flow, 3, versions={"planner": step - 1}):
                push(
                    flow,
                    each,
                    version=max(0, step - 1 - order.randrange(2)),
                    rewards=order.choice([(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)]),
                )
        for each in lease(flow, 2, versions={"planner": step - 1}):
            push(flow, each, version=max(0, step - 1 - order.randrange(2)))
        flow.progress(Progress("planner", step, step // 2))
        if step == num_steps // 2:
            flow.register(planner(num_groups=4, max_staleness=1, step=step // 2))
            flow.progress(Progress("planner", step, step // 2))
    return flow


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("honest") / "ledger.db"
    flow = trained(ledger(path, **RULES))
    flow.close()
    return path


@pytest.fixture
def copy(honest: Path, tmp_path: Path) -> Path:
    path = tmp_path / "ledger.db"
    with sqlite3.connect(honest) as source, sqlite3.connect(path) as target:
        source.backup(target)
    return path


def test_an_honest_ledger_has_every_decision_again(honest: Path) -> None:
    flow = ledger(honest, **RULES)
    found, states = recheck(flow.history()), {share.state for share in flow.history().shares}
    assert found.differences == ()
    assert found.num_batches == NUM_STEPS
    assert found.num_groups > 4 * NUM_STEPS
    assert found.num_prompts > found.num_groups
    assert {"assigned", "stale", "filtered"} <= states, "the run has nothing to show"
    assert sum(row.is_replay for row in flow.history().assignments) > 2
    assert recheck(flow.history()) == found
    flow.close()


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            "UPDATE decisions SET admitted = 1 - admitted WHERE position = 30",
            "position 30 in the order of tasks, 'task-",
        ),
        (
            "UPDATE decisions SET draw = 0.5 WHERE position = 9",
            "position 9 in the order of tasks: it is 'task-",
        ),
        (
            "UPDATE decisions SET task_id = 'task-99' WHERE position = 9",
            "position 9 in the order of tasks: it is 'task-",
        ),
        (
            "UPDATE decisions SET num_events = 9999 WHERE position = 40",
            "position 40 in the order of tasks: the prompt filter had seen 9999 events",
        ),
        ("UPDATE groups SET event = 9999 WHERE event = 5", ": the prompt filter had seen "),
        (
            "UPDATE groups SET rewards = '[1.0, 1.0]' WHERE rewards = '[0.0, 0.0]'",
            "the prompt filter says",
        ),
        (
            "UPDATE groups SET rewards = '[0.0, 1.0]' WHERE work_item = (SELECT work_item FROM"
            " shares WHERE state = 'filtered')",
            "the group filter says yes, the",
        ),
        (
            "UPDATE shares SET state = 'filtered' WHERE work_item = (SELECT min(work_item) FROM"
            " shares WHERE state = 'assigned')",
            "the group filter says yes, the",
        ),
        (
            "UPDATE groups SET rewards = '[1.0, 1.0]' WHERE work_item = (SELECT max(work_item) FROM"
            " shares WHERE state = 'assigned')",
            "the group filter says no, the ledger has yes",
        ),
        ("UPDATE bumps SET version = version + 1 WHERE event = (SELECT max(event) FROM bumps)", ""),
        (
            "DELETE FROM bumps WHERE event = (SELECT min(event) FROM bumps)",
            "the prompt filter had seen",
        ),
        (
            "UPDATE assignments SET position = 9 WHERE step = 7 AND position = 0",
            "batch of step 7, planner: the selector takes [",
        ),
        (
            "UPDATE assignments SET work_item = work_item + 1000 WHERE step = 7 AND is_replay = 1",
            "batch of step 7, planner: the selector takes [",
        ),
        (
            "UPDATE batches SET num_events = num_events / 2 WHERE step = 8",
            "batch of step 8, planner: the selector takes [",
        ),
        ("UPDATE shares SET state = 'assigned' WHERE state = 'stale'", "batch of step "),
        ("UPDATE work_items SET kind = 'odd'", "batch of step "),
    ],
)
def test_what_was_tampered_with_is_found(copy: Path, change: str, difference: str) -> None:
    """Only the number of a new version, which no built-in rule looks at, may be another one."""
    with sqlite3.connect(copy) as database:
        assert database.execute(change).rowcount > 0
    flow = ledger(copy, **RULES)
    found = recheck(flow.history()).differences
    assert difference in "".join(found) if difference else found == ()
    flow.close()


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"group_filter": "all"}, "the group filter says yes, the ledger has no"),
        ({"selector": "arrival", "selector_options": {}}, "batch of step "),
        ({"replay_share": 0.5}, "batch of step "),
    ],
)
def test_other_options_than_those_of_the_run_are_found(
    honest: Path, changed: dict[str, object], difference: str
) -> None:
    flow = ledger(honest, **{**RULES, **changed})
    assert difference in recheck(flow.history()).differences[0]
    flow.close()


class Moody:
    """A prompt filter that decides by something that it was not told."""

    def __init__(self) -> None:
        self.mood = random.Random()

    def admits(self, task_id: str, kind: str, draw: float) -> bool:
        return self.mood.random() < 0.5

    def observe(self, outcome: object) -> None: ...

    def on_version(self, version: int) -> None: ...


def test_a_rule_that_is_no_function_of_the_ledger_is_found(tmp_path: Path) -> None:
    def make_rules() -> Rules:
        rules = load(options().dataflow)
        return Rules(Moody(), rules.group_filter, rules.selector)

    flow = trained(ledger(tmp_path / "ledger.db", make_rules=make_rules), 4)
    assert "the prompt filter says" in recheck(flow.history()).differences[0]
    flow.close()


def test_an_empty_ledger_has_nothing_to_make_again(tmp_path: Path) -> None:
    flow = ledger(tmp_path / "ledger.db")
    assert (
        found := recheck(flow.history())
    ).differences == () and found.num_prompts == found.num_batches == 0
    flow.close()


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "ledger.db")
    words = [
        *("--rollout.group_size", "2", "--tasks.num_train", "40", "--dataflow.group_filter"),
        "mixed",
    ]
    config = parse(words)
    assert config is not None
    flow = trained(open_ledger(config, path), 3)
    flow.close()
    command = ["recheck", "--database", path]
    assert main([*command, *words]) == 0
    assert capsys.readouterr().out.endswith(
        "3 batches decided about\nevery decision comes out as it was\n"
    )
    assert main([*command, *words[:-1], "all"]) == 1
    assert "differs: group of work item " in capsys.readouterr().out
    assert main([*command, *words, "--run.seed", "5"]) == 2
    assert "run.seed" in capsys.readouterr().err
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM assignments WHERE step = 2")
    assert main([*command, *words]) == 1
    assert capsys.readouterr().out.startswith("problem: ")
    assert main(["recheck", "--database", str(tmp_path / "none.db"), *words]) == 2
    assert not (tmp_path / "none.db").exists()


def test_a_restarted_service_decides_as_one_that_went_on(tmp_path: Path) -> None:
    """Every request is answered by a new ledger object: the prompt filter's state comes from the
    database alone.
    """

    class Restarted:
        def __getattr__(self, name: str) -> Callable[[object], object]:
            def ask(request: object) -> object:
                flow = ledger(tmp_path / "ledger.db", **RULES)
                answer = getattr(flow, name)(request)
                flow.close()
                return answer

            return ask

    trained(Restarted(), 4)  # type: ignore[arg-type]
    again = ledger(tmp_path / "ledger.db", **RULES)
    went_on = trained(ledger(tmp_path / "whole.db", **RULES), 4)
    assert again.history().decisions == went_on.history().decisions
    assert again.history().assignments == went_on.history().assignments
    again.close()
    went_on.close()
