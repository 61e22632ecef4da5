"""The tokens of a run that trainer and sampler disagree most about, as the page shows them."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flowtrain.metrics.jsonl import read_lines
from flowtrain.view.detokenize import text_of

NUM_SHOWN = 30
"""Tokens of a page."""


def worst_tokens(run_dir: Path, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Read the worst tokens of all steps, the worst first; [] where nothing was written down."""
    path = run_dir / "worst_tokens.jsonl"
    if not path.is_file():
        return []
    worst = heapq.nlargest(NUM_SHOWN, read_lines(path), key=distance)
    return [worst_token(each, tokenizer) for each in worst]


def worst_token(record: Mapping[str, Any], tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Convert a line of the log."""
    return {
        "rollout": f"train.{record['step']}.{record['group_index']}.{record['member']}",
        "step": record["step"],
        "sampler": record["sampler"],
        "trainer": record["trainer"],
        "before": _text(tokenizer, record["before"]),
        "text": _text(tokenizer, [record["id"]]),
        "after": _text(tokenizer, record["after"]),
    }


def distance(record: Mapping[str, Any]) -> float:
    """Return how far trainer and sampler are apart, in nats."""
    return abs(float(record["trainer"]) - float(record["sampler"]))


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """The ids as text, or as numbers where the tokenizer is gone."""
    return " ".join(map(str, ids)) if tokenizer is None else text_of(tokenizer, ids)
