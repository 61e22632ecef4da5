"""Runs that go on hold the questions out that they held out at first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.tasks.corpus import load_corpus
from flowtrain.tasks.sets import task_set
from flowtrain.trainer.distributed import World
from flowtrain.trainer.run.opening import SPLITS, check_splits

Row = dict[str, Any]


def rows(num: int) -> list[Row]:
    return [{"question": f"question number {i}?", "answer": str(i)} for i in range(num)]


def write(path: Path, found: list[Row]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return str(path)


def components(folder: Path, tasks: dict[str, Any], **more: Any) -> Any:
    """A run in `folder` that goes on with such tasks."""
    given = {"tasks": tasks, "run": {"dir": str(folder), "resume": "auto"}, **more}
    config = Config.model_validate(given)
    world = World(0, 1, torch.device("cpu"))
    return SimpleNamespace(config=config, world=world, tasks=task_set(config))


def begin(folder: Path, tasks: dict[str, Any], **more: Any) -> None:
    splits = components(folder, tasks, **more).tasks.splits
    (folder / "manifest.json").write_text(json.dumps({SPLITS: splits}))


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found + rows(50)[40:],
        lambda found: found[:-1],
        lambda found: found[::-1],
        lambda found: [*found[:5], *rows(60)[55:], *found[10:]],
    ],
    ids=["grown", "shrunk", "turned", "replaced"],
)
def test_a_file_that_changes_what_is_held_out_is_refused(
    change: Callable[[list[Row]], list[Row]], tmp_path: Path
) -> None:
    path = write(tmp_path / "q.jsonl", rows(40))
    tasks = {"name": "file", "path": path, "held_out_share": 0.5}
    begin(tmp_path, tasks)
    check_splits(components(tmp_path, tasks))
    write(tmp_path / "q.jsonl", change(rows(40)))
    said = f"^tasks.path='{path}' holds out other questions than at the start of {tmp_path}"
    with pytest.raises(UserError, match=said):
        check_splits(components(tmp_path, tasks))


def test_another_share_is_refused(tmp_path: Path) -> None:
    tasks = {"name": "file", "path": write(tmp_path / "q.jsonl", rows(40))}
    begin(tmp_path, tasks)
    with pytest.raises(UserError, match=r"tasks\.held_out_share"):
        check_splits(components(tmp_path, {**tasks, "held_out_share": 0.5}))


def test_a_mixture_of_other_files_is_refused(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one.jsonl", rows(20)), write(tmp_path / "two.jsonl", rows(30))
    tasks = {"name": "file", "mixture": {one: 1, other: 1}}
    begin(tmp_path, tasks)
    check_splits(components(tmp_path, {**tasks, "mixture": {one: 1, other: 2}}))
    with pytest.raises(UserError, match=f"^tasks.path='{other}' holds out other questions"):
        check_splits(components(tmp_path, {**tasks, "mixture": {one: 1}}))
    write(tmp_path / "two.jsonl", rows(31))
    with pytest.raises(UserError, match=f"^tasks.path='{other}' holds out other questions"):
        check_splits(components(tmp_path, tasks))


def test_a_corpus_that_grows_is_refused(tmp_path: Path) -> None:
    path, every = tmp_path / "corpus.json", load_corpus()
    found = [{"name": e.name, "kind": e.kind, "facts": dict(e.facts)} for e in every]
    path.write_text(json.dumps(found[:-40]))
    begin(tmp_path, {"corpus": str(path)})
    path.write_text(json.dumps(found))
    with pytest.raises(UserError, match=f"^tasks.corpus='{path}' holds out other questions"):
        check_splits(components(tmp_path, {"corpus": str(path)}))


def test_what_holds_the_same_out_goes_on(tmp_path: Path) -> None:
    """Where the file lies, how many held-out questions are asked, who reads other columns."""
    path = write(tmp_path / "q.jsonl", rows(40))
    begin(tmp_path, {"name": "file", "path": path})
    moved = write(tmp_path / "moved.jsonl", rows(40))
    scored = {"reward": {"function": "reward.py:score"}, "eval": {"num_tasks": 2}}
    check_splits(components(tmp_path, {"name": "file", "path": moved}, **scored))
    (tmp_path / "manifest.json").write_text("{}")  # of an older version
    check_splits(
        components(tmp_path, {"name": "file", "path": write(tmp_path / "q.jsonl", rows(50))})
    )
