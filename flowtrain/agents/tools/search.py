"""Search over a fixed list of passages: BM25, in process, no stemmer, no stop words."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import bm25s

from flowtrain.agents.tools.base import ToolCard, ToolError
from flowtrain.agents.tools.registry import ToolContext
from flowtrain.types import UserError

WORD = re.compile(r"\w+")


class Search:
    """Finds the passages that share the rarest words with the query. Reads only after construction, so it is safe to share.

    >>> asyncio.run(Search(["Paris lies in France.", "Rome lies in Italy."]).execute("Where is Rome?"))
    'Rome lies in Italy.'
    """

    card = ToolCard("Search", "Looks a few words up in a collection of texts; returns the passage that fits best.")

    def __init__(self, passages: Sequence[str], top_k: int = 1) -> None:
        """Index the passages; `top_k` is how many a query returns at most."""
        if top_k < 1:
            raise UserError(f"top_k must be at least 1, got {top_k}")
        vocabulary: dict[str, int] = {}
        token_ids = [[vocabulary.setdefault(word, len(vocabulary)) for word in words(passage)] for passage in passages]
        if not vocabulary:
            raise UserError(f"Search needs a passage with at least one word, got {len(passages)} passages without any")
        self._passages = tuple(passages)
        self._top_k = top_k
        self._vocabulary = vocabulary
        self._index = _build_index(token_ids, vocabulary)

    async def execute(self, query: str) -> str:
        """The best passages, best first, one per line; of equals the earlier one. Raises ToolError when none shares a word.

        A word counts once however often the query repeats it, which bounds the time by the vocabulary.
        """
        if not query.strip():
            raise ToolError("empty query")
        ids = list(dict.fromkeys(self._vocabulary[word] for word in words(query) if word in self._vocabulary))
        if not ids:
            raise ToolError(f"no passage matches {query[:80]!r}")
        scores = self._index.get_scores_from_ids(ids)
        hits = scores.nonzero()[0]
        best = hits[(-scores[hits]).argsort(kind="stable")[: self._top_k]]
        return "\n".join(self._passages[index] for index in best)

    def close(self) -> None:
        """Nothing to release."""


def make(context: ToolContext) -> Search:
    return Search(context.passages)


def words(text: str) -> list[str]:
    """The words of a text, in order, without case."""
    return WORD.findall(text.casefold())


def _build_index(token_ids: list[list[int]], vocabulary: dict[str, int]) -> bm25s.BM25:
    """BM25 scores of every (passage, word) pair, summed up at query time."""
    logging.getLogger("bm25s").setLevel(logging.WARNING)
    index = bm25s.BM25()
    index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
    return index
