"""Questions of evaluations in the ledger: who gets them, and that training does not notice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_groups import TASKS, Clock, begun, events, group, joined, lease, planner, push

from flowtrain.records import Group
from flowtrain.rollouts.codec import pack_group, unpack_group
from flowtrain.rollouts.contract import (
    BatchRequest,
    EvalSettings,
    Evaluate,
    EvaluationRequest,
    EvaluationState,
    Lease,
    LeaseRequest,
    Progress,
    Push,
    Refused,
    Release,
)
from flowtrain.rollouts.ledger import Ledger
from flowtrain.rollouts.ledger.group_checks import GroupLimits, Summary
from flowtrain.rollouts.ledger.sql import Transaction
from flowtrain.rollouts.show import status_text

SETTINGS = EvalSettings(max_turns=3, temperature=0.5, trials=1)
NODE = {"planner": 0}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def flow(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    yield from opened(tmp_path / "ledger.db", clock)


@pytest.fixture
def either(database: str, clock: Clock) -> Iterator[Ledger]:
    """On SQLite, and on PostgreSQL."""
    yield from opened(database, clock)


def opened(database: str | Path, clock: Clock) -> Iterator[Ledger]:
    made = begun(
        database,
        clock,
        lease_s=60.0,
        max_attempts=2,
        trainer=planner(num_groups=4, max_staleness=1),
    )
    yield made
    assert made.audit().problems == ()
    made.close()


def ask(flow: Any, num: int = 3, step: int = 0, name: str = "texts", **settings: Any) -> None:
    tasks = tuple(replace(task, id=f"eval-{task.id}") for task in TASKS[:num])
    told = replace(SETTINGS, **settings)
    flow.evaluate(Evaluate("planner", step, name, told, 1000 + step, tasks))


def state(flow: Any, step: int = 0, name: str = "texts", **which: int) -> EvaluationState:
    return flow.evaluation(EvaluationRequest("planner", step, name, **which))


def answer(flow: Any, each: Lease, version: int = 0, node: str = "n1", num: int = 1) -> str:
    return push(flow, each, version, node, num=num)


def train(flow: Any, step: int) -> None:
    """Make and take the batch of a step, and report its version."""
    for each in lease(flow, 4, versions={"planner": step - 1}):
        push(flow, each, step - 1)
    assert not flow.batch(BatchRequest("planner", step)).num_missing
    flow.progress(Progress("planner", step, 0))


def test_questions_come_first_in_order_and_then_work_to_train(either: Ledger) -> None:
    flow = either
    ask(flow, 3)
    ask(flow, 1, name="forms", trials=2)
    first, rest = lease(flow, 2, versions=NODE), lease(flow, 4, versions=NODE)
    questions = [*first, *rest[:2]]
    assert [each.index for each in questions] == [0, 1, 2, 0]
    assert [each.work_item for each in questions] == [-1, -2, -3, -4]
    assert {each.evaluation for each in questions[:3]} == {SETTINGS} and questions[0].seed == 1000
    assert questions[3].evaluation == replace(SETTINGS, trials=2)
    assert [(each.work_item, each.evaluation) for each in rest[2:]] == [(1, None), (2, None)]
    for each in questions[:3]:
        assert state(flow).results == ()
        assert answer(flow, each) == "committed"
    assert answer(flow, questions[0]) == "duplicate"
    found = state(flow)
    assert (found.num_questions, found.num_left) == (3, 0)
    assert [each.index for each in found.results] == [0, 1, 2]
    (rollout,) = unpack_group(found.results[1].payload).trajectories
    assert rollout.task.id == "eval-task-1"
    assert [each.index for each in state(flow, rank=1, num_ranks=2).results] == [1]
    assert [each.index for each in state(flow, first=2).results] == [2]
    assert state(flow, name="forms").num_left == 1


def test_a_node_whose_weights_are_older_gets_none(flow: Ledger) -> None:
    train(flow, 1)
    ask(flow, 2, step=1)
    assert {each.work_item > 0 for each in lease(flow, 1, versions={"planner": 0})} == {True}
    assert {each.work_item > 0 for each in lease(flow, 1)} == {True}, "it names no version"
    (one,) = lease(flow, 1, versions={"planner": 1})
    (two,) = lease(flow, 1, versions={"planner": 2})
    assert [one.work_item, two.work_item] == [-1, -2]


def test_it_is_asked_once_whoever_asks_again(flow: Ledger) -> None:
    ask(flow, 3)
    flow.register(replace(planner(), life="resumed"))
    ask(flow, 2)
    assert state(flow).num_questions == 3
    assert state(flow, name="never asked") == EvaluationState(0)
    assert len([each for each in lease(flow, 9, versions=NODE) if each.evaluation]) == 3


def test_a_request_that_is_sent_again_gets_the_same_questions(flow: Ledger) -> None:
    ask(flow, 2)
    request = LeaseRequest("n1", "a", 3, NODE, key="k")
    first, again = flow.lease(request).leases, flow.lease(request).leases
    assert sorted(first, key=lambda each: each.work_item) == list(again) and len(first) == 3


def test_questions_of_a_dead_node_go_to_another_and_failures_count(
    flow: Ledger, clock: Clock
) -> None:
    ask(flow, 2)
    joined(flow, "n2", "b")
    lost, failing = lease(flow, 2, versions=NODE)
    clock.now += 61
    again = lease(flow, 2, "n2", "b", versions=NODE)
    assert [(each.work_item, each.attempt) for each in again] == [(-1, 2), (-2, 2)]
    assert again[0].seed == lost.seed and again[0].task == lost.task
    flow.release(Release("n2", ((failing.work_item, 2),), "no", is_failure=True))
    (last,) = lease(flow, 1, versions=NODE)
    assert (last.work_item, last.attempt) == (-2, 3)
    flow.release(Release("n1", ((-2, 3),), "no", is_failure=True))
    assert answer(flow, again[0], node="n2") == "committed"
    results = state(flow).results
    assert [bool(each.payload) for each in results] == [True, False], "one that nobody could do"
    assert answer(flow, failing) == "duplicate", "the result stays what the trainer was told"
    assert flow.audit().counts["questions.failed"] == 1


def test_training_does_not_notice(flow: Ledger) -> None:
    """Neither numbers of work items, nor batches, rules, their replay and backpressure."""
    ask(flow, 12)
    questions = lease(flow, 12, versions=NODE)
    full = lease(flow, 1024, versions=NODE)
    assert [each.work_item for each in full] == list(range(1, 9)), "2 batches, as without questions"
    ask(flow, 1, name="forms")
    assert [each.work_item for each in lease(flow, 5, versions=NODE)] == [-13], "though it is full"
    for each in (*questions, *full):
        answer(flow, each, num=1 if each.evaluation else 2)
    batch = flow.batch(BatchRequest("planner", 1))
    assert [each.work_item for each in batch.groups] == [1, 2, 3, 4]
    assert batch.stats["num_leased"] == 0
    assert events(flow)[-1].number == 8
    assert flow.status()["work_items"]["committed"] == 8


def test_questions_are_left_when_training_is_done(flow: Ledger) -> None:
    train(flow, 1)
    ask(flow, 1, step=1)
    flow.progress(Progress("planner", 1, 1, is_done=True))
    old, new = {"planner": 0}, {"planner": 1}
    assert flow.lease(LeaseRequest("n1", "a", 1, old)).reason == "evaluating"
    (each,) = lease(flow, 1, versions=new)
    assert flow.lease(LeaseRequest("n1", "a", 1, new)).reason == "evaluating", "it may come back"
    answer(flow, each, version=1)
    assert flow.lease(LeaseRequest("n1", "a", 1, new)).reason == "done"


def test_results_go_once_the_log_of_a_checkpoint_has_them(either: Ledger) -> None:
    flow = either
    ask(flow, 1)
    (each,) = lease(flow, 1, versions=NODE)
    answer(flow, each)
    train(flow, 1)
    ask(flow, 1, step=1)
    flow.progress(Progress("planner", 1, 1, evaluated=0))
    assert state(flow).results, "nobody had seen that it is complete"
    flow.progress(Progress("planner", 1, 1, evaluated=1))
    with pytest.raises(Refused, match="'texts' of planner after step 0: its results were deleted"):
        state(flow)
    assert state(flow, step=1).num_left == 1, "what is not complete stays"
    (each,) = lease(flow, 1, versions={"planner": 1})
    answer(flow, each, version=1)
    assert state(flow, step=1).results


def test_a_result_that_comes_while_they_are_collected_is_not_kept(
    either: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = either
    train(flow, 1)
    ask(flow, 1)
    for _ in range(2):
        (each,) = lease(flow, 1, versions=NODE)
        flow.release(Release("n1", ((each.work_item, each.attempt),), "no", is_failure=True))
    check = GroupLimits.check

    def collected_meanwhile(limits: GroupLimits, group: Group) -> Summary:
        assert state(flow).num_left == 0
        flow.progress(Progress("planner", 1, 1, evaluated=0))
        return check(limits, group)

    monkeypatch.setattr(GroupLimits, "check", collected_meanwhile)
    assert answer(flow, each) == "duplicate"  # and the audit finds nothing wrong


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"policy": "critic"}, "'critic' has not been registered"),
        ({"step": 1}, "version 1 of planner cannot be evaluated: the service"),
        ({"tasks": ()}, "the number of questions is 0"),
        ({"name": ""}, "the length of the name is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"settings": replace(SETTINGS, trials=0)}, "trials is 0"),
    ],
)
def test_what_cannot_be_asked_is_refused(
    flow: Ledger, change: dict[str, Any], problem: str
) -> None:
    request = Evaluate("planner", 0, "texts", SETTINGS, 1, (TASKS[0],))
    with pytest.raises(Refused, match=problem):
        flow.evaluate(replace(request, **change))


def test_an_answer_that_is_none_is_refused(flow: Ledger) -> None:
    ask(flow, 1)
    (each,) = lease(flow, 1, versions=NODE)
    turns = group(each.task, num=1).trajectories[0].turns * 4
    long = replace(group(each.task, num=1).trajectories[0], turns=turns)
    for wrong, problem in (
        (group(each.task, num=2), "the group has 2 rollouts, but groups of this run have 1"),
        (replace(group(each.task, num=1), trajectories=(long,)), "4 turns, max_turns=3"),
        (group(TASKS[5], num=1), "is of task 'eval-task-0', the group of another"),
        (group(each.task, num=1, version=1), "version 1 of planner does not exist"),
    ):
        with pytest.raises(Refused, match=problem):
            flow.push(Push("n1", each.work_item, each.attempt, pack_group(wrong)))


def test_the_status_shows_what_is_open(either: Ledger) -> None:
    flow = either
    ask(flow, 3)
    one, _ = lease(flow, 2, versions=NODE)
    answer(flow, one)
    text = status_text(flow.status())
    assert "evaluations: planner step 0, texts: 1 of 3, 1 under way" in text
    assert flow.status()["nodes"]["n1"]["num_leased"] == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("DELETE FROM work_items WHERE id = -2", "an evaluation does not have its questions"),
        ("DELETE FROM evaluations", "a question has no evaluation"),
        ("UPDATE evaluations SET state = 'complete'", "is over and a question is left"),
        ("DELETE FROM results", "a question is not answered once"),
        ("UPDATE work_items SET evaluation = 0, id = 9 WHERE id = -1", "a result has no question"),
        ("UPDATE results SET node = 'n7'", "a result was not leased"),
        ("UPDATE results SET payload = NULL", "a result that is still needed is gone"),
    ],
)
def test_the_audit_finds_what_is_lost(
    tmp_path: Path, clock: Clock, change: str, problem: str
) -> None:
    made = begun(tmp_path / "ledger.db", clock)
    ask(made, 2)
    answer(made, lease(made, 1, versions=NODE)[0])
    with made.database.write() as transaction:
        transaction.run(change)
    assert any(problem in found for found in made.audit().problems)
    made.close()


def test_a_lease_reads_no_work_items_but_those_that_wait_or_are_leased(
    flow: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite finds them by the partial indices, not among all that there ever were."""
    plans: list[str] = []
    real = Transaction.run

    def explained(self: Transaction, statement: str, *values: object) -> int:
        if "FROM work_items WHERE state" in statement:
            real(self, f"EXPLAIN QUERY PLAN {statement}", *values)
            plans.extend(row.detail for row in self._cursor.fetchall())
        return real(self, statement, *values)

    ask(flow, 2)
    monkeypatch.setattr(Transaction, "run", explained)
    lease(flow, 4, versions=NODE)
    used = {plan.partition("INDEX ")[2].split(" ")[0] for plan in plans if "work_items" in plan}
    assert used == {"work_items_waiting", "work_items_drawn", "work_items_failed"}, plans
