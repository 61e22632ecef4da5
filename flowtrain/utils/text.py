"""Small helpers for texts that models write."""

from __future__ import annotations

import re
from itertools import pairwise

_WORD = re.compile(r"\w+")
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)


def words(text: str) -> list[str]:
    """Return the words of a text, in order, without case."""
    return _WORD.findall(text.casefold())


def final_answer(text: str) -> str:
    """Return the content of the last `<answer>...</answer>`, else the whole text, stripped.

    The time is linear in the length of the text.
    """
    content = text
    for opening, closing in pairwise(_TAG.finditer(text)):
        if not opening[1] and closing[1]:
            content = text[opening.end() : closing.start()]
    return content.strip()


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which neither tokenizers nor wires take."""
    return text.encode(errors="replace").decode()
