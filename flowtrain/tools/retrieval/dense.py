"""Embeddings of texts from an endpoint with OpenAI's /embeddings, and search by cosine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowtrain.config import Chat, Config
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.bm25 import best
from flowtrain.tools.web.api import Api, Request, key_from_env
from flowtrain.types import UserError

BATCH = 64
"""Texts per request."""
MAX_CHARS = 8000
"""Characters of a text that are sent; some 2,000 tokens, which every embedding model takes."""


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


def rank(matrix: np.ndarray, query_D: np.ndarray, k: int) -> list[int]:
    """Return the `k` rows most like the query, best first."""
    return best(matrix @ query_D, k).tolist()


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
