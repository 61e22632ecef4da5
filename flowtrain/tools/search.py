"""Search over a fixed list of passages: BM25, in process, no stemmer, no stop words; or over the
passages of `[corpus]`, which are on disk, or found by a retriever elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from flowtrain.records import UserError
from flowtrain.tools.base import Tool, ToolCard, ToolError
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.corpus import open_search
from flowtrain.tools.retrieval.passages import Searchable
from flowtrain.tools.retrieval.text import check_query, fit


class Search(Tool):
    """Finds the passages that share the rarest words with the query. Safe to share.

    >>> asyncio.run(Search(["Paris lies in France.", "Rome lies in Italy."]).execute("Is it Rome?"))
    'Rome lies in Italy.'
    """

    card = ToolCard(
        "Search",
        "Looks a few words up in a collection of texts; returns the passage that fits best.",
        finds_passages=True,
    )

    def __init__(self, passages: Sequence[str], top_k: int = 1) -> None:
        """Index the passages; a query returns `top_k` of them at most."""
        try:
            self._index = Bm25.build(passages)
        except ValueError:
            raise UserError(
                f"Search needs a passage with at least one word, got {len(passages)} passages "
                "without any"
            ) from None
        self._passages = tuple(passages)
        self._top_k = top_k

    async def execute(self, query: str) -> str:
        """Return the best passages, best first, one per line; of equals the earlier one.

        Raises ToolError when no passage shares a word with the query.
        """
        if not query.strip():
            raise ToolError("empty query")
        best = self._index.rank(query, self._top_k)
        if not best:
            raise ToolError(f"no passage matches {query[:80]!r}")
        return "\n".join(self._passages[index] for index in best)


class CorpusSearch(Tool):
    """Finds passages of `[corpus]`, whole and one per line, each after its title."""

    card = Search.card

    def __init__(self, corpus: Searchable, top_k: int, deadline_s: float, max_chars: int) -> None:
        """`deadline_s`: seconds for a query; `max_chars`: characters of a result."""
        self._corpus = corpus
        self._top_k = top_k
        self._deadline_s = deadline_s
        self._max_chars = max_chars

    async def execute(self, query: str) -> str:
        """Return the best passages, best first; raises ToolError where there is none."""
        passages = await self._corpus.search(check_query(query), self._top_k, self._deadline_s)
        if not passages:
            raise ToolError(f"no passage matches {query[:80]!r}")
        texts = [f"{hit.title}: {hit.text}" if hit.title else hit.text for hit in passages]
        lines = [" ".join(text.split()) for text in texts]
        return fit(lines, self._max_chars).replace("\n\n", "\n")


def make(context: ToolContext) -> Tool:
    """Raises UserError for questions of the user beside passages that cannot answer them."""
    config = context.config
    if config.tasks.name == "file" and not config.tasks.corpus:
        if config.corpus.path or config.corpus.retriever:
            agent = config.agent
            corpus = open_search(config.corpus)
            return CorpusSearch(
                corpus, agent.num_passages, agent.tool_timeout_s, agent.max_result_chars
            )
        raise UserError(
            f"agent.tools={list(config.agent.tools)} with tasks.name='file': Search would search "
            "the shipped sentences about countries and elements. Provide your own passages "
            "(corpus.path, corpus.retriever, tasks.corpus), or use Web_Search or "
            "Wikipedia_Search; set tasks.corpus='shipped' if you want these sentences"
        )
    return Search(context.passages, context.config.agent.num_passages)
