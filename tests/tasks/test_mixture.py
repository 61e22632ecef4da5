"""Mixtures: shares by weight in every batch, each source once per epoch of its own, exact resume;
and the task sets made of files.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain.config import Config
from flowtrain.records import Task, UserError
from flowtrain.tasks.mixture import MixedCursor, shares
from flowtrain.tasks.sets import MAIN_SPLIT, task_set

WEIGHTS = st.lists(st.floats(0.5, 4), min_size=1, max_size=4).map(
    lambda found: {f"s{i}": weight for i, weight in enumerate(found)}
)


def sources(*sizes: int) -> dict[str, list[Task]]:
    return {
        f"s{i}": [Task(f"s{i}-{j}", "q", ("a",), kind=f"s{i}") for j in range(size)]
        for i, size in enumerate(sizes)
    }


@pytest.mark.parametrize(
    ("weights", "n", "expected"),
    [
        ({"a": 1, "b": 1}, 8, {"a": 4, "b": 4}),
        ({"nq": 79_168, "math": 103_022}, 32, {"nq": 14, "math": 18}),
        ({"a": 1, "b": 2}, 16, {"a": 5, "b": 11}),
        ({"a": 1, "b": 1, "c": 1}, 4, {"a": 2, "b": 1, "c": 1}),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, 10, {"a": 1, "b": 2, "c": 7}),
    ],
)
def test_shares(weights: dict[str, float], n: int, expected: dict[str, int]) -> None:
    assert shares(weights, n) == expected


@given(WEIGHTS, st.integers(20, 64))
def test_shares_are_within_one_of_the_weights(weights: dict[str, float], n: int) -> None:
    found = shares(weights, n)
    assert sum(found.values()) == n
    assert all(
        abs(found[name] - n * weight / sum(weights.values())) < 1
        for name, weight in weights.items()
    )


def test_a_weight_too_small_for_a_batch_is_refused() -> None:
    told = r"tasks\.mixture assigns 'b' none of the 8 questions of a step; raise its weight 0\.01"
    with pytest.raises(UserError, match=told):
        shares({"a": 1.0, "b": 0.01}, 8)


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    st.integers(0, 5),
    st.integers(0, 9),
    st.integers(1, 6),
)
def test_a_resumed_cursor_goes_on_exactly(
    sizes: list[int], seed: int, num_before: int, num_after: int
) -> None:
    made, weights = sources(*sizes), {f"s{i}": float(i + 1) for i in range(len(sizes))}
    whole = MixedCursor(made, weights, seed)
    for _ in range(num_before):
        whole.take(6)
    resumed = MixedCursor(made, weights, seed, whole.position)
    assert resumed.position == num_before * 6
    assert [resumed.take(6) for _ in range(num_after)] == [whole.take(6) for _ in range(num_after)]


def test_every_batch_has_its_shares_and_every_source_its_epochs() -> None:
    cursor = MixedCursor(sources(6, 4), {"s0": 3.0, "s1": 1.0}, seed=1)
    batches = [cursor.take(4) for _ in range(8)]
    assert all(Counter(task.kind for task in batch) == {"s0": 3, "s1": 1} for batch in batches)
    assert all(len({task.id for task in batch}) == 4 for batch in batches)
    for name, size in (("s0", 6), ("s1", 4)):
        walked = [task.id for batch in batches for task in batch if task.kind == name]
        for start in range(0, len(walked) - size + 1, size):
            assert len(set(walked[start : start + size])) == size
    assert len({tuple(task.kind for task in batch) for batch in batches}) > 1, (
        "the first places are not always the same source's"
    )
    assert batches != [
        MixedCursor(sources(6, 4), {"s0": 3.0, "s1": 1.0}, seed=2).take(4) for _ in range(8)
    ]


# ---- task sets


def write(folder: Path, name: str, num: int, **more: Any) -> str:
    path = folder / f"{name}.jsonl"
    rows = [
        {"question": f"{name} question number {i}?", "answer": str(i), "kind": name, **more}
        for i in range(num)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_mixture_of_files(tmp_path: Path) -> None:
    one, other = write(tmp_path, "one", 20), write(tmp_path, "other", 40)
    config = Config.model_validate(
        {"tasks": {"name": "file", "mixture": {one: 1, other: 3}}, "rollout": {"num_questions": 8}}
    )
    tasks = task_set(config)
    assert Counter(task.kind for task in tasks.train) == {"one": 18, "other": 36}
    assert Counter(task.kind for task in tasks.held_out[MAIN_SPLIT]) == {"one": 2, "other": 4}
    assert not {task.id for task in tasks.train} & {task.id for task in tasks.held_out[MAIN_SPLIT]}
    cursor = tasks.cursor(seed=0, position=16)
    batch = cursor.take(8)
    assert Counter(task.kind for task in batch) == {"one": 2, "other": 6} and cursor.position == 24
    drawn = dict(zip((task.id for task in tasks.train), tasks.draw_weights(), strict=True))
    assert sum(w for i, w in drawn.items() if i.startswith("one")) == pytest.approx(1)
    assert sum(w for i, w in drawn.items() if i.startswith("other")) == pytest.approx(3)


def test_one_file_is_walked_as_ever(tmp_path: Path) -> None:
    tasks = task_set(
        Config.model_validate(
            {"tasks": {"name": "file", "path": write(tmp_path, "one", 20), "scorer": "math"}}
        )
    )
    assert {task.scorer for task in tasks.train} == {"math"} and tasks.draw_weights() == [1.0] * 18
    assert sorted(task.id for task in tasks.cursor(0, 0).take(18)) == sorted(
        task.id for task in tasks.train
    )


def test_what_is_wrong_with_a_mixture_is_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    one, twin = write(tmp_path, "one", 20), write(tmp_path / "sub", "one", 20)
    for mixture, message in (
        ({one: 1, twin: 1}, "both have a task with id 'one-1'; ids must be unique"),
        ({one: 1000, twin: 1}, "none of the 16 questions"),
        ({str(tmp_path / "no.jsonl"): 1}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            task_set(Config.model_validate({"tasks": {"name": "file", "mixture": mixture}}))


def test_training_leaves_out_what_benchmarks_ask(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "hotpotqa.json").write_text(
        json.dumps([{"query": f"One question, number {i}!", "answer": ["x"]} for i in range(12)])
    )
    config = {
        "tasks": {"name": "file", "path": write(tmp_path, "one", 20), "benchmarks": str(folder)}
    }
    left = {task.question for task in task_set(Config.model_validate(config)).train}
    assert left and left <= {f"one question number {i}?" for i in range(12, 20)}
    config["tasks"]["path"] = write(tmp_path, "one", 10)
    with pytest.raises(
        UserError, match=r"tasks\.benchmarks=.* contain nearly all training questions"
    ):
        task_set(Config.model_validate(config))


def test_training_on_puzzles_leaves_out_those_of_the_benchmark(tmp_path: Path) -> None:
    every = task_set(Config.model_validate({"tasks": {"name": "gameof24"}})).train
    row = {
        "question": [int(number) for number in reversed(every[0].answers)],
        "query": "Make 24.",
        "answer": ["..."],
    }
    (tmp_path / "gameof24.json").write_text(json.dumps([row]))
    left = task_set(
        Config.model_validate({"tasks": {"name": "gameof24", "benchmarks": str(tmp_path)}})
    ).train
    assert left == every[1:]
