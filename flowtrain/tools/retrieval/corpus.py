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
from flowtrain.tools.retrieval.index import ensure_index, page_hash, page_url
from flowtrain.tools.retrieval.passages import Passage, Passages, Searchable
from flowtrain.tools.retrieval.remote import Retriever
from flowtrain.types import UserError

SCHEME = "corpus:"
"""A passage without a URL gets this and its number in the file, so that all can be read."""

T = TypeVar("T")


class Corpus(Searchable):
    """Passages of a file and their index."""

    def __init__(self, folder: Path) -> None:
        """Open the index that `ensure_index` built."""
        self._passages = Passages(folder)
        self._bm25 = Bm25.load(folder / "bm25")
        self._pages = np.load(folder / "pages.npy", mmap_mode="r")
        self._places = np.load(folder / "places.npy", mmap_mode="r")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="corpus")

    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """As `Searchable.search`, by BM25: finds only passages that share a word."""
        return await self._in_thread(lambda: self._take(self._bm25.rank(query, k)))

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


def open_search(config: Config, key: str) -> Searchable:
    """Return the retriever of `[corpus]`, or else its file as `open_corpus` does."""
    return Retriever(config.corpus) if config.corpus.retriever else open_corpus(config, key)


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
        folder, stamp = ensure_index(config.corpus)
        name = (folder, *stamp.items())
        corpus = _open.get(name)
        if corpus is None:
            corpus = _open[name] = Corpus(folder)
        return corpus
