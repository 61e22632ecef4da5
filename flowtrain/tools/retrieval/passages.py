"""Passages in a file of the user's, and in the folder of an index."""

from __future__ import annotations

import json
import mmap
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from flowtrain.config.search import Corpus
from flowtrain.tasks.rows import read_rows
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error


@dataclass(frozen=True, slots=True)
class Passage:
    """One text that a search finds."""

    text: str
    title: str = ""
    url: str = ""


Source = Callable[[str, float], Coroutine[Any, Any, Sequence[Passage]]]
"""A function of query and seconds that returns passages, best first, or raises ToolError."""


class Searchable(ABC):
    """Passages that can be searched. Safe to share between tasks, event loops and threads."""

    @abstractmethod
    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """Return at most `k` passages, best first; raises ToolError when the search fails."""

    def pages(self, page_of: Callable[[Passage], str], num_pages: int) -> Source:
        """Make the source whose hits are pages, each with its best passage."""

        async def search(query: str, deadline_s: float) -> list[Passage]:
            pages: dict[str, Passage] = {}
            for passage in await self.search(query, 3 * num_pages, deadline_s):
                pages.setdefault(page_of(passage), passage)
            return list(pages.values())[:num_pages]

        return search


def read_passages(corpus: Corpus) -> Iterator[Passage]:
    """Yield the passages of a .jsonl, .json or .parquet file, in file order.

    Raises UserError, which names the file, the line or row, the keys and what is wrong.
    """
    keys = {"text": corpus.text_key, "title": corpus.title_key, "url": corpus.url_key}
    named = ", ".join(f"corpus.{name}_key={key!r}" for name, key in keys.items())
    for _, where, row in read_rows(Path(corpus.path), tuple(keys.values())):
        found = {name: row[key] for name, key in keys.items() if row.get(key) is not None}
        with user_error(f"{where} ({named})", msgspec.ValidationError):
            passage = msgspec.convert(found, Passage)
        yield passage


class Passages:
    """Passages on disk, memory-mapped: [text, title, url] per line of `passages.jsonl`.

    `offsets.npy` has the byte at which each line begins.
    """

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / "offsets.npy", mmap_mode="r")
        with (folder / "passages.jsonl").open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @staticmethod
    def write(folder: Path, passages: Iterable[Passage]) -> None:
        offsets = array("q", [0])
        with (folder / "passages.jsonl").open("wb") as file:
            for passage in passages:
                file.write(json.dumps(astuple(passage), ensure_ascii=False).encode() + b"\n")
                offsets.append(file.tell())
        if len(offsets) == 1:
            raise UserError("corpus.path: the file holds no passages; at least one is needed")
        np.save(folder / "offsets.npy", np.array(offsets))

    def __iter__(self) -> Iterator[Passage]:
        return map(self.__getitem__, range(len(self)))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Passage:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = map(int, self._offsets[index : index + 2])
        return Passage(*json.loads(self._lines[start:end]))
