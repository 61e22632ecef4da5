"""What the rules call right and wrong: the answers of answers.toml, and any text."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.records import Task, UserError
from flowtrain.rewards import SCORERS
from flowtrain.rewards.gameof24 import is_right
from flowtrain.rewards.squad import token_f1

OPTIONS = ("Hemolytic uremic syndrome", "Oral ulcers", "Colorectal cancer", "Pancreatic cancer")
TABLES = tomllib.loads(Path(__file__).with_name("answers.toml").read_text("utf-8"))
ROWS = [
    pytest.param(scorer, relation, accepted, answers, id=f"{scorer} {relation} {number}")
    for scorer, relations in TABLES.items()
    for relation, rows in relations.items()
    for number, (accepted, answers) in enumerate(rows.items())
]


def task(scorer: str, *accepted: str) -> Task:
    numbers = tuple(accepted[0].split()) if scorer == "gameof24" and accepted else accepted
    return Task("t7", "q", numbers, scorer=scorer, choices=OPTIONS if scorer == "choice" else ())


def reward(scorer: str, answer: str, *accepted: str) -> float:
    return SCORERS[scorer](task(scorer, *accepted), answer)


@pytest.mark.parametrize(("scorer", "relation", "accepted", "answers"), ROWS)
def test_answers(scorer: str, relation: str, accepted: str, answers: list[str]) -> None:
    expected = 0.0 if relation == "wrong" else 1.0
    assert [each for each in answers if reward(scorer, each, accepted) != expected] == []
    if relation == "both_ways" or (scorer, relation) == ("exact", "wrong"):
        assert [each for each in answers if reward(scorer, accepted, each) != expected] == []
    if (scorer, relation) == ("qa", "both_ways"):
        assert [token_f1(task("qa", accepted), each) for each in answers] == [1.0] * len(answers)
    if (scorer, relation) == ("gameof24", "wrong"):
        numbers = [int(number) for number in accepted.split()]
        assert not any(is_right(each, numbers) for each in answers)


@pytest.mark.parametrize("scorer", ["exact", "qa", "f1", "math"])
def test_any_accepted_answer_is_right(scorer: str) -> None:
    assert reward(scorer, "myanmar", "Burma", "Myanmar") == 1.0
    assert reward(scorer, "siam", "Burma", "Myanmar") == reward(scorer, "siam") == 0.0


SIGNS = [
    *("1", "23", "x", "\\frac", "\\sqrt", "\\pm", "\\cup", "\\{", "\\}"),
    *"{}()[],^=%$;",
    " cm",
]
ANSWERS = {
    "exact": st.text(),
    "qa": st.text(),
    "math": st.one_of(st.text(), st.lists(st.sampled_from(SIGNS), max_size=20).map("".join)),
    "gameof24": st.one_of(st.text(), st.text("118+-*/()=[]{}\\\\frac x.", max_size=40)),
}


@settings(max_examples=300)
@given(st.data())
@pytest.mark.parametrize("scorer", ANSWERS)
def test_any_text_is_scored(scorer: str, data: st.DataObject) -> None:
    answer = data.draw(ANSWERS[scorer])
    accepted = data.draw(st.text("0123x,()[]", max_size=8) if scorer == "math" else st.text())
    given = "1 1 1 8" if scorer == "gameof24" else accepted
    assert reward(scorer, answer, given) in (0.0, 1.0)
    if scorer != "gameof24":
        same = reward(scorer, answer, answer)
        assert same == 1.0 or (scorer == "math" and same == 0.0)


@given(st.integers(-(10**12), 10**12), st.integers(0, 3))
def test_every_spelling_of_an_integer(number: int, num_zeros: int) -> None:
    zeros = "0" * (num_zeros + 1)
    for spelling in (f"{number:,}", f"{number}.{zeros}", f" {number}.", f"{number:,}.{zeros}"):
        assert reward("exact", spelling, str(number)) == 1.0
        assert reward("exact", spelling, str(number + 1)) == 0.0


@pytest.mark.parametrize(
    ("scorer", "accepted", "needs"),
    [
        *(("choice", each, "an answer among the options") for each in (("Gout",), ("E",), ())),
        *(
            ("gameof24", (each,), "the numbers of the puzzle")
            for each in ("3 x", "3.5", "-3", "9" * 5000)
        ),
    ],
)
def test_a_task_without_what_its_scorer_needs_is_refused(
    scorer: str, accepted: tuple[str, ...], needs: str
) -> None:
    with pytest.raises(UserError, match=f"task 't7': scorer '{scorer}' needs {needs}"):
        reward(scorer, "A", *accepted)
