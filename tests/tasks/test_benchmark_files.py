"""The benchmark files as AgentFlow keeps them, through loader and scorer."""

from __future__ import annotations

import json
import os
import random
import string
from pathlib import Path
from typing import Any

import pytest

from flowtrain.rewards import SCORERS, score
from flowtrain.tasks.benchmarks import BENCHMARKS, available, load_benchmark
from flowtrain.tasks.overlap import benchmark_tasks, overlaps
from flowtrain.types import Group, Task, Trajectory, UserError

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(
    os.environ.get("FLOWTRAIN_BENCHMARKS", ROOT.parent / "shared" / "data" / "benchmarks")
)
needs_files = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"no benchmark files in {FOLDER}; name their folder in FLOWTRAIN_BENCHMARKS",
)

COUNTS = {
    "2wiki": (200, 100),
    "aime24": (30, 30),
    "bamboogle": (125, 125),
    "gameof24": (300, 100),
    "hotpotqa": (100, 100),
    "medqa": (300, 100),
}
"""Rows in the file, and rows that the paper ran."""


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def references(name: str) -> list[list[str]]:
    """All the answers that a file gives, by question."""
    return [
        list(map(str, row["answer"] if isinstance(row["answer"], list) else [row["answer"]]))
        for row in rows(name)
    ]


def rewards(tasks: list[Task], answers: list[str]) -> list[float | None]:
    (group,) = score(
        [
            Group(
                0,
                tuple(
                    Trajectory(task, (), answer, 1.0, 0)
                    for task, answer in zip(tasks, answers, strict=True)
                ),
            )
        ]
    )
    return [trajectory.reward for trajectory in group.trajectories]


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_formats(name: str) -> None:
    whole = load_benchmark(name, FOLDER)
    run = whole[: BENCHMARKS[name].num_rows]
    assert (len(whole), len(run)) == COUNTS[name] and run == whole[: len(run)]
    assert [task.id for task in whole] == [f"{name}-{index}" for index in range(len(whole))]
    assert {(task.kind, task.scorer) for task in whole} == {(name, BENCHMARKS[name].scorer)}
    assert not any("<answer>" in task.question for task in whole)
    if name in ("bamboogle", "hotpotqa", "aime24"):
        assert all("<answer>" in row["query"] for row in rows(name)), "it was there"
    if name == "medqa":
        assert {len(task.choices) for task in whole} == {4} and not any(
            option[:2] == "A." for task in whole for option in task.choices
        )
    if name == "gameof24":
        assert {len(task.answers) for task in whole} == {4} and all(
            answer.isdigit() for task in whole for answer in task.answers
        )


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_reference_answers_are_right(name: str) -> None:
    tasks = load_benchmark(name, FOLDER)
    pairs = [
        (task, answer)
        for task, found in zip(tasks, references(name), strict=True)
        for answer in found
    ]
    for form in ("{}", "Let me see.\n<answer> {} </answer>", "<answer>{}.</answer>"):
        assert set(
            rewards([task for task, _ in pairs], [form.format(answer) for _, answer in pairs])
        ) == {1.0}


@needs_files
@pytest.mark.parametrize(
    "form",
    ["{letter}", "({letter})", "{letter}. {text}", "The answer is {letter}.", "**{letter}**"],
)
def test_references_of_medqa_by_letter(form: str) -> None:
    tasks = load_benchmark("medqa", FOLDER)
    places = [task.choices.index(task.answers[0].strip()) for task in tasks]
    answers = [
        form.format(letter=string.ascii_uppercase[i], text=task.choices[i])
        for task, i in zip(tasks, places, strict=True)
    ]
    assert set(rewards(tasks, answers)) == {1.0}
    wrong = [(i + 1) % 4 for i in places]
    answers = [
        form.format(letter=string.ascii_uppercase[i], text=task.choices[i])
        for task, i in zip(tasks, wrong, strict=True)
    ]
    assert set(rewards(tasks, answers)) == {0.0}


@needs_files
@pytest.mark.parametrize("name", COUNTS)
def test_answers_of_other_questions_are_wrong(name: str) -> None:
    """Each question gets the answer of one with another answer: 2wiki has two in five "yes" or
    "no", which a shuffle deals back.
    """
    tasks, given = load_benchmark(name, FOLDER), references(name)
    rng = random.Random(0)
    answers = [
        rng.choice([other[0] for other in given if not set(other) & set(own)]) for own in given
    ]
    assert set(rewards(tasks, answers)) == {0.0}


@needs_files
def test_shuffled_answers_score_below_five_percent() -> None:
    tasks = [
        task
        for name in COUNTS
        for task in load_benchmark(name, FOLDER)[: BENCHMARKS[name].num_rows]
    ]
    answers = [
        found[0] for name, (_, num_run) in COUNTS.items() for found in references(name)[:num_run]
    ]
    random.Random(0).shuffle(answers)
    assert sum(rewards(tasks, answers)) / len(tasks) < 0.05


@needs_files
def test_a_benchmark_overlaps_with_itself_and_hardly_with_others() -> None:
    tasks = [task for task in benchmark_tasks(FOLDER) if task.scorer in ("qa", "math")]
    pairs = overlaps(tasks, tasks)
    assert {one.id for one, other in pairs if one is other} == {task.id for task in tasks}
    others = {frozenset((one.id, other.id)) for one, other in pairs if one is not other}
    assert len(others) < 12, (
        "one thing asked about twice, such as the father and the mother of somebody"
    )


# ---- without the files


def test_every_benchmark_has_a_rule() -> None:
    assert list(BENCHMARKS) == [
        "bamboogle",
        "2wiki",
        "hotpotqa",
        "musique",
        "gaia",
        "aime24",
        "amc23",
        "gameof24",
        "gpqa",
        "medqa",
    ]
    assert {benchmark.scorer for benchmark in BENCHMARKS.values()} <= set(SCORERS)


def test_gpqa_as_its_file_comes(tmp_path: Path) -> None:
    row = {
        "pid": 0,
        "query": "Which?",
        "choices": ["1 eV", "2 eV", "3 eV"],
        "answer_idx": 1,
        "answer": "B. 2 eV",
    }
    (tmp_path / "gpqa").mkdir()
    (tmp_path / "gpqa" / "data").mkdir()
    (tmp_path / "gpqa" / "data" / "data.json").write_text(json.dumps([row] * 150))
    tasks = load_benchmark("gpqa", tmp_path)
    assert len(tasks) == 150 and tasks[0] == Task(
        "gpqa-0", "Which?", ("B. 2 eV",), "gpqa", 0, "choice", choices=("1 eV", "2 eV", "3 eV")
    )
    assert rewards(tasks[:3], ["B", "2 eV", "C"]) == [1.0, 1.0, 0.0] and available(tmp_path) == [
        "gpqa"
    ]


def test_what_is_not_there_is_named_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"benchmark 'gaia': there is neither .*gaia\.json nor .*; copy "
        r"test/gaia/data/data\.json of",
    ):
        load_benchmark("gaia", tmp_path)
    with pytest.raises(UserError, match="benchmark 'gai' is unknown; known: bamboogle, 2wiki"):
        load_benchmark("gai", tmp_path)
    (tmp_path / "gaia.json").write_text('[{"query": "q"}]')
    with pytest.raises(UserError, match=r"gaia\.json, entry 1 .*missing required field `answer`"):
        load_benchmark("gaia", tmp_path)
    (tmp_path / "gaia.json").write_text("[]")
    with pytest.raises(UserError, match=r"gaia\.json: holds no tasks"):
        load_benchmark("gaia", tmp_path)
