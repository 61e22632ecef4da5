"""The processes that publish, or hold the shards of one model, together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from flowtrain.weights.manifest import StoreError

_T = TypeVar("_T")


class Ranks(Protocol):
    """The processes that work together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_text(self, text: str) -> list[str]:
        """The text of each rank, on every rank."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One process."""

    rank: int = 0
    size: int = 1

    def gather_text(self, text: str) -> list[str]:
        return [text]


def together(ranks: Ranks, action: Callable[[], _T]) -> _T:
    """What `action` returns on this rank. When it raises on one, every rank raises: its own
    exception, or StoreError with its text.
    """
    try:
        result = action()
    except BaseException as error:
        ranks.gather_text(f"rank {ranks.rank}: {type(error).__name__}: {error}")
        raise
    failures = [text for text in ranks.gather_text("") if text]
    if failures:
        raise StoreError(failures[0])
    return result
