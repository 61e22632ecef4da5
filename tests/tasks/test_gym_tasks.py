"""Questions of reasoning-gym: sets, seeds, weights, held-out questions, and what is refused."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pytest
from pydantic import ValidationError

from flowtrain.config import Config, GymSet
from flowtrain.tasks import gym, gym_worker
from flowtrain.tasks.gym import gym_tasks
from flowtrain.tasks.sets import MAIN_SPLIT, task_set
from flowtrain.types import Task, UserError


@pytest.fixture
def needs_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="needs pip install 'flowtrain[gym]'")


def numbers(monkeypatch: pytest.MonkeyPatch) -> list[gym.Draw]:
    """Make every question be its number; returns the list to which draws will be added."""
    drawn: list[gym.Draw] = []

    def made(draws: Sequence[gym.Draw]) -> list[dict[str, Any]]:
        drawn.extend(draws)
        return [
            {"question": f"{draw.name} {draw.seed + index}?", "answer": "a", "entry": "{}"}
            for draw in draws
            for index in range(draw.size)
        ]

    monkeypatch.setattr(gym, "_made", made)
    return drawn


# ---- without reasoning-gym


def test_questions_are_shared_out_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(monkeypatch)
    sets = {"a": GymSet(), "easy": GymSet(name="a", weight=2.0, options={"n": 1}), "b": GymSet()}
    train, held_out = gym_tasks(sets, num_train=20, num_held_out=8, seed=0)
    assert {key: len(tasks) for key, tasks in train.items()} == {"a": 5, "easy": 10, "b": 5}
    assert train["easy"][3].id == "easy-train-3" and train["easy"][3].kind == "easy"
    assert Counter(task.kind for task in held_out) == {"a": 2, "easy": 2, "b": 2}


@pytest.mark.parametrize("seed", range(4))
def test_no_number_makes_a_training_and_a_held_out_question(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = numbers(monkeypatch)
    gym_tasks({"a": GymSet(), "b": GymSet(seed=seed + 7)}, 5000, 5000, seed)
    train, held_out = drawn[:2], drawn[2:]
    assert all(
        draw.seed + draw.size <= gym._TRAIN <= other.seed for draw in held_out for other in train
    )
    assert all(other.seed + other.size < 2**32 for other in train)
    assert train[0].seed != train[1].seed and {draw.seed for draw in held_out} == {0}


def test_training_begins_where_held_out_questions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = numbers(monkeypatch)
    monkeypatch.setattr(gym, "derive_seed", lambda *parts: 0)
    train, held_out = gym_tasks({"a": GymSet()}, 4, 4, 0)
    assert [draw.seed for draw in drawn] == [gym._TRAIN, 0] and len(train["a"] + held_out) == 8
    with pytest.raises(UserError, match=f"eval.num_tasks=.* must be at most {gym._TRAIN}"):
        gym_tasks({"a": GymSet()}, 4, gym._TRAIN + 1, 0)


def test_equal_questions_leave_the_held_out_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["one", "two", "three", "one", "four", "four", "five"]
    monkeypatch.setattr(
        gym, "_made", lambda draws: [{"question": q, "answer": None, "entry": "{}"} for q in lines]
    )
    train, held_out = gym_tasks({"a": GymSet()}, 3, 4, 0)
    assert [task.question for task in train["a"]] == ["one", "two", "three"]
    expected = [("a-texts-1", "four"), ("a-texts-3", "five")]
    assert [(task.id, task.question) for task in held_out] == expected
    assert train["a"][0].answers == ()
    lines[4:] = ["two", "one", "three"]
    with pytest.raises(UserError, match=r"every held-out question is asked in training"):
        gym_tasks({"a": GymSet()}, 3, 4, 0)


def test_seeds_decide_on_training_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers(monkeypatch)
    asked = {}
    for seed in (0, 1):
        train, held_out = gym_tasks({"a": GymSet(), "b": GymSet(seed=5)}, 8, 4, seed)
        asked[seed] = (train["a"], train["b"], held_out)
    assert asked[0][0] != asked[1][0], "run.seed, where a set has no seed"
    assert asked[0][1] == asked[1][1] and asked[0][2] == asked[1][2]


def test_data_keeps_its_types_as_text() -> None:
    numpy = pytest.importorskip("numpy")
    metadata = {"board": ((1, 2), [3]), 4: numpy.str_("x"), "n": numpy.int64(5), "b": True}
    entry = {"question": "?", "answer": numpy.float64(0.5), "metadata": metadata}
    line = gym_worker.question(entry, "a", {"n": 1})
    assert line["answer"] == "0.5"
    read = ast.literal_eval(line["entry"])
    assert (read["name"], read["options"]) == ("a", {"n": 1})
    assert read["entry"]["metadata"] == {"board": ((1, 2), [3]), 4: "x", "n": 5, "b": True}
    with pytest.raises(SyntaxError):
        gym_worker.question({**entry, "metadata": object}, "a", {})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"name": "reasoning-gym"}, r"tasks.gym=\[\] goes with tasks.name = 'reasoning-gym'"),
        ({"gym": {"a": {}}}, r"tasks.gym=\['a'\] goes with .*, which is 'facts'"),
        (
            {"name": "reasoning-gym", "gym": {"a": {"options": {"seed": 1}}}},
            "'seed' is not set here: see seed and tasks.num_train",
        ),
        ({"name": "reasoning-gym", "gym": {"a": {"weight": 0}}}, "greater than 0"),
    ],
)
def test_wrong_options_are_refused(tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Config.model_validate({"tasks": tasks})


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('gone')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"pip install 'flowtrain\[gym\]' \(gone\)"):
        gym_tasks({"a": GymSet()}, 1, 1, 0)


def test_a_worker_that_dies_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match=r"died \(status 3\)"):
        gym_tasks({"a": GymSet()}, 1, 1, 0)


HASHES = """
from . import factory

def create_dataset(name, seed, size):
    print("made")
    return [{"question": str(hash(name)), "answer": "a", "metadata": {}}] * size
"""


def test_questions_do_not_depend_on_the_hash_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what a data set prints is no question."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text(HASHES)
    (tmp_path / "reasoning_gym" / "factory.py").write_text("DATASETS = ['a']")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    draw = gym.Draw("a", "a", {}, 0, 1)
    first = gym._made([draw])
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert gym._made([draw]) == first and len(first) == 1


# ---- with reasoning-gym


def made_here(draws: Sequence[gym.Draw]) -> NoReturn:
    """The worker's answer to draws that it refuses, without a process."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.suppress(SystemExit):
        patched.setattr(sys, "stdin", io.StringIO(json.dumps([asdict(each) for each in draws])))
        patched.setattr(sys, "stdout", said)
        patched.setattr(sys, "__stdout__", said)
        gym_worker.main()
    raise UserError(json.loads(said.getvalue())["error"])


def config(**sets: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "tasks": {"name": "reasoning-gym", "gym": sets, "num_train": 12},
            "rollout": {"num_questions": 4},
            "eval": {"num_tasks": 8},
        }
    )


def test_a_task_set(needs_gym: None) -> None:
    made = config(
        leg_counting={"weight": 3.0, "options": {"max_animals": 4}}, ransom_note={}, arc_1d={}
    )
    made = made.model_copy(update={"rollout": made.rollout.model_copy(update={"num_questions": 5})})
    tasks = task_set(made)
    expected = {"leg_counting": 7, "ransom_note": 2, "arc_1d": 2}
    assert Counter(task.kind for task in tasks.train) == expected
    held_out = tasks.held_out[MAIN_SPLIT]
    assert held_out and not {t.question for t in held_out} & {t.question for t in tasks.train}
    assert all(task.scorer == "reasoning-gym" and task.num_turns == 0 for task in tasks.train)
    assert ast.literal_eval(tasks.train[0].entry)["options"] == {"max_animals": 4}
    batch: list[Task] = tasks.cursor(0, 0).take(5)
    expected = {"leg_counting": 3, "ransom_note": 1, "arc_1d": 1}
    assert Counter(task.kind for task in batch) == expected


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"leg_count": {}}, "has no data set 'leg_count'; did you mean leg_counting"),
        ({"composite": {}}, "has no data set 'composite'"),
        (
            {"legs": {"name": "leg_counting", "options": {"max_legs": 3}}},
            r"tasks\.gym\.legs\.options={'max_legs': 3}: TypeError",
        ),
        (
            {"leg_counting": {"options": {"min_animals": 9, "max_animals": 3}}},
            "AssertionError: max_animals must be",
        ),
    ],
)
def test_what_reasoning_gym_refuses_is_named(
    needs_gym: None, sets: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gym, "_made", made_here)
    with pytest.raises(UserError, match=message):
        task_set(config(**sets))
