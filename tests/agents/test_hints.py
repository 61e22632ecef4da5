"""Tests of hints (their time and text) and of refiners."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import make
import pytest
from make import Chat, call

from flowtrain.agents.agentflow.memory import Memory, MemoryEntry
from flowtrain.agents.agentflow.refiner import FullRefinerPrompt, ModelRefiner, Refiner, RuleRefiner
from flowtrain.agents.agentflow.voices import ChatVoice
from flowtrain.agents.policy import Moment
from flowtrain.records import Action, SubGoal, Task, ToolResult, Turn
from flowtrain.tasks.sub_goals import Hints

GOALS = (
    SubGoal(("Chad",), 0.6, "country with capital N'Djamena"),
    SubGoal(("1284",), 0.4, "area of Chad"),
)
TASK = Task(
    "t",
    "What is the area of the country with capital N'Djamena plus 1?",
    ("1285",),
    sub_goals=GOALS,
)


def turn(written: str, result: str) -> Turn:
    action = Action("", "", written, "Search")
    return make.turn(call(text=written), action, result=ToolResult(output=result))


LOST = turn("N'Djamena", "nothing")
FIND = turn("country with capital N'Djamena", "Chad.")
USE = turn("area of Chad", "1284.")
ALWAYS = Hints(1.0, turn=1, patience=1)


def test_hint_names_next_query_but_not_its_answer() -> None:
    assert ALWAYS.give(TASK, (LOST,), 0) == "country with capital N'Djamena"
    assert ALWAYS.give(TASK, (FIND, USE, LOST), 0) == "area of Chad"
    found = ALWAYS.give(TASK, (FIND, USE, turn("1284 + 1", "1285"), LOST), 0)
    assert found == "", "nothing is left to find"


def test_it_waits_for_its_turn_and_for_a_stall() -> None:
    assert ALWAYS.give(TASK, (), 0) == ""
    assert Hints(1.0, turn=3, patience=1).give(TASK, (LOST, LOST), 0) == ""
    assert ALWAYS.give(TASK, (FIND, USE), 0) == "", "the last turn reached Chad"
    patient = Hints(1.0, turn=1, patience=3)
    expected = [False, False, False, True, True]
    assert [bool(patient.give(TASK, (LOST,) * n, 0)) for n in range(5)] == expected


def test_hint_rate_is_share_of_rollouts() -> None:
    half = Hints(0.5, turn=1, patience=1)
    lots = [bool(half.give(TASK, (LOST,), seed)) for seed in range(400)]
    assert 0.4 < sum(lots) / 400 < 0.6
    assert lots == [bool(half.give(TASK, (LOST, LOST), seed)) for seed in range(400)]
    assert not any(Hints(0.0, 1, 1).give(TASK, (LOST,), seed) for seed in range(50))


@pytest.mark.parametrize(
    "task", [Task("t", "q", ("a",)), Task("t", "q", ("a",), sub_goals=(SubGoal(("x",), 1.0),))]
)
def test_where_nobody_wrote_one_there_is_none(task: Task) -> None:
    assert ALWAYS.give(task, (LOST,), 0) == ""


# ---- the refiner


PASSAGES = (
    "The area of Mali is 1240.\nThe capital of Chad is N'Djamena.\nThe area of Chad is 1284.\n"
)


def refine(refiner: Refiner) -> str:
    """The text of its evidence, which is nobody's to train."""
    memory = Memory().add(MemoryEntry("Search", "capital of Chad", "", "N'Djamena"))
    moment = Moment(Task("t", "How large is Chad?", ()), memory, "area of Chad", PASSAGES)
    found = asyncio.run(refiner.refine(moment, 3, 5.0))
    assert found.call is None
    return found.text


def test_the_rule_keeps_the_passage_that_fits_best() -> None:
    assert refine(RuleRefiner()) == "The area of Chad is 1284."


def test_a_model_gets_question_knowledge_goal_and_passages() -> None:
    engine = Chat("  Evidence: Chad covers 1284.\nNext: add Mali. ")
    refiner = ModelRefiner(ChatVoice(engine), FullRefinerPrompt(), 1000)
    assert refine(refiner) == "Evidence: Chad covers 1284.\nNext: add Mali."
    assert all(
        part in engine.prompts[0]
        for part in (
            "How large is Chad?",
            "- capital of Chad: N'Djamena",
            "Looked for: area of Chad",
            PASSAGES,
        )
    )
    assert engine.asked[0][1] == 3
    assert refine(replace(refiner, max_chars=9)) == "Evidence:"
