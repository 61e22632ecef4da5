"""Checks of sampled tokens and of reward parts, for the trainer and the dataflow service."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from flowtrain.records.sample import Sample
from flowtrain.records.sampling import Call

MIN_LOGPROB, MAX_LOGPROB = -50.0, 1e-3
"""Log-probs of a sampler, in nats: no sampler draws a token of probability e^-50, whose ratio to
another policy would overflow the gradient's norm, and only rounding errors lie above 0."""
MAX_PARTS = 32
"""Parts of a reward, and"""
MAX_PART_NAME = 64
"""characters of a part's name."""


def length_problem(tokens: Sample | Call, max_positions: int) -> str:
    """Return an error text if prompt and response exceed the model's positions, else ""."""
    # The last response token is a target but never an input.
    num_inputs = len(tokens.prompt_ids) + len(tokens.response_ids) - 1
    if num_inputs <= max_positions:
        return ""
    return f"it has {num_inputs} tokens, but the model has {max_positions} positions"


def token_problem(tokens: Sample | Call, vocab_size: int) -> str:
    """Return why a model of `vocab_size` tokens cannot read prompt and response; "" if it can."""
    if not tokens.prompt_ids:
        return "its prompt is empty"
    for ids in (tokens.prompt_ids, tokens.response_ids):
        if problem := _id_problem(ids, vocab_size):
            return problem
    mask, response_ids = tokens.sampling_mask, tokens.response_ids
    if problem := routes_problem(tokens):
        return problem
    if mask is None or not response_ids:
        return ""
    counts = mask.counts
    if len(counts) != len(response_ids) or min(counts) < 1 or sum(counts) != len(mask.ids):
        return "its sampling mask does not fit its response"
    if problem := _id_problem(mask.ids, vocab_size):
        return f"in its sampling mask: {problem}"
    end = 0
    for token, count in zip(response_ids, counts, strict=True):
        start, end = end, end + count
        choices = set(mask.ids[start:end])
        if token not in choices:
            return f"token {token} is not in its sampling mask"
        if len(choices) < count:
            return f"the sampling mask of token {token} contains an id twice"
    return ""


def routes_problem(tokens: Sample | Call, sizes: tuple[int, int, int] | None = None) -> str:
    """Return why routes do not match the tokens or a model with `sizes`: (layers with a router,
    experts chosen per token, all experts); "" if they match or are None.
    """
    routes = tokens.routes
    if routes is None or not tokens.response_ids:
        return ""
    num_inputs = len(tokens.prompt_ids) + len(tokens.response_ids) - 1
    dimensions = routes.num_layers, routes.num_chosen
    if min(dimensions) < 1 or len(routes.experts) != num_inputs * routes.bytes_per_token:
        return f"its routes do not cover {num_inputs} tokens"
    if sizes is None:
        return ""
    words = memoryview(routes.experts).cast("H" if routes.is_wide else "B")
    if dimensions != sizes[:2] or max(words) >= sizes[2]:
        return "its routes belong to another model"
    return ""


def _id_problem(ids: Iterable[int], vocab_size: int) -> str:
    extremes = max(ids, default=0), min(ids, default=0)
    return next(
        (
            f"{token_id} is not among the model's {vocab_size} tokens"
            for token_id in extremes
            if not 0 <= token_id < vocab_size
        ),
        "",
    )


def logprob_problem(logprobs: Iterable[float]) -> str:
    """Return an error text if a log-prob is impossible for a sampled token, else ""."""
    for logprob in logprobs:
        if not MIN_LOGPROB <= logprob <= MAX_LOGPROB:
            return (
                f"a sampled token has the log-prob {logprob:g}, outside of "
                f"{MIN_LOGPROB:g} to {MAX_LOGPROB:g}"
            )
    return ""


def part_problem(parts: Mapping[str, float]) -> str:
    """Return an error text for invalid parts of a reward, else ""."""
    if len(parts) > MAX_PARTS:
        return f"{len(parts)} parts, {MAX_PARTS} are allowed"
    for name, part in parts.items():
        if not 0 < len(name) <= MAX_PART_NAME or not name.isprintable():
            return f"a part's name must be 1 to {MAX_PART_NAME} printable characters"
        if not math.isfinite(part):
            return f"its part {name!r} is {part}"
    return ""
