"""Multiple choice: the option that an answer names, by letter or text.

The answer may be a letter, an option's text, both, or end with a sentence that states one: "the
answer is (B)", "The capital is Oslo". A sentence that denies, doubts or names two options states
none.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence

from flowtrain.records import Task, UserError
from flowtrain.rewards.normal import normalise, visible
from flowtrain.utils.text import boxed

_WORDS_IN_LATEX = re.compile(r"\\(?:boxed|text\w*|math(?:rm|bf|it))\s*\{([^{}]*)\}")
_POWER = re.compile(r"(?<=[\^_])\{([^\W_]|[-+]?[0-9]+)\}")
_MARKS = re.compile(r"\*\*|__|[$`]|(?<!\\)\\[()\[\],;! ]|(?<![^\W_])[*_](?=\S)|(?<=\S)[*_](?!\w)")
_SIGNS = re.compile(r"[-+<>=^|{}\[\]*/\\_%~?\u2264\u2265\u2260\u00b1'\"\u2032\u2033]|(?<=[0-9])!")
_DASH = re.compile(r"[\u2010-\u2015\u2212]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-'](?=[^\W\d_])")
_FRAME = re.compile(
    r"(?:(?:so|thus|hence|therefore|finally)[,:]?\s+|(?:actually|wait|no)[,.:!]+\s+)*"
    r"(?:i (?:think|believe|choose|pick|would go with)(?: that)?\s+)?"
    r"(?:it(?:'s| is| must be)\s+|(?:(?:the|my|our|final|correct|right|best|most likely)\s+)*"
    r"(?:answer|option|choice)\s*(?:(?:is|must be|should be)(?: therefore)?\b|:)?:?\s*)?"
    r"(?:most likely\s+)?(?:(?:option|choice|answer)[\s:]*)?",
    re.IGNORECASE,
)
"""Text that may precede a letter."""
_OPENER = r"(?:Wait|No|Actually|Sorry|Correction|But|Hmm)\b"
_LETTER = re.compile(r"[(\[\"']*([A-Za-z])(?![\w'+-])[)\]\"']*\s*([.:,)-]?)\s*")
_AFTER = re.compile(r"(?:is (?:the )?(?:correct|right|best)(?: (?:answer|option|choice))?)?[.!]*")
_STATED = re.compile(r"(?:\b(?:is|are|was|were|be)|:)\s+(?:most likely |the |an? )?", re.IGNORECASE)
_CONTRAST = re.compile(r"(?:it(?:'s| is) )?not (.+?),? but (?:rather )?(.+)", re.IGNORECASE)
_REASON = re.compile(
    r"[,.;\s]*(?:(?:this|that|it) is )?(?:because|since|due to|reason(?:ing)?:|explanation:)\s.*",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\?|n['\u2019]t\b|\b(?:not?|never|none|nor|neither|cannot|without|wrong|incorrect|false|untrue"
    r"|mistaken?|error|but|however|although|though|unless|if|or|wait|rather|sorry|otherwise|other"
    r"|kidding|joke|trap|distractor|opposite|except|anything|would|could|should|might|may|maybe"
    r"|perhaps|possibly|unlikely|hardly|least|some|say|says|said|thought|doubt|rule[ds]?|exclud\w*"
    r"|eliminat\w*|reject\w*|avoid|forget|first|once|guess\w*|ignore|suppos\w*|alleg\w*|believe[sd]"
    r"|claim\w*|assum\w*|pretend\w*|everyone|people|friend|almost|nearly|close|had)\b",
    re.IGNORECASE,
)


def choice(task: Task, answer: str) -> float:
    """Return 1.0 when the answer names the right option of `task.choices`, else 0.0.

    Raises UserError when `task.answers` name none of the options.
    """
    indices = [_accepted_option(accepted, task.choices) for accepted in task.answers]
    right = {_spaced(task.choices[index]) for index in indices if index is not None}
    if not right:
        raise UserError(
            f"task {task.id!r}: scorer 'choice' needs an answer among the options "
            f"{task.choices!r}, not {task.answers!r}"
        )
    option = named_option(answer, task.choices)
    return float(option is not None and _spaced(task.choices[option]) in right)


def named_option(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the one option that an answer names; None for none, for several, for a
    question, a denial or a doubt, and for a letter beside the text of another option or that is
    the text of another option.
    """
    text = "\n".join(filter(None, map(_plain, visible(answer).splitlines())))
    options = _same_text(answer, choices)
    match = re.fullmatch(rf"{_FRAME.pattern}{_LETTER.pattern}[.!]*", text, re.IGNORECASE)
    if match and not _mentions(text[: match.start(1)], choices):
        options |= {index for index in [_index(match[1], choices)] if index is not None}
    if options:
        return _only(options, choices)
    # A letter with its own text, which may have the words of a denial ("B. No tests required").
    if (letter := re.match(rf"{_FRAME.pattern}{_LETTER.pattern}", text, re.IGNORECASE)) and (
        (index := _index(letter[1], choices)) in _same_text(text[letter.end() :].strip(), choices)
        and not _mentions(text[: letter.start(1)], choices)
    ):
        return index
    ends = rf"(?<=[^\W_]{{2}}[.!?])\s+|(?<=[?!])\s+|\n(?![a-z][^)])|(?<=\.)\s+(?={_OPENER})"
    sentences = re.split(ends, text)
    while len(sentences) > 1 and not _without_reason(sentences[-1]):
        sentences.pop()
    *statements, last = [_option_in(_without_reason(sentence), choices) for sentence in sentences]
    is_last_word = re.match(rf"{_OPENER}|.*\bfinal\b", sentences[-1], re.IGNORECASE)
    return last if is_last_word or {*statements} <= {None, last} else None


def _option_in(sentence: str, choices: Sequence[str]) -> int | None:
    """Return the option that a sentence states."""
    if match := _CONTRAST.fullmatch(sentence.rstrip(".! ")):
        denied, stated = (named_option(part, choices) for part in match.groups())
        return stated if denied is not None and denied != stated else None
    frame = _FRAME.match(sentence)
    start = frame.end() if frame else 0
    if start and _mentions(sentence[:start], choices):
        return None
    match = _LETTER.match(sentence, start)
    if match and _index(match[1], choices) is not None:
        tail = sentence[match.end() :].strip("()\"' ")
        is_marked = match[0].strip() != match[1]  # "a cancer" and "A cancer" begin with an article
        if is_marked or _AFTER.fullmatch(tail) or (start and match[1] not in "aAI"):
            index = _index(match[1], choices)
            return index if _AFTER.fullmatch(tail) or index in _same_text(tail, choices) else None
    text = sentence.rstrip(".! ")
    if match := re.fullmatch(r"(.+?)\s*\(([A-Za-z])\)", text):
        named = named_option(match[1], choices)
        return named if _index(match[2], choices) == named else None
    is_numbered = re.search(r"(?:option|choice)[\s:#]*\Z", text[:start], re.IGNORECASE)
    places = [start] if start and not is_numbered else []
    for place in [*places, *(match.end() for match in _STATED.finditer(text))]:
        if options := _same_text(text[place:], choices):
            is_doubtful = _DOUBT.search(text[:place]) or _mentions(text[:place], choices)
            return None if is_doubtful else _only(options, choices)
    return None


def _without_reason(sentence: str) -> str:
    """Drop a reason that takes nothing back and names no other option."""
    reason = _REASON.search(sentence)
    is_plain = reason and not _DOUBT.search(reason[0]) and not re.search(r"\b[A-HJ-Z]\b", reason[0])
    return sentence[: reason.start()] if reason and is_plain else sentence


def _mentions(text: str, choices: Sequence[str]) -> bool:
    """Return whether a text has the text of an option."""
    options = filter(None, map(_plain, choices))
    return any(
        re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.IGNORECASE) for option in options
    )


def _accepted_option(accepted: str, choices: Sequence[str]) -> int | None:
    """Return the index of an accepted answer, for which a text comes before a letter.

    Among the blood groups O, A, B and AB the accepted "A" is the second.
    """
    options = _same_text(accepted, choices)
    return _only(options, choices) if options else named_option(accepted, choices)


def _same_text(text: str, choices: Sequence[str]) -> set[int]:
    """Return the options with that text, in the strictest sense in which there is any."""
    for text_form, *option_forms in zip(_forms(text), *map(_forms, choices), strict=True):
        if options := {index for index, form in enumerate(option_forms) if form == text_form}:
            return options
    return set()


def _forms(text: str) -> tuple[str, ...]:
    """Return a text in forms in which fewer and fewer differences count, but signs always."""
    plain = _plain(visible(text)).rstrip(".")
    signs = "".join(_SIGNS.findall(_HYPHEN.sub("", plain)))
    # "Hepatitis A" is not "Hepatitis", nor "A. Oslo" "Oslo", though "a" is an article.
    named = re.sub(r"\bA\b|\ba\b(?! \w)", "letter-a", plain)
    return _spaced(text), plain, plain.casefold(), f"{normalise(named)} {signs}"


def _plain(text: str) -> str:
    """Drop what marks a text: bold, dollar signs, a box, braces around one thing."""
    text = re.sub(r"\s[\"'](?=\.?$)", "", _DASH.sub("-", _MARKS.sub("", text)).strip())
    if (content := boxed(text)) and text == f"\\boxed{{{content}}}":
        text = content
    for _ in range(3):
        text = _WORDS_IN_LATEX.sub(r" \1 ", text)
    return _spaced(_POWER.sub(r"\1", text))


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _only(indices: set[int], choices: Sequence[str]) -> int | None:
    """Return the one option of several, among which those with the same text are one."""
    texts = {_spaced(choices[index]) for index in indices}
    return min(indices) if len(texts) == 1 else None


def _index(letter: str, choices: Sequence[str]) -> int | None:
    index = string.ascii_uppercase.find(letter.upper()) if len(letter) == 1 else -1
    return index if 0 <= index < len(choices) else None
