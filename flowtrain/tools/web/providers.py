"""Search engines behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flowtrain.config.search import WebSearch
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.passages import Passage, Source
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.types import UserError


@dataclass(frozen=True, slots=True)
class _Service:
    """A search service: its address and the form of its answers."""

    url: str
    """Its address, where it has only one."""
    path: str
    key_env: str
    """The usual environment variable of the key; "": it needs none."""
    hits: str
    """The key of the list of hits in an answer."""
    names: tuple[str, str, str]
    """Its names for the text, the title and the URL of a hit."""


_SERVICES = {
    # developers.google.com/custom-search/v1/reference/rest/v1/cse/list
    "google": _Service(
        "https://customsearch.googleapis.com",
        "/customsearch/v1",
        "GOOGLE_API_KEY",
        hits="items",
        names=("snippet", "title", "link"),
    ),
    "serper": _Service(
        "https://google.serper.dev",
        "/search",
        "SERPER_API_KEY",
        hits="organic",
        names=("snippet", "title", "link"),
    ),
    # docs.searxng.org/dev/search_api.html; with `json` among `search.formats` of its settings
    "searxng": _Service("", "/search", "", hits="results", names=("content", "title", "url")),
}


def online(options: WebSearch) -> Source:
    """Return the source that asks the service of `web_search.provider`."""
    service = _SERVICES[options.provider]
    base_url = options.base_url or service.url
    if not base_url.startswith(("http://", "https://")):
        raise UserError(
            f"web_search.base_url={base_url!r} must begin with http:// or https://, such as "
            "http://localhost:8080 of an instance of SearXNG"
        )
    url = base_url.rstrip("/") + service.path
    key = cx = ""
    if service.key_env:
        variable = options.api_key_env or service.key_env
        key = key_from_env(variable, "web_search.api_key_env", options.provider.title())
    if options.provider == "google":
        cx = key_from_env(options.cx_env, "web_search.cx_env", "Google")
    api = Api()

    def request(query: str) -> Request:
        match options.provider:
            case "google":
                asked: dict[str, str | int] = {"q": query, "cx": cx, "num": options.num_results}
                return Request(url, asked, {"X-Goog-Api-Key": key})
            case "serper":
                body = {"q": query, "num": options.num_results}
                return Request(url, headers={"X-API-KEY": key}, body=body)
        return Request(url, {"q": query, "format": "json"})

    async def search(query: str, deadline_s: float) -> list[Passage]:
        answer = await api.ask(request(query), deadline_s)
        hits = _hits(answer, service)[: options.num_results]
        if not hits and (silent := answer.get("unresponsive_engines")):
            raise ToolError(f"no engine behind SearXNG answered: {str(silent)[:200]}")
        return hits

    return search


def _hits(answer: Any, service: _Service) -> list[Passage]:
    """Read the hits with a URL from an answer; raises ToolError for another shape."""
    # A search of Google's without results has no "items" at all.
    items = answer.get(service.hits, []) if isinstance(answer, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ToolError(
            f"the search service answered without a list {service.hits!r}: {str(answer)[:200]}"
        )
    hits = [Passage(*(_line(item.get(name)) for name in service.names)) for item in items]
    return [hit for hit in hits if hit.url]


def _line(value: object) -> str:
    """Return a text on one line, "" for other values."""
    return " ".join(value.split()) if isinstance(value, str) else ""
