"""Search engines behind one interface."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain.config.search import WebSearch
from flowtrain.tools.base import ToolError
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class Hit:
    """One search result."""

    title: str
    url: str
    snippet: str


Provider = Callable[[str, float], Awaitable[Sequence[Hit]]]
"""A function of query and seconds that returns hits, best first, or raises ToolError."""


def google(options: WebSearch) -> Provider:
    """Google's Programmable Search.

    developers.google.com/custom-search/v1/reference/rest/v1/cse/list
    """
    key = key_from_env(options.api_key_env or "GOOGLE_API_KEY", "web_search.api_key_env", "Google")
    cx = key_from_env(options.cx_env, "web_search.cx_env", "Google")
    url = _address(options.base_url or "https://customsearch.googleapis.com") + "/customsearch/v1"
    api = Api()

    async def search(query: str, deadline_s: float) -> list[Hit]:
        request = Request(
            url, {"q": query, "cx": cx, "num": options.num_results}, {"X-Goog-Api-Key": key}
        )
        # A search without results has no "items" at all.
        return _hits(await api.ask(request, deadline_s), "items", ("title", "link", "snippet"))

    return search


def serper(options: WebSearch) -> Provider:
    """serper.dev, which reads Google's pages."""
    key = key_from_env(options.api_key_env or "SERPER_API_KEY", "web_search.api_key_env", "Serper")
    url = _address(options.base_url or "https://google.serper.dev") + "/search"
    api = Api()

    async def search(query: str, deadline_s: float) -> list[Hit]:
        request = Request(
            url, headers={"X-API-KEY": key}, body={"q": query, "num": options.num_results}
        )
        return _hits(await api.ask(request, deadline_s), "organic", ("title", "link", "snippet"))

    return search


def searxng(options: WebSearch) -> Provider:
    """An instance of SearXNG with `json` among `search.formats` of its settings.

    docs.searxng.org/dev/search_api.html
    """
    if not options.base_url:
        raise UserError(
            "web_search.base_url='' must be the address of a SearXNG instance, such as "
            "http://localhost:8080"
        )
    url = _address(options.base_url) + "/search"
    api = Api()

    async def search(query: str, deadline_s: float) -> list[Hit]:
        answer = await api.ask(Request(url, {"q": query, "format": "json"}), deadline_s)
        hits = _hits(answer, "results", ("title", "url", "content"))[: options.num_results]
        if not hits and (silent := answer.get("unresponsive_engines")):
            raise ToolError(f"no engine behind SearXNG answered: {str(silent)[:200]}")
        return hits

    return search


PROVIDERS: dict[str, Callable[[WebSearch], Provider]] = {
    "google": google,
    "serper": serper,
    "searxng": searxng,
}


def _address(base_url: str) -> str:
    if not base_url.startswith(("http://", "https://")):
        raise UserError(f"web_search.base_url={base_url!r} must begin with http:// or https://")
    return base_url.rstrip("/")


def _hits(answer: Any, key: str, names: tuple[str, str, str]) -> list[Hit]:
    """Read the hits with a URL from an answer; raises ToolError for another shape.

    `names` are the service's names for title, URL and snippet.
    """
    items = answer.get(key, []) if isinstance(answer, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ToolError(f"the search service answered without a list {key!r}: {str(answer)[:200]}")
    hits = [Hit(*(_line(item.get(name)) for name in names)) for item in items]
    return [hit for hit in hits if hit.url]


def _line(value: object) -> str:
    """Return a text on one line, "" for other values; halves of surrogate pairs are replaced."""
    if not isinstance(value, str):
        return ""
    return " ".join(value.encode(errors="replace").decode().split())
