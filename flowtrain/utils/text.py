"""Small helpers for texts that models write."""

from __future__ import annotations

import re
from itertools import pairwise

THINK_END = "</think>"
_WORD = re.compile(r"\w+")
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_BRACE = re.compile(
    r"(?<!\bnot )(?<!\bnot \$)\\(?:boxed|fbox)"
    r"(?:(?P<box>\s*\{)|\s+(?P<number>[-+]?[0-9][0-9.,/]*))|(?<!\\)\\[{}]|[{}]"
)
"""Braces, with the command before those of a box, and \\{ and \\}, which are none."""
_DENIED = re.compile(r"[\s}$*)\]]*(?:\?|(?:(?:is|was) )(?:not|wrong|incorrect|false)\b|isn't\b)")


def words(text: str) -> list[str]:
    """Return the words of a text, in order, without case."""
    return _WORD.findall(text.casefold())


def without_thinking(text: str) -> str:
    """Return what stands behind the last `</think>`; "" where thinking has begun and not ended."""
    _, has_ended, answer = text.rpartition(THINK_END)
    return answer if has_ended or not text.lstrip().startswith("<think>") else ""


def final_answer(text: str) -> str:
    """Return the content of the last `<answer>...</answer>`, else the whole text, stripped; of what
    a model said after it had thought.

    The time is linear in the length of the text.
    """
    content = text = without_thinking(text)
    for opening, closing in pairwise(_TAG.finditer(text)):
        if not opening[1] and closing[1]:
            content = text[opening.end() : closing.start()]
    return content.strip()


def marked_answer(text: str) -> str | None:
    r"""Return what a solution marks as its answer: the content of its last box, else the 72 of a
    last line "#### 72"; None where it marks nothing.

    The time is linear in the length of the text.
    """
    if (content := boxed(text)) is not None:
        return content
    last_line = text.rstrip().rpartition("\n")[2].lstrip()
    answer = last_line.removeprefix("####")
    return None if answer == last_line or answer.startswith("#") else answer.strip() or None


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} or \fbox{...} whose braces match, else None.

    Of "\boxed 2", which MATH has in places, it is "2"; of "not \boxed{2}" and "\boxed{2} is wrong"
    None. The time is linear in the text's length.
    """
    starts: list[int | None] = []  # of the contents of open boxes; None for other braces
    span = (-1, -1)  # spans compare by their starts: the greatest is of the last box
    for mark in _BRACE.finditer(text):
        if mark["number"]:
            span = max(span, mark.span("number"))
        elif mark[0] == "{" or mark["box"]:
            starts.append(mark.end() if mark["box"] else None)
        elif mark[0] == "}" and starts and (start := starts.pop()) is not None:
            span = max(span, (start, mark.start()))
    start, end = span
    is_answer = start >= 0 and not _DENIED.match(text, end)
    return text[start:end].strip() if is_answer else None


def encodable(text: str) -> str:
    """Replace halves of surrogate pairs, which neither tokenizers nor wires take."""
    return text.encode(errors="replace").decode()


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Escape what a terminal would obey or not show: control characters but those to `keep`,
    changes of the direction of writing, separators of lines, halves of surrogate pairs.

    ASCII ones become \x1b, others \u202e, so existing JSON stays the same JSON.
    """
    return _UNPRINTABLE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(letter: str) -> str:
    return f"\\x{ord(letter):02x}" if letter < " " else f"\\u{ord(letter):04x}"
