"""Ranks texts by embeddings from an endpoint with OpenAI's /embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from flowtrain.config import Chat, Config
from flowtrain.records import UserError
from flowtrain.tools.base import ToolError
from flowtrain.tools.retrieval.bm25 import best
from flowtrain.tools.web.api import Api, Request, key_from_env

BATCH = 64
"""Texts per request."""
MAX_CHARS = 8000
"""Characters of a text that are sent; some 2,000 tokens, which every embedding model takes."""


class Embedder:
    """Safe to share between tasks."""

    def __init__(self, name: str, options: Chat) -> None:
        """Take the options of table `name` in [engines]; raises UserError when it cannot embed."""
        if options.kind != "openai" or not options.model:
            raise UserError(
                f"engines.{name} must name an embedding model of an endpoint with kind = 'openai'"
            )
        self._headers = {}
        if variable := options.api_key_env:
            key = key_from_env(variable, f"engines.{name}.api_key_env", options.base_url)
            self._headers["Authorization"] = f"Bearer {key}"
        self._name = f"{options.model} at {options.base_url}"
        self._model = options.model
        self._url = options.base_url.rstrip("/") + "/embeddings"
        self._api = Api(options.max_concurrency)

    async def rank(self, query: str, texts: Sequence[str], k: int, deadline_s: float) -> list[int]:
        """Return the `k` texts most like the query by cosine, best first; raises ToolError when
        their embeddings do not come in time.
        """
        inputs = [query, *texts]
        parts = [inputs[start : start + BATCH] for start in range(0, len(inputs), BATCH)]
        tasks = [asyncio.ensure_future(self._embed(part, deadline_s)) for part in parts]
        try:
            vectors = np.concatenate(await asyncio.gather(*tasks))
        except ValueError:
            raise ToolError(f"{self._name} answered with embeddings of several lengths") from None
        finally:  # when one fails, the others are useless
            for task in tasks:
                task.cancel()
        return best(vectors[1:] @ vectors[0], k).tolist()

    async def _embed(self, texts: Sequence[str], deadline_s: float) -> np.ndarray:
        """Return a vector of length 1 for each text; [len(texts), D] float32."""
        # Some servers refuse an empty text.
        body = {"model": self._model, "input": [text[:MAX_CHARS] or " " for text in texts]}
        request = Request(self._url, headers=self._headers, body=body)
        answer: Any = await self._api.ask(request, deadline_s)
        try:
            rows = sorted(answer["data"], key=lambda row: row["index"])
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float32)
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
            fits = vectors.ndim == 2 and len(vectors) == len(texts)
            if not fits or not (np.isfinite(norms) & (norms > 0)).all():
                raise ValueError
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ToolError(
                f"{self._name} answered without embeddings of {len(texts)} texts: "
                f"{str(answer)[:200]}"
            ) from None
        return vectors / norms


def embedder(config: Config, key: str, name: str) -> Embedder | None:
    """Return the embedder of the table in [engines] that a config key names; None for ""."""
    if name and name not in config.engines:
        raise UserError(
            f"{key}={name!r} is not in [engines], which defines: "
            f"{', '.join(config.engines) or 'none'}"
        )
    return Embedder(name, config.engines[name]) if name else None
