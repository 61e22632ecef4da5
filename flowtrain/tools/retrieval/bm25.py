"""BM25 over a list of texts, by words: no stemmer, no stop words, so that it serves any language
that puts spaces between words.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

import bm25s
import numpy as np
from tqdm import tqdm

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """The words of a text, in order, without case."""
    return _WORD.findall(text.casefold())


class Bm25:
    """Ranks the texts it was built of. Reads only after construction, so it is safe to share
    between threads.
    """

    def __init__(self, index: bm25s.BM25, vocabulary: Mapping[str, int]) -> None:
        self._index, self._vocabulary = index, vocabulary

    @classmethod
    def build(cls, texts: Iterable[str], progress: str = "") -> Bm25:
        """`progress` is what its bar says; "": there is none. Raises ValueError when no text has a
        word.
        """
        vocabulary: dict[str, int] = {}
        shown = tqdm(texts, desc=progress, unit="text", disable=not progress)
        token_ids = [
            array("i", (vocabulary.setdefault(word, len(vocabulary)) for word in words(text)))
            for text in shown
        ]
        if not vocabulary:
            raise ValueError("no text has a word")
        logging.getLogger("bm25s").setLevel(logging.WARNING)
        index = bm25s.BM25()
        index.index((token_ids, vocabulary), create_empty_token=False, show_progress=bool(progress))
        return cls(index, vocabulary)

    def save(self, folder: Path) -> None:
        self._index.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> Bm25:
        """The scores stay on disk and are mapped into memory; only the vocabulary is read."""
        index = bm25s.BM25.load(folder, mmap=True, show_progress=False)
        return cls(index, index.vocab_dict)

    def rank(self, query: str, k: int) -> list[int]:
        """At most `k` texts that share a word with the query, best first; of equals the earlier
        one.

        A word counts once however often the query repeats it, which bounds the time by the
        vocabulary.
        """
        ids = list(
            dict.fromkeys(
                self._vocabulary[word] for word in words(query) if word in self._vocabulary
            )
        )
        if not ids:
            return []
        scores = self._index.get_scores_from_ids(ids)
        hits = scores.nonzero()[0]
        return hits[best(scores[hits], k)].tolist()


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """The places of the `k` highest scores, or of all if there are fewer, highest first; of equals
    the earlier one.
    """
    places = (
        np.arange(len(scores))
        if len(scores) <= k
        else (scores >= np.partition(scores, -k)[-k]).nonzero()[0]
    )
    return places[(-scores[places]).argsort(kind="stable")[:k]]
