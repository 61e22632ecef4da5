"""Log-probs of given tokens, and the likeliest in their place, from a frozen model behind an
endpoint: vLLM's server, which returns those of a prompt (`prompt_logprobs`); OpenAI's do not.
"""

from __future__ import annotations

import asyncio
import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from flowtrain.inference.endpoint import Endpoint, parse_json, usage
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Likeliest, Sample
from flowtrain.records.checks import MIN_LOGPROB

T = TypeVar("T")
Ids = tuple[int, ...]
_ROUNDING = 1e-3
"""Nats by which rounding may lift a log-prob above 0."""
_BYTES, _MORE_BYTES = 256, 2**20
"""Bytes of the longest entry of a reply (a token's id, log-prob, rank and text) and its share of
the rest."""


class EndpointScorer:
    """See `Scorer`; at temperature 1. A log-prob is at least MIN_LOGPROB."""

    def __init__(self, endpoint: Endpoint, model: str, timeout_s: float) -> None:
        """
        Args:
            model: name of the model at the endpoint.
            timeout_s: for a request with all its attempts, from its turn on.
        """
        self._endpoint = endpoint
        self._model = model
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(endpoint.max_concurrency)

    async def score(
        self, samples: Sequence[Sample], temperature: float
    ) -> tuple[int, list[tuple[float, ...]]]:
        """Raises EngineError when the endpoint does not answer, or without log-probs of the tokens
        it was asked for; UserError as `Endpoint.ask` does.
        """
        assert temperature == 1.0, "a server tells log-probs of prompts at temperature 1"
        return 0, [tuple(found) for found in await self._ask(samples, 0, _own)]

    async def likeliest(self, samples: Sequence[Sample], num: int, vocab: int) -> list[Likeliest]:
        """Return the `num` tokens that are likeliest in the place of each token of each response,
        of a vocabulary of so many; raises as `score` does.
        """
        read = partial(_most, num=num, vocab=vocab)
        return [
            Likeliest(
                array("i", [token for place in places for token, _ in place]),
                array("f", [logprob for place in places for _, logprob in place]),
            )
            for places in await self._ask(samples, num, read)
        ]

    async def _ask(
        self, samples: Sequence[Sample], num: int, read: Callable[[Any, int], T]
    ) -> list[list[T]]:
        """Ask for `num` log-probs beside each token's own, and read what is said at each token of
        each response. A sequence that another one goes on from is read there.
        """
        starts = [len(s.prompt_ids) for s in samples]
        sequences = [s.prompt_ids + s.response_ids for s in samples]
        # In their order one that goes on from another comes right behind it.
        asked = [a for a, b in pairwise([*sorted(set(sequences)), ()]) if b[: len(a)] != a]
        places = [bisect_left(asked, sequence) for sequence in sequences]
        first: dict[int, int] = {}
        for place, start in zip(places, starts, strict=True):
            first[place] = min(start, first.get(place, start))
        said = await asyncio.gather(
            *(self._request(ids, first[n], num, read) for n, ids in enumerate(asked))
        )
        return [
            said[place][start - first[place] : len(sequence) - first[place]]
            for place, start, sequence in zip(places, starts, sequences, strict=True)
        ]

    async def _request(
        self, ids: Ids, start: int, num: int, read: Callable[[Any, int], T]
    ) -> list[T]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": num,  # beside those of the prompt's own tokens
        }
        parse = partial(_parse, ids=ids, start=start, read=read)
        max_bytes = len(ids) * (num + 1) * _BYTES + _MORE_BYTES
        async with self._free:
            return await self._endpoint.post("completions", body, parse, self._timeout_s, max_bytes)


def _parse(
    content: bytes, ids: Ids, start: int, read: Callable[[Any, int], T]
) -> tuple[list[T], int, int]:
    """Return the entries of `ids` from `start` on, and the numbers of tokens."""
    reply = parse_json(content)
    match reply:
        case {"choices": [{"prompt_logprobs": list(entries)}, *_]} if len(entries) == len(ids):
            pairs = zip(entries[start:], ids[start:], strict=True)
            return [read(by_token, token) for by_token, token in pairs], *usage(reply)
    raise EngineError(
        f"a reply without the log-probs of the {len(ids)} tokens that it was asked for "
        "(choices[0].prompt_logprobs, as vLLM's server has it)"
    )


def _own(by_token: Any, token: int) -> float:
    """Return the log-prob of a token at one place of the prompt: {"17": {"logprob": -0.5}}."""
    match by_token:
        case dict() if (value := _logprob(by_token.get(str(token)))) is not None:
            return value
    raise EngineError(f"a reply without a log-prob of token {token} where it stands")


def _most(by_token: Any, token: int, num: int, vocab: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of a place, the most likely first; its own may be beside them."""
    where = f"where token {token} stands"
    if not isinstance(by_token, dict) or not num <= len(by_token) <= num + 1:
        raise EngineError(f"a reply without the {num} likeliest tokens {where}")
    found = []
    for name, entry in by_token.items():
        value, is_id = _logprob(entry), re.fullmatch(r"0|[1-9][0-9]{0,9}", name)
        if value is None or not is_id or int(name) >= vocab:
            raise EngineError(
                f"a reply with {name[:20]!r} {where}: it has no log-prob, or is none of "
                f"{vocab} tokens"
            )
        found.append((int(name), value))
    if sum(math.exp(value) for _, value in found) > 1 + 2 * _ROUNDING:
        raise EngineError(f"a reply with probabilities that sum to more than 1 {where}")
    return sorted(found, key=lambda pair: -pair[1])[:num]


def _logprob(entry: Any) -> float | None:
    """Return an entry's log-prob; None where it has none."""
    match entry:
        case {"logprob": int() | float() as value} if -math.inf < value <= _ROUNDING:
            return min(float(max(value, MIN_LOGPROB)), 0.0)  # an int may be too large for a float
    return None
