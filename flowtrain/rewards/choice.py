"""Multiple choice: the option that an answer names, by letter or by text."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from flowtrain.rewards.normal import normalise
from flowtrain.rewards.numerals import in_digits
from flowtrain.types import Task, UserError

_WRAPPING = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\b|[*_`${}]")
_LETTER = re.compile(r"(?:(?:option|choice|answer)[\s:(]*)?([a-z])", re.IGNORECASE)
_LABEL = re.compile(r"(?:(?:[Oo]ption|[Cc]hoice)\s+)?\(?([A-Z]|[a-z](?=\)))(?:\)|[.:]|\s+-)\s+(.*)")
_NAMED = re.compile(
    r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\b(?:\s+is)?\s*:?\s*\(?([A-Z])\b"
    r"(?!['\u2019]|\)?\s*(?:,|/|and|or)\s*\(?[A-Z]\b)"
)
_PLACE = re.compile(
    r"(?:(?:the )?answer is )?(?:the )?"
    r"(?:(?P<ordinal>[0-9]{1,2})(?:st|nd|rd|th) (?:option|choice|answer|1)"
    r"|(?:option|choice|answer)(?: (?:number|no\.?))?[\s:#(]*(?P<number>[0-9]{1,2}))"
    r"\b\)?(?P<rest>.*)",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"\b(?:not|isn['\u2019]?t|never|except|neither|exclude|eliminate)\s+(?:the\s+)?"
    r"(?:option|choice|answer|\(?[A-Z]\b)"
    r"|\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+\(?[A-Z]\)?\s+"
    r"(?:is|was|seems)\s+(?:not|wrong|incorrect|false)\b"
)
_CONTRAST = re.compile(
    r"(?:it(?:'s| is) )?not (?P<denied>.+?),? but (?:rather )?(?P<named>.+)", re.IGNORECASE
)
_DENIAL = re.compile(
    r"\b(?:not|no|never|except|unlikely|rather|instead|or|"
    r"neither|nor|isnt|cannot|wrong|incorrect|false)\b"
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
    ulcers", "B) because ..."), the text of the option, its place ("Option 2", "the second option"),
    "the answer is B", "not A but B", and last by a sentence that has the text of one option and
    neither denies nor weighs. None for no option, for several, and for a letter or a place beside
    the text of another option; a letter that is the text of another option is none.
    """
    plain = " ".join(_WRAPPING.sub(" ", answer).split())
    texts = [normalise(option) for option in choices]
    letter = _LETTER.fullmatch(plain.strip(string.punctuation + string.whitespace))
    if letter and (index := _index(letter[1], choices)) is not None:
        bare = normalise(plain) if normalise(plain) in texts else letter[1].casefold()
        return index if bare not in texts or texts[index] == bare else None
    label = _LABEL.fullmatch(plain)
    # Options may look like labels: "C. difficile".
    if label and plain.casefold() not in (option.casefold() for option in choices):
        return _agreeing(_index(label[1], choices), label[2], texts)
    if normalise(plain) in texts:
        return texts.index(normalise(plain))
    if place := _PLACE.fullmatch(in_digits(plain)):
        return _placed(place, texts)
    named = {_index(letter, choices) for letter in _NAMED.findall(plain)} - {None}
    if named:
        if _DENIED.search(plain):
            return None
        return _agreeing(named.pop(), _NAMED.sub(" ", plain), texts) if len(named) == 1 else None
    if contrast := _CONTRAST.fullmatch(plain):
        denied, meant = (named_option(contrast[part], choices) for part in ("denied", "named"))
        return meant if denied is not None and denied != meant else None
    return _contained(plain, texts)


def _agreeing(index: int | None, rest: str, texts: Sequence[str]) -> int | None:
    """Return the index unless the rest of the answer has the text of another option alone, or of
    several as alternatives.
    """
    if index is None:
        return None
    words = f" {normalise(rest)} "
    found = {text for text in texts if text and f" {text} " in words}
    longest = {text for text in found if not any(text != each and text in each for each in found)}
    if longest and texts[index] not in longest:
        # A letter of an explanation ("a") is no option's text.
        return index if all(len(text) == 1 for text in longest) else None
    is_weighed = len(longest) > 1 and " or " in words
    return None if is_weighed else index


def _placed(place: re.Match[str], texts: Sequence[str]) -> int | None:
    """Return the option of "option 2", unless options are numbers themselves."""
    index = int(place["ordinal"] or place["number"]) - 1
    rest = place["rest"].strip(string.punctuation + string.whitespace)
    has_numbers = any(re.fullmatch(r"[0-9]+\W?.*", text) for text in texts)
    is_other = bool(rest) and bool(
        re.match(r"(?:and|to|[0-9])\b", rest)
        or _DENIAL.search(normalise(rest))
        or _agreeing(index, rest, texts) is None
    )
    return index if 0 <= index < len(texts) and not has_numbers and not is_other else None


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
