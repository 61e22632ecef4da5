"""The screen: a rollout is a shortcut unless a tool found what it answers."""

from __future__ import annotations

from typing import Any

import make
import pytest

from flowtrain.records import Action, SubGoal, Task, ToolCall, ToolResult, Turn
from flowtrain.rewards.shortcuts import shortcut

TASK = Task("t", "What is the capital of Chad?", ("N'Djamena", "Ndjamena"))


def turn(
    sub_goal: str = "capital of Chad",
    output: str = "The capital of Chad is N'Djamena.",
    tool: str = "Search",
    text: str = "",
    **changes: Any,
) -> Turn:
    found = {"result": ToolResult(output), "action": Action("", "", sub_goal, tool), **changes}
    act = found.pop("action")
    return make.turn(make.call(text=text), act, **found)


def verdict(*turns: Turn, task: Task = TASK, answer: str = "N'Djamena") -> str:
    return shortcut(make.rollout(*turns, task=task, answer=answer, reward=1.0))


@pytest.mark.parametrize(
    ("turns", "reason"),
    [
        ([turn()], ""),
        ([turn(output="nothing"), turn(output="NDJAMENA (Chad)")], ""),
        ([], "answer_not_found"),
        ([turn(output="The capital of Mali is Bamako.")], "answer_not_found"),
        ([turn(output="N'Djamenas")], "answer_not_found"),
        ([turn(tool="Base_Generator")], "answer_not_found"),
        ([turn(result=ToolResult("", "no hit for N'Djamena"))], "answer_not_found"),
        ([turn("Is N'Djamena the capital of Chad?")], "answer_not_found"),
        ([turn("Is N'Djamena the capital?", text="x"), turn()], ""),
        ([turn(output="Chad is large.", evidence="N'Djamena")], "answer_not_found"),
        ([turn(output="The capital is N'Djamena.", evidence="short")], ""),
    ],
)
def test_a_tool_must_have_found_the_answer(turns: list[Turn], reason: str) -> None:
    assert verdict(*turns) == reason


@pytest.mark.parametrize(
    ("used", "reason"),
    [
        (ToolCall("Search", '{"query": "capital"}', ToolResult("It is N'Djamena.")), ""),
        (ToolCall("Base_Generator", "{}", ToolResult("N'Djamena")), "answer_not_found"),
        (
            ToolCall("Python_Coder", 'print("N\'Djamena")', ToolResult("N'Djamena")),
            "answer_not_found",
        ),
        (ToolCall("Search", "{}", ToolResult("", "N'Djamena")), "answer_not_found"),
    ],
)
def test_calls_of_a_conversation_count_as_well(used: ToolCall, reason: str) -> None:
    asks = turn(action=None, tool_calls=(used,))
    assert verdict(asks, turn(action=None)) == reason


def test_an_answer_that_the_question_names_may_be_searched_for() -> None:
    task = Task("t", "Which is larger, Chad or Mali?", ("Chad",))
    search = turn("area of Chad", "The area of Chad is 1284.")
    assert verdict(search, task=task, answer="Chad") == ""


def test_a_choice_is_found_by_its_text() -> None:
    task = Task("t", "Capital of Chad?", ("B",), choices=("Bamako", "N'Djamena"))
    assert verdict(turn(), task=task, answer="B") == ""
    assert verdict(turn(output="plan B"), task=task, answer="N'Djamena") == "answer_not_found"


def test_numbers_are_found_with_their_commas() -> None:
    task = Task("t", "Area of Chad?", ("1284000",))
    assert verdict(turn(output="It has 1,284,000 km2."), task=task, answer="1284000") == ""


def test_a_task_with_sub_goals_must_reach_one() -> None:
    """Reached: a result had named it, and the planner's text of a later turn names it."""
    goals = (SubGoal(("Chad",), 1.0),)
    task = Task("t", "Capital of the country of Abeche?", ("N'Djamena",), sub_goals=goals)
    names = turn("country", "Abeche is in Chad.", text="country of Abeche")
    knows = turn(text="capital of the country of Abeche")
    uses = turn(text="capital of Chad")
    assert verdict(names, uses, task=task) == ""
    assert verdict(names, knows, task=task) == "no_sub_goal"
    assert verdict(uses, task=task) == "no_sub_goal", "it knew"
