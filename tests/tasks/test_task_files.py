"""Tasks from the user's files, and one clear line for everything that can be wrong with them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.records import Task, UserError
from flowtrain.tasks.files import load_tasks

TEXTS = st.text(st.characters(blacklist_categories=["Cs"])).filter(str.strip)


def write(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_bytes(content.encode())
    return path


def test_jsonl(tmp_path: Path) -> None:
    lines = [
        '{"question": "Why?", "answer": "Because"}',
        "",
        '{"question": "How many?", "answer": [385, "385.0", 3.5], "id": "mine", "kind": "count", '
        '"num_turns": 2, "scorer": "gameof24"}\r',
        '{"question": "a\u2028b", "answer": 7, "id": 12}',
    ]
    assert load_tasks(write(tmp_path, "set.jsonl", "\n".join(lines))) == [
        Task("set-1", "Why?", ("Because",), "", 0, "exact"),
        Task("mine", "How many?", ("385", "385.0", "3.5"), "count", 2, *("gameof24",) * 2),
        Task("12", "a\u2028b", ("7",), "", 0, "exact"),
    ]


def test_json_with_byte_order_mark_and_plain_string_path(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "set.json",
        '\ufeff[{"question": "Why?", "answer": "x"}, {"question": "Why?", "answer": "y"}]',
    )
    expected = [("set-1", ("x",)), ("set-2", ("y",))]
    assert [(task.id, task.answers) for task in load_tasks(str(path))] == expected


@settings(max_examples=40)
@given(
    st.lists(st.tuples(TEXTS, st.lists(TEXTS, min_size=1)), min_size=1, max_size=4),
    st.sampled_from(["json", "jsonl"]),
    st.booleans(),
)
def test_any_texts_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    pairs: list[tuple[str, list[str]]],
    suffix: str,
    ensure_ascii: bool,
) -> None:
    entries = [{"question": question, "answer": answers} for question, answers in pairs]
    texts = [json.dumps(entry, ensure_ascii=ensure_ascii) for entry in entries]
    content = "\n".join(texts) if suffix == "jsonl" else f"[{','.join(texts)}]"
    tasks = load_tasks(write(tmp_path_factory.mktemp("tasks"), f"set.{suffix}", content))
    assert [(task.question, list(task.answers)) for task in tasks] == pairs


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: cannot be read as JSON"),
        ("[" * 100_000, "line 2: cannot be read as JSON"),
        ('{"question": "q", "answer": ' + "9" * 5000 + "}", "line 2: cannot be read as JSON"),
        ("3", "line 2: must be an object, not a number"),
        ("null", "line 2: must be an object, not null"),
        ('["q"]', "line 2: must be an object, not a list"),
        ('{"answer": "x"}', "missing required field `question`"),
        ('{"question": "q"}', "missing required field `answer`"),
        (
            '{"question": "q", "answer": "x", "answr": 1}',
            "line 2: unknown key 'answr'; allowed are question, answer, id, kind",
        ),
        (
            '{"question": "  ", "answer": "x"}',
            "Expected `str` matching regex '\\\\S' - at `$.question`",
        ),
        ('{"question": ["q"], "answer": "x"}', "Expected `str`, got `array` - at `$.question`"),
        ('{"question": "q", "answer": ""}', "at `$.answer`"),
        ('{"question": "q", "answer": []}', "Expected `array` of length >= 1 - at `$.answer`"),
        (
            '{"question": "q", "answer": true}',
            "Expected `int | float | str | array`, got `bool` - at `$.answer`",
        ),
        ('{"question": "q", "answer": null}', "at `$.answer`"),
        ('{"question": "q", "answer": ["x", {}]}', "at `$.answer[1]`"),
        ('{"question": "q", "answer": "x", "id": ""}', "at `$.id`"),
        (
            '{"question": "q", "answer": "x", "id": 1.5}',
            "Expected `int | str`, got `float` - at `$.id`",
        ),
        (
            '{"question": "q", "answer": "x", "id": "first"}',
            "line 2: id 'first' was already used by",
        ),
        ('{"question": "q", "answer": "x", "kind": 4}', "at `$.kind`"),
        ('{"question": "q", "answer": "x", "scorer": ""}', "at `$.scorer`"),
        (
            '{"question": "q", "answer": "x", "num_turns": -1}',
            "Expected `int` >= 0 - at `$.num_turns`",
        ),
        ('{"question": "q", "answer": "x", "num_turns": true}', "at `$.num_turns`"),
        ('{"question": "q", "answer": "x", "num_turns": 1.0}', "at `$.num_turns`"),
    ],
    ids=range(24),
)
def test_malformed_lines_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, "set.jsonl", '{"question": "q", "answer": "x", "id": "first"}\n' + line)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_tasks(path)
    text = str(refused.value)
    assert (
        text.startswith(f"{path}, line 2") and "\n" not in text and len(text) < len(str(path)) + 300
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("set.jsonl", "", "holds no tasks"),
        ("set.jsonl", "\n \n", "holds no tasks"),
        ("set.json", "[]", "holds no tasks"),
        ("set.json", "", "cannot be read as JSON"),
        (
            "set.json",
            '{"question": "q"}\n{"question": "r"}\n',
            "JSON lines: rename it to end in .jsonl",
        ),
        ("set.json", '{"question": "q"}', "must hold a list of objects, not an object"),
        (
            "set.json",
            '[{"question": "q", "answer": "x"}, 3]',
            "entry 2: must be an object, not a number",
        ),
        ("set.tsv", "question\tanswer\n", "holds no tasks"),
        ("set.tsv", "question\tanswer\nq\n", "line 2: must have 2 columns"),
        ("set.tsv", "question\tanswer\nq\ta\tb\n", "line 2: must have 2 columns"),
        ("set.tsv", 'question\tanswer\n"q\ta\n', "cannot be read as TSV in UTF-8"),
        ("set.csv", "question,answer\na,b,c\n", "line 2: must have 2 columns"),
        ("set", "", "the file name must end in .jsonl, .json, .tsv, .csv, .parquet"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        load_tasks(path)
    assert str(path) in str(refused.value)


def test_a_given_id_may_not_equal_a_default_id(tmp_path: Path) -> None:
    lines = '{"question": "q", "answer": "x", "id": "set-2"}\n{"question": "r", "answer": "y"}'
    with pytest.raises(UserError, match=r"line 2: id 'set-2' was already used by .*line 1"):
        load_tasks(write(tmp_path, "set.jsonl", lines))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    told = r"absent\.json: cannot be read as UTF-8 text: No such file"
    with pytest.raises(UserError, match=told):
        load_tasks(tmp_path / "absent.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(UserError, match=r"folder\.json': holds no dataset"):
        load_tasks(tmp_path / "folder.json")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "\xff"}')
    with pytest.raises(UserError, match=r"bytes\.jsonl, line 1: is not UTF-8 text"):
        load_tasks(tmp_path / "bytes.jsonl")


def test_a_table_with_commas_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, "set.csv", 'question,answer\n"a, b?",007\n')
    assert [(task.question, task.answers) for task in load_tasks(path)] == [("a, b?", ("007",))]
