"""Search engines behind one interface: serper.dev, which asks Google, and SearXNG."""

from __future__ import annotations

from typing import Any

from flowtrain.config.search import WebSearch
from flowtrain.records import UserError
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.passages import Passage, Source
from flowtrain.tools.web.api import Api, Request, key_from_env

_NUM_RESULTS = 10
HITS = {
    "serper": ("organic", ("snippet", "title", "link")),
    # docs.searxng.org/dev/search_api.html; with `json` among `search.formats` of its settings
    "searxng": ("results", ("content", "title", "url")),
}
"""The key of the list of hits in an answer, and the names of a hit's text, title and URL."""


def online(options: WebSearch) -> Source:
    """Return the source that asks the service of `web_search.provider`."""
    is_serper = options.provider == "serper"
    base_url = options.base_url or ("https://google.serper.dev" if is_serper else "")
    if not base_url.startswith(("http://", "https://")):
        raise UserError(
            f"web_search.base_url={base_url!r} must begin with http:// or https://, such as "
            "http://localhost:8080 of an instance of SearXNG"
        )
    url = base_url.rstrip("/") + "/search"
    key = key_from_env(options.api_key_env, "web_search.api_key_env", "Serper") if is_serper else ""
    api = Api()

    def request(query: str) -> Request:
        if is_serper:
            body = {"q": query, "num": _NUM_RESULTS}
            return Request(url, headers={"X-API-KEY": key}, body=body)
        return Request(url, {"q": query, "format": "json"})

    async def search(query: str, deadline_s: float) -> list[Passage]:
        answer = await api.ask(request(query), deadline_s)
        results = hits(answer, *HITS[options.provider])[:_NUM_RESULTS]
        if not results and (silent := answer.get("unresponsive_engines")):
            raise ToolError(f"no engine behind SearXNG answered: {str(silent)[:200]}")
        return results

    return search


def hits(answer: Any, key: str, names: tuple[str, str, str]) -> list[Passage]:
    """Read the hits with a URL from an answer; raises ToolError for another shape."""
    items = answer.get(key) if isinstance(answer, dict) else None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ToolError(f"the search service answered without a list {key!r}: {str(answer)[:200]}")
    passages = [Passage(*(_line(item.get(name)) for name in names)) for item in items]
    return [hit for hit in passages if hit.url]


def _line(value: object) -> str:
    """Return a text on one line, "" for other values."""
    return " ".join(value.split()) if isinstance(value, str) else ""
