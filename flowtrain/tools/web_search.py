"""The tool that searches the web through a service, or a corpus offline."""

from __future__ import annotations

from dataclasses import dataclass

from flowtrain.tools.base import Tool, ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.retrieval.corpus import open_corpus
from flowtrain.tools.retrieval.index import page_url
from flowtrain.tools.retrieval.passages import Source
from flowtrain.tools.retrieval.text import check_query, cut, fit
from flowtrain.tools.web.providers import online

SNIPPET_CHARS = 300


@dataclass(frozen=True, slots=True)
class WebSearch(Tool):
    """Asks a source and lists its hits."""

    source: Source
    deadline_s: float
    """Seconds for a query, all attempts included."""
    max_chars: int
    """Characters of a result."""

    card = ToolCard(
        "Web_Search",
        "Searches the web; returns the titles, addresses and a few words of the best pages.",
        limits="Shows snippets, not pages; weak on questions that no single page answers.",
        advice="Ask for one thing in the words that a page about it would use; read a promising "
        "address with Web_Reader.",
        examples=({"query": "capital of Mali"},),
        finds_passages=True,
        aliases=("Ground_Google_Search_Tool",),
    )

    async def execute(self, query: str) -> str:
        """Return title, URL and snippet of each hit, best first; raises ToolError without hits."""
        hits = await self.source(check_query(query), self.deadline_s)
        if not hits:
            raise ToolError(f"nothing was found for {query[:80]!r}; ask in other words")
        texts = [
            f"{hit.title or hit.url}\n{hit.url}\n{cut(hit.text, SNIPPET_CHARS)}".rstrip()
            for hit in hits
        ]
        return fit(texts, self.max_chars)


def make(context: ToolContext) -> WebSearch:
    options = context.config.web_search
    agent = context.config.agent
    if options.provider == "corpus":
        corpus = open_corpus(context.config, "web_search.provider")
        source = corpus.pages(lambda passage: page_url(passage.url), options.num_results)
    else:
        source = online(options)
    return WebSearch(source, agent.tool_timeout_s, agent.max_result_chars)
