"""BM25 over a list of texts, for any language with spaces: no stemmer and no stop words."""

from __future__ import annotations

import logging
import sys
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.utils.terminal import bar
from flowtrain.utils.text import words

# Where bm25s finds JAX it tries it, and JAX takes three quarters of a GPU's memory for itself.
_modules: dict[str, Any] = sys.modules
_jax = _modules.get("jax")
_modules["jax"] = None
import bm25s  # noqa: E402

del _modules["jax"]
if _jax is not None:
    _modules["jax"] = _jax


class Bm25:
    """Ranks the texts that it was built from. The index is immutable, so threads may share it."""

    def __init__(self, index: bm25s.BM25, vocabulary: Mapping[str, int]) -> None:
        self._index = index
        self._vocabulary = vocabulary

    @classmethod
    def build(cls, texts: Iterable[str], progress: str = "") -> Bm25:
        """Index the texts; raises ValueError when no text has a word.

        `progress` is the text of the progress bar; "": no bar.
        """
        vocabulary: dict[str, int] = {}
        progress_bar = bar(texts, desc=progress, unit="text", disable=not progress)
        token_ids = [
            array("i", (vocabulary.setdefault(word, len(vocabulary)) for word in words(text)))
            for text in progress_bar
        ]
        if not vocabulary:
            raise ValueError("no text has a word")
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        index = bm25s.BM25()
        index.index((token_ids, vocabulary), create_empty_token=False, show_progress=False)
        return cls(index, vocabulary)

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Bm25:
        """Map the scores on disk into memory and read the vocabulary."""
        index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        return cls(index, index.vocab_dict)

    def rank(self, query: str, k: int) -> list[int]:
        """Return at most `k` texts that share a word with the query, best first.

        Of equal texts the earlier comes first. A word that the query repeats counts once, which
        bounds the time by the vocabulary.
        """
        word_ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not word_ids:
            return []
        scores = self._index.get_scores_from_ids(list(dict.fromkeys(word_ids)))
        hits = scores.nonzero()[0]
        return hits[best(scores[hits], k)].tolist()


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the indices of the `k` highest scores, highest first; of equals the earlier one."""
    indices = np.arange(len(scores))
    if len(scores) > k:  # with all that equal the k-th, whose order is decided below
        indices = (scores >= np.partition(scores, -k)[-k]).nonzero()[0]
    return indices[(-scores[indices]).argsort(kind="stable")[:k]]
