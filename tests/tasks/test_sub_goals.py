"""Tests of reached sub-goals, by hand and on plans that are followed perfectly."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import make
import pytest
from make import call, rollout

from flowtrain.records import Action, SubGoal, Task, ToolResult, Turn, UserError
from flowtrain.rewards import score
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import DEEP_KINDS, facts_tasks
from flowtrain.tasks.files import load_tasks
from flowtrain.tasks.sub_goals import check, solved, solved_weight, sought

CHAD = SubGoal(("Chad", "Republic of Chad"), 0.75, "country with capital N'Djamena")
AREA = SubGoal(("1284",), 0.25, "area of Chad")
TASK = Task(
    "t",
    "What is the area of the country with capital N'Djamena, in millions?",
    ("1.284",),
    sub_goals=(CHAD, AREA),
)


def turn(written: str, result: str, error: str | None = None, is_malformed: bool = False) -> Turn:
    action = None if is_malformed else Action("", "", written, "Search")
    found = ToolResult(output=result) if error is None else ToolResult(error=error)
    problem = "malformed" if is_malformed else ""
    return make.turn(call(text=written), action, found, problem=problem)


def memorised(written: str, result: str) -> Turn:
    """The same by the tool that answers from a model's memory."""
    act = Action("", "", written, "Base_Generator")
    return make.turn(call(text=written), act, ToolResult(result))


def given(arguments: str, result: str) -> Turn:
    """A turn whose tool was given what its planner does not write."""
    act = Action("", "", "x", "Search")
    return make.turn(call(text="x"), act, ToolResult(result), arguments)


FIND = turn("country with capital N'Djamena", "The country with capital N'Djamena is Chad.")
USE = turn("area of CHAD", "The area of Chad is 1284.")
SUM = turn("1284 / 1000", "1.284")


def test_what_was_found_and_then_used_is_reached() -> None:
    assert solved(TASK, (FIND, USE, SUM)) == [CHAD, AREA]
    assert solved(TASK, (FIND, USE)) == [CHAD]
    assert (
        solved_weight(TASK, (FIND, USE)),
        solved_weight(TASK, (FIND, USE, SUM)),
        solved_weight(TASK, ()),
    ) == (0.75, 1.0, 0.0)


@pytest.mark.parametrize(
    "turns",
    [
        (USE, SUM),  # named before anything said so: only the area is earned
        (turn("area of Chad", "no"), turn("1284 / 1000", "1.284")),
        (
            turn("country with capital N'Djamena, Chad?", "Chad"),
        ),  # written in the turn whose result it is, not after it
        (turn("x", "", error="The country is Chad."), USE),
        (FIND, turn("area of Chad", "1284", is_malformed=True)),
        (turn("x", "Chadwick"), turn("Chadwick", "x")),
        # A list of candidates, of which passages say a word each, and again.
        (turn("Chad Mali Niger", "Chad. Mali. Niger."), turn("Chad Mali Niger", "Chad. Mali.")),
        (given('{"query": "Chad"}', "Chad"), USE),
        (given('{"query": "\\u0043had"}', "Chad"), USE),
        (given("[" * 100_000 + "Chad", "Chad"), USE),
        (given("Chad " + "[" * 9 + "\\ud800", "Chad"), USE),
        (memorised("country with capital N'Djamena", "Chad"), USE),
    ],
)
def test_dropping_a_name_or_meeting_it_is_not_enough(turns: tuple[Turn, ...]) -> None:
    assert CHAD not in solved(TASK, turns)


@pytest.mark.parametrize(
    ("turns", "output", "reached"),
    [
        ((FIND,), "The capital N'Djamena is Chad's. <answer>1</answer>", [CHAD]),
        ((FIND, USE), "Chad has 1284 units. <answer>1.284</answer>", [CHAD, AREA]),
        ((FIND, USE), "<answer>1.284</answer>", [CHAD]),
        ((FIND,), "", []),
        ((), "Chad has an area of 1284.", []),
        ((turn("area of Chad", "no passage"),), "It is Chad's area, 1284.", []),
        ((turn("x", "", error="The country is Chad."),), "It is Chad.", []),
        ((FIND, USE), "Chadian. 12840.", [CHAD]),
    ],
)
def test_the_generator_may_name_what_was_found_also_in_the_last_turn(
    turns: tuple[Turn, ...], output: str, reached: list[SubGoal]
) -> None:
    assert solved(TASK, turns, output) == reached
    assert solved_weight(TASK, turns, output) == sum(goal.weight for goal in reached)


def test_rewards_read_what_a_generator_wrote_and_no_answer_by_rules() -> None:
    """A rule's answer copies the last result, so that meeting a name would be enough."""

    def share(**generated: str) -> float | None:
        made = rollout(FIND, USE, task=TASK, answer="1284", **generated)
        (group,) = score([make.group(made)])
        return group.trajectories[0].sub_goals

    assert (share(), share(output="It has 1284. <answer>1284</answer>")) == (0.75, 1.0)


def test_any_name_will_do_on_either_side() -> None:
    assert solved(TASK, (turn("x", "the REPUBLIC of  Chad!"), turn("area of Chad", "?"))) == [CHAD]


def test_what_the_question_names_is_nothing_to_find_and_nothing_to_earn() -> None:
    named = replace(TASK, question="What is the area of Chad in millions?")
    assert sought(named) == [AREA] and solved_weight(named, (USE, SUM)) == 0.25
    assert solved_weight(replace(TASK, sub_goals=()), (FIND, USE)) == 0.0


@pytest.mark.parametrize("kind", ["chain", "sum", *DEEP_KINDS])
def test_a_perfect_planner_reaches_all_sub_goals_of_a_question(kind: str) -> None:
    corpus = load_corpus()
    for task in facts_tasks(corpus, "train", 40, 0, [kind]):
        check(task)
        turns = tuple(
            turn(step.sub_goal, goal.names[0])
            for step, goal in zip(
                task.plan, [*task.sub_goals, SubGoal(task.answers, 1)], strict=True
            )
        )
        assert solved_weight(task, turns) == pytest.approx(1.0)
        assert solved_weight(task, turns[:1]) == 0.0
        assert sum(goal.weight for goal in task.sub_goals) == pytest.approx(1.0)
        assert [goal.weight for goal in task.sub_goals] == sorted(
            (goal.weight for goal in task.sub_goals), reverse=True
        )


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ((replace(CHAD, weight=0.5), AREA), "must be above 0 and sum to 1, not to 0.75"),
        ((replace(CHAD, weight=1.5), replace(AREA, weight=-0.5)), "must be above 0"),
        ((replace(CHAD, weight=1.0, names=()),), "needs names"),
        ((replace(CHAD, weight=1.0, names=("?!",)),), "needs names"),
        ((replace(CHAD, query="area of Chad"), AREA), "reveals its answer 'Chad'"),
        ((replace(CHAD, query="what is 1.284 million"), AREA), "reveals its answer '1.284'"),
    ],
)
def test_what_does_not_fit_is_refused(goals: tuple[SubGoal, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(replace(TASK, sub_goals=goals))


# ---- from files


def load(tmp_path: Path, sub_goals: object) -> Task:
    path = tmp_path / "tasks.jsonl"
    path.write_text(
        json.dumps({"question": TASK.question, "answer": "1.284", "sub_goals": sub_goals})
    )
    (task,) = load_tasks(path)
    return task


def test_files_may_hold_them(tmp_path: Path) -> None:
    goals = [
        {
            "names": ["Chad", "Republic of Chad"],
            "weight": 0.75,
            "query": "country with capital N'Djamena",
        },
        {"names": ["1284"], "weight": 0.25},
    ]
    assert load(tmp_path, goals).sub_goals == (CHAD, replace(AREA, query=""))


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ("Chad", "Expected `array`, got `str` - at `$.sub_goals`"),
        ([{"names": ["Chad"]}], "missing required field `weight` - at `$.sub_goals[0]`"),
        ([{"names": "Chad", "weight": 1}], "Expected `array`, got `str`"),
        ([{"names": [1], "weight": 1}], "Expected `str`, got `int`"),
        ([{"names": ["Chad"], "weight": "1"}], "Expected `float`, got `str`"),
        ([{"names": ["Chad"], "weight": True}], "Expected `float`, got `bool`"),
    ],
)
def test_what_is_no_sub_goal_is_named(tmp_path: Path, goals: object, message: str) -> None:
    with pytest.raises(UserError, match="line 1 .*" + re.escape(message)):
        load(tmp_path, goals)
