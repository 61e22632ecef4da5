"""Rules that all engines share: where a response ends, and which tokens could be sampled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from flowtrain.inference.requests import answer, hits_stop_string, kept_sets, stop_place
from flowtrain.records import FinishReason, VersionSpan


class Letters:
    """A tokenizer whose tokens are the bytes of a text; it counts what it decodes."""

    eos_token_id = None

    def __init__(self) -> None:
        self.num_decoded = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.num_decoded += len(token_ids)
        return bytes(token_ids).decode(errors="replace")


def test_a_stop_string_is_looked_for_in_the_last_tokens_alone() -> None:
    tokenizer, ids = Letters(), list(b"a" * 5000)
    for end in range(1, len(ids) + 1):
        assert not hits_stop_string(ids[:end], ("b", "Observation:"), tokenizer)
    assert tokenizer.num_decoded < 30 * len(ids)


@pytest.mark.parametrize("stop", ["</é>", "🙂", "xy", "b", ""])
def test_the_token_that_completes_a_stop_string_is_found(stop: str) -> None:
    text = "é🙂" * 40 + "ax" + stop + "after"
    ids, tokenizer = list(text.encode()), Letters()
    first = next(
        end for end in range(1, len(ids) + 1) if stop in bytes(ids[:end]).decode(errors="replace")
    )
    assert stop_place(ids, 0, (stop, "never there"), tokenizer) == first


def test_a_stop_string_is_looked_for_without_copying_all_that_was_sampled() -> None:
    """vLLM hands out a token at a time; so the place is asked for with every one of them."""

    class Sampled(list[int]):
        num_copied = 0

        def __getitem__(self, place: Any) -> Any:
            found = super().__getitem__(place)
            self.num_copied += len(found) if isinstance(place, slice) else 1
            return found

    ids = Sampled()
    for _ in range(3000):
        ids.append(ord("a"))
        assert not stop_place(ids, len(ids) - 1, ("Observation:",), Letters())
    assert ids.num_copied < 30 * len(ids)


def test_the_whole_text_decides_not_what_its_end_looks_like_alone() -> None:
    class Capitals(Letters):
        def decode(self, token_ids: Sequence[int]) -> str:
            return super().decode(token_ids).capitalize()

    ids = list(b"b" + b"c" * 40)
    assert not hits_stop_string(ids, ("C",), Capitals())
    assert hits_stop_string(ids, ("cc",), Capitals())


def test_spans_cover_the_response_and_no_token_behind_it() -> None:
    """The third version came when all had been sampled."""
    labels = [(3, 0), (4, 2), (5, 7)]
    made = answer((1,), (9, 8, 7, 6), (-1.0,) * 4, labels, FinishReason.STOP)
    assert made.spans == (VersionSpan(0, 2, 3), VersionSpan(2, 4, 4))
    nothing = answer((1,), (), (), [(3, 0)], FinishReason.DEADLINE)
    assert nothing.spans == (VersionSpan(0, 0, 3),)


class Counted(list[float]):
    """Counts how often an item is read by itself."""

    num_read = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(place)


def test_the_tokens_that_could_be_sampled_are_found_without_reading_all() -> None:
    """The first entry of a position is the sampled token, the others go from likely to unlikely."""
    rows = [[-1.0 - i if i < kept else -math.inf for i in range(264)] for kept in (1, 100, 264)]
    logprobs = Counted(value for row in rows for value in [row[0], *row])
    starts = [265 * row for row in range(len(rows))]
    flat: Any = SimpleNamespace(
        start_indices=starts,
        end_indices=[start + 265 for start in starts],
        token_ids=[place for _ in rows for place in (0, *range(1000, 1264))],
        logprobs=logprobs,
    )
    assert kept_sets(flat) == [list(range(1000, 1000 + kept)) for kept in (1, 100, 264)]
    assert logprobs.num_read <= 10 * len(rows)


@pytest.mark.parametrize("num_told", [3, 4])
def test_a_set_with_more_ties_than_were_asked_for_is_not_trained(num_told: int) -> None:
    """Four tokens tie, and one of those that are told was sampled."""
    flat: Any = SimpleNamespace(
        start_indices=[0],
        end_indices=[1 + num_told],
        token_ids=[11, *range(10, 10 + num_told)],
        logprobs=[math.log(1 / 4)] * (1 + num_told),
    )
    (kept,) = kept_sets(flat)
    assert (11 in kept) == (num_told == 4)
