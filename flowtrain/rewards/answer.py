"""The final answer within a text, and answers that are none."""

from __future__ import annotations

import re
from itertools import pairwise

MAX_CHARS = 2000
"""Characters that rules read, at the end of a longer text, which no judge is asked about."""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_REFUSALS = {
    *("none", "null", "n/a", "na", "unknown", "unclear", "undetermined", "unanswerable", "idk"),
    *("no answer", "no idea", "no information", "not known", "not found", "not available"),
    *("i do not know", "i don't know", "cannot answer", "unable to answer", "cannot determine"),
    *("unable to determine", "cannot be determined", "can not be determined"),
    *("not enough information", "insufficient information"),
}


def final_answer(text: str) -> str:
    """Return the content of the last `<answer>...</answer>`, else the whole text, stripped.

    The time is linear in the length of the text.
    """
    content = text
    for opening, closing in pairwise(_TAG.finditer(text)):
        if not opening[1] and closing[1]:
            content = text[opening.end() : closing.start()]
    return content.strip()


def is_refusal(answer: str) -> bool:
    """Return whether a final answer gives none ("", "None", "I don't know.")."""
    plain = " ".join(answer[:100].casefold().replace("\u2019", "'").split())
    plain = plain.strip(" .!?\"'*`()[]<>")
    return not plain or plain in _REFUSALS
