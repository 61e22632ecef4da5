"""A corpus to search offline: passages of a file, with an index on disk that all tools share."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from flowtrain.config import Config
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.index import DATABASE, ensure_index, page_url
from flowtrain.tools.retrieval.passages import Passage, Searchable
from flowtrain.tools.retrieval.remote import Retriever
from flowtrain.types import UserError
from flowtrain.utils.text import encodable

SCHEME = "corpus:"
"""A passage without a URL gets this and its number in the file, so that all can be read."""

T = TypeVar("T")


class Corpus(Searchable):
    """Passages of a file and their index."""

    def __init__(self, folder: Path) -> None:
        """Open the index that `ensure_index` built."""
        # Nobody writes to it, so that a network's file system need not lock it.
        where = f"{(folder / DATABASE).as_uri()}?mode=ro&immutable=1"
        self._database = sqlite3.connect(where, uri=True, check_same_thread=False)
        weakref.finalize(self, self._database.close)
        self._bm25 = Bm25.load(folder / "bm25")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="corpus")

    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """As `Searchable.search`, by BM25: finds only passages that share a word."""
        return await self._in_thread(lambda: self._take(self._bm25.rank(query, k)))

    async def read(self, url: str) -> list[Passage]:
        """Return the passages of a page, in the order of the file; none for an unknown page."""
        return await self._in_thread(lambda: self._page(url))

    def _page(self, url: str) -> list[Passage]:
        number = url.removeprefix(SCHEME)
        if url.startswith(SCHEME) and number.isdecimal() and len(number) < 12:
            return self._take([int(number)])
        return self._select("page = ? ORDER BY number", encodable(page_url(url)))

    def _take(self, numbers: list[int]) -> list[Passage]:
        return [found for number in numbers for found in self._select("number = ?", number)]

    def _select(self, where: str, value: object) -> list[Passage]:
        rows = self._database.execute(
            f"SELECT text, title, url, number FROM passages WHERE {where}", (value,)
        )
        return [Passage(text, title, url or f"{SCHEME}{n}") for text, title, url, n in rows]

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
