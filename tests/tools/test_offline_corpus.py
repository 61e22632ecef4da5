"""Search over a corpus on disk: an index built once, a retriever elsewhere, wrong files."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from web_servers import Answer, html, json_answer, serving, status

from flowtrain.config import Config
from flowtrain.config.search import Corpus
from flowtrain.records import UserError
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.retrieval import index as index_module
from flowtrain.tools.retrieval.corpus import open_corpus
from flowtrain.tools.retrieval.index import ensure_index

ROWS: list[dict[str, Any]] = [
    {"text": "Mali is a country in West Africa.", "title": "Mali"},
    {"text": "The capital of Mali is Bamako.", "title": "Mali"},
    {"text": "Bamako lies on the river Niger.", "title": "Bamako"},
    {"text": "Room 7 holds 12 chairs\u2028and a table.", "title": None},
    {"text": "The capital of Niger is Niamey.", "title": "Niger", "url": "https://wiki.example"},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a file of either kind and gives its path."""

    def write(rows: Sequence[Mapping[str, Any]] = ROWS, name: str = "corpus.jsonl") -> str:
        path = tmp_path / name
        if path.suffix == ".parquet":
            columns = list(dict.fromkeys(key for row in rows for key in row))
            pyarrow.parquet.write_table(
                pyarrow.table({key: [row.get(key) for row in rows] for key in columns}), path
            )
        else:
            path.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
            )
        return str(path)

    return write


def made(path: str, top_k: int = 2, max_chars: int = 2000, **options: Any) -> Tool:
    agent = {"tools": ["Search"], "num_passages": top_k, "max_result_chars": max_chars}
    tasks = {"name": "file", "path": "questions.jsonl"}
    values = {"agent": agent, "tasks": tasks, "corpus": {"path": path, **options}}
    return make_tools(Config.model_validate(values))["Search"]


def refused(reason: str, path: str, **options: Any) -> None:
    with pytest.raises(UserError, match=reason):
        made(path, **options)


def ask(tool: Tool, query: str) -> str:
    return asyncio.run(run_tool(tool, {"query": query}, 10.0, 2000)).text


def answers(tool: Tool) -> list[str]:
    queries = ("capital of Mali", "river Niger", "chairs", "CAPITAL", "zebra")
    return [ask(tool, query) for query in queries]


def test_search_reads_whole_passages(corpus: Callable[..., str]) -> None:
    """As many as agent.num_passages, a line each, with their titles."""
    path = corpus()
    assert ask(made(path, 1), "capital of Mali") == "Mali: The capital of Mali is Bamako."
    lines = ask(made(path, 5), "Mali country").splitlines()
    expected = ["Mali: Mali is a country in West Africa.", "Mali: The capital of Mali is Bamako."]
    assert lines == expected
    assert ask(made(path, 5), "chairs table") == "Room 7 holds 12 chairs and a table."
    assert len(ask(made(path, 5, 80), "capital of Niger Mali")) <= 80
    assert ask(made(path), "zebra") == "Error: no passage matches 'zebra'"
    assert made(path).card.finds_passages


def test_parquet_and_jsonl_are_equal(corpus: Callable[..., str]) -> None:
    Path(listed := corpus(name="e.json")).write_text(json.dumps(ROWS))
    one, *others = (
        answers(made(path)) for path in (corpus(name="a.parquet"), corpus(name="b.jsonl"), listed)
    )
    assert others == [one, one]


def test_other_names_of_the_columns(corpus: Callable[..., str]) -> None:
    rows = [{"contents": "The capital of Mali is Bamako.", "title": "Mali", "id": 3}]
    for name in ("x.jsonl", "x.parquet"):
        tool = made(corpus(rows, name), text_key="contents")
        assert ask(tool, "Bamako") == "Mali: The capital of Mali is Bamako."


# ---- the index


def test_the_index_is_built_once_and_shared(
    corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = corpus()
    tool = made(path)
    before = answers(tool)
    assert "passages of" in capfd.readouterr().err, "a person sees that it goes on"
    assert open_corpus(Corpus(path=path)) is open_corpus(Corpus(path=path)), "in memory once"
    del tool
    gc.collect()
    monkeypatch.setattr(index_module, "read_passages", None)  # whoever reads the file again, fails
    assert answers(made(path)) == before
    assert capfd.readouterr().err == ""


def test_another_file_or_column_has_another_index(corpus: Callable[..., str]) -> None:
    path = corpus()
    assert "river Niger" in ask(made(path), "Bamako")
    corpus([{"text": "Ouagadougou is a city.", "other": "Kigali is a city."}])
    assert "no passage matches" in ask(made(path), "Bamako")
    assert "Ouagadougou" in ask(made(path), "city")
    assert "Kigali" in ask(made(path, text_key="other"), "city")
    expected = ["corpus.jsonl", "corpus.jsonl.index", "corpus.jsonl.index.lock"]
    assert sorted(child.name for child in Path(path).parent.iterdir()) == expected


def test_a_file_of_the_same_size_is_another_file(corpus: Callable[..., str]) -> None:
    path = corpus([{"text": "Bamako"}])
    made(path)
    corpus([{"text": "Niamey"}])
    os.utime(path, ns=(0, 0))
    assert ask(made(path), "Niamey") == "Niamey"


def test_the_index_lies_where_the_config_says(corpus: Callable[..., str], tmp_path: Path) -> None:
    index = str(tmp_path / "deep" / "index")
    assert "river Niger" in ask(made(corpus(), index=index), "Bamako")
    assert (tmp_path / "deep" / "index" / "stamp.json").exists()
    assert not (tmp_path / "corpus.jsonl.index").exists()


def test_failed_build_keeps_old_index(corpus: Callable[..., str]) -> None:
    path = corpus()
    made(path)
    Path(path).write_text('{"text": "x"}\n{"text": 3}\n')
    refused("line 2", path)
    expected = ["corpus.jsonl", "corpus.jsonl.index", "corpus.jsonl.index.lock"]
    assert sorted(child.name for child in Path(path).parent.iterdir()) == expected


def _open(path: str) -> str:
    return ask(made(path), "Bamako")


def test_processes_that_start_together_build_one_index(corpus: Callable[..., str]) -> None:
    path = corpus([{"text": f"Bamako {n}"} for n in range(2000)])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_open, [path] * 3)
    assert found[0].startswith("Bamako ") and found[0] == found[1] == found[2]


def test_who_has_waited_for_the_lock_finds_the_index_there(
    corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, built = Corpus(path=corpus()), []
    build = index_module._build
    monkeypatch.setattr(index_module, "_build", lambda *args: (built.append(args), build(*args)))

    def another_was_faster(*_: object) -> None:
        monkeypatch.setattr(index_module.fcntl, "flock", lambda *_: None)
        ensure_index(options)

    monkeypatch.setattr(index_module.fcntl, "flock", another_was_faster)
    ensure_index(options)
    assert len(built) == 1


def test_a_foreign_folder_is_not_replaced(corpus: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    told = r"corpus\.index='.*mine' exists and is not a flowtrain index; choose another folder"
    refused(told, corpus(), index=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").exists()


def test_a_folder_that_cannot_be_made_is_named(corpus: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    refused(r"corpus\.index=", corpus(), index=str(tmp_path / "file" / "index"))
    if os.geteuid():  # root may write anywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        told = r"corpus\.index=.*cannot be written: Permission denied"
        refused(told, corpus(), index=str(tmp_path / "locked" / "index"))


# ---- a retriever elsewhere


def documents(*found: object) -> Answer:
    return json_answer({"result": [list(found)]})


FOUND = [
    {"document": {"id": "7", "contents": '"Mali"\nThe capital of Mali is Bamako.'}, "score": 0.9},
    {"document": {"id": 8, "contents": "Bamako lies on the Niger."}, "score": 0.8},
    {"id": "9", "contents": "no score", "title": "Niger", "url": "https://wiki.example/Niger"},
]


def test_search_asks_the_retriever_for_as_many_as_it_shows() -> None:
    with serving(documents(*FOUND)) as server:
        for address in (server.url, f"{server.url}/retrieve"):
            text = ask(made("", retriever=address), "capital of Mali")
            assert text == "Mali: The capital of Mali is Bamako.\nBamako lies on the Niger."
        asked = json.loads(server.seen[-1].body)
        assert {request.path for request in server.seen} == {"/retrieve"}
    assert asked == {"queries": ["capital of Mali"], "topk": 2, "return_scores": True}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(404, "no such path"), r"127\.0\.0\.1 refused with HTTP 404"),
        (html("<html>"), "not JSON"),
        *(
            (answer, "the retriever answered in another form")
            for answer in (
                json_answer({"data": []}),
                json_answer({"result": []}),
                documents({"document": {"body": "x"}}),
                documents({"document": {"contents": 5}}),
                documents("x"),
            )
        ),
    ],
)
def test_what_is_no_retriever_ends_the_run_at_its_start(answer: Answer, reason: str) -> None:
    with serving(answer) as server:
        told = rf"^corpus\.retriever='{server.url}': .*{reason}"
        refused(told, "", retriever=server.url)


def test_a_retriever_has_an_address() -> None:
    told = r"corpus\.retriever='localhost:8000' must be the address"
    refused(told, "", retriever="localhost:8000")


# ---- files that are wrong


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        (
            "x.txt",
            b"text\n",
            r"x\.txt: the file name must end in \.jsonl, \.json, \.tsv, \.csv, \.parquet",
        ),
        ("x.jsonl", b"", "the file holds no passages"),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', r"x\.jsonl, line 2: cannot be read as JSON"),
        ("x.jsonl", b'{"text": "a"}\n[1]\n', r"x\.jsonl, line 2: must be an object, not a list"),
        (
            "x.jsonl",
            b'{"body": "a", "id": 1}\n',
            r"line 1 \(corpus\.text_key='text'.*missing required field `text`",
        ),
        ("x.jsonl", b'{"text": "a"}\n{"body": "a"}\n', r"line 2 .*missing required field `text`"),
        ("x.jsonl", b'{"text": null}\n', r"line 1 .*missing required field `text`"),
        ("x.jsonl", b'{"text": 3}\n', r"line 1 .*Expected `str`, got `int` - at `\$\.text`"),
        (
            "x.jsonl",
            b'{"text": "a", "title": ["b"]}\n',
            r"line 1 .*Expected `str`, got `array` - at `\$\.title`",
        ),
        ("x.jsonl", b'{"text": "\\ud800"}\n', r"line 1: cannot be read as JSON"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"line 2: is not UTF-8 text"),
        ("x.jsonl", b'{"text": "?! ..."}\n', r"corpus\.text_key='text': no text has a word"),
        ("x.parquet", b"PAR1 it is not", "cannot be read as Parquet"),
        ("x.parquet", b"", "cannot be read as Parquet"),
    ],
)
def test_a_file_that_is_wrong_is_named_with_its_line(
    name: str, content: bytes, reason: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    refused(reason, str(tmp_path / name))


def test_a_parquet_file_that_is_wrong_is_named_with_its_columns(corpus: Callable[..., str]) -> None:
    for rows, reason in (
        ([{"body": "a", "id": 1}], "row 1 .*missing required field `text`"),
        ([{"text": "a"}, {"text": None}], "row 2 .*missing required field `text`"),
        ([{"text": "a", "title": 3}], r"row 1 .*Expected `str`, got `int` - at `\$\.title`"),
    ):
        refused(rf"x\.parquet, {reason}", corpus(rows, "x.parquet"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    told = r"corpus\.path='.*no\.jsonl' cannot be read: No such file or directory"
    refused(told, str(tmp_path / "no.jsonl"))
