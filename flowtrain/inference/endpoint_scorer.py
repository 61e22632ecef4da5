"""Log-probs of given tokens from a frozen model behind an endpoint: vLLM's server, which returns
those of a prompt (`prompt_logprobs`); OpenAI's own endpoints do not.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Sequence
from typing import Any

from flowtrain.inference.endpoint import Endpoint, parse_json, usage
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Sample

_ROUNDING = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""


class EndpointScorer:
    """See `Scorer`; at temperature 1."""

    def __init__(self, endpoint: Endpoint, model: str, timeout_s: float) -> None:
        """
        Args:
            model: name of the model at the endpoint.
            timeout_s: for a request with all its attempts.
        """
        self._endpoint = endpoint
        self._model = model
        self._timeout_s = timeout_s

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Raises EngineError when the endpoint does not answer, or without log-probs of the tokens
        it was asked for; UserError as `Endpoint.ask` does.
        """
        assert temperature == 1.0, "a server tells log-probs of prompts at temperature 1"
        return 0, await asyncio.gather(*map(self._logprobs, samples))

    async def _logprobs(self, sample: Sample) -> tuple[float, ...]:
        ids = [*sample.prompt_ids, *sample.response_ids]
        body: dict[str, object] = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,  # those of the prompt's own tokens alone
        }
        parse = functools.partial(_parse, ids=ids, start=len(sample.prompt_ids))
        return await self._endpoint.post("completions", body, parse, self._timeout_s)


def _parse(content: bytes, ids: Sequence[int], start: int) -> tuple[tuple[float, ...], int, int]:
    """Return the log-probs of `ids` from `start` on, and the numbers of tokens."""
    reply = parse_json(content)
    match reply:
        case {"choices": [{"prompt_logprobs": list(entries)}, *_]} if len(entries) == len(ids):
            pairs = zip(entries[start:], ids[start:], strict=True)
            return tuple(_logprob(by_token, token) for by_token, token in pairs), *usage(reply)
    raise EngineError(
        f"a reply without the log-probs of the {len(ids)} tokens that it was asked for "
        "(choices[0].prompt_logprobs, as vLLM's server has it)"
    )


def _logprob(by_token: Any, token: int) -> float:
    """Return the log-prob of a token at one place of the prompt: {"17": {"logprob": -0.5}}."""
    match by_token:
        case dict() if isinstance(entry := by_token.get(str(token)), dict):
            value = entry.get("logprob")
            if isinstance(value, int | float) and -math.inf < value <= _ROUNDING:
                return min(float(value), 0.0)
    raise EngineError(f"a reply without a log-prob of token {token} where it stands")
