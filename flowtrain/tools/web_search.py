"""The tool that searches the web through a service, or a corpus offline."""

from __future__ import annotations

from flowtrain.tools.base import ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.retrieval.corpus import Corpus, open_corpus
from flowtrain.tools.retrieval.index import page_url
from flowtrain.tools.retrieval.text import check_query, cut, fit
from flowtrain.tools.web.providers import PROVIDERS, Hit, Provider

SNIPPET_CHARS = 300


class WebSearch:
    """Asks a provider and lists its hits."""

    card = ToolCard(
        "Web_Search",
        "Searches the web; returns the titles, addresses and a few words of the best pages.",
        limits="Shows snippets, not pages; weak on questions that no single page answers.",
        advice="Ask for one thing in the words that a page about it would use; read a promising "
        "address with Web_Reader.",
        examples=({"query": "capital of Mali"},),
        finds_passages=True,
    )

    def __init__(self, provider: Provider, deadline_s: float, max_chars: int) -> None:
        """Bound each query, all attempts included, to `deadline_s` and results to `max_chars`."""
        self._provider = provider
        self._deadline_s = deadline_s
        self._max_chars = max_chars

    async def execute(self, query: str) -> str:
        """Return title, URL and snippet of each hit, best first; raises ToolError without hits."""
        hits = await self._provider(check_query(query), self._deadline_s)
        if not hits:
            raise ToolError(f"nothing was found for {query[:80]!r}; ask in other words")
        texts = [
            f"{hit.title or hit.url}\n{hit.url}\n{cut(hit.snippet, SNIPPET_CHARS)}".rstrip()
            for hit in hits
        ]
        return fit(texts, self._max_chars)

    def close(self) -> None:
        """Release nothing: connections end with their event loop."""


def make(context: ToolContext) -> WebSearch:
    options = context.config.web_search
    agent = context.config.agent
    if options.provider == "corpus":
        provider = from_corpus(
            open_corpus(context.config, "web_search.provider"), options.num_results
        )
    else:
        provider = PROVIDERS[options.provider](options)
    return WebSearch(provider, agent.tool_timeout_s, agent.max_result_chars)


def from_corpus(corpus: Corpus, num_results: int) -> Provider:
    """Make the offline provider: a hit is a page of the corpus with its best passage."""

    async def search(query: str, deadline_s: float) -> list[Hit]:
        passages = await corpus.search(query, 3 * num_results, deadline_s)
        pages: dict[str, Hit] = {}
        for passage in passages:
            pages.setdefault(page_url(passage.url), Hit(passage.title, passage.url, passage.text))
        return list(pages.values())[:num_results]

    return search
