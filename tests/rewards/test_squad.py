"""Short answers: what a person would call the same, and what only looks like it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.rewards.normal import normalise
from flowtrain.rewards.squad import exact_match, published_metrics, token_f1
from flowtrain.types import Task


def exact(answer: str, *accepted: str) -> float:
    return exact_match(Task("t", "q", accepted), answer)


def f1(answer: str, *accepted: str) -> float:
    return token_f1(Task("t", "q", accepted), answer)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("The Beatles", "beatles"),
        ("\u201cLet's Make Money\u201d", "Let'S Make Money"),
        ("S*P*Y*S", "SPYS"),
        ("Cats and Dogs", "Cats & Dogs"),
        ("U.S.", "US"),
        ("One World One Dream!", "One World, One Dream"),
        ("Toghon Temur", "Toghon Tem\u00fcr"),
        ("Gul\u00e7icek Hatun", "G\u00fcl\u00e7i\u00e7ek Hatun"),
        ("138535", "138,535"),
        ("4,884 m", "4884 m."),
        ("10.80", "10.8"),
        (".5", "0.5"),
        ("27.0", "27"),
        ("-5", "\u22125"),
        ("$3,000", "3000"),
        ("5 January 1964", "January 5, 1964"),
        ("January 5th, 1964", "5 January 1964"),
        ("5th of January, 1964", "Jan. 5 1964"),
        ("1964-01-05", "5 January 1964."),
        ("Sept. 13, 1993", "September 13, 1993"),
        ("The The", "the the"),
        ("George VI", "George VI\n"),
        ("\uff2f\uff53\uff4c\uff4f", "Oslo"),
    ],
)
def test_same(answer: str, accepted: str) -> None:
    assert exact(answer, accepted) == exact(accepted, answer) == 1.0
    assert f1(answer, accepted) == 1.0


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("", "Oslo"),
        ("Oslo, Norway", "Oslo"),
        ("Bergen", "Oslo"),
        ("108", "10.8"),
        (".45", "45"),
        ("1.5", "15"),
        ("5", "-5"),
        ("138,536", "138,535"),
        ("1,3853", "13853.1"),
        ("6 January 1964", "5 January 1964"),
        ("5 June 1964", "5 January 1964"),
        ("January 1964", "5 January 1964"),
        ("The", "The The"),
        ("John Grubb II", "John Grubb"),
        ("not sure", "no"),
        ("Nobody", "no"),
        ("No-one", "no"),
        ("yes and no", "yes"),
        ("No, both were.", "yes"),
    ],
)
def test_near_misses(answer: str, accepted: str) -> None:
    assert exact(answer, accepted) == 0.0


def test_a_yes_may_be_explained() -> None:
    assert (
        exact("Yes, both were born in 1950.", "yes")
        == exact("No. They were not.", "no")
        == exact("YES", "yes")
        == 1.0
    )
    assert exact("Yes, both were born in 1950.", "Yes Minister") == 0.0


def test_any_accepted_answer_is_right() -> None:
    assert exact("myanmar", "Burma", "Myanmar") == f1("myanmar", "Burma", "Myanmar") == 1.0
    assert (
        exact("siam", "Burma", "Myanmar")
        == f1("siam", "Burma", "Myanmar")
        == exact("siam")
        == f1("siam")
        == 0.0
    )


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
    ],
)
def test_f1_by_hand(answer: str, accepted: str, value: float) -> None:
    assert f1(answer, accepted) == pytest.approx(value)


@settings(derandomize=True, deadline=None)
@given(st.text(), st.text())
def test_any_text_is_scored(answer: str, accepted: str) -> None:
    assert exact(answer, accepted) in (0.0, 1.0) and 0 <= f1(answer, accepted) <= 1
    assert exact(answer, answer) == f1(answer, answer) == 1.0
    assert f1(answer, accepted) == pytest.approx(f1(accepted, answer))
    assert exact(answer, accepted) <= f1(answer, accepted) or answer.strip().casefold().startswith(
        ("yes", "no")
    )


@settings(derandomize=True, deadline=None)
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
