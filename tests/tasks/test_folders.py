"""Folders of a data set as `datasets`, the Hub and people lay them out, and names of the Hub."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.tasks.files import load_source, load_tasks
from flowtrain.tasks.sets import MAIN_SPLIT, task_set

datasets = pytest.importorskip("datasets")
Rows = list[dict[str, Any]]


def rows(*names: str) -> Rows:
    return [{"question": f"{name}?", "answer": f"It is\n#### {len(name)}"} for name in names]


def write(path: Path, entries: Rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(entries)
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path)
        case _:
            path.write_text("\n".join(map(json.dumps, entries)))


def questions(folder: Path, split: str = "train") -> list[str]:
    return [task.question for task in load_tasks(folder, split=split)]


LAYOUTS = {
    "shards of the Hub": (
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
    ),
    "a folder a split": ("train/a.parquet", "train/b.parquet", "test/0.parquet"),
    "a file a split": ("my-train-1.jsonl", "my-train-2.jsonl", "my_test.jsonl"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    one, other, test = LAYOUTS[layout]
    folder = tmp_path / "gsm8k"
    for name, entries in ((one, rows("a", "b")), (other, rows("c")), (test, rows("d"))):
        write(folder / name, entries)
    (folder / ".cache").mkdir()
    (folder / ".cache" / "train.json").write_text("{}")
    (folder / "README.md").write_text("# train")
    source = load_source(folder)
    assert [task.question for task in source.tasks] == ["a?", "b?", "c?"]
    assert [task.id for task in source.tasks] == [f"gsm8k-train-{n}" for n in (1, 2, 3)]
    assert source.text().startswith("tasks: gsm8k, 3 rows, preset gsm8k: ")
    assert questions(Path("gsm8k"), "test") == ["d?"]
    with pytest.raises(UserError, match=r"tasks\.split='x': .* it has test, train"):
        load_tasks(folder, split="x")


def test_a_folder_that_names_no_split(tmp_path: Path) -> None:
    for name in ("one.jsonl", "two.jsonl"):
        write(tmp_path / "plain" / name, rows(name))
    assert questions(tmp_path / "plain") == ["one.jsonl?", "two.jsonl?"]
    with pytest.raises(UserError, match=r"tasks\.split='test': .* it has train"):
        load_tasks(tmp_path / "plain", split="test")


def test_answers_are_what_the_lines_say(tmp_path: Path) -> None:
    """The reader of JSON that `datasets` has would make 7 of one, and a date of the other."""
    made = [{"question": "a?", "answer": "007"}, {"question": "b?", "answer": ["1", "1964-01-05"]}]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, made)))
    assert [task.answers for task in load_tasks(tmp_path)] == [("007",), ("1", "1964-01-05")]


def test_splits_of_other_names(tmp_path: Path) -> None:
    for name in ("train_sft-00000-of-00001.parquet", "train_prefs-00000-of-00001.parquet"):
        write(tmp_path / "data" / name, rows(name))
    assert questions(tmp_path, "train_sft") == ["train_sft-00000-of-00001.parquet?"]
    with pytest.raises(UserError, match="it has train_prefs, train_sft"):
        load_tasks(tmp_path)


def test_what_is_no_one_data_set_is_refused(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    for name in ("main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"):
        write(tmp_path / "configs" / name, rows("a"))
    for name, message in (
        ("none", "holds no dataset: "),
        ("configs", "split 'train' lies in several folders, main, socratic; name one of them"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as refused:
            load_tasks(tmp_path / name)
        assert str(refused.value).startswith(f"tasks.path={str(tmp_path / name)!r}: ")
    assert questions(tmp_path / "configs" / "main") == ["a?"]


def test_the_wrong_row_of_several_files_is_named(tmp_path: Path) -> None:
    write(tmp_path / "train" / "a.jsonl", rows("a"))
    write(tmp_path / "train" / "b.jsonl", [*rows("b"), {"question": "c?", "answer": None}])
    with pytest.raises(UserError, match=r"b\.jsonl, line 2 \(question: question"):
        load_tasks(tmp_path)


def test_a_run_takes_the_split_that_the_config_names(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", rows(*"abcd"))
    write(tmp_path / "train.jsonl", rows("e", "f"))
    config = {"tasks": {"name": "file", "path": str(tmp_path), "split": "test"}}
    found = task_set(Config.model_validate(config))
    every = (*found.train, *found.held_out[MAIN_SPLIT])
    assert {task.question for task in every} == {"a?", "b?", "c?", "d?"}
    assert [source.path for source in found.sources] == [str(tmp_path)]


def test_a_file_has_no_splits(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows("a"))
    with pytest.raises(UserError, match=r"tasks\.split='test' requires a folder .*train\.jsonl"):
        load_tasks(tmp_path / "train.jsonl", split="test")


# ---- the Hub, in place of which a module of the test answers


class FakeDatasets(ModuleType):
    """Stands in for `datasets`: no test reaches the network."""

    def __init__(self, found: Rows | Exception) -> None:
        super().__init__("datasets")
        self.found = found
        self.calls: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> Rows:
        self.calls.append((name, config, split))
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_a_name_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDatasets([*rows("a", "b"), {**rows("c")[0], "extra": None}])
    monkeypatch.setitem(sys.modules, "datasets", fake)
    source = load_source("openai/gsm8k")
    assert [task.id for task in source.tasks] == [f"gsm8k-train-{n}" for n in (1, 2, 3)]
    assert source.preset == "gsm8k" and source.text().startswith("tasks: gsm8k, 3 rows")
    source = load_source("openai/gsm8k:main", split="test")
    assert source.tasks[0].id == "gsm8k-main-test-1"
    assert fake.calls == [("openai/gsm8k", None, "train"), ("openai/gsm8k", "main", "test")], (
        "loaded once"
    )
    fake.found = [*rows("a"), {"question": "b?", "answer": None}]
    with pytest.raises(UserError, match=r"openai/gsm8k, split train, row 2 \(question"):
        load_tasks("openai/gsm8k")


def test_what_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ValueError("Config name is missing.\nPlease pick one among ['main', 'socratic']")
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(error))
    with pytest.raises(UserError) as refused:
        load_tasks("data/questions", split="test")
    text = str(refused.value)
    assert text.startswith("tasks.path='data/questions' is neither a file nor a folder")
    assert "split 'test'" in text and "\n" not in text
    assert text.endswith("Config name is missing. Please pick one among ['main', 'socratic']")


def test_without_datasets_the_error_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError) as refused:
        load_tasks("openai/gsm8k")
    text = str(refused.value)
    assert "pip install -e '.[hub]'" in text and "\n" not in text
    assert "hf download openai/gsm8k --repo-type dataset --local-dir FOLDER" in text
    with pytest.raises(UserError, match=r"a folder needs pip install -e '\.\[hub\]'"):
        load_tasks(tmp_path)


@pytest.mark.parametrize("path", ["data/no.jsonl", "no", "a/b/c", "./no", "/no/folder", "~/x"])
def test_what_is_no_name_of_the_hub_is_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    fake = FakeDatasets(rows("a"))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    with pytest.raises(UserError, match=r"[Nn]o such file"):
        load_tasks(path)
    assert not fake.calls


@pytest.mark.parametrize("name", ["set[1]", "a*", "what?", "[ab]"])
def test_a_folder_with_the_letters_of_a_pattern_is_no_other(tmp_path: Path, name: str) -> None:
    for sibling in ("set1", "ab", "whats", "a"):
        write(tmp_path / sibling / "train.jsonl", rows(f"other-{sibling}"))
    write(tmp_path / name / "data" / "train-0.jsonl", rows("mine"))
    write(tmp_path / name / "data" / "test.jsonl", rows("held"))
    assert questions(tmp_path / name) == ["mine?"]
    assert questions(tmp_path / name, "test") == ["held?"]
