"""Special tokens in messages: plain text there, whatever a tokenizer would make of them.

The result of a tool, say, must not end its message and speak in another role. So special tokens are
marked before a chat template renders the messages, and the marks are encoded in two pieces. Behind
an endpoint the tokenizer is not known, so whatever looks like a special token is broken up.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_OPEN, _CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")
"""Stands for a special token, by its number."""


LIKE_SPECIAL = re.compile(
    r"<(?=[^\s<>]{1,60}>)|\[(?=/?g?[A-Z][A-Z_]*\])|\](?=~!?b[\[\]])|\[(?=e~\[)"
)
"""The first letter of what looks like a special token of some model: <|im_end|>, </s>, [INST],
[gMASK], and MiniMax's ]~b]."""
_OUR_TAG = re.compile(r"</?answer>")
"""Tags that our own prompts ask for, and that are special to no model."""


class Rendered(str):
    """A text that a chat template wrote, with marks for the special tokens of its messages."""

    __slots__ = ()


class SpecialTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {str(token) for token in added if token.special} - {""}
        # Those first that contain others.
        self._texts = sorted(texts, key=lambda text: (-len(text), text))
        self._numbers = {text: number for number, text in enumerate(self._texts)}
        self._any = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")

    def marked(self, value: Any) -> Any:
        """Return a text, or a tree of lists and objects, with marks for special tokens."""

        def mark(match: re.Match[str]) -> str:
            return f"{_OPEN}{self._numbers[match[0]]}{_CLOSE}"

        return _with_texts(unmarked(value), lambda text: self._any.sub(mark, text))

    def encode(self, text: str) -> list[int]:
        """Encode a rendered text with its marks."""
        ids: list[int] = []
        for piece in self._pieces(text):
            ids += self._tokenizer.encode(piece, add_special_tokens=False) if piece else ()
        return ids

    def last_in(self, text: str) -> str:
        """Return a text from its last special token on; "" where it has none."""
        return next((text[match.start() :] for match in [*self._any.finditer(text)][-1:]), "")

    @functools.cached_property
    def first_ids(self) -> tuple[int, ...]:
        """The ids that the tokenizer puts before a text by itself, such as that of <bos>."""
        plain_ids = self._tokenizer.encode("a", add_special_tokens=False)
        ids, size = self._tokenizer.encode("a"), len(plain_ids)
        starts = range(len(ids) - size + 1)
        return next((tuple(ids[:n]) for n in starts if ids[n : n + size] == plain_ids), ())

    def _pieces(self, text: str) -> Iterator[str]:
        for i, piece in enumerate(_MARK.split(text)):
            # Cut after the first letter, a special token is none any more.
            special = self._texts[int(piece)] if i % 2 else ""
            yield from (special[:1], special[1:]) if special else (piece,)


def broken_up(text: str) -> str:
    """Return a text with a space behind the first letter of whatever looks like a special token."""

    def broken(match: re.Match[str]) -> str:
        return match[0] if _OUR_TAG.match(text, match.start()) else f"{match[0]} "

    return LIKE_SPECIAL.sub(broken, text)


def unmarked(value: Any) -> Any:
    """Return a text, or a tree of lists and objects, without anything that looks like a mark."""
    return _with_texts(value, lambda text: text.replace(_OPEN, "").replace(_CLOSE, ""))


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a tree of lists and objects with each of its texts changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(item, change) for item in value]
    return value


_cached = functools.lru_cache(maxsize=16)(SpecialTokens)


def special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens of a tokenizer, which are looked up once."""
    return _cached(tokenizer)


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """Encode a text in which only what a chat template wrote is special."""
    special = special_tokens(tokenizer)
    return special.encode(text if isinstance(text, Rendered) else special.marked(text))


def encode_prompt(tokenizer: Any, text: str) -> list[int]:
    """`encode_plain` a prompt, after what the tokenizer begins a text with where no chat template
    wrote it.
    """
    first = () if isinstance(text, Rendered) else special_tokens(tokenizer).first_ids
    return [*first, *encode_plain(tokenizer, text)]
