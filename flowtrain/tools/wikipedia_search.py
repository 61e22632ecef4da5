"""The tool that searches a wiki through MediaWiki's API, or a corpus offline."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flowtrain import __version__
from flowtrain.config.search import Wikipedia
from flowtrain.engines.chat import ChatEngine
from flowtrain.engines.protocol import EngineError
from flowtrain.tools.base import ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.retrieval.corpus import Corpus, open_corpus
from flowtrain.tools.retrieval.text import check_query, cut, fit
from flowtrain.tools.web.api import Api, Request
from flowtrain.types import UserError

MAX_RELEVANT = 3
"""Pages that are returned with their text (AgentFlow: 3)."""
ABSTRACT_CHARS = 150
"""Characters of a page that the choosing model reads (AgentFlow: 100)."""
PASSAGE_CHARS = 1500
MAX_WIKI_QUERY = 300
"""Characters that MediaWiki's search takes."""


@dataclass(frozen=True, slots=True)
class WikiPage:
    """A page that a search found."""

    title: str
    url: str
    passage: str
    """The beginning of the page; of a corpus, the passage that fits best."""


Pages = Callable[[str, float], Awaitable[Sequence[WikiPage]]]
"""A function of query and seconds that returns pages, best first."""


class WikipediaSearch:
    """Finds pages; a model, where there is one, chooses the relevant ones, else the first are."""

    card = ToolCard(
        "Wikipedia_Search",
        "Searches Wikipedia; returns how the relevant pages begin, with their addresses, and the "
        "titles of other pages.",
        limits="Shows the beginning of a page; details further down are not in it.",
        advice="Ask for a person, a place, a thing or an event by name; read an address with "
        "Web_Reader for details.",
        examples=({"query": "Niger River"},),
        finds_passages=True,
    )

    def __init__(
        self, pages: Pages, chat: ChatEngine | None, deadline_s: float, max_chars: int
    ) -> None:
        """Bound each query, the model included, to `deadline_s` and results to `max_chars`."""
        self._pages = pages
        self._chat = chat
        self._deadline_s = deadline_s
        self._max_chars = max_chars

    async def execute(self, query: str) -> str:
        """Return the relevant pages with URL and passage, then the titles of the others.

        Raises ToolError when there is no page or the wiki fails.
        """
        end = time.monotonic() + self._deadline_s
        query = check_query(query)
        pages = await self._pages(query, self._deadline_s)
        if not pages:
            raise ToolError(f"no page was found for {query[:80]!r}; ask in other words")
        chosen = await self._choose(query, pages, end - time.monotonic())
        others = [page.title for index, page in enumerate(pages) if index not in chosen]
        footer = cut(f"Other pages: {'; '.join(others)}", self._max_chars // 4) if others else ""
        texts = [
            f"{page.title}\n{page.url}\n{cut(page.passage, PASSAGE_CHARS)}".rstrip()
            for page in map(pages.__getitem__, chosen)
        ]
        return "\n\n".join(filter(None, (fit(texts, self._max_chars - len(footer) - 2), footer)))

    def close(self) -> None:
        """Release nothing: connections end with their event loop."""

    async def _choose(self, query: str, pages: Sequence[WikiPage], deadline_s: float) -> list[int]:
        """Return the indices of the relevant pages: the model's choice, else the first."""
        named: list[int] = []
        if self._chat is not None and len(pages) > MAX_RELEVANT:
            with contextlib.suppress(EngineError):
                reply = await self._chat.ask(_choice_prompt(query, pages), deadline_s=deadline_s)
                named = parse_choice(reply, len(pages))
        return named or list(range(min(MAX_RELEVANT, len(pages))))


def parse_choice(reply: str, num_pages: int) -> list[int]:
    """Return the indices in the last line of a reply that names pages; the reply counts from 1."""
    for line in reversed(reply[-4000:].splitlines()):
        numbers = [int(digits) - 1 for digits in re.findall(r"\d{1,3}", line)]
        if named := list(dict.fromkeys(n for n in numbers if 0 <= n < num_pages)):
            return named[:MAX_RELEVANT]
    return []


def _choice_prompt(query: str, pages: Sequence[WikiPage]) -> str:
    listed = "\n".join(
        f"{number}. {page.title}: {cut(page.passage, ABSTRACT_CHARS)}"
        for number, page in enumerate(pages, start=1)
    )
    return f"""Which of these Wikipedia pages are most likely to answer the query? Choose at most \
{MAX_RELEVANT}.

Query: {query}

{listed}

Answer with nothing but the numbers of the pages, the best first, separated by commas."""


def make(context: ToolContext) -> WikipediaSearch:
    options = context.config.wikipedia
    agent = context.config.agent
    if options.provider == "corpus":
        pages = from_corpus(open_corpus(context.config, "wikipedia.provider"), options.num_pages)
    else:
        pages = from_mediawiki(options)
    return WikipediaSearch(pages, context.chat, agent.tool_timeout_s, agent.max_result_chars)


def from_mediawiki(options: Wikipedia) -> Pages:
    """Make the online source, which gets search hits and first sections in one request.

    www.mediawiki.org/wiki/API:Search and Extension:TextExtracts.
    """
    url = options.base_url or f"https://{options.language}.wikipedia.org/w/api.php"
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
        "gsrlimit": options.num_pages,
        "prop": "extracts|info",
        "exintro": 1,
        "explaintext": 1,
        "exlimit": 20,
        "inprop": "url",
    }

    async def search(query: str, deadline_s: float) -> list[WikiPage]:
        return _wiki_pages(
            await api.ask(Request(url, {**params, "gsrsearch": query[:MAX_WIKI_QUERY]}), deadline_s)
        )

    return search


def _wiki_pages(answer: Any) -> list[WikiPage]:
    """Read an answer, which has no "query" without hits; raises ToolError for any other shape."""
    match answer:
        case {"error": {"info": str(info)}}:
            raise ToolError(f"the wiki refused: {info[:200]}")
        case {"query": {"pages": list(pages)}}:
            found = [p for p in pages if isinstance(p, dict) and isinstance(p.get("title"), str)]
        case {"batchcomplete": _}:
            return []
        case _:
            raise ToolError(f"the wiki answered in another form: {str(answer)[:200]}")
    found.sort(key=lambda page: rank if isinstance(rank := page.get("index"), int) else math.inf)
    return [
        WikiPage(_text(page["title"]), _text(page.get("fullurl")), _text(page.get("extract")))
        for page in found
    ]


def _text(value: object) -> str:
    """Strip a text; "" for other values. Halves of surrogate pairs, which JSON allows, go."""
    return value.encode(errors="replace").decode().strip() if isinstance(value, str) else ""


def from_corpus(corpus: Corpus, num_pages: int) -> Pages:
    """Make the offline source: passages with the same title are one page."""

    async def search(query: str, deadline_s: float) -> list[WikiPage]:
        pages: dict[str, WikiPage] = {}
        for passage in await corpus.search(query, 3 * num_pages, deadline_s):
            title = passage.title or cut(passage.text, 60)
            pages.setdefault(title, WikiPage(title, passage.url, passage.text))
        return list(pages.values())[:num_pages]

    return search
