"""Multiple choice: the option that an answer names, by letter, place or text.

A sentence names an option when it holds nothing beside it but words of `_FRAME`, as in "So the
answer must be (B) Oslo", and perhaps a reason. All other sentences name none: whatever they say
("I rule out Oslo") may deny it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator, Sequence

from flowtrain.rewards.normal import normalise
from flowtrain.types import Task, UserError
from flowtrain.utils.text import boxed

_WORDS_IN_LATEX = re.compile(r"\\(?:boxed|text\w*|math(?:rm|bf|it))\s*\{([^{}]*)\}")
_POWER = re.compile(r"(?<=[\^_])\{([^\W_]|[-+]?[0-9]+)\}")
_MARKS = re.compile(r"\*\*|__|[$`]|(?<!\\)\\[()\[\],;! ]|(?<![^\W_])[*_](?=\S)|(?<=\S)[*_](?!\w)")
_SIGNS = re.compile(r"[-+<>=^|{}\[\]*/\\_%~?\u2264\u2265\u2260\u00b1'\"\u2032\u2033]|(?<=[0-9])!")
_DASH = re.compile(r"[\u2010-\u2015\u2212]")
_HYPHEN = re.compile(r"(?<=[^\W\d_])[-'](?=[^\W\d_])")
_LETTER = re.compile(
    r"(?:option|choice|answer)?[\s:]*[(\[\"']*([a-z])[)\]\"']*[.:,;!]*", re.IGNORECASE
)
_NAMED = re.compile(
    r"\b(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s*:?\s*\(?([A-Za-z])\b\)?(?!['\u2019-])"
    r"|(?<![\w(])\(([A-Za-z])\)(?!\w)"
    r"|^([a-z])\)(?=\s)"
    r"|(?<![\w'\u2019+-])(?P<bare>[A-HJ-Z])(?![\w'\u2019+-])",
    re.MULTILINE,
)
_PLACES = {
    word: place
    for place, row in enumerate(
        ("first 1st one 1", "second 2nd two 2", "third 3rd three 3", "fourth 4th four 4")
    )
    for word in row.split()
}
_PLACE = re.compile(
    rf"\b(?:({'|'.join(_PLACES)}) (?:option|choice|answer|one)|(?:option|choice|answer)"
    rf"(?: number| no\.?)?[\s:#(]*({'|'.join(_PLACES)}))\b\)?(?!\.?[0-9])",
    re.IGNORECASE,
)
_BEFORE_PLACE = re.compile(r"(?:option|choice)(?: number| no\.?)?[\s:#(]*\Z", re.IGNORECASE)
_MENTION = "[\ue000-\uf8ff]"
_LABEL = re.compile(rf"^({_MENTION})\.(?=\s*{_MENTION})", re.MULTILINE)
_CONTRAST = re.compile(
    rf"(?:it(?:'s| is) )?not {_MENTION},? but (?:rather )?{_MENTION}[.! ]*", re.IGNORECASE
)
_OPENERS = re.compile(
    r"(?:(?:wait|no|sorry|correction|on second thought)[,.:;!\u2014]+\s*"
    r"|(?:actually|so|thus|therefore|hence|finally|in conclusion)\b,?\s*)+",
    re.IGNORECASE,
)
_REASON = re.compile(
    r"(?:(?:this|that|it) is )?\b(?:because|since|due to)\b|^(?:reason(?:ing)?|explanation):",
    re.IGNORECASE,
)
_DOUBT = re.compile(
    r"\?|n['\u2019]t\b|\b(?:not?|never|nor|neither|wrong|incorrect|false|untrue|mistaken?|error|but"
    r"|however|although|though|unless|if|or|wait|actually|instead|rather|sorry|otherwise|other"
    r"|kidding|joke|trap|distractor|except|would|should|unlikely|hardly)\b",
    re.IGNORECASE,
)
_WORDS = (
    "a an the is it it's this that be my our final best correct right true of these "
    "answer option choice letter must should would i i'd we we'd choose chose pick picked "
    "select selected go with think believe say conclude get am confident sure "
    "most likely probably definitely clearly certainly therefore thus hence going "
    ", ; : . ( ) \" ' \u201c \u201d - \u2013 \u2014"
)
_FRAME = frozenset(_WORDS.split())
"""Words and signs of a sentence that states its option."""
_QUESTION = ("is", "am", "must", "should", "would")
_SEVERAL = -1
"""Stands for several options that were stated side by side."""


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
    given = named_option(answer, task.choices)
    return float(given is not None and _spaced(task.choices[given]) in right)


def named_option(answer: str, choices: Sequence[str]) -> int | None:
    """Return the index of the one option that an answer names.

    It is a letter alone ("B", "(b)", "option B."), the text of the option, or both; its place
    ("Option 2", "the second option"); or what the last sentence with an option states of it. None
    for no option, for several, for a question, a denial or a sentence that is not known, and for a
    letter beside the text of another option or that is the text of another option.
    """
    plain = re.sub(_MENTION, "?", "\n".join(map(_plain, answer.splitlines()))).strip()
    whole = _same_text(answer, choices)
    if (letter := _LETTER.fullmatch(plain)) and (index := _index(letter[1], choices)) is not None:
        whole.add(index)
    if whole:
        return _only(whole, choices)
    options: list[set[int]] = []
    current: int | None = None
    for sentence in _sentences(plain, choices, options):
        mentions = [options[ord(each) - 0xE000] for each in re.findall(_MENTION, sentence)]
        is_for_it = all(_only(each, choices) == current for each in mentions)
        if not mentions or (is_for_it and _is_reason(sentence)):
            current = current if _is_reason(sentence) else None
            continue
        body = sentence[found.end() :] if (found := _OPENERS.match(sentence)) else sentence
        stated = _stated(body, options, choices)
        is_last_word = body != sentence or "final" in body.casefold()
        is_another = stated is not None and current not in (None, stated)
        current = _SEVERAL if is_another and not is_last_word else stated
    return None if current == _SEVERAL else current


def _sentences(text: str, choices: Sequence[str], options: list[set[int]]) -> Iterator[str]:
    """Yield sentences in which a private character, of the number of its entry in `options`, stands
    for each mention of an option.
    """

    def mention(indices: set[int]) -> str:
        options.append(indices)
        return chr(0xE000 + len(options) - 1)

    def placed(found: re.Match[str]) -> str:
        place = _PLACES[(found[1] or found[2]).casefold()]
        return mention({place} if place < len(choices) and not has_numbers else set())

    def named(found: re.Match[str]) -> str:
        letter = next(filter(None, found.groups()))
        index = _index(letter, choices)
        if index is None:
            return found[0]
        if found["bare"] and re.search(rf"{_MENTION} $", text[: found.start()][-2:]):
            return mention(set())  # "Hepatitis A" is not "Hepatitis (A)"
        return mention({index, *(i for i, each in enumerate(choices) if each.strip() == letter)})

    def said(found: re.Match[str]) -> str:
        is_place = has_numbers and _BEFORE_PLACE.search(text[: found.start()][-20:])
        return mention(set() if is_place else _same_text(found[0], choices))

    has_numbers = any(re.match(r"\W*[0-9]", option) for option in choices)
    texts = {_plain(option) for option in choices if _index(option, choices) is None} - {""}
    if texts:
        longest_first = "|".join(map(re.escape, sorted(texts, key=len, reverse=True)))
        text = re.sub(
            rf"(?<![\w+^/\\-])(?!(?<=\.)[0-9])(?:{longest_first})(?![\w+^/%'\u2019\\-]|[.,][0-9])",
            said,
            text,
            flags=re.IGNORECASE,
        )
    text = _LABEL.sub(r"\1 ", _NAMED.sub(named, _PLACE.sub(placed, text)))
    for sentence in re.split(r"(?<=[.!?\u2026])\s+|\n(?![a-z][^)])", text):
        if stripped := re.sub(r"^(?:[>#*\u2022-]+\s+)+", "", sentence.strip("\"' \n")):
            yield stripped


def _stated(sentence: str, options: Sequence[set[int]], choices: Sequence[str]) -> int | None:
    """Return the option that a sentence states; None for a sentence that is not known."""
    mentions = [options[ord(each) - 0xE000] for each in re.findall(_MENTION, sentence)]
    if _CONTRAST.fullmatch(sentence):
        return _only(mentions[1] - mentions[0], choices)
    head = sentence.rstrip("!")
    if (reason := _REASON.search(sentence)) and _is_reason(sentence[reason.start() :]):
        head = sentence[: reason.start()]
    words = re.findall(r"[^\W_]+(?:'[^\W_]+)?|\S", head.replace("\u2019", "'").casefold())
    is_known = all(word in _FRAME or re.fullmatch(_MENTION, word) for word in words)
    if not is_known or not words or words[0] in _QUESTION or words[-1] == "a":
        return None
    if re.search(rf"{_MENTION}\s*[,;]", head) and any(len(each) > 1 for each in mentions):
        return None
    common = _only(set.intersection(*mentions), choices)
    return _SEVERAL if common is None else common


def _is_reason(sentence: str) -> bool:
    """Return whether a sentence gives a reason and takes nothing back."""
    return bool(_REASON.match(sentence)) and not _DOUBT.search(sentence)


def _accepted_option(accepted: str, choices: Sequence[str]) -> int | None:
    """Return the index of an accepted answer, for which a text comes before a letter.

    Among the blood groups O, A, B and AB the accepted "A" is the second.
    """
    same = _same_text(accepted, choices)
    return _only(same, choices) if same else named_option(accepted, choices)


def _same_text(text: str, choices: Sequence[str]) -> set[int]:
    """Return the options with that text, in the strictest sense in which there is any."""
    for given, *wanted in zip(_forms(text), *map(_forms, choices), strict=True):
        if found := {index for index, form in enumerate(wanted) if form == given}:
            return found
    return set()


def _forms(text: str) -> tuple[str, ...]:
    """Return a text in forms in which fewer and fewer differences count, but signs always."""
    plain = _plain(text).rstrip(".")
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
