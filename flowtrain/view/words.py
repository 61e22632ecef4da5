"""Token ids as text, by the tokenizer that the run left beside its logs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, each of which may be a token of its own."""


def find_tokenizer(run_dir: Path, model_path: str) -> Tokenizer | None:
    """That of the run, of its newest checkpoint or of the model folder it started from; None where none of them is there (any more)."""
    checkpoints = sorted(run_dir.glob("checkpoints/step_????????/tokenizer.json"), reverse=True)
    candidates = (run_dir / "tokenizer.json", *checkpoints, Path(model_path) / "tokenizer.json")
    found = next((path for path in candidates if path.is_file()), None)
    return None if found is None else Tokenizer.from_file(str(found))


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; "" for one that holds a part of a character, which the token that completes it shows."""
    texts: list[str] = []
    start = read = 0  # what came before matters to a tokenizer: ids from `start` are decoded again, those up to `read` have been shown
    for index in range(len(ids)):
        before = text_of(tokenizer, ids[start:read])
        after = text_of(tokenizer, ids[start : index + 1])
        is_part = after.endswith("\ufffd") and index - read + 1 < _LONGEST_CHARACTER and index + 1 < len(ids)
        texts.append("" if is_part else after[len(before) :])
        if not is_part:
            start, read = read, index + 1
    return texts
