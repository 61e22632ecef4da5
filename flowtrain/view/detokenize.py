"""Token ids as text, by the tokenizer that the run left beside its logs."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Special tokens included."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; "" for one that holds a part of a character, which the token
    that completes it shows.
    """
    texts: list[str] = []
    # Ids from `start` are decoded together, for what is before a token matters; all before `read`
    # are whole.
    start = read = num_shown = 0
    for index in range(len(ids)):
        text = text_of(tokenizer, ids[start : index + 1])
        # Only the last character may still change: the bytes that are there may be the start of
        # one.
        is_open = text.endswith("\ufffd") and index + 1 < len(ids)
        settled = text[:-1] if is_open else text
        texts.append(settled[num_shown:])
        num_shown = len(settled)
        if not is_open:
            start, read = read, index + 1
            num_shown = len(text_of(tokenizer, ids[start:read]))
    return texts
