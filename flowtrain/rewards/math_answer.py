"""Compare mathematical answers: by their text, and where they are numbers by their value.

Other notation is left to math-verify (`symbolic.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from flowtrain.records import Task
from flowtrain.rewards.latex import tidy
from flowtrain.rewards.numerals import in_digits
from flowtrain.rewards.statements import NOUN, Numbers, is_same

MAX_LENGTH = 1000
"""Characters of an answer, or of its box; longer ones are wrong."""

_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),? )?(?:it|they|there|[a-z]|(?:(?:the|our|my|its) )?"
    rf"(?:final |correct )?{NOUN}"
    r"(?: (?:of|to|for)(?: (?!wrong|not|incorrect)[\w\\^(){}]+){1,4})?)"
    r"(?: (?:is|are|equals|is equal to)(?: equal to)?:? |: ?)",
    re.IGNORECASE,
)
"""Text that may precede a value; any other sentence ("I doubt that it is 5") states none."""
_COUNTED = re.compile(r"(.*[0-9)}]) ([A-Za-z]{3,})")
_AFTER_UNIT = re.compile(r"(?<=[A-Za-z]{2}) (?:from [A-Z]|long|wide|tall|high|deep|old|apart)$")
_MINUS = re.compile(r"^(?:minus|negative) (?=[0-9\\])", re.IGNORECASE)
_NONE = re.compile(
    r"(?:there (?:is|are) )?no solutions?|(?:the )?empty set|\\emptyset|\u2205|\\\{\s*\\\}",
    re.IGNORECASE,
)


def math_match(task: Task, answer: str) -> float:
    """Return 1.0 when the answer is the text of an accepted one, or its value where both are
    numbers or lists of them, else 0.0.
    """
    return float(any(is_same(*pair, Numbers()) for pair in pairs(task, answer)))


def pairs(task: Task, answer: str) -> Iterator[tuple[str, str]]:
    """Yield the ways to read the answer, each beside one to read an accepted answer."""
    texts = [_plain(text, task.question) for text in readings(answer)]
    for accepted in task.answers:
        for gold in _logarithms(accepted, _plain(tidy(accepted), task.question)):
            for text in texts:
                yield from ((reading, gold) for reading in _logarithms(answer, text))


def readings(answer: str) -> list[str]:
    """Return the tidied answer, and what its last sentence says that it is."""
    text = tidy(answer)
    if not text or len(text) > MAX_LENGTH:
        return []
    texts = [text]
    for part in (text, tidy(re.split(r"\n(?![a-z])", answer.strip())[-1])):
        last = re.split(r"(?<=[.!?])\s+", part)[-1]
        if (lead := _LEAD.match(last)) and last[lead.end() :].strip() not in texts:
            texts.append(last[lead.end() :].strip())
    return texts


def _logarithms(text: str, tidied: str) -> list[str]:
    r"""Return both ways to read log(2): as \log, and as Python does, which prints it for \ln."""
    is_python = "\\log" in tidied and "\\log" not in text
    return [tidied, tidied.replace("\\log", "\\ln")] if is_python else [tidied]


def _plain(text: str, question: str) -> str:
    """Write numbers in digits, without what is counted where the question speaks of it."""
    text = _MINUS.sub("-", in_digits(text))
    if _NONE.fullmatch(text):
        return "\\emptyset"
    text = _AFTER_UNIT.sub("", text)
    match = _COUNTED.fullmatch(text)
    is_asked = match and re.search(rf"\b{re.escape(match[2])}\b", question, re.IGNORECASE)
    return match[1] if match and is_asked else text
