"""Small helpers for texts that models write."""

from __future__ import annotations

import re
from itertools import pairwise

_WORD = re.compile(r"\w+")
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
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


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Escape what a terminal would obey or not show: control characters but those to `keep`,
    changes of the direction of writing, separators of lines, halves of surrogate pairs.

    Those of ASCII become \x1b, others \u202e, so JSON that has been made stays the same JSON.
    """
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escape(found[0]), text)


def _escape(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if letter < " " else f"\\u{ord(letter):04x}"
