"""Multiple choice: the option that an answer names, by letter or by text."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from flowtrain.rewards.normal import normalise
from flowtrain.types import Task, UserError

_WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\b|[*_`${}]")
_LETTER = re.compile(r"(?:(?:option|choice|answer)[\s:(]*)?([a-z])", re.IGNORECASE)
_LABEL = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?([A-Z]|[a-z](?=\)))(?:\)|[.:]|\s+-)\s+(.*)")
_NAMED = re.compile(
    r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\b(?:\s+is)?\s*:?\s*\(?([A-Z])\b(?!['\u2019]|\)?\s*(?:,|/|and|or)\s*\(?[A-Z]\b)"
)
_DENIAL = re.compile(
    r"\b(?:not|no|never|except|unlikely|rather|instead|or|neither|nor|isnt|cannot)\b"
)


def choice(task: Task, answer: str) -> float:
    """Return 1.0 when the answer names the right option of `task.choices`, else 0.0.

    Raises UserError when `task.answers` name none of the options.
    """
    indices = [_accepted_option(accepted, task.choices) for accepted in task.answers]
    right = {normalise(task.choices[index]) for index in indices if index is not None}
    if not right:
        raise UserError(
            f"task {task.id!r}: scorer 'choice' needs an answer among the options "
            f"{task.choices!r}, not {task.answers!r}"
        )
    given = named_option(answer, task.choices)
    return float(given is not None and normalise(task.choices[given]) in right)


def named_option(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the one option that an answer names.

    An option is named by a letter alone ("B", "(b)", "option B."), a labelled text ("B. Oral
    ulcers", "B) because ..."), the text of the option, "the answer is B", and last by a sentence
    that has the text of one option and neither denies nor weighs. None for no option, for several,
    and for a letter beside the text of another option.
    """
    plain = " ".join(_WRAPPING.sub(" ", answer).split())
    texts = [normalise(option) for option in choices]
    letter = _LETTER.fullmatch(plain.strip(string.punctuation + string.whitespace))
    if letter and (index := _index(letter[1], choices)) is not None:
        return index
    label = _LABEL.fullmatch(plain)
    # Options may look like labels: "C. difficile".
    if label and plain.casefold() not in (option.casefold() for option in choices):
        index = _index(label[1], choices)
        text = normalise(label[2])
        return index if index is not None and (text not in texts or texts[index] == text) else None
    if normalise(plain) in texts:
        return texts.index(normalise(plain))
    named = {_index(letter, choices) for letter in _NAMED.findall(plain)} - {None}
    if named:
        return named.pop() if len(named) == 1 else None
    return _contained(plain, texts)


def _accepted_option(accepted: str, choices: Sequence[str]) -> int | None:
    """Return the index of an accepted answer, for which a text comes before a letter.

    Among the blood groups O, A, B and AB the accepted "A" is the second.
    """
    texts = [" ".join(option.split()).casefold() for option in choices]
    text = " ".join(accepted.split()).casefold()
    return texts.index(text) if text in texts else named_option(accepted, choices)


def _index(letter: str, choices: Sequence[str]) -> int | None:
    index = string.ascii_uppercase.index(letter.upper())
    return index if index < len(choices) else None


def _contained(sentence: str, texts: Sequence[str]) -> int | None:
    """Return the only option that the sentence contains, apart from options that are part of it."""
    words = f" {normalise(sentence)} "
    found = [text for text in dict.fromkeys(texts) if text and f" {text} " in words]
    longest = max(found, key=len, default="")
    if not longest or any(f" {text} " not in f" {longest} " for text in found):
        return None
    # An option's own words ("not contagious") deny nothing.
    return None if _DENIAL.search(words.replace(f" {longest} ", " ", 1)) else texts.index(longest)
