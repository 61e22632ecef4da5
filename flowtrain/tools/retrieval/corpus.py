"""A corpus to search offline: passages of a file, with an index on disk that all tools share."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from flowtrain.config import Config
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.dense import Embedder, embedder, rank
from flowtrain.tools.retrieval.index import ensure_index, page_hash, page_url
from flowtrain.tools.retrieval.passages import Passage, Passages, Source
from flowtrain.types import UserError

SCHEME = "corpus:"
"""A passage without a URL gets this and its number in the file, so that all can be read."""

T = TypeVar("T")


class Corpus:
    """Passages and their indexes. Safe to share between tasks, event loops and threads."""

    def __init__(self, folder: Path, embedder: Embedder | None) -> None:
        """Open the index that `ensure_index` built with that embedder."""
        self._passages = Passages(folder)
        self._embedder = embedder
        if embedder:
            self._vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        else:
            self._bm25 = Bm25.load(folder / "bm25")
        self._pages = np.load(folder / "pages.npy", mmap_mode="r")
        self._places = np.load(folder / "places.npy", mmap_mode="r")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="corpus")

    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """Return at most `k` passages, best first; BM25 finds only those that share a word.

        Raises ToolError when the embedder fails.
        """
        if self._embedder is None:
            return await self._in_thread(lambda: self._take(self._bm25.rank(query, k)))
        vectors_1D = await self._embedder.embed([self._embedder.as_query(query)], deadline_s)
        return await self._in_thread(lambda: self._take(rank(self._vectors, vectors_1D[0], k)))

    def pages(self, page_of: Callable[[Passage], str], num_pages: int) -> Source:
        """Make the source whose hits are pages, each with its best passage."""

        async def search(query: str, deadline_s: float) -> list[Passage]:
            pages: dict[str, Passage] = {}
            for passage in await self.search(query, 3 * num_pages, deadline_s):
                pages.setdefault(page_of(passage), passage)
            return list(pages.values())[:num_pages]

        return search

    async def read(self, url: str) -> list[Passage]:
        """Return the passages of a page, in the order of the file; none for an unknown page."""
        return await self._in_thread(lambda: self._page(url))

    def _page(self, url: str) -> list[Passage]:
        number = url.removeprefix(SCHEME)
        is_number = url.startswith(SCHEME) and number.isdecimal() and len(number) < 12
        if is_number and int(number) < len(self._passages):
            return self._take([int(number)])
        start, end = (
            int(np.searchsorted(self._pages, page_hash(url), side)) for side in ("left", "right")
        )
        same_hash = self._take(self._places[start:end].tolist())
        return [passage for passage in same_hash if page_url(passage.url) == page_url(url)]

    def _take(self, numbers: list[int]) -> list[Passage]:
        passages = [(number, self._passages[number]) for number in numbers]
        return [p if p.url else replace(p, url=f"{SCHEME}{number}") for number, p in passages]

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


_open: weakref.WeakValueDictionary[tuple[object, ...], Corpus] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def open_corpus(config: Config, key: str) -> Corpus:
    """Return the corpus of `[corpus]`, the same object for all users; raises UserError.

    Builds the index, with a progress bar, unless there is one of this file. `key` names the option
    that asks for the corpus, such as "web_search.provider".
    """
    if not config.corpus.path:
        raise UserError(
            f"corpus.path='' must name the file of passages that {key}='corpus' searches"
        )
    with _opening:
        vectors = embedder(config, "corpus.embedder", config.corpus.embedder)
        folder, stamp = ensure_index(config.corpus, vectors)
        name = (folder, *stamp.items())
        corpus = _open.get(name)
        if corpus is None:
            corpus = _open[name] = Corpus(folder, vectors)
        return corpus
