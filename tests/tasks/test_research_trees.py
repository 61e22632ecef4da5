"""Sub-goals in the structure of published rows, by hand; and rows in which anything may stand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.tasks.research_trees import Finding, as_sub_goals, findings, passages
from flowtrain.tasks.sub_goals import check
from flowtrain.types import SubGoal, Task


def task(
    row: dict[str, Any], answer: str = "Oslo", question: str = "Where does the mayor live?"
) -> Task:
    return Task("t", question, (answer,), columns=json.dumps(row))


MUSIQUE = {
    "question_decomposition": [
        {"id": 1, "question": "Utopia >> author", "answer": "Ann Lee"},
        {"id": 2, "question": "When was #1 born?", "answer": "1901"},
        {"id": 3, "question": "mayor of the town of #1 in #2", "answer": "Bo Dahl"},
        {"id": 4, "question": "Where does #3 live?", "answer": "Oslo"},
    ]
}


def test_musiques_steps_weigh_as_much_as_builds_on_them() -> None:
    """Three steps need the author, two the year, one the mayor: 4, 3 and 2 of 9."""
    asked = task(MUSIQUE)
    goals = as_sub_goals(asked, findings(asked) or [])
    assert [(goal.names, goal.query) for goal in goals] == [
        (("Ann Lee",), "Utopia, author"),
        (("1901",), "When was Ann Lee born?"),
        (("Bo Dahl",), "mayor of the town of Ann Lee in 1901"),
    ]
    assert [goal.weight for goal in goals] == pytest.approx([4 / 9, 3 / 9, 2 / 9])


TREE = {
    "entity": "Oslo",
    "question": "Where does the mayor live?",
    "children": [
        {"entity": "Bo Dahl", "question": "mayor of a fjord town", "children": []},
        {
            "entity": "Moss",
            "children": [
                {"entity": "Ann Lee", "question": "author born in Moss", "children": []},
                {"entity": "None", "children": []},
            ],
        },
    ],
}


@pytest.mark.parametrize(
    "row", [{"root": TREE}, {"tree": TREE}, {"tree": json.dumps(TREE)}, {"tree": {"root": TREE}}]
)
def test_a_tree_begins_with_what_is_deepest(row: dict[str, Any]) -> None:
    """Two nodes stand on the author, one on the others: 3, 2 and 2 of 7."""
    asked = task(row)
    goals = as_sub_goals(asked, findings(asked) or [])
    assert [(goal.names[0], goal.query) for goal in goals] == [
        ("Ann Lee", "author born in Moss"),
        ("Bo Dahl", "mayor of a fjord town"),
        ("Moss", ""),
    ]
    assert [goal.weight for goal in goals] == pytest.approx([3 / 7, 2 / 7, 2 / 7])


def test_the_answer_is_no_sub_goal_and_a_hint_names_nothing() -> None:
    asked = Task("t", "Who wrote Utopia?", ("Ann Lee", "A. Lee"))
    found = [
        Finding(("a. lee",), 1),
        Finding(("Moss", "the town of Moss"), 1, "Moss on the map"),
        Finding(("moss!",), 5, "again"),
        Finding(("Bo",), 3, "pupil of Ann Lee"),
        Finding(("?!",), 9),
    ]
    assert as_sub_goals(asked, found) == (
        SubGoal(("Moss", "the town of Moss"), 0.25),
        SubGoal(("Bo",), 0.75),
    )
    assert as_sub_goals(asked, found[:1]) == ()


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"tree": "no JSON"},
        {"tree": "[" * 100_000},
        {"root": {"entity": "x", "children": []}},
        {"evidences": [["Utopia", "author", "Ann Lee"]]},
        {"question_decomposition": [1, "x"]},
    ],
)
def test_other_rows_have_no_structure(row: dict[str, Any]) -> None:
    assert findings(task(row)) is None


def test_a_wide_and_deep_tree_is_cut() -> None:
    deep: dict[str, Any] = {"entity": "leaf"}
    for number in range(200):
        deep = {"entity": f"node {number}", "children": [deep, {"entity": f"side {number}"}]}
    found = findings(Task("t", "q", ("a",), columns=json.dumps({"tree": deep})))
    assert found is not None and len(found) == 64


_JSON = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["entity", "children", "title", "question", "answer", "sentences", "root"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(["tree", "root", "question_decomposition", "context"]),
        _JSON,
        max_size=4,
    )
)
def test_whatever_a_row_holds_its_sub_goals_fit(row: dict[str, Any]) -> None:
    asked = task(row)
    goals = as_sub_goals(asked, findings(asked) or [])
    assert isinstance(passages(row, 100), str)
    check(replace(asked, sub_goals=goals))


# ---- passages


def test_passages_of_published_rows() -> None:
    """HotpotQA in both of its published forms, and MuSiQue's paragraphs."""
    pairs = [["Moss", ["Moss is", " a town."]], ["Utopia", ["By Ann Lee."]]]
    table = {"title": ["Moss", "Utopia"], "sentences": [pair[1] for pair in pairs]}
    wanted = "Moss: Moss is a town.\n\nUtopia: By Ann Lee."
    assert passages({"context": pairs}, 1000) == passages({"context": table}, 1000) == wanted
    paragraphs = [{"title": "Moss", "paragraph_text": "Moss is a town."}, "plain"]
    assert passages({"paragraphs": paragraphs}, 1000) == "Moss: Moss is a town.\n\nplain"
    assert passages({"context": "one text"}, 3) == "one" and passages({}, 9) == ""
