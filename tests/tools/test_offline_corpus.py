"""The three search tools over a corpus on disk: the same interface, an index that is built once,
and files that are wrong.
"""

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
from make import Chat
from web_servers import Answer, html, json_answer, serving, status

from flowtrain.config import Config
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.retrieval import index as index_module
from flowtrain.tools.retrieval.corpus import open_corpus
from flowtrain.tools.retrieval.index import ensure_index
from flowtrain.tools.retrieval.passages import Passage, read_passages
from flowtrain.types import UserError

TOOLS = ("Web_Search", "Wikipedia_Search", "Web_Reader")
ROWS: list[dict[str, Any]] = [
    {
        "text": "Mali is a country in West Africa.",
        "title": "Mali",
        "url": "https://wiki.example/Mali",
    },
    {
        "text": "The capital of Mali is Bamako.",
        "title": "Mali",
        "url": "https://wiki.example/Mali#capital",
    },
    {
        "text": "Bamako lies on the river Niger.",
        "title": "Bamako",
        "url": "https://wiki.example/Bamako",
    },
    {"text": "The capital of Chad is N'Djamena.", "title": "Chad"},
    {"text": "Room 7 holds 12 chairs\u2028and a table.", "title": None, "url": None},
    {
        "text": "The capital of Niger is Niamey.",
        "title": "Niger",
        "url": "https://wiki.example/Niger",
    },
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


def config(path: str, **options: Any) -> Config:
    offline = {name: {"provider": "corpus"} for name in ("web_search", "wikipedia", "web_reader")}
    tools = options.pop("tools", TOOLS)
    agent = {"tools": tools, "max_result_chars": 2000, "tool_timeout_s": 10.0}
    return Config.model_validate({**offline, "agent": agent, "corpus": {"path": path, **options}})


def made(path: str, chat: Chat | None = None, **options: Any) -> dict[str, Tool]:
    settings = config(path, **options)
    return make_tools(settings, chat=chat)


def ask(tool: Tool, **arguments: str) -> str:
    return asyncio.run(run_tool(tool, arguments, 10.0, 2000)).text


def answers(tools: Mapping[str, Tool]) -> list[str]:
    """Return the tools' results for a few questions, positions in the file included."""
    queries = ("capital of Mali", "river Niger", "chairs", "CAPITAL", "zebra")
    found = [ask(tools[name], query=query) for name in TOOLS[:2] for query in queries]
    urls = (
        "https://wiki.example/Mali",
        "https://wiki.example/Mali#capital",
        "corpus:3",
        "corpus:4",
        "https://wiki.example/Oslo",
    )
    return found + [ask(tools["Web_Reader"], url=url, query="capital") for url in urls]


# ---- the same interface


def test_web_search_lists_the_pages_of_the_corpus(corpus: Callable[..., str]) -> None:
    text = ask(made(corpus())["Web_Search"], query="capital of Mali")
    first, second, *_ = text.split("\n\n")
    assert first == "Mali\nhttps://wiki.example/Mali#capital\nThe capital of Mali is Bamako."
    assert second in (
        "Chad\ncorpus:3\nThe capital of Chad is N'Djamena.",
        "Niger\nhttps://wiki.example/Niger\nThe capital of Niger is Niamey.",
    )
    assert text.count("wiki.example/Mali") == 1, "a page is listed once"


def test_search_reads_whole_passages_for_questions_from_a_file(corpus: Callable[..., str]) -> None:
    """As many as agent.num_passages, those of one page too, a line each, with their titles."""

    def search(top_k: int) -> Tool:
        settings = Config.model_validate(
            {
                "agent": {"tools": ["Search"], "num_passages": top_k, "max_result_chars": 80},
                "tasks": {"name": "file", "path": "questions.jsonl"},
                "corpus": {"path": corpus()},
            }
        )
        return make_tools(settings)["Search"]

    assert ask(search(1), query="capital of Mali") == "Mali: The capital of Mali is Bamako."
    lines = ask(search(5), query="Mali country").splitlines()
    expected = ["Mali: Mali is a country in West Africa.", "Mali: The capital of Mali is Bamako."]
    assert lines == expected
    assert ask(search(5), query="chairs table") == "Room 7 holds 12 chairs and a table."
    assert len(ask(search(5), query="capital of Niger Mali")) <= 80
    assert ask(search(5), query="zebra") == "Error: no passage matches 'zebra'"
    assert search(1).card.finds_passages


def test_wikipedia_search_shows_pages_and_titles(corpus: Callable[..., str]) -> None:
    rows = [
        *ROWS,
        {
            "text": "The capital of Togo is Lome.",
            "title": "Togo",
            "url": "https://wiki.example/Togo",
        },
    ]
    text = ask(made(corpus(rows))["Wikipedia_Search"], query="capital of Mali")
    assert (
        text.startswith(
            "Mali\nhttps://wiki.example/Mali#capital\nThe capital of Mali is Bamako.\n\n"
        )
        and "\n\nOther pages: " in text
    )
    chosen = ask(made(corpus(rows), Chat("4"))["Wikipedia_Search"], query="capital of Mali")
    assert chosen.startswith(text.rpartition("Other pages: ")[2].split("; ")[0] + "\n")
    assert "; " in chosen.rpartition("Other pages: ")[2]


def test_web_reader_reads_all_passages_of_a_page(corpus: Callable[..., str]) -> None:
    reader = made(corpus())["Web_Reader"]
    whole = "Mali Mali is a country in West Africa. The capital of Mali is Bamako."
    for url in (
        "https://wiki.example/Mali",
        "https://wiki.example/Mali#capital",
        "https://wiki.example/Mali#",
    ):
        assert ask(reader, url=url, query="capital") == f"{url}\n{whole}"
    found = ask(reader, url="corpus:3", query="capital")
    assert found == "corpus:3\nChad The capital of Chad is N'Djamena."
    for url in (
        *("https://wiki.example/Oslo", "corpus:6", "corpus:-1", "corpus:", "corpus:" + "9" * 30),
        *("", "\ud800"),
    ):
        assert "is in the corpus; take one from a search result" in ask(
            reader, url=url, query="capital"
        )


def test_what_a_search_lists_can_be_read(corpus: Callable[..., str]) -> None:
    tools = made(corpus())
    for entry in ask(tools["Web_Search"], query="capital river chairs west").split("\n\n"):
        assert ask(tools["Web_Reader"], url=entry.split("\n")[1], query="capital").startswith(
            entry.split("\n")[1] + "\n"
        )


def test_nothing_found_is_an_error(corpus: Callable[..., str]) -> None:
    tools = made(corpus())
    found = ask(tools["Web_Search"], query="zebra")
    assert found == "Error: nothing was found for 'zebra'; ask in other words"
    found = ask(tools["Wikipedia_Search"], query="zebra")
    assert found == "Error: no page was found for 'zebra'; ask in other words"


def test_parquet_and_jsonl_are_equal(corpus: Callable[..., str]) -> None:
    Path(listed := corpus(name="e.json")).write_text(json.dumps(ROWS))
    assert (
        answers(made(corpus(name="a.parquet")))
        == answers(made(corpus(name="b.jsonl")))
        == answers(made(listed))
    )
    both = [
        list(read_passages(config(corpus(name=name)).corpus)) for name in ("c.parquet", "d.jsonl")
    ]
    assert (
        both[0]
        == both[1]
        == [Passage(row["text"], row.get("title") or "", row.get("url") or "") for row in ROWS]
    )


def test_other_names_of_the_columns(corpus: Callable[..., str]) -> None:
    rows = [{"contents": "The capital of Mali is Bamako.", "heading": "Mali", "id": 3}]
    for name in ("x.jsonl", "x.parquet"):
        tools = made(corpus(rows, name), text_key="contents", title_key="heading")
        found = ask(tools["Web_Search"], query="Bamako")
        assert found == "Mali\ncorpus:0\nThe capital of Mali is Bamako."


# ---- the index


def test_the_index_is_built_once_and_shared(
    corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = corpus()
    tools = made(path)
    before = answers(tools)
    assert "passages of" in capfd.readouterr().err, "a person sees that it goes on"
    settings = config(path)
    assert open_corpus(settings, "x") is open_corpus(settings, "y"), "in memory once"
    del tools
    gc.collect()
    monkeypatch.setattr(index_module, "read_passages", None)  # whoever reads the file again, fails
    assert answers(made(path)) == before
    assert capfd.readouterr().err == ""


def test_another_file_or_column_has_another_index(corpus: Callable[..., str]) -> None:
    path = corpus()
    assert "river Niger" in ask(made(path)["Web_Search"], query="Bamako")
    corpus([{"text": "Ouagadougou is a city.", "other": "Kigali is a city."}])
    assert "nothing was found" in ask(made(path)["Web_Search"], query="Bamako")
    assert "Ouagadougou" in ask(made(path)["Web_Search"], query="city")
    assert "Kigali" in ask(made(path, text_key="other")["Web_Search"], query="city")
    expected = ["corpus.jsonl", "corpus.jsonl.index", "corpus.jsonl.index.lock"]
    assert sorted(child.name for child in Path(path).parent.iterdir()) == expected


def test_a_file_of_the_same_size_is_another_file(corpus: Callable[..., str]) -> None:
    path = corpus([{"text": "Bamako"}])
    made(path)
    corpus([{"text": "Niamey"}])
    os.utime(path, ns=(0, 0))
    assert ask(made(path)["Web_Search"], query="Niamey") == "corpus:0\ncorpus:0\nNiamey"


def test_the_index_lies_where_the_config_says(corpus: Callable[..., str], tmp_path: Path) -> None:
    assert "river Niger" in ask(
        made(corpus(), index=str(tmp_path / "deep" / "index"))["Web_Search"], query="Bamako"
    )
    assert (tmp_path / "deep" / "index" / "stamp.json").exists() and not (
        tmp_path / "corpus.jsonl.index"
    ).exists()


def test_failed_build_keeps_old_index(corpus: Callable[..., str]) -> None:
    path = corpus()
    made(path)
    Path(path).write_text('{"text": "x"}\n{"text": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        made(path)
    expected = ["corpus.jsonl", "corpus.jsonl.index", "corpus.jsonl.index.lock"]
    assert sorted(child.name for child in Path(path).parent.iterdir()) == expected


def _open(path: str) -> str:
    return ask(made(path)["Web_Search"], query="Bamako")


def test_processes_that_start_together_build_one_index(corpus: Callable[..., str]) -> None:
    path = corpus(
        [{"text": f"Bamako {n}", "url": f"https://wiki.example/{n}"} for n in range(2000)]
    )
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_open, [path] * 3)
    assert found[0].startswith("https://wiki.example/") and found[0] == found[1] == found[2]


def test_who_has_waited_for_the_lock_finds_the_index_there(
    corpus: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options, built = config(corpus()).corpus, []
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
    told = r"corpus\.index='.*mine' exists and is no index of ours; name another folder"
    with pytest.raises(UserError, match=told):
        made(corpus(), index=str(tmp_path / "mine"))
    assert (tmp_path / "mine" / "thesis.txt").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_named(
    corpus: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(UserError, match=r"corpus\.index=.*cannot be written: Permission denied"):
        made(corpus(), index=str(tmp_path / "locked" / "index"))


def test_a_file_where_the_folder_should_be_is_named(
    corpus: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match=r"corpus\.index="):
        made(corpus(), index=str(tmp_path / "file" / "index"))


# ---- a retriever elsewhere


def documents(*found: object) -> Answer:
    return json_answer({"result": [list(found)]})


FOUND = [
    {"document": {"id": "7", "contents": '"Mali"\nThe capital of Mali is Bamako.'}, "score": 0.9},
    {"document": {"id": 8, "contents": "Bamako lies on the Niger."}, "score": 0.8},
    {"id": "9", "contents": "no score", "title": "Niger", "url": "https://wiki.example/Niger"},
]


def test_a_retriever_finds_what_the_tools_show() -> None:
    with serving(documents(*FOUND)) as server:
        for address in (server.url, f"{server.url}/retrieve"):
            tools = made("", tools=TOOLS[:2], retriever=address)
            assert ask(tools["Web_Search"], query="capital of Mali") == (
                "Mali\ncorpus:7\nThe capital of Mali is Bamako.\n\n"
                "corpus:8\ncorpus:8\nBamako lies on the Niger.\n\n"
                "Niger\nhttps://wiki.example/Niger\nno score"
            )
        assert "Mali\ncorpus:7\n" in ask(tools["Wikipedia_Search"], query="x")
        asked = [json.loads(request.body) for request in server.seen if request.body]
        assert {request.path for request in server.seen} == {"/retrieve"}
    assert {"queries": ["capital of Mali"], "topk": 30, "return_scores": True} in asked


def test_search_asks_the_retriever_for_as_many_as_it_shows() -> None:
    with serving(documents(*FOUND)) as server:
        settings = Config.model_validate(
            {
                "agent": {"tools": ["Search"], "num_passages": 2, "max_result_chars": 400},
                "tasks": {"name": "file", "path": "questions.jsonl"},
                "corpus": {"retriever": server.url},
            }
        )
        text = ask(make_tools(settings)["Search"], query="capital of Mali")
        assert json.loads(server.seen[-1].body)["topk"] == 2
    assert text == "Mali: The capital of Mali is Bamako.\nBamako lies on the Niger."


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(404, "no such path"), r"127\.0\.0\.1 refused with HTTP 404"),
        (html("<html>"), "not JSON"),
        (json_answer({"data": []}), "the retriever answered in another form"),
        (json_answer({"result": []}), "the retriever answered in another form"),
        (documents({"document": {"body": "x"}}), "the retriever answered in another form"),
        (documents({"document": {"contents": 5}}), "the retriever answered in another form"),
        (documents("x"), "the retriever answered in another form"),
    ],
)
def test_what_is_no_retriever_ends_the_run_at_its_start(answer: Answer, reason: str) -> None:
    with (
        serving(answer) as server,
        pytest.raises(UserError, match=rf"^corpus\.retriever='{server.url}': .*{reason}"),
    ):
        made("", tools=TOOLS[:1], retriever=server.url)


def test_a_retriever_reads_no_pages_and_has_an_address() -> None:
    with (
        serving(documents(*FOUND)) as server,
        pytest.raises(UserError, match=r"corpus\.path='' must name .* web_reader\.provider"),
    ):
        made("", retriever=server.url)
    with pytest.raises(UserError, match=r"corpus\.retriever='localhost:8000' must be the address"):
        made("", tools=TOOLS[:1], retriever="localhost:8000")


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
            r"line 1 \(corpus\.text_key='text', .*missing required field `text`",
        ),
        ("x.jsonl", b'{"text": "a"}\n{"body": "a"}\n', r"line 2 .*missing required field `text`"),
        ("x.jsonl", b'{"text": null}\n', r"line 1 .*missing required field `text`"),
        ("x.jsonl", b'{"text": 3}\n', r"line 1 .*Expected `str`, got `int` - at `\$\.text`"),
        (
            "x.jsonl",
            b'{"text": "a", "title": ["b"]}\n',
            r"line 1 .*corpus\.title_key='title'.*Expected `str`, got `array` - at `\$\.title`",
        ),
        (
            "x.jsonl",
            b'{"text": "a", "url": 3}\n',
            r"line 1 .*Expected `str`, got `int` - at `\$\.url`",
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
    with pytest.raises(UserError, match=reason):
        made(str(tmp_path / name))


def test_a_parquet_file_that_is_wrong_is_named_with_its_columns(corpus: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"x\.parquet, row 1 .*missing required field `text`"):
        made(corpus([{"body": "a", "id": 1}], "x.parquet"))
    with pytest.raises(UserError, match=r"x\.parquet, row 2 .*missing required field `text`"):
        made(corpus([{"text": "a"}, {"text": None}], "x.parquet"))
    told = r"x\.parquet, row 1 .*Expected `str`, got `int` - at `\$\.title`"
    with pytest.raises(UserError, match=told):
        made(corpus([{"text": "a", "title": 3}], "x.parquet"))


def test_a_missing_path_is_named_with_who_needs_it(tmp_path: Path) -> None:
    with pytest.raises(
        UserError,
        match=r"corpus\.path='' must name the file of passages that web_search\.provider='corpus' "
        r"searches",
    ):
        made("")
    told = r"corpus\.path='.*no\.jsonl' cannot be read: No such file or directory"
    with pytest.raises(UserError, match=told):
        made(str(tmp_path / "no.jsonl"))


def test_an_unknown_provider_is_named_with_what_it_may_be() -> None:
    for section in ("web_search", "wikipedia", "web_reader"):
        with pytest.raises(ValueError, match=r"Input should be .*'corpus'"):
            Config.model_validate({section: {"provider": "bing"}})
