"""The processes that publish one model together, or hold its shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from flowtrain.weights.format.manifest import StoreError

_T = TypeVar("_T")


class Ranks(Protocol):
    """The processes that work together."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    def gather_text(self, text: str) -> list[str]:
        """Return the text of each rank, on every rank; collective."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """One process."""

    rank: int = 0
    size: int = 1

    def gather_text(self, text: str) -> list[str]:
        return [text]


def gather(ranks: Ranks, value: object) -> list[Any]:
    """Return the values of all ranks, passed through JSON, on every rank; collective."""
    return [json.loads(text) for text in ranks.gather_text(json.dumps(value))]


def on_all_ranks(
    ranks: Ranks, action: Callable[[], _T], other_failed: type[Exception] = StoreError
) -> _T:
    """Run `action` on every rank and return this rank's result; collective.

    When it raises on one rank, every rank raises: that one its own exception, the others
    `other_failed` with its text.
    """
    try:
        result = action()
    # The other ranks are blocked in a gather: report to them before raising.
    except BaseException as error:
        ranks.gather_text(f"rank {ranks.rank}: {type(error).__name__}: {error}")
        raise
    if failures := [text for text in ranks.gather_text("") if text]:
        raise other_failed(failures[0])
    return result
