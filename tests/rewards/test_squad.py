"""Short answers: what a person would call the same, and what only looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.rewards.normal import normalise
from flowtrain.rewards.squad import exact_match, published_metrics, token_f1


def exact(answer: str, *accepted: str) -> float:
    return exact_match(Task("t", "q", accepted), answer)


def f1(answer: str, *accepted: str) -> float:
    return token_f1(Task("t", "q", accepted), answer)


@pytest.mark.parametrize(
    ("answer", "accepted", "value"),
    [
        ("Oslo, Norway", "Oslo", 2 / 3),
        ("the capital is Oslo", "Oslo", 1 / 2),
        ("Kurt Weill", "Kurt Julian Weill", 4 / 5),
        ("to to be", "to be or not to be", 2 * 3 / 9),
        ("yes", "yes, indeed", 0.0),
        ("it is no", "no", 0.0),
        ("Bergen", "Oslo", 0.0),
        ("", "Oslo", 0.0),
        ("It was May 18, 2018", "May 18, 2018", 3 / 4),
        ("May 2018", "May 18, 2018", 4 / 5),
        ("May 18 , 2018", "May 18, 2018", 1.0),
        ("J. R. R. Tolkien", "J.R.R. Tolkien", 1.0),
        ("Hydro\u00adgen\ufeff", "hydrogen", 1.0),
    ],
)
def test_f1_by_hand(answer: str, accepted: str, value: float) -> None:
    assert f1(answer, accepted) == pytest.approx(value)


@given(st.text(), st.text())
def test_f1_of_any_text(answer: str, accepted: str) -> None:
    assert f1(answer, answer) == 1.0 and 0 <= f1(answer, accepted) <= 1
    assert f1(answer, accepted) == pytest.approx(f1(accepted, answer))
    assert exact(answer, accepted) <= f1(answer, accepted) or answer.strip().casefold().startswith(
        ("yes", "no")
    )


@given(st.text())
def test_normal_is_normal(text: str) -> None:
    assert (
        normalise(normalise(text)) == normalise(text)
        or any(c in text.casefold() for c in "\u00df\u0130\ufb01")
        or not text.isascii()
    )


# ---- the metrics as papers publish them


@pytest.mark.parametrize(
    ("answer", "accepted", "em", "f1"),
    [
        ("The Beatles!", ("beatles",), 1.0, 1.0),
        ("Oslo, Norway", ("Oslo",), 0.0, 2 * (1 / 2) * 1 / (1 / 2 + 1)),
        # 3 of 4 given tokens and 3 of 3 accepted ones.
        ("on 14 December 1972", ("the 14 December 1972 UTC", "14 December 1972"), 0.0, 6 / 7),
        ("Ann Lee", ("Ann", "ann  lee.", "Lee"), 1.0, 1.0),
        ("10.8", ("108",), 1.0, 1.0),
        ("5 January 1964", ("1964-01-05",), 0.0, 0.0),
        ("Yes, both were.", ("yes",), 0.0, 0.0),
        ("no", ("no",), 1.0, 1.0),
        ("a b a", ("a a b",), 1.0, 1.0),
        ("x x y", ("x y y",), 0.0, 2 / 3),
        ("The", ("An", "the"), 0.0, 0.0),
        ("", ("x",), 0.0, 0.0),
    ],
)
def test_em_and_f1_as_squad_s_script_counts(
    answer: str, accepted: tuple[str, ...], em: float, f1: float
) -> None:
    found = published_metrics(Task("t", "q", accepted, scorer="qa"), answer)
    assert found == {"em": em, "f1": pytest.approx(f1)}


def test_only_short_answers_have_them() -> None:
    assert published_metrics(Task("t", "q", ("2",), scorer="math"), "2") == {}
    assert published_metrics(Task("t", "q", ("B",), scorer="choice"), "B") == {}


@given(st.text(max_size=30), st.lists(st.text(max_size=30), min_size=1, max_size=3))
def test_f1_is_between_em_and_1(answer: str, accepted: list[str]) -> None:
    found = published_metrics(Task("t", "q", tuple(accepted), scorer="qa"), answer)
    assert 0 <= found["em"] <= found["f1"] <= 1
