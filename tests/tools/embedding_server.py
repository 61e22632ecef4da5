"""A fake of OpenAI's /embeddings, in which texts are alike that share words."""

from __future__ import annotations

import hashlib
import json
import re

from web_servers import Answer, Handler

DIMENSIONS = 256


def vector(text: str) -> list[float]:
    """Counts of the words, each at a place that its hash picks; never all zero."""
    counts = [0.0] * DIMENSIONS
    for word in re.findall(r"\w+", text.casefold()) or ["nothing"]:
        counts[
            int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "big")
            % DIMENSIONS
        ] += 1.0
    return counts


def embeddings() -> Answer:
    """platform.openai.com/docs/api-reference/embeddings, in another order than the texts."""

    def answer(handler: Handler) -> None:
        asked = json.loads(handler.body)
        assert (handler.path, set(asked)) == ("/v1/embeddings", {"model", "input"})
        assert 1 <= len(asked["input"]) <= 64
        data = [
            {"object": "embedding", "index": place, "embedding": vector(text)}
            for place, text in enumerate(asked["input"])
        ]
        usage = {"prompt_tokens": 8, "total_tokens": 8}
        handler.reply(
            200,
            json.dumps(
                {"object": "list", "data": data[::-1], "model": asked["model"], "usage": usage}
            ),
        )

    return answer
