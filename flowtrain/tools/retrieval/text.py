"""Check queries, cut texts into chunks, and fit lists of texts into a number of characters."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flowtrain.tools.base import ToolError
from flowtrain.utils.text import encodable

MAX_QUERY = 2000
"""Characters; search services take no more."""
_WORD = re.compile(r"\S{1,64}")
"""A text without spaces, such as Chinese or an endless line, is cut into words of this length."""


def check_query(query: str) -> str:
    """Return the query on one line; raises ToolError when it is empty or too long."""
    query = " ".join(encodable(query).split())
    if not query:
        raise ToolError("empty query")
    if len(query) > MAX_QUERY:
        raise ToolError(
            f"the query has {len(query)} characters; ask for one thing in at most {MAX_QUERY}"
        )
    return query


def split_words(text: str) -> list[str]:
    return _WORD.findall(text)


def chunks(words: Sequence[str], size: int, overlap: int) -> list[list[str]]:
    """Cut into pieces of `size` words that overlap by `overlap`; the last may be shorter.

    >>> chunks("a b c d e".split(), 3, 1)
    [['a', 'b', 'c'], ['c', 'd', 'e']]
    """
    assert 0 <= overlap < size
    starts = range(0, max(1, len(words) - overlap), size - overlap) if words else ()
    return [list(words[start : start + size]) for start in starts]


def fit(items: Sequence[str], max_chars: int) -> str:
    """Join the first items with empty lines between them, up to `max_chars` characters.

    The first item that does not fit is cut if at least a fifth of the limit is left, else dropped.
    """
    text = ""
    for item in items:
        separator = "\n\n" if text else ""
        room = max_chars - len(text) - len(separator)
        if len(item) > room:
            return text + (separator + cut(item, room) if room >= max_chars // 5 else "")
        text += separator + item
    return text


def cut(text: str, max_chars: int) -> str:
    """Return the text, or its beginning with an ellipsis."""
    if len(text) <= max_chars:
        return text
    return text[: max(0, max_chars - 3)].rstrip() + "..."[:max_chars]
