"""Near-duplicates of benchmark questions are found, distinct questions are not."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.tasks import facts_tasks, load_corpus
from flowtrain.tasks.overlap import _similarity, _weights, _words, main, overlaps
from flowtrain.types import Task

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
        (pair.train.question, pair.held_out.id)
        for pair in overlaps([Task(q, q, ("x",)) for q in questions], HELD_OUT)
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
    assert [(pair.train.id, pair.similarity) for pair in pairs] == [("8111", 1.0)]


def test_a_word_that_stands_twice_counts_twice() -> None:
    once, often = (
        Task("a", "Tick tick tock tock boom?", ("x",)),
        Task("b", "Tick tock boom?", ("x",)),
    )
    (pair,) = overlaps([once], [often], threshold=0.1)
    assert pair.similarity < 0.6


TEXTS = st.lists(
    st.lists(st.sampled_from("abcdefghij"), min_size=1, max_size=8).map(" ".join),
    min_size=1,
    max_size=8,
)


@settings(derandomize=True, deadline=None, max_examples=200)
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
        (pair.train.id, pair.held_out.id) for pair in overlaps(tasks, others, threshold)
    ] == every


def test_the_built_in_splits_are_templates_not_duplicates() -> None:
    """Sixteen templates over names: questions of one template must not all be alike."""
    train, held_out = (facts_tasks(load_corpus(), "train", 400, seed) for seed in (0, 1))
    distinct = [
        task for task in held_out if task.question not in {other.question for other in train}
    ]
    assert len(overlaps(train, distinct)) < len(distinct) / 2


def files(folder: Path, *questions: str) -> list[str]:
    (folder / "bamboogle").mkdir()
    data = folder / "bamboogle" / "data"
    data.mkdir()
    (data / "data.json").write_text(
        json.dumps([{"query": task.question, "answer": ["x"]} for task in HELD_OUT])
    )
    train = folder / "train.jsonl"
    train.write_text(
        "\n".join(json.dumps({"question": question, "answer": "x"}) for question in questions)
    )
    return ["--train", str(train), "--benchmarks", str(folder)]


def test_the_command_prints_pairs_and_exits_with_1(tmp_path: Path) -> None:
    argv = files(
        tmp_path,
        "What is a mole?",
        "WHO was president of the United States in the year Citibank was founded?",
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "flowtrain.tasks.overlap", *argv],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    first, second, last = done.stdout.splitlines()
    assert "train-2: WHO was president" in first and "bamboogle-3: Who was president" in second
    assert last == "1 pairs at 0.6 or more, against 6 benchmark questions"


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = files(tmp_path, "What is a mole?")
    assert main(argv) == 0 and main([*argv, "--threshold", "0"]) == 2
    assert main(["--train", str(tmp_path / "no.jsonl"), "--benchmarks", str(tmp_path)]) == 2
    (tmp_path / "none").mkdir()
    assert main([*argv[:3], str(tmp_path / "none")]) == 2
    errors = capsys.readouterr().err.splitlines()
    parts = ("--threshold=0.0: must be", "no.jsonl: cannot be read", "holds no benchmark file")
    assert all(part in error for part, error in zip(parts, errors, strict=True))
