"""Queries, chunks and what fits; and BM25 beneath them."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain.tools import ToolError
from flowtrain.tools.retrieval.bm25 import Bm25, best
from flowtrain.tools.retrieval.text import MAX_QUERY, check_query, chunks, cut, fit, split_words

SIZES = st.integers(1, 12).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size - 1)))


@given(st.lists(st.integers(), max_size=80), SIZES)
@settings(max_examples=300)
def test_chunks_lose_no_word_and_overlap_exactly(words: list[int], sizes: tuple[int, int]) -> None:
    size, overlap = sizes
    pieces = chunks(words, size, overlap)
    assert [
        word for place, piece in enumerate(pieces) for word in piece[overlap if place else 0 :]
    ] == words
    assert all(
        later[:overlap] == earlier[len(earlier) - overlap :] for earlier, later in pairwise(pieces)
    )
    assert all(len(piece) == size for piece in pieces[:-1])
    assert all(len(piece) > (overlap if place else 0) for place, piece in enumerate(pieces)), (
        "none repeats what is there already"
    )


@given(st.text())
@settings(max_examples=200)
def test_words_are_all_that_is_not_space(text: str) -> None:
    words = split_words(text)
    assert "".join(words) == "".join(text.split())
    assert all(1 <= len(word) <= 64 for word in words)


def test_agentflows_chunks() -> None:
    pieces = chunks([str(n) for n in range(560)], 200, 20)
    expected = [("0", "199"), ("180", "379"), ("360", "559")]
    assert [(piece[0], piece[-1]) for piece in pieces] == expected


@given(st.lists(st.text(alphabet="ab \n", max_size=40), max_size=8), st.integers(5, 120))
@settings(max_examples=300)
def test_fit_returns_prefix_within_limit(items: list[str], max_chars: int) -> None:
    text = fit(items, max_chars)
    whole = fit(items, 10_000)
    assert len(text) <= max_chars
    assert whole.startswith(text.rstrip(".").rstrip())
    if len(whole) <= max_chars:
        assert text == whole


def test_what_fits_by_example() -> None:
    assert fit(["aaaa", "bbbb", "cccc"], 100) == "aaaa\n\nbbbb\n\ncccc"
    assert fit(["aaaa", "bbbb", "cccc"], 16) == "aaaa\n\nbbbb\n\ncccc"
    assert fit(["a" * 50, "b" * 50], 20) == "a" * 17 + "..."
    assert fit(["a" * 50, "b" * 500], 100) == "a" * 50 + "\n\n" + "b" * 45 + "..."
    found = fit(["a" * 90, "b" * 500], 100)
    assert found == "a" * 90, "eight letters of the next one would tell nothing"
    assert (fit([], 10), fit([""], 10)) == ("", "")
    expected = ("abcdef", "abc...", "..", "")
    assert (cut("abcdef", 6), cut("abcdefg", 6), cut("abc", 2), cut("abc", 0)) == expected


def test_queries_are_one_line_and_not_endless() -> None:
    assert check_query("  capital\n of \t Mali ") == "capital of Mali"
    assert check_query("\ud800x") == "?x"
    for query in ("", " \n\t"):
        with pytest.raises(ToolError, match="empty query"):
            check_query(query)
    assert len(check_query("x" * MAX_QUERY)) == MAX_QUERY
    with pytest.raises(ToolError, match="has 2001 characters; ask for one thing in at most 2000"):
        check_query("x" * (MAX_QUERY + 1))


@given(st.lists(st.integers(-3, 3), max_size=30), st.integers(1, 12))
@settings(max_examples=300)
def test_the_best_are_those_of_a_stable_sort(values: list[int], k: int) -> None:
    expected = sorted(range(len(values)), key=lambda place: -values[place])[:k]
    assert best(np.array(values, dtype=np.float32), k).tolist() == expected


def test_bm25_from_disk_ranks_as_it_did(tmp_path: Path) -> None:
    texts = [
        f"node {n} of ring {n % 7} says {'hello ' * (n % 3)}{'münchen' if n % 5 else 'Straße'}"
        for n in range(60)
    ]
    built = Bm25.build(texts)
    built.save(tmp_path / "bm25")
    loaded = Bm25.load(tmp_path / "bm25")
    for query in ("node 17", "ring 3 hello", "MÜNCHEN", "strasse", "nothing at all", "", "?!"):
        assert loaded.rank(query, 10) == built.rank(query, 10)
    assert built.rank("node 17", 1) == [17]
    assert sorted(built.rank("strasse", 99)) == list(range(0, 60, 5))
    assert built.rank("absent", 3) == []
    assert isinstance(loaded._index.scores["data"], np.memmap), (
        "a large index is not read at the start"
    )


def test_a_word_that_a_query_repeats_counts_once() -> None:
    index = Bm25.build(["salt salt salt", "pepper and oil", "vinegar and bread"])
    assert index.rank("pepper salt", 1) == index.rank("pepper pepper pepper salt", 1) == [0]


def test_bm25_leaves_jax_alone(tmp_path: Path) -> None:
    """Imported beside a GPU, JAX takes three quarters of its memory."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("started = True")
    (tmp_path / "jax" / "lax.py").write_text("print('JAX was tried')\ndef top_k(x, k): ...")
    code = "import flowtrain.tools.retrieval.bm25, jax; print(jax.started)"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = [sys.executable, "-c", code]
    assert subprocess.check_output(run, text=True, env={"PYTHONPATH": path}) == "True\n"


def test_bm25_of_texts_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="no text has a word"):
        Bm25.build(["", "?!"])
