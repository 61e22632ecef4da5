"""Web_Reader from the address to the answer, over servers that pass for the public internet."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import pytest
from embedding_server import embeddings
from make import Chat
from web_servers import (
    PUBLIC,
    Answer,
    Internet,
    Server,
    cancel_once_seen,
    drip,
    html,
    redirect,
    serving,
    tasks_left,
)

from flowtrain.config import Config
from flowtrain.inference.protocol import EngineError
from flowtrain.records import ToolResult, UserError
from flowtrain.tools import run_tool, web_reader
from flowtrain.tools.registry import make_tools
from flowtrain.tools.retrieval.dense import embedder
from flowtrain.tools.web.addresses import Resolver, Rules
from flowtrain.tools.web.cache import Cache
from flowtrain.tools.web.extract import Extractor
from flowtrain.tools.web.fetch import Fetcher
from flowtrain.tools.web_reader import MAX_BYTES, HttpPages, WebReader

URL = "http://site.example/river"
FILLER = (
    "The banks are green and people live there from fishing and from trade with their neighbours "
    "upstream."
)


class Unclosed(Extractor):
    """One for all readers of this file."""

    def close(self) -> None: ...


EXTRACTOR = Unclosed(timeout_s=20.0)


def article(*facts: str) -> str:
    """A page in which each fact stands about 270 words from the next."""
    paragraphs = "".join(
        f"<p>{fact}</p>" + "".join(f"<p>{fact[-3:]}{n} {FILLER}</p>" for n in range(15))
        for fact in facts
    )
    return (
        "<html><body><nav><a "
        f"href='/'>Home</a></nav><article><h1>River</h1>{paragraphs}</article></body></html>"
    )


PAGE = article(
    "Its source is in the Guinea Highlands.",
    "Its length is 4180 kilometres.",
    "Timbuktu lies near its great bend.",
)


@contextmanager
def reading(
    *answers: Answer,
    chat: Chat | None = None,
    max_chars: int = 4000,
    deadline_s: float = 20.0,
    config: Config | None = None,
) -> Iterator[tuple[WebReader, Server]]:
    config = config or Config()
    with serving(*answers) as server:
        internet = Internet(
            {"site.example": [[PUBLIC]], "inside.example": [["10.0.0.7"]]},
            {PUBLIC: server, "10.0.0.7": server},
        )
        fetcher = Fetcher(Rules(), internet.resolve, MAX_BYTES, internet)
        vectors = embedder(config, "web_reader.embedder", config.web_reader.embedder)
        pages = HttpPages(fetcher, EXTRACTOR, Resolver(), Cache(64))
        reader = WebReader(pages, vectors, chat, deadline_s, max_chars)
        try:
            yield reader, server
        finally:
            reader.close()
            reader.close()


def read(
    reader: WebReader, query: str = "What is the length of the river?", url: str = URL
) -> ToolResult:
    return asyncio.run(run_tool(reader, {"url": url, "query": query}, 30.0, 10_000))


@pytest.fixture(scope="module", autouse=True)
def end_of_the_extractor() -> Iterator[None]:
    yield
    Extractor.close(EXTRACTOR)


def test_the_chunk_that_fits_best_comes_first() -> None:
    with reading(html(PAGE)) as (reader, _):
        first = {
            query: read(reader, query).text
            for query in ("length in kilometres", "source highlands", "timbuktu")
        }
    assert "4180" in first["length in kilometres"].split("\n\n")[0]
    assert "Guinea Highlands" in first["source highlands"].split("\n\n")[0]
    assert "Timbuktu" in first["timbuktu"].split("\n\n")[0]
    assert all(text.startswith(f"{URL}\n") and "Home" not in text for text in first.values())


def test_chunks_have_so_many_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_reader, "CHUNK_WORDS", 30)
    monkeypatch.setattr(web_reader, "NUM_CHUNKS", 4)
    with reading(html(PAGE)) as (reader, _):
        chunks = read(reader, "length").text.partition("\n")[2].split("\n\n")
        beginning = read(reader, "zebra").text.partition("\n")[2].split("\n\n")
    assert all("length" in chunk for chunk in chunks), "only what shares a word with the query"
    assert any("4180" in chunk for chunk in chunks)
    assert all(len(chunk.split()) == 30 for chunk in chunks)
    assert len(beginning) == 4 and beginning[0].startswith("River Its source"), "none has the word"
    assert beginning[0].split()[-3:] == beginning[1].split()[:3]


def test_a_model_answers_from_the_chunks() -> None:
    chat = Chat("  It is 4180 kilometres long.\n")
    with reading(html(PAGE), chat=chat) as (reader, _):
        assert read(reader).text == f"{URL}\nIt is 4180 kilometres long."
    (prompt,) = chat.prompts
    assert "Query: What is the length of the river?" in prompt
    assert "[1] " in prompt
    assert "4180 kilometres" in prompt
    assert 0 < chat.asked[0][2] < 20.0, "what is left of the time"


def test_where_the_model_fails_the_chunks_speak() -> None:
    with reading(html(PAGE), chat=Chat(EngineError("engines.helper: HTTP 500"))) as (reader, _):
        text = read(reader).text
    assert text.startswith(f"{URL} (no summary: engines.helper: HTTP 500)\n") and "4180" in text


def test_embeddings_rank_where_an_engine_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBED_KEY", "key-of-embeddings")
    with serving(embeddings()) as engine:
        table = {"model": "toy", "base_url": f"{engine.url}/v1", "api_key_env": "EMBED_KEY"}
        config = Config.model_validate(
            {"engines": {"vectors": table}, "web_reader": {"embedder": "vectors"}}
        )
        with reading(html(PAGE), config=config) as (reader, _):
            text = read(reader, "timbuktu bend").text
    assert "Timbuktu" in text.split("\n\n")[0]
    assert engine.seen[0].headers["Authorization"] == "Bearer key-of-embeddings"


@pytest.mark.parametrize(
    ("answers", "url", "reason"),
    [
        (
            [redirect("http://inside.example/")],
            URL,
            "inside.example is at 10.0.0.7, which is not on the public internet",
        ),
        ([html("x")], "http://inside.example/", "inside.example is at 10.0.0.7"),
        (
            [html("%PDF-1.7", Content_Type="application/pdf")],
            URL,
            "sent application/pdf; only text/html",
        ),
        ([html("x" * 5_000_001)], URL, "longer than 5000000 bytes"),
        ([html("<html></html>")], URL, "no text that can be read"),
    ],
)
def test_what_cannot_be_read_is_an_error(answers: list[Answer], url: str, reason: str) -> None:
    with reading(*answers) as (reader, _):
        assert reason in (read(reader, url=url).error or "")


@pytest.mark.parametrize("text", ["Its length is 4180 kilometres.", ". . . - - -"])
def test_plain_text_is_read_too(text: str) -> None:
    with reading(html(text, Content_Type="text/plain")) as (reader, _):
        assert read(reader).text == f"{URL}\n{text}"


def test_a_result_fits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_reader, "CHUNK_WORDS", 40)
    for chat in (None, Chat("word " * 1000)):
        with reading(html(PAGE), chat=chat, max_chars=700) as (reader, _):
            assert 500 < len(read(reader, "banks people length").output) <= 700


def test_an_empty_query_reads_nothing() -> None:
    with reading(html(PAGE)) as (reader, server):
        assert read(reader, " ").error == "empty query"
        assert server.seen == []


def test_the_card_names_both_arguments() -> None:
    with reading(html(PAGE)) as (reader, _):
        found = asyncio.run(run_tool(reader, {"url": URL}, 1.0, 100)).error
        assert found == "Web_Reader takes (url: str, query: str); got (url: str)"


@pytest.mark.clock
def test_a_page_of_a_million_words_does_not_block_the_loop() -> None:
    """The longest pause of the loop stays far below the work itself."""
    pauses: list[float] = []

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0)
            pauses.append(time.perf_counter() - start)

    async def main(reader: WebReader) -> str:
        watcher = asyncio.create_task(watch())
        result = await reader._best("needle", "hay " * 100_000 + "needle", 30.0)
        watcher.cancel()
        return result[0]

    with reading(html(PAGE)) as (reader, _):
        assert asyncio.run(main(reader)).endswith("needle")
    assert len(pauses) > 5 and max(pauses) < 1.0


def test_cancelled_read_leaks_no_task_connection_or_thread() -> None:
    async def main(reader: WebReader, server: Server) -> None:
        asking = run_tool(reader, {"url": URL, "query": "q"}, 60.0, 100)
        await cancel_once_seen(asking, server)
        await asyncio.sleep(0)
        while await tasks_left():
            await asyncio.sleep(0.001)

    before = set(threading.enumerate())
    with reading(drip) as (reader, server):
        asyncio.run(main(reader, server))
        while not server.hung_up:
            server.released.wait(0.01)
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("reader", "resolve")):
            thread.join()


def test_reader_refuses_localhost_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(url: str, ports: tuple[int, ...], **options: Any) -> str:
        monkeypatch.setattr("flowtrain.tools.web_reader.Rules", partial(Rules, ports))
        agent = {"tools": ["Web_Reader"], "tool_timeout_s": 20.0}
        config = Config.model_validate({"agent": agent, "web_reader": options})
        with closing(make_tools(config)["Web_Reader"]) as reader:
            return read(reader, "length", url).text

    private = "which is not on the public internet, and is not read"
    with serving(html("Its length is 4180 kilometres.", Content_Type="text/plain")) as server:
        own, url = (server.server_port,), f"{server.url}/"
        assert shown(url, own) == f"Error: 127.0.0.1, {private}"
        other = f"'{url}': port {own[0]} is not read, only 80, 443"
        assert shown(url, (80, 443), allow_private=True) == f"Error: {other}"
        expected = f"{url}\nIts length is 4180 kilometres."
        assert shown(url, own, allow_private=True) == expected
        local = shown(url.replace("127.0.0.1", "localhost"), own)
        assert local == f"Error: localhost is at 127.0.0.1, {private}" or "::1" in local
        assert len(server.seen) == 1


def test_an_embedder_must_be_an_engine() -> None:
    reader = {"agent": {"tools": ["Web_Reader"]}, "web_reader": {"embedder": "vectors"}}
    config = Config.model_validate({**reader, "engines": {"judge": {"model": "x"}}})
    told = r"web_reader\.embedder='vectors' is not in \[engines\], which defines: judge"
    with pytest.raises(UserError, match=told):
        make_tools(config)
