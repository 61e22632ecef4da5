"""Web_Search against fakes that answer in the shapes of the services' public documentation."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from make import Chat
from web_servers import Answer, Server, json_answer, serving, status

from flowtrain.config import Config
from flowtrain.inference.protocol import EngineError
from flowtrain.records import ToolResult, UserError
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools

# serper.dev, playground: web search
SERPER = {
    "searchParameters": {"q": "mali", "type": "search", "num": 10, "engine": "google"},
    "knowledgeGraph": {"title": "Mali", "type": "Country in West Africa"},
    "organic": [
        {
            "title": "Mali - Wikipedia",
            "link": "https://en.wikipedia.org/wiki/Mali",
            "snippet": "The capital of Mali\n is Bamako.",
            "position": 1,
        },
        {"title": "Bamako", "link": "https://en.wikipedia.org/wiki/Bamako", "position": 2},
    ],
    "credits": 1,
}
# docs.searxng.org/dev/search_api.html, searx/webutils.py: get_json_response
SEARXNG = {
    "query": "mali",
    "number_of_results": 0,
    "results": [
        {
            "url": "https://en.wikipedia.org/wiki/Mali",
            "title": "Mali - Wikipedia",
            "content": "The capital of Mali\n is Bamako.",
            "engine": "wikipedia",
            "engines": ["wikipedia", "brave"],
            "score": 4.0,
        },
        {
            "url": "https://en.wikipedia.org/wiki/Bamako",
            "title": "Bamako",
            "content": None,
            "engine": "brave",
        },
        {"url": "", "title": "an answer without a page", "content": "x"},
    ],
    "answers": [],
    "corrections": [],
    "infoboxes": [],
    "suggestions": ["mali empire"],
    "unresponsive_engines": [["google", "timeout"]],
}
SHAPES = {"serper": SERPER, "searxng": SEARXNG}
LISTED = """Mali - Wikipedia
https://en.wikipedia.org/wiki/Mali
The capital of Mali is Bamako.

Bamako
https://en.wikipedia.org/wiki/Bamako"""
PROVIDERS = pytest.mark.parametrize("provider", SHAPES)


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "key-of-serper")


def tool(
    provider: str,
    url: str,
    max_chars: int = 4000,
    timeout_s: float = 5.0,
    chat: Chat | None = None,
    **options: object,
) -> Tool:
    agent = {"tools": ["Web_Search"], "max_result_chars": max_chars, "tool_timeout_s": timeout_s}
    config = Config.model_validate(
        {"agent": agent, "web_search": {"provider": provider, "base_url": url, **options}}
    )
    return make_tools(config, chat=chat)["Web_Search"]


def search(
    server: Server, provider: str, query: str = "capital of Mali", **options: Any
) -> ToolResult:
    return asyncio.run(
        run_tool(tool(provider, server.url, **options), {"query": query}, 10.0, 4000)
    )


@PROVIDERS
def test_hits_are_listed_with_title_address_and_snippet(provider: str) -> None:
    with serving(json_answer(SHAPES[provider])) as server:
        assert search(server, provider).text == LISTED


def summarised(reply: str | Exception, **options: Any) -> tuple[str, Chat]:
    """The result for a query with a model in the tool, and the model."""
    chat = Chat(reply)
    with serving(json_answer(SHAPES["serper"])) as server:
        searcher = tool("serper", server.url, chat=chat, **options)
        result = asyncio.run(run_tool(searcher, {"query": "capital of Mali"}, 10.0, 4000))
    return result.text, chat


def test_a_model_answers_from_the_hits_and_its_sources_are_listed() -> None:
    text, chat = summarised(" It is Bamako [2], say [2] and [9]. ")
    assert text == (
        "It is Bamako [2], say [2] and [9].\n\nSources:\n\n"
        "[2] Bamako\nhttps://en.wikipedia.org/wiki/Bamako"
    )
    (prompt,) = chat.prompts
    assert "Query: capital of Mali" in prompt and "The capital of Mali is Bamako." in prompt


def test_without_marks_all_sources_are_listed_within_the_characters() -> None:
    text, _ = summarised("x" * 5000, max_chars=200)
    reply, _, sources = text.partition("\n\nSources:\n\n")
    assert (
        len(text) <= 200 and sources.startswith("[1] Mali - Wikipedia\n") and reply.endswith("x...")
    )


def test_the_hits_are_listed_where_the_model_fails() -> None:
    text, _ = summarised(EngineError("engines.helper: HTTP 500"))
    assert text == f"(no summary: engines.helper: HTTP 500)\n\n{LISTED}"


def test_what_each_service_is_asked() -> None:
    asked = {}
    for provider, shape in SHAPES.items():
        with serving(json_answer(shape)) as server:
            search(server, provider, "capital  of\nMali & Chad")
        asked[provider] = server.seen[0]
    serper, searxng = asked["serper"], asked["searxng"]
    expected = ("POST", "/search", "key-of-serper")
    assert (serper.command, serper.path, serper.headers["X-API-KEY"]) == expected
    assert json.loads(serper.body) == {"q": "capital of Mali & Chad", "num": 10}
    address = urlsplit(searxng.path)
    assert (searxng.command, address.path) == ("GET", "/search")
    assert parse_qs(address.query) == {"q": ["capital of Mali & Chad"], "format": ["json"]}


@PROVIDERS
def test_no_hits_is_an_error_that_says_what_to_do(provider: str) -> None:
    empty = {"serper": {"organic": []}, "searxng": {"results": [], "unresponsive_engines": []}}
    with serving(json_answer(empty[provider])) as server:
        found = search(server, provider).error
        assert found == "nothing was found for 'capital of Mali'; ask in other words"


def test_searxng_says_when_all_its_engines_are_silent() -> None:
    with serving(
        json_answer({"results": [], "unresponsive_engines": [["google", "timeout"]]})
    ) as server:
        found = search(server, "searxng").error
        assert found == "no engine behind SearXNG answered: [['google', 'timeout']]"


@PROVIDERS
@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (status(401, '{"message": "Unauthorized."}'), "refused with HTTP 401"),
        (status(429, "quota", Retry_After="99"), "HTTP 429: 'quota'; the deadline leaves no time"),
        (json_answer(None), "answered without a list"),
        (json_answer({"items": "x", "organic": {}, "results": 3}), "answered without a list"),
        (
            json_answer({"items": ["x"], "organic": ["x"], "results": ["x"]}),
            "answered without a list",
        ),
    ],
)
def test_a_service_that_fails_is_an_error_without_the_key(
    provider: str, answer: Answer, reason: str
) -> None:
    with serving(answer) as server:
        error = search(server, provider).error or ""
    assert reason in error and "key-of" not in error


@PROVIDERS
def test_hits_of_odd_kinds_are_read_as_far_as_they_go(provider: str) -> None:
    odd = {
        "title": 3,
        "link": "https://a.example/",
        "url": "https://a.example/",
        "snippet": ["x"],
        "content": "\ud800 x",
    }
    shape = {name: [odd, {}] for name in ("items", "organic", "results")}
    with serving(json_answer(shape)) as server:
        text = search(server, provider).text
    assert text.startswith("https://a.example/\nhttps://a.example/") and text.encode()


def test_a_result_fits_the_memory() -> None:
    hits = [
        {"title": f"Page {n}", "link": f"https://site.example/{n}", "snippet": "word " * 200}
        for n in range(10)
    ]
    with serving(json_answer({"organic": hits})) as server:
        text, whole = (search(server, "serper", max_chars=n).output for n in (780, 4000))
    assert len(text) <= 780 and text.count("https://") == 2 and "https://site.example/1" in text
    assert whole.count("https://") == 10 and all(len(line) <= 300 for line in whole.splitlines())


def test_the_number_of_hits_is_bounded() -> None:
    results = [
        {"title": str(n), "url": f"https://site.example/{n}", "content": ""} for n in range(25)
    ]
    with serving(json_answer({"results": results})) as server:
        assert search(server, "searxng").output.count("https://") == 10


def test_a_bad_query_is_not_asked() -> None:
    with serving(json_answer(SERPER)) as server:
        assert search(server, "serper", " \n").error == "empty query"
        assert "2000" in (search(server, "serper", "x" * 2001).error or "")
        assert server.seen == []


def test_a_missing_key_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(UserError) as caught:
        tool("serper", "")
    names = ("web_search.api_key_env='SERPER_API_KEY'", "Serper", "export SERPER_API_KEY=")
    assert all(name in str(caught.value) for name in names)


def test_another_variable_may_hold_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "mine")
    with serving(json_answer(SERPER)) as server:
        search(server, "serper", api_key_env="MY_KEY")
    assert server.seen[0].headers["X-API-KEY"] == "mine"


def test_addresses_are_named_and_checked_at_the_start() -> None:
    with pytest.raises(UserError, match=r"web_search\.base_url='' must begin with http.* SearXNG"):
        tool("searxng", "")
    told = r"web_search\.base_url='localhost:8080' must begin with http"
    with pytest.raises(UserError, match=told):
        tool("searxng", "localhost:8080")
