"""The tokens of a run that trainer and sampler disagree most about, as the page shows them."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flowtrain.report.jsonl import read_lines
from flowtrain.report.viewer.detokenize import text_of

NUM_SHOWN = 30
"""Tokens of a page."""


def worst_tokens(run_dir: Path, tokenizer: Tokenizer | None) -> list[dict[str, Any]]:
    """Read the worst tokens of all steps, the worst first; [] where nothing was written down."""
    path = run_dir / "worst_tokens.jsonl"
    if not path.is_file():
        return []
    return [
        {
            "rollout": f"train.{each['step']}.{each['group_index']}.{each['member']}",
            "step": each["step"],
            "sampler": each["sampler"],
            "trainer": each["trainer"],
            "before": _text(tokenizer, each["before"]),
            "text": _text(tokenizer, [each["id"]]),
            "after": _text(tokenizer, each["after"]),
        }
        for each in heapq.nlargest(NUM_SHOWN, read_lines(path), key=_distance)
    ]


def _distance(record: dict[str, Any]) -> float:
    return abs(float(record["trainer"]) - float(record["sampler"]))


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """The ids as text, or as numbers where the tokenizer is gone."""
    return " ".join(map(str, ids)) if tokenizer is None else text_of(tokenizer, ids)
