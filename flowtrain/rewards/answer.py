"""The final answer within a text, and what says that there is none."""

from __future__ import annotations

import re
from itertools import pairwise

MAX_CHARS = 2000
"""A final answer is short; of a longer text no rule reads more than its end, and no judge is asked.
"""

_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
_REFUSALS = frozenset(
    (
        *("none", "null", "n/a", "na", "unknown", "unclear", "undetermined", "unanswerable", "idk"),
        *(
            "no answer",
            "no idea",
            "no information",
            "not known",
            "not found",
            "not available",
            "i do not know",
            "i don't know",
        ),
        *(
            "cannot be determined",
            "can not be determined",
            "cannot determine",
            "unable to determine",
        ),
        *(
            "cannot answer",
            "unable to answer",
            "not enough information",
            "insufficient information",
        ),
    )
)


def final_answer(text: str) -> str:
    """The content of the last `<answer>...</answer>`, else the whole text; without white space
    around it. Linear in the text.
    """
    content = text
    for opening, closing in pairwise(_TAG.finditer(text)):
        if not opening[1] and closing[1]:
            content = text[opening.end() : closing.start()]
    return content.strip()


def is_refusal(answer: str) -> bool:
    """Whether a final answer is empty or says that there is none ("", "None", "I don't know.")."""
    plain = " ".join(answer[:100].casefold().replace("\u2019", "'").split()).strip(
        " .!?\"'*`()[]<>"
    )
    return not plain or plain in _REFUSALS
