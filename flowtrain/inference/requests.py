"""Shared rules of engines: valid requests, the end of a response, and the record of a call."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

from flowtrain.inference.token_chat import message_end
from flowtrain.records import (
    Call,
    FinishReason,
    Routes,
    Sampling,
    SamplingMask,
    UserError,
    VersionSpan,
)

_SLACK = 8
"""Number of leading tokens that a tokenizer may decode differently."""


_ROUNDING = 1e-4
"""By as much the probabilities of tokens that were sampled from may add up to less than 1."""


class Decodes(Protocol):
    """The part of a tokenizer that stop strings need."""

    @property
    def eos_token_id(self) -> int | None: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


def check_request(prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int) -> None:
    """Raise UserError if prompt and response exceed `max_tokens`, if either is empty, and for top-p
    without top-k.
    """
    num_prompt = len(prompt_ids)
    num_new = sampling.max_new_tokens
    if num_prompt < 1 or num_new < 1 or num_prompt + num_new > max_tokens:
        raise UserError(
            f"a prompt of {num_prompt} tokens with max_new_tokens={num_new} does not fit: both "
            f"must be at least 1 and their sum at most {max_tokens}"
        )
    if sampling.top_p < 1 and not sampling.top_k:
        raise UserError(
            f"top_p={sampling.top_p} needs a top_k above 0, which bounds how many tokens it keeps"
        )


def stop_ids(generation_config: object, tokenizer: Decodes) -> frozenset[int]:
    """Return the tokens that end a response: from the generation config, the tokenizer, and the
    chat template's end of a reply.
    """
    eos = getattr(generation_config, "eos_token_id", None)
    model_ids = [eos] if isinstance(eos, int) else list(eos or [])
    tokenizer_ids = (tokenizer.eos_token_id, message_end(tokenizer))
    return frozenset(token for token in (*model_ids, *tokenizer_ids) if token is not None)


def name_stop_ids(generation_config: Any, tokenizer: Decodes) -> None:
    """Append missing `stop_ids` to a generation config."""
    eos = generation_config.eos_token_id
    model_ids = [eos] if isinstance(eos, int) else list(eos or [])
    if missing := sorted(stop_ids(generation_config, tokenizer).difference(model_ids)):
        is_single = not model_ids and len(missing) == 1
        generation_config.eos_token_id = missing[0] if is_single else [*model_ids, *missing]


def hits_stop_string(ids: Sequence[int], stop_strings: Sequence[str], tokenizer: Decodes) -> bool:
    """Return whether the last token of a response completes a stop string outside of the prompt."""
    return bool(stop_strings) and _hits(ids, len(ids), stop_strings, tokenizer)


def _hits(ids: Sequence[int], end: int, stop_strings: Sequence[str], tokenizer: Decodes) -> bool:
    """Return whether the first `end` tokens hold a stop string that the last of them completes."""
    # A token has at least one byte of the text. To decode or copy all of it at every token would
    # take quadratic time; it is decoded once its end shows that it is worth it.
    num_last = max(len(stop.encode()) for stop in stop_strings) + _SLACK
    for first in (max(0, end - num_last), 0):
        text = tokenizer.decode(ids[first:end])
        if not any(stop in text for stop in stop_strings):
            return False
    return True


def stop_place(
    ids: Sequence[int], start: int, stop_strings: Sequence[str], tokenizer: Decodes
) -> int:
    """Return the number of tokens up to the first one from `start` on that completes a stop string;
    0: none does.
    """
    ends = range(start + 1, len(ids) + 1)
    return next((end for end in ends if _hits(ids, end, stop_strings, tokenizer)), 0)


class FlatLogprobs(Protocol):
    """vLLM's log-probs: for each sampled token its own entry, then the most likely tokens in
    descending order.
    """

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def kept_sets(flat: FlatLogprobs) -> list[list[int]]:
    """Return the tokens that could be sampled at each position; the remaining entries have log-prob
    -inf.

    More tokens can tie with the last one than the request asked for. The sampled token is left out
    of such an incomplete set, so that its sample is excluded as `FilterReason.TOKEN`.
    """
    kept = []
    for start, end in zip(flat.start_indices, flat.end_indices, strict=True):
        # The entry at `start` is the sampled token's own, which the ranking holds once more.
        stop = bisect_left(flat.logprobs, True, start + 1, end, key=(-math.inf).__eq__)
        ids = flat.token_ids[start + 1 : stop]
        if stop == end and sum(map(math.exp, flat.logprobs[start + 1 : end])) < 1 - _ROUNDING:
            ids = [token for token in ids if token != flat.token_ids[start]]
        kept.append(ids)
    return kept


def answer(
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    labels: Sequence[tuple[int, int]],
    reason: FinishReason,
    kept: Sequence[Sequence[int]] | None = None,
    entropies: Sequence[float] = (),
    routes: Routes | None = None,
) -> Call:
    """Return the call of a prompt and its response `ids`.

    Args:
        labels: (version, first token) of each span, in order.
        kept: the tokens that each id was sampled from; None: all.
        entropies: in nats, one per id, if the engine records them.
    """
    assert len(ids) == len(logprobs) and (kept is None or len(kept) == len(ids))
    ends = [*(start for _, start in labels[1:]), len(ids)]
    spans = [
        VersionSpan(start, min(end, len(ids)), version)
        for (version, start), end in zip(labels, ends, strict=True)
    ]
    # A span is empty where the next update came before a token.
    filled_spans = tuple(span for span in spans if span.start < span.end)
    return Call(
        tuple(prompt_ids),
        tuple(ids),
        tuple(logprobs),
        spans=filled_spans or (VersionSpan(0, 0, labels[-1][0]),),
        finish_reason=reason,
        sampling_mask=None if kept is None else SamplingMask.of(kept),
        entropies=tuple(entropies),
        routes=routes,
    )
