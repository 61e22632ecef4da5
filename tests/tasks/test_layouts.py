"""Parquet files, the columns of published data sets, and columns that a person names."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flowtrain.records import Task, UserError
from flowtrain.tasks.files import load_source, load_tasks
from flowtrain.tasks.layouts import _OPTIONAL, OWN, read_task

BAKED_IN = (
    "When ready, output the final answer enclosed in <answer> and </answer> tags. Do not generate "
    "any content after the </answer> tag."
)


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / name
    if path.suffix == ".parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(json.dumps(rows))
    return path


SEARCH_R1 = {
    "id": "train_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann Lee", "A. Lee"],
    "data_source": "nq",
    "prompt": [{"role": "user", "content": "..."}],
    "reward_model": {"ground_truth": {"target": ["Ann Lee", "A. Lee"]}, "style": "rule"},
}
DEEPMATH = {
    "question": "Half of one?",
    "final_answer": "\\dfrac{1}{2}",
    "difficulty": 4.0,
    "topic": "Algebra",
    "r1_solution_1": "long",
}
COMBINED = [
    {
        "id": 0,
        "question": "who?",
        "chain": "",
        "result": "Ann; Bob",
        "source": "nq",
        "extra_info": {"ground_truth": "Ann; Bob", "idx": 3},
    },
    {
        "id": 1,
        "question": "set?",
        "chain": "",
        "result": "1; 2",
        "source": "mathhard",
        "extra_info": {"ground_truth": "1; 2", "idx": 3},
    },
]


@pytest.mark.parametrize("suffix", ["parquet", "json"])
@pytest.mark.parametrize("preset", ["auto", "named"])
def test_presets(tmp_path: Path, suffix: str, preset: str) -> None:
    def load(name: str, rows: list[dict[str, Any]]) -> list[Task]:
        return load_tasks(
            write(tmp_path, f"{name}.{suffix}", rows), name if preset == "named" else "auto"
        )

    assert load("search-r1", [SEARCH_R1]) == [
        Task("search-r1-1", "who wrote it?", ("Ann Lee", "A. Lee"), "nq", 0, "qa")
    ]
    without = {key: value for key, value in SEARCH_R1.items() if key != "golden_answers"}
    assert load("search-r1", [without])[0].answers == ("Ann Lee", "A. Lee")
    assert load("deepmath", [DEEPMATH]) == [
        Task("deepmath-1", "Half of one?", ("\\dfrac{1}{2}",), "", 0, "math")
    ]
    assert load("agentflow", COMBINED) == [
        Task("agentflow-1", "who?", ("Ann", "Bob"), "nq", 0, "qa"),
        Task("agentflow-2", "set?", ("1; 2",), "mathhard", 0, "math"),
    ]


def test_own_layout_in_parquet(tmp_path: Path) -> None:
    rows = [
        {"question": "Why?", "answer": ["x", "y"], "id": "a", "choices": None, "scorer": None},
        {
            "question": "Which?",
            "answer": ["B"],
            "id": None,
            "choices": ["A. one", "B. two"],
            "scorer": "choice",
        },
    ]
    assert load_tasks(write(tmp_path, "own.parquet", rows)) == [
        Task("a", "Why?", ("x", "y"), "", 0, "exact"),
        Task("own-2", "Which?", ("B",), "", 0, "choice", choices=("one", "two")),
    ]
    with pytest.raises(UserError, match=r"odd\.parquet, row 1: unknown key 'answr'"):
        load_tasks(
            write(tmp_path, "odd.parquet", [{"question": "Why?", "answer": "x", "answr": 1}])
        )


@pytest.mark.parametrize(
    ("name", "row", "found"),
    [
        ("geo.parquet", {"problem": "<image> x?", "answer": "1", "images": [b"PNG"]}, "images"),
        ("own.json", {"question": "What is it?", "answer": "a cat", "image": "cat.png"}, "image"),
        (
            "chat.json",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text"}, {"type": "image_url"}]},
                    {"role": "assistant", "content": "\\boxed{1}"},
                ]
            },
            "image_url",
        ),
    ],
)
def test_a_question_with_a_picture_is_refused(
    tmp_path: Path, name: str, row: dict, found: str
) -> None:
    path = write(tmp_path, name, [row])
    told = rf"1: has content other than text \('{found}'\), which training does not support$"
    with pytest.raises(UserError, match=told):
        load_tasks(path)
    nothing = {key: [] if key == found else value for key, value in row.items()}
    if "messages" not in row and name != "own.json":  # there, another key is a mistake
        assert load_tasks(write(tmp_path, name, [nothing]))


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(*[st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip)] * 2),
        min_size=1,
        max_size=5,
    )
)
def test_any_texts_round_trip_through_parquet(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    rows = [{"question": question, "answer": answer} for question, answer in pairs]
    tasks = load_tasks(write(tmp_path_factory.mktemp("tasks"), "set.parquet", rows))
    assert [(task.question, *task.answers) for task in tasks] == pairs


def test_named_columns_and_scorer(tmp_path: Path) -> None:
    path = write(
        tmp_path, "set.json", [{"ask": {"text": "Why?"}, "gold": {"all": ["x", 3]}, "noise": 1}]
    )
    (task,) = load_tasks(path, question_key="ask.text", answer_key="gold.all", scorer="f1")
    assert task == Task("set-1", "Why?", ("x", "3"), "", 0, "f1")
    (task,) = load_tasks(
        write(tmp_path, "math.json", [{**DEEPMATH, "gold": "7"}]), answer_key="gold"
    )
    assert (task.answers, task.scorer) == (("7",), "math"), "the rest stays the preset's"
    assert [
        task.scorer for task in load_tasks(write(tmp_path, "mix.json", COMBINED), scorer="f1")
    ] == ["f1", "f1"]


def test_the_baked_in_instruction_goes(tmp_path: Path) -> None:
    questions = [f"Why?{BAKED_IN}", f"Why? \n{BAKED_IN}", "When ready, say <answer>."]
    tasks = load_tasks(
        write(
            tmp_path, "set.json", [{"question": question, "answer": "x"} for question in questions]
        )
    )
    assert [task.question for task in tasks] == ["Why?", "Why?", "When ready, say <answer>."]


@pytest.mark.parametrize(
    ("preset", "row", "message"),
    [
        (
            "search-r1",
            {"question": "q"},
            "golden_answers or reward_model.ground_truth.target): Object missing",
        ),
        (
            "search-r1",
            {"question": "q", "golden_answers": []},
            "Expected `array` of length >= 1 - at `$.answer`",
        ),
        ("search-r1", {"question": "q", "reward_model": 3}, "field `answer`"),
        ("deepmath", {"final_answer": "1"}, "Object missing required field `question`"),
        (
            "agentflow",
            {"question": BAKED_IN, "result": "x"},
            "Expected `str` matching regex '\\\\S' - at `$.question`",
        ),
        (
            "own",
            {"question": "q", "answer": "A", "choices": ["one"]},
            "Expected `array` of length >= 2 - at `$.choices`",
        ),
        ("own", {"question": "q", "answer": "A", "choices": ["one", " "]}, "at `$.choices[1]`"),
        ("own", {"question": "q", "answer": "A", "choices": "one, two"}, "at `$.choices`"),
    ],
)
def test_missing_columns_are_named(
    tmp_path: Path, preset: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_tasks(write(tmp_path, "set.json", [row]), preset)
    assert str(refused.value).startswith(f"{tmp_path / 'set.json'}, entry 1 (question: ")


def test_files_that_are_no_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.parquet").write_text("question,answer")
    with pytest.raises(UserError, match=r"text\.parquet: cannot be read as Parquet"):
        load_tasks(tmp_path / "text.parquet")
    told = r"absent\.parquet: cannot be read as Parquet: .*No such file"
    with pytest.raises(UserError, match=told):
        load_tasks(tmp_path / "absent.parquet")
    with pytest.raises(UserError, match=r"empty\.parquet: holds no tasks"):
        load_tasks(write(tmp_path, "empty.parquet", []))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs pip install -e '\.\[parquet\]'"):
        load_tasks(tmp_path / "text.parquet")


def test_columns_that_no_one_needs_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepMath's solutions are most of its bytes."""
    path = write(tmp_path, "set.parquet", [DEEPMATH])
    read: list[list[str]] = []
    real = parquet.ParquetFile.iter_batches

    def spied(self: Any, columns: list[str]) -> Any:
        read.append(columns)
        return real(self, columns=columns)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", spied)
    assert len(load_tasks(path)) == 1 and read == [["question", "final_answer"]] * 2


# ---- rows for a reward function


@pytest.mark.parametrize("suffix", ["parquet", "json"])
def test_other_columns_reach_a_reward_function_untouched(tmp_path: Path, suffix: str) -> None:
    rows = [
        {"question": "q", "tests": ["assert f(1)", "\u2028"], "meta": {"level": 3, "x": 0.1}},
        {"question": "r", "tests": [], "meta": {"level": 4, "x": 1e300}},
    ]
    tasks = load_tasks(write(tmp_path, f"mine.{suffix}", rows), keeps_columns=True)
    assert [task.answers for task in tasks] == [(), ()]
    for task, row in zip(tasks, rows, strict=True):
        assert task.extra == {"tests": row["tests"], "meta": row["meta"]}
    assert Task("a", "q", ()).extra == {}


def test_columns_that_are_read_in_part_are_kept_whole(tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path, "nq.json", [SEARCH_R1]), keeps_columns=True)
    expected = ("who wrote it?", ("Ann Lee", "A. Lee"), "nq")
    assert (task.question, task.answers, task.kind) == expected
    assert task.extra == {name: SEARCH_R1[name] for name in ("id", "prompt", "reward_model")}


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name not in ("question", "answer", *_OPTIONAL)),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
            lambda leaf: st.lists(leaf) | st.dictionaries(st.text(), leaf),
            max_leaves=5,
        ),
    )
)
def test_any_columns_are_the_same_afterwards(columns: dict[str, Any]) -> None:
    layout = replace(OWN, is_closed=False, keeps_columns=True)
    row = json.loads(json.dumps({"question": "q", **columns}))
    task = read_task(row, layout, "here", "id")
    assert task.extra == columns
    hash(task)


@pytest.mark.parametrize(
    ("answer", "answers"), [(None, ()), ("", ()), ([], ()), (3, ("3",)), (["a", ""], ("a",))]
)
def test_an_answer_may_be_missing_for_a_reward_function_alone(
    answer: Any, answers: tuple[str, ...], tmp_path: Path
) -> None:
    path = write(tmp_path, "mine.json", [{"question": "q", "answer": answer}])
    (task,) = load_tasks(path, keeps_columns=True)
    assert task.answers == answers and task.columns == ""
    if not answers:
        with pytest.raises(UserError):
            load_tasks(path)
    with pytest.raises(UserError, match="answer"):
        load_tasks(write(tmp_path, "bare.json", [{"question": "q"}]))
    with pytest.raises(UserError, match="unknown key 'tests'"):
        load_tasks(write(tmp_path, "more.json", [{"question": "q", "answer": 1, "tests": []}]))


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (
            [{"answer": "A"}, {"anwser": "B"}],
            "1 of them {}, the first is row 2, which has 'anwser'",
        ),
        ([{"answer": "A"}, {}, {"Answer": "B"}], "2 of them {}, the first is row 2"),
        ([{"answer": "A"}, {"answer": "B", "note": "x"}], ""),
        ([{"note": "x"}, {"note": "y"}], ""),
    ],
)
def test_rows_without_an_answer_among_others_are_told(
    tmp_path: Path, rows: list[dict[str, str]], told: str
) -> None:
    given = [{"question": f"q{number}", **row} for number, row in enumerate(rows)]
    source = load_source(write(tmp_path, "mine.json", given), "own", keeps_columns=True)
    told = told.format("without an answer")
    assert source.unanswered == told and (f", {told}: question" in source.text()) == bool(told)


def test_numbers_of_parquet_are_as_they_were_written(tmp_path: Path) -> None:
    columns = {
        "big": pa.array([Decimal("12345678901234567891")]),
        "exact": pa.array([Decimal("0.10")]),
        "single": pa.array([0.1], pa.float32()),
        "half": pa.array([np.float16(0.1)], pa.float16()),
        "double": pa.array([0.1 + 0.2], pa.float64()),
        "several": pa.array([[0.1, 1e20]], pa.list_(pa.float32())),
    }
    found = {}
    for name, values in columns.items():
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(pa.table({"question": ["q"], "answer": values}), path)
        found[name] = load_tasks(path)[0].answers
    assert found == {
        "big": ("12345678901234567891",),
        "exact": ("0.10",),
        "single": ("0.1",),
        "half": ("0.1",),
        "double": ("0.30000000000000004",),
        "several": ("0.1", "1e+20"),
    }
