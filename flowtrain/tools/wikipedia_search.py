"""The tool that searches a wiki through MediaWiki's API."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain import __version__
from flowtrain.config.search import Wikipedia
from flowtrain.inference.chat import ChatEngine
from flowtrain.inference.protocol import EngineError
from flowtrain.records import UserError
from flowtrain.tools.base import Tool, ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.retrieval.passages import Passage, Source
from flowtrain.tools.retrieval.text import check_query, cut, fit
from flowtrain.tools.web.api import Api, Request
from flowtrain.tools.web.cache import cached
from flowtrain.utils.text import encodable

MAX_RELEVANT = 3
"""Pages that are returned with their text (AgentFlow: 3)."""
ABSTRACT_CHARS = 150
"""Characters of a page that the choosing model reads (AgentFlow: 100)."""
PASSAGE_CHARS = 1500
_NUM_PAGES = 10
MAX_WIKI_QUERY = 300
"""Characters that MediaWiki's search takes."""


@dataclass(frozen=True, slots=True)
class WikipediaSearch(Tool):
    """Finds pages; a model, where there is one, chooses the relevant ones, else the first are."""

    source: Source
    """Finds the beginnings of pages."""
    chat: ChatEngine | None
    deadline_s: float
    """Seconds for a query, the model included."""
    max_chars: int
    """Characters of a result."""

    card = ToolCard(
        "Wikipedia_Search",
        "Searches Wikipedia; returns how the relevant pages begin, with their addresses, and the "
        "titles of other pages.",
        limits="Shows the beginning of a page; details further down are not in it.",
        advice="Ask for a person, a place, a thing or an event by name; read an address with "
        "Web_Reader for details.",
        examples=({"query": "Niger River"},),
        finds_passages=True,
        aliases=("Wikipedia_RAG_Search_Tool",),
    )

    async def execute(self, query: str) -> str:
        """Return the relevant pages with URL and passage, then the titles of the others.

        Raises ToolError when there is no page or the wiki fails.
        """
        end = time.monotonic() + self.deadline_s
        query = check_query(query)
        pages = await self.source(query, self.deadline_s)
        if not pages:
            raise ToolError(f"no page was found for {query[:80]!r}; ask in other words")
        relevant = await self._choose(query, pages, end - time.monotonic())
        titles = [_title(page) for index, page in enumerate(pages) if index not in relevant]
        footer = cut(f"Other pages: {'; '.join(titles)}", self.max_chars // 4) if titles else ""
        texts = [
            f"{_title(page)}\n{page.url}\n{cut(page.text, PASSAGE_CHARS)}".rstrip()
            for page in map(pages.__getitem__, relevant)
        ]
        return "\n\n".join(filter(None, (fit(texts, self.max_chars - len(footer) - 2), footer)))

    async def _choose(self, query: str, pages: Sequence[Passage], deadline_s: float) -> list[int]:
        """Return the indices of the relevant pages: the model's choice, else the first."""
        choice: list[int] = []
        if self.chat is not None and len(pages) > MAX_RELEVANT:
            with contextlib.suppress(EngineError):
                reply = await self.chat.ask(_choice_prompt(query, pages), deadline_s=deadline_s)
                choice = parse_choice(reply, len(pages))
        return choice or list(range(min(MAX_RELEVANT, len(pages))))


_DENIAL = re.compile(r"\b(?:none|neither|not?)\b", re.IGNORECASE)


def parse_choice(reply: str, num_pages: int) -> list[int]:
    """Return the indices in the last line of a reply that names pages; the reply counts from 1.

    A line that denies, as "None of the 10 pages answers it", names none.
    """
    for line in reversed(reply[-4000:].splitlines()):
        if _DENIAL.search(line):
            continue
        numbers = [int(digits) - 1 for digits in re.findall(r"\d{1,3}", line)]
        if indices := list(dict.fromkeys(n for n in numbers if 0 <= n < num_pages)):
            return indices[:MAX_RELEVANT]
    return []


def _title(page: Passage) -> str:
    """Return the name of a page."""
    return page.title or cut(page.text, 60)


def _choice_prompt(query: str, pages: Sequence[Passage]) -> str:
    page_list = "\n".join(
        f"{number}. {_title(page)}: {cut(page.text, ABSTRACT_CHARS)}"
        for number, page in enumerate(pages, start=1)
    )
    return f"""Which of these Wikipedia pages are most likely to answer the query? Choose at most \
{MAX_RELEVANT}.

Query: {query}

{page_list}

Answer with nothing but the numbers of the pages, the best first, separated by commas."""


def make(context: ToolContext) -> WikipediaSearch:
    options = context.config.wikipedia
    agent = context.config.agent
    source = cached(from_mediawiki(options))
    return WikipediaSearch(source, context.chat, agent.tool_timeout_s, agent.max_result_chars)


def from_mediawiki(options: Wikipedia) -> Source:
    """Make the online source, which gets search hits and first sections in one request.

    www.mediawiki.org/wiki/API:Search and Extension:TextExtracts.
    """
    url = options.base_url or "https://en.wikipedia.org/w/api.php"
    if not url.startswith(("http://", "https://")):
        raise UserError(
            f"wikipedia.base_url={options.base_url!r} must be the address of an api.php, such as "
            "https://de.wikipedia.org/w/api.php"
        )
    # Required by foundation.wikimedia.org/wiki/Policy:Wikimedia_Foundation_User-Agent_Policy.
    api = Api(user_agent=f"flowtrain/{__version__} ({options.contact or 'no contact given'})")
    params: dict[str, str | int] = {
        "action": "query",
        "format": "json",
        "formatversion": 2,
        "generator": "search",
        "gsrlimit": _NUM_PAGES,
        "prop": "extracts|info",
        "exintro": 1,
        "explaintext": 1,
        "exlimit": 20,
        "inprop": "url",
    }

    async def search(query: str, deadline_s: float) -> list[Passage]:
        return _wiki_pages(
            await api.ask(Request(url, {**params, "gsrsearch": query[:MAX_WIKI_QUERY]}), deadline_s)
        )

    return search


def _wiki_pages(answer: Any) -> list[Passage]:
    """Read an answer, which has no "query" without hits; raises ToolError for any other shape."""
    match answer:
        case {"error": {"info": str(info)}}:
            raise ToolError(f"the wiki refused: {info[:200]}")
        case {"query": {"pages": list(pages)}}:
            hits = [p for p in pages if isinstance(p, dict) and isinstance(p.get("title"), str)]
        case {"batchcomplete": _}:
            return []
        case _:
            raise ToolError(f"the wiki answered in another form: {str(answer)[:200]}")
    hits.sort(key=lambda page: rank if isinstance(rank := page.get("index"), int) else math.inf)
    return [
        Passage(_text(page.get("extract")), _text(page["title"]), _text(page.get("fullurl")))
        for page in hits
    ]


def _text(value: object) -> str:
    """Strip a text; "" for other values. Halves of surrogate pairs, which JSON allows, go."""
    return encodable(value).strip() if isinstance(value, str) else ""
