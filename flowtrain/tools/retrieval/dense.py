"""Embeddings of texts from an endpoint with OpenAI's /embeddings, and search by cosine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain.config import Chat, Config
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.bm25 import best
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.types import UserError
from flowtrain.utils.errors import user_error
from flowtrain.utils.terminal import bar

BATCH = 64
"""Texts per request."""
MAX_CHARS = 8000
"""Characters of a text that are sent; some 2,000 tokens, which every embedding model takes."""
_BUILD_S = 600.0
"""Seconds for a batch while an index is built, pauses of a busy endpoint included."""
_ROWS = 1 << 16
"""Rows of the matrix that are read from disk and multiplied at a time."""


class Embedder:
    """Turns texts into vectors of length 1. Safe to share between tasks and event loops."""

    def __init__(self, name: str, options: Chat) -> None:
        """Take the options of table `name` in [engines]; raises UserError when it cannot embed."""
        if options.kind != "openai":
            raise UserError(
                f"engines.{name}.kind={options.kind!r}: embeddings come from an endpoint, which "
                "takes kind = 'openai'"
            )
        if not options.model:
            raise UserError(
                f"engines.{name}.model must name the embedding model at {options.base_url}"
            )
        variable = options.api_key_env
        key = (
            key_from_env(variable, f"engines.{name}.api_key_env", options.base_url)
            if variable
            else ""
        )
        self.name = f"{options.model} at {options.base_url}"
        self._model = options.model
        self._query_prefix, self._passage_prefix = options.query_prefix, options.passage_prefix
        self._url = options.base_url.rstrip("/") + "/embeddings"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._api = Api(options.max_concurrency)

    @property
    def stamp(self) -> str:
        """Name what the vectors of an index depend on."""
        return f"{self.name}, {self._passage_prefix!r}" if self._passage_prefix else self.name

    def as_query(self, text: str) -> str:
        """Return a query as the model wants it."""
        return self._query_prefix + text

    def as_passage(self, text: str) -> str:
        """Return a passage as the model wants it."""
        return self._passage_prefix + text

    async def embed(self, texts: Sequence[str], deadline_s: float) -> np.ndarray:
        """Return [len(texts), D] float32; raises ToolError when they do not come in time."""
        batches = [texts[start : start + BATCH] for start in range(0, len(texts), BATCH)]
        tasks = [asyncio.ensure_future(self._batch(batch, deadline_s)) for batch in batches]
        try:
            return np.concatenate(await asyncio.gather(*tasks))
        except ValueError:
            raise ToolError(f"{self.name} answered with embeddings of several lengths") from None
        finally:  # when one fails, the others are useless
            for task in tasks:
                task.cancel()

    async def _batch(self, texts: Sequence[str], deadline_s: float) -> np.ndarray:
        # Some servers refuse an empty text.
        body = {"model": self._model, "input": [text[:MAX_CHARS] or " " for text in texts]}
        answer = await self._api.ask(
            Request(self._url, headers=self._headers, body=body), deadline_s
        )
        return _vectors(answer, len(texts), self.name)


def embedder(config: Config, key: str, name: str) -> Embedder | None:
    """Return the embedder of the table in [engines] that a config key names; None for ""."""
    if name and name not in config.engines:
        raise UserError(
            f"{key}={name!r} is no table of [engines]; there are: "
            f"{', '.join(config.engines) or 'none'}"
        )
    return Embedder(name, config.engines[name]) if name else None


def write_vectors(path: Path, texts: Iterable[str], num_texts: int, embedder: Embedder) -> None:
    """Write a .npy file of one row per text, with a progress bar; raises UserError on failure."""
    work = _write_vectors(path, iter(texts), num_texts, embedder)
    # On a thread with a loop of its own, because this thread may have one that runs.
    with (
        ThreadPoolExecutor(1, thread_name_prefix="embed") as thread,
        user_error("corpus.embedder", ToolError),
    ):
        thread.submit(asyncio.run, work).result()


async def _write_vectors(
    path: Path, texts: Iterable[str], num_texts: int, embedder: Embedder
) -> None:
    matrix: np.memmap | None = None
    done = 0
    with bar(total=num_texts, desc="embeddings", unit="text") as shown:
        while batch := list(itertools.islice(texts, 8 * BATCH)):
            vectors = await embedder.embed(list(map(embedder.as_passage, batch)), _BUILD_S)
            if matrix is None:
                matrix = np.lib.format.open_memmap(
                    path, "w+", np.float32, (num_texts, vectors.shape[1])
                )
            if vectors.shape[1] != matrix.shape[1]:
                raise ToolError(f"{embedder.name} answered with embeddings of several lengths")
            matrix[done : done + len(batch)] = vectors
            done += len(batch)
            shown.update(len(batch))
    assert matrix is not None and done == num_texts
    matrix.flush()


def rank(matrix: np.ndarray, query_D: np.ndarray, k: int) -> list[int]:
    """Return the `k` rows most like the query, best first; the matrix may be on disk."""
    scores = np.concatenate(
        [matrix[start : start + _ROWS] @ query_D for start in range(0, len(matrix), _ROWS)]
    )
    return best(scores, k).tolist()


def _vectors(answer: Any, num_texts: int, name: str) -> np.ndarray:
    """Return one unit vector per text; raises ToolError unless all are finite and of one length."""
    try:
        rows = sorted(answer["data"], key=lambda row: row["index"])
        vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        if vectors.ndim != 2:
            raise ValueError
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ToolError(f"{name} answered without embeddings: {str(answer)[:200]}") from None
    if len(vectors) != num_texts or not (np.isfinite(norms).all() and (norms > 0).all()):
        raise ToolError(
            f"{name} answered with {len(vectors)} embeddings, some of them of no use, for "
            f"{num_texts} texts"
        )
    return vectors / norms
