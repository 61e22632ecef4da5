"""Passages, and how they are read from a file of the user's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from flowtrain.config.search import Corpus
from flowtrain.tasks.rows import read_rows
from flowtrain.utils.errors import user_error


@dataclass(frozen=True, slots=True)
class Passage:
    """A text that a search returns."""

    text: str
    title: str = ""
    url: str = ""


Source = Callable[[str, float], Coroutine[Any, Any, Sequence[Passage]]]
"""A function of query and seconds that returns passages, best first, or raises ToolError."""


class Searchable(ABC):
    """Passages that can be searched. Safe to share between tasks."""

    @abstractmethod
    async def search(self, query: str, k: int, deadline_s: float) -> list[Passage]:
        """Return at most `k` passages, best first; raises ToolError when the search fails."""


def read_passages(corpus: Corpus) -> Iterator[Passage]:
    """Yield the passages of a .jsonl, .json or .parquet file, in file order.

    Raises UserError, which names the file, the line or row, the keys and what is wrong.
    """
    keys = {"text": corpus.text_key, "title": "title"}
    option = f"corpus.text_key={corpus.text_key!r}"
    for _, where, row in read_rows(Path(corpus.path), tuple(keys.values())):
        fields = {name: row[key] for name, key in keys.items() if row.get(key) is not None}
        with user_error(f"{where} ({option})", msgspec.ValidationError):
            passage = msgspec.convert(fields, Passage)
        yield passage
