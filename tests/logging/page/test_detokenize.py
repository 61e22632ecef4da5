from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from flowtrain.logging.page.rollouts import pieces, text_of

ANY_FIXTURE = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)


@ANY_FIXTURE
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_pieces_of_a_text_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    texts = pieces(tokenizer, ids)
    assert len(texts) == len(ids) and "".join(texts) == text


@ANY_FIXTURE
@given(ids=st.lists(st.integers(0, 299), max_size=60))
def test_any_ids_have_a_piece_each_and_none_is_lost(tokenizer: Tokenizer, ids: list[int]) -> None:
    """Sampled bytes need not be UTF-8."""
    texts = pieces(tokenizer, ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text_of(tokenizer, ids)


def test_a_character_of_several_tokens_is_shown_by_its_last(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀é").ids
    assert pieces(tokenizer, ids) == ["a", "", "", "", "😀", "", "é"]
    assert pieces(tokenizer, ids[:4]) == ["a", "", "", "\ufffd"], "cut off within it"


def test_bytes_that_are_no_text_hold_nothing_up(tokenizer: Tokenizer) -> None:
    byte = next(n for n in range(1, 300) if text_of(tokenizer, [n]) == "\ufffd")
    texts = pieces(tokenizer, [byte] * 12 + tokenizer.encode("a").ids)
    assert texts == ["", *["\ufffd"] * 11, "\ufffda"]


@pytest.mark.parametrize("tail", ["a", "😀", "é😀", ""])
@pytest.mark.parametrize("num_bytes", [31, 34, 2000])
def test_a_long_run_of_bytes_that_are_no_text_is_read_in_linear_time(
    tokenizer: Tokenizer, num_bytes: int, tail: str
) -> None:
    class Counting:
        num_decoded = 0

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            self.num_decoded += len(ids)
            return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    byte = next(n for n in range(1, 300) if text_of(tokenizer, [n]) == "\ufffd")
    counting: Any = Counting()
    ids = [byte] * num_bytes + tokenizer.encode(tail).ids
    assert "".join(pieces(counting, ids)) == text_of(tokenizer, ids)
    assert counting.num_decoded < 50 * len(ids)


def test_a_word_keeps_its_space() -> None:
    """Some decoders strip it where a text begins, so a token must not be decoded alone."""
    words = Tokenizer(models.WordLevel({"\u2581to": 0, "\u2581be": 1}, unk_token="\u2581to"))
    words.decoder = decoders.Metaspace()
    assert pieces(words, [0, 1, 1, 0]) == ["to", " be", " be", " to"]


def test_a_special_token_is_shown(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, [0, 0]) == ["<|end|>", "<|end|>"]
