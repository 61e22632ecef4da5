"""A corpus to search offline: the passages of a file under an index on disk, which is built once
and shared by all tools.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from flowtrain.config import Config
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.dense import Embedder, embedder, rank
from flowtrain.tools.retrieval.index import ensure_index, page_hash, page_url
from flowtrain.tools.retrieval.passages import Passage, Passages
from flowtrain.types import UserError

SCHEME = "corpus:"
"""A passage without a URL has this with its place in the file, so that every passage can be asked
for."""

T = TypeVar("T")


class Corpus:
    """Passages and the ways to find them. Safe to share between tasks, event loops and threads;
    what it holds goes with its last user.
    """

    def __init__(self, folder: Path, embedder: Embedder | None) -> None:
        """`folder` as `ensure_index` leaves it, for that embedder."""
        self._passages, self._embedder = Passages(folder), embedder
        if embedder:
            self._vectors = np.load(folder / "vectors.npy", mmap_mode="r")
        else:
            self._bm25 = Bm25.load(folder / "bm25")
        self._pages, self._places = (
            np.load(folder / name, mmap_mode="r") for name in ("pages.npy", "places.npy")
        )
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="corpus")

    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """At most `k` passages, best first; by BM25 only such as share a word with the query.
        Raises ToolError when the embedder fails.
        """
        if self._embedder is None:
            return await self._in_thread(lambda: self._take(self._bm25.rank(query, k)))
        vectors_1D = await self._embedder.embed([query], deadline_s)
        return await self._in_thread(lambda: self._take(rank(self._vectors, vectors_1D[0], k)))

    async def read(self, url: str) -> list[Passage]:
        """The passages of a page, in the order of the file; none when the corpus does not have it."""
        return await self._in_thread(lambda: self._page(url))

    def _page(self, url: str) -> list[Passage]:
        number = url.removeprefix(SCHEME)
        if (
            url.startswith(SCHEME)
            and number.isdecimal()
            and len(number) < 12
            and int(number) < len(self._passages)
        ):
            return self._take([int(number)])
        start, end = (
            int(np.searchsorted(self._pages, page_hash(url), side)) for side in ("left", "right")
        )
        same_hash = self._take(self._places[start:end].tolist())
        return [passage for passage in same_hash if page_url(passage.url) == page_url(url)]

    def _take(self, places: list[int]) -> list[Passage]:
        passages = [(place, self._passages[place]) for place in places]
        return [
            p if p.url else Passage(p.text, p.title, f"{SCHEME}{place}") for place, p in passages
        ]

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


_open: weakref.WeakValueDictionary[tuple[object, ...], Corpus] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def open_corpus(config: Config, key: str) -> Corpus:
    """The corpus of `[corpus]`, the same one for all who have it open; `key` is who asks, such as
    "web_search.provider".

    Builds the index when there is none, or none of this file; then it shows how far it is. Raises
    UserError.
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
