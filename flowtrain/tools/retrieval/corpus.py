"""A corpus to search offline: passages of a file, with an index on disk that all ranks share."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flowtrain.config.search import Corpus as Options
from flowtrain.tools.retrieval.bm25 import Bm25
from flowtrain.tools.retrieval.index import DATABASE, ensure_index
from flowtrain.tools.retrieval.passages import Passage, Searchable
from flowtrain.tools.retrieval.remote import Retriever


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
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._search, query, k)

    def _search(self, query: str, k: int) -> list[Passage]:
        query_sql = "SELECT text, title FROM passages WHERE number = ?"
        numbers = self._bm25.rank(query, k)
        return [Passage(*self._database.execute(query_sql, (n,)).fetchone()) for n in numbers]


def open_search(options: Options) -> Searchable:
    """Return the retriever of `[corpus]`, or else its file as `open_corpus` does."""
    return Retriever(options) if options.retriever else open_corpus(options)


_open: weakref.WeakValueDictionary[tuple[object, ...], Corpus] = weakref.WeakValueDictionary()
_opening = threading.Lock()


def open_corpus(options: Options) -> Corpus:
    """Return the corpus of `[corpus]`, the same object for all users; raises UserError.

    Builds the index, with a progress bar, unless there is one of this file.
    """
    with _opening:
        folder, stamp = ensure_index(options)
        name = (folder, *stamp.items())
        corpus = _open.get(name)
        if corpus is None:
            corpus = _open[name] = Corpus(folder)
        return corpus
