"""Near-duplicates of benchmark questions are found, distinct questions are not."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.records import Task
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.facts import facts_tasks
from flowtrain.tasks.overlap import _similarity, _weights, _words, overlaps

HELD_OUT = [
    Task(f"b{i}", question, ("x",))
    for i, question in enumerate(
        [
            "Which film has the director who is older than the other, Let'S Make Money or Short "
            "Term 12?",
            "What is the place of birth of George Linnaeus Banks's wife?",
            "When is the director of film Les Tuche 2 's birthday?",
            "Who was president of the United States in the year that Citibank was founded?",
            "What rocket was the first spacecraft that ever approached Uranus launched on?",
            "Let $x,y$ and $z$ be positive real numbers that satisfy the system $\\log_2(x/yz) = "
            "1/2$. Find $m+n$.",
        ]
    )
]


def found(*questions: str) -> list[tuple[str, str]]:
    return [
        (train.question, held_out.id)
        for train, held_out in overlaps([Task(q, q, ("x",)) for q in questions], HELD_OUT)
    ]


@pytest.mark.parametrize(
    ("question", "place"),
    [
        (
            "which FILM has the director who is older than the other: Let's make money, or Short "
            "Term 12",
            "b0",
        ),
        (
            "Which movie has the director who is older than the other, Let'S Make Money or Short "
            "Term 12?",
            "b0",
        ),
        ("What is the place of death of George Linnaeus Banks's wife?", "b1"),
        ("George Linnaeus Banks's wife: what is the place of birth of her?", "b1"),
        ("When is the director of the film Les Tuche 2's birthday", "b2"),
        ("Who was the president of the US in the year that Citibank was founded?", "b3"),
        ("What rocket was the first probe that ever approached Uranus launched on?", "b4"),
        (
            "Let $x, y$ and $z$ be positive real numbers that satisfy the system "
            "$\\log_2(x/yz)=1/2.$ Find m + n.",
            "b5",
        ),
    ],
)
def test_near_duplicates(question: str, place: str) -> None:
    assert found(question) == [(question, place)]


@pytest.mark.parametrize(
    "question",
    [
        "Which film has the director who is older than the other, The Matrix or Casablanca?",
        "What is the place of birth of Karl Marx's wife?",
        "When is the director of film Jaws's birthday?",
        "Who was president of the United States in the year that Microsoft was founded by Gates "
        "and Allen?",
        "What spacecraft first approached Neptune?",
        "Let $a$ and $b$ be real numbers. Find $a+b$.",
        "?",
    ],
)
def test_distinct_questions(question: str) -> None:
    assert found(question) == []


def test_puzzles_are_compared_by_their_numbers() -> None:
    def puzzle(*numbers: str) -> Task:
        return Task("".join(numbers), f"Use {numbers}!", numbers, scorer="gameof24")

    held_out = [
        Task(
            "g",
            "Using the numbers [1, 1, 1, 8], create ...",
            ("1", "1", "1", "8"),
            scorer="gameof24",
        )
    ]
    pairs = overlaps(
        [puzzle("8", "1", "1", "1"), puzzle("1", "1", "8", "8"), puzzle("1", "1", "1", "11")],
        held_out,
    )
    assert [train.id for train, _ in pairs] == ["8111"]


def test_a_word_that_stands_twice_counts_twice() -> None:
    once, often = (
        Task("a", "Tick tick tock tock boom?", ("x",)),
        Task("b", "Tick tock boom?", ("x",)),
    )
    assert overlaps([once], [often], threshold=0.1) and not overlaps([once], [often])


TEXTS = st.lists(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=8).map(" ".join),
    min_size=1,
    max_size=8,
)


@settings(max_examples=200)
@given(TEXTS, TEXTS, st.sampled_from([0.2, 0.5, 0.6, 0.9, 1.0]))
def test_no_pair_is_missed(train: list[str], held_out: list[str], threshold: float) -> None:
    """Against a comparison of every pair."""
    tasks, others = (
        [Task(f"{i}", text, ("x",)) for i, text in enumerate(texts)] for texts in (train, held_out)
    )
    weights = _weights([_words(task) for task in (*tasks, *others)])
    every = [
        (a.id, b.id)
        for a, b in product(tasks, others)
        if _similarity(_words(a), _words(b), weights) >= threshold
    ]
    assert [
        (train.id, held_out.id) for train, held_out in overlaps(tasks, others, threshold)
    ] == every


def test_the_built_in_splits_are_templates_not_duplicates() -> None:
    """Sixteen templates over names: questions of one template must not all be alike."""
    train, held_out = (facts_tasks(load_corpus(), "train", 400, seed) for seed in (0, 1))
    distinct = [
        task for task in held_out if task.question not in {other.question for other in train}
    ]
    assert len(overlaps(train, distinct)) < len(distinct) / 2
