"""Wikipedia_Search against a fake of MediaWiki's API, in the shape of its documentation."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from make import Chat
from web_servers import Answer, Server, html, json_answer, serving, status

from flowtrain.config import Config
from flowtrain.inference.protocol import EngineError
from flowtrain.records import ToolResult, UserError
from flowtrain.tools import Tool, run_tool
from flowtrain.tools.registry import make_tools
from flowtrain.tools.wikipedia_search import parse_choice


def wiki_page(index: int, title: str, extract: str | None) -> dict[str, Any]:
    """www.mediawiki.org/wiki/API:Query, generator=search, prop=extracts|info with inprop=url and
    formatversion=2.
    """
    shape = {
        "pageid": 1000 + index,
        "ns": 0,
        "title": title,
        "index": index,
        "contentmodel": "wikitext",
        "pagelanguage": "en",
    }
    url = f"https://en.wikipedia.org/wiki/{title.replace(' ', '_')}"
    return {
        **shape,
        "fullurl": url,
        "editurl": f"{url}?action=edit",
        **({"extract": extract} if extract is not None else {}),
    }


TITLES = ["Mali", "Bamako", "Mali Empire", "Niger River", "Chad"]
# The pages of an answer are ordered by their id; `index` is the rank.
PAGES = [
    wiki_page(rank, title, f"{title} is a topic. " * 3)
    for rank, title in reversed(list(enumerate(TITLES, start=1)))
]
FOUND = {
    "batchcomplete": True,
    "continue": {"gsroffset": 10, "continue": "gsroffset||"},
    "query": {"pages": PAGES},
}


def tool(
    url: str,
    chat: Chat | None = None,
    max_chars: int = 4000,
    timeout_s: float = 5.0,
    **options: object,
) -> Tool:
    agent = {
        "tools": ["Wikipedia_Search"],
        "max_result_chars": max_chars,
        "tool_timeout_s": timeout_s,
    }
    config = Config.model_validate({"agent": agent, "wikipedia": {"base_url": url, **options}})
    return make_tools(config, chat=chat)["Wikipedia_Search"]


def search(
    server: Server, chat: Chat | None = None, query: str = "capital of Mali", **options: Any
) -> ToolResult:
    return asyncio.run(
        run_tool(tool(f"{server.url}/w/api.php", chat, **options), {"query": query}, 10.0, 4000)
    )


def entry(title: str) -> str:
    return (
        f"{title}\nhttps://en.wikipedia.org/wiki/{title.replace(' ', '_')}\n{title} is a topic. "
        f"{title} is a topic. {title} is a topic."
    )


def test_first_pages_have_text_and_others_title_only() -> None:
    with serving(json_answer(FOUND)) as server:
        text = search(server).text
    assert text == "\n\n".join([*map(entry, TITLES[:3]), "Other pages: Niger River; Chad"])


def test_what_the_wiki_is_asked() -> None:
    with serving(json_answer(FOUND)) as server:
        search(server, query="capital  of\nMali" + " x" * 200, contact="me@example.org")
    request = server.seen[0]
    asked = {key: value for key, (value,) in parse_qs(urlsplit(request.path).query).items()}
    assert request.command == "GET" and request.path.startswith("/w/api.php?")
    assert asked.pop("gsrsearch") == ("capital of Mali" + " x" * 200)[:300]
    assert asked == {
        "action": "query",
        "format": "json",
        "formatversion": "2",
        "generator": "search",
        "gsrlimit": "10",
        "prop": "extracts|info",
        "exintro": "1",
        "explaintext": "1",
        "exlimit": "20",
        "inprop": "url",
    }
    assert request.headers["User-Agent"].startswith("flowtrain/")
    assert request.headers["User-Agent"].endswith("(me@example.org)")


def test_a_model_chooses_the_pages() -> None:
    chat = Chat("I looked at 5 pages.\n4, 1")
    with serving(json_answer(FOUND)) as server:
        text = search(server, chat).text
    assert text == "\n\n".join(
        [entry("Niger River"), entry("Mali"), "Other pages: Bamako; Mali Empire; Chad"]
    )
    (prompt,) = chat.prompts
    assert "Query: capital of Mali" in prompt
    assert "\n4. Niger River: Niger River is a topic." in prompt
    assert 0 < chat.asked[0][2] < 5.0, "what is left of the time"


@pytest.mark.parametrize("reply", ["none of them", "", "0, 6, 99", EngineError("down")])
def test_where_the_model_chooses_none_the_search_does(reply: str | Exception) -> None:
    with serving(json_answer(FOUND)) as server:
        assert search(server, Chat(reply)).text.startswith(entry("Mali") + "\n\n" + entry("Bamako"))


def test_there_is_nothing_to_choose_among_three() -> None:
    chat = Chat("3")
    with serving(json_answer({"batchcomplete": True, "query": {"pages": PAGES[:3]}})) as server:
        assert "Other pages" not in search(server, chat).text
    assert chat.prompts == []


@pytest.mark.parametrize(
    ("reply", "places"),
    [
        ("2", [1]),
        ("3, 1, 3, 2, 4", [2, 0, 1]),
        ("Pages: [4] and [2].\n", [3, 1]),
        ("Of 12 pages\n2\nthat is all", [1]),
        ("1234567 9", []),
        ("-1", [0]),
        ("no", []),
        ("None of the 4 pages answers it", []),
        ("2\n1 and 3 are not about it", [1]),
    ],
)
def test_a_choice_is_read_from_the_last_line_that_makes_one(reply: str, places: list[int]) -> None:
    assert parse_choice(reply, 5) == places


@given(st.text(), st.integers(1, 20))
def test_any_reply_is_a_choice_of_places(reply: str, num_pages: int) -> None:
    places = parse_choice(reply, num_pages)
    assert len(places) <= 3
    assert len(set(places)) == len(places)
    assert all(0 <= place < num_pages for place in places)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            json_answer({"batchcomplete": True}),
            "no page was found for 'capital of Mali'; ask in other words",
        ),
        (
            json_answer({"error": {"code": "maxlag", "info": "Waiting for a database"}}),
            "the wiki refused: Waiting for a database",
        ),
        (json_answer({"error": "x"}), "the wiki answered in another form: {'error': 'x'}"),
        (json_answer([]), "the wiki answered in another form"),
        (json_answer({"query": {"pages": {"12": {}}}}), "the wiki answered in another form"),
        (json_answer({"query": {"pages": [3, {"title": 4}]}}), "no page was found"),
        (status(429, "too many", Retry_After="60"), "HTTP 429: 'too many'; the deadline leaves"),
        (status(403, "User-Agent"), "refused with HTTP 403: 'User-Agent'"),
        (html("<html>"), "not JSON"),
    ],
)
def test_a_wiki_that_fails_is_an_error(answer: Answer, reason: str) -> None:
    with serving(answer) as server:
        assert reason in (search(server).error or "")


def test_pages_without_text_or_rank_come_last_and_bare() -> None:
    pages = [
        {"title": "Odd", "extract": None, "index": "x"},
        wiki_page(1, "Mali", None),
        {"title": "\ud800", "fullurl": 3},
    ]
    with serving(json_answer({"query": {"pages": pages}})) as server:
        text = search(server).text
    assert text == "Mali\nhttps://en.wikipedia.org/wiki/Mali\n\nOdd\n\n?"


def test_a_result_fits_the_memory() -> None:
    pages = [wiki_page(n, f"Title {n}", "word " * 2000) for n in range(1, 20)]
    with serving(json_answer({"query": {"pages": pages}})) as server:
        small, large = (search(server, max_chars=n).output for n in (400, 4000))
    assert len(small) <= 400 and "Title 1\n" in small and "\n\nOther pages: Title 4; " in small
    assert len(large) <= 4000 and all(f"Title {n}\n" in large for n in (1, 2)) and len(large) > 3000


def test_an_address_of_no_wiki_is_refused() -> None:
    told = r"wikipedia\.base_url='de\.wikipedia\.org' must be the address of an api\.php"
    with pytest.raises(UserError, match=told):
        tool("de.wikipedia.org")
