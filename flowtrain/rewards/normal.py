"""The normalisation of SQuAD (Rajpurkar et al. 2016), with its mistakes corrected.

The normalisation drops case, punctuation, articles and repeated white space. Here, what makes a
number or a name another one stays: decimal points, minus signs, what stands between digits (10.8 is
not 108, 1-0 is not 10), < and >, and the signs of B+, B- and C#. Accents do not count (Tem\u00fcr
is Temur), & is and, J. K. is J.K., and what nobody sees (soft hyphens, a byte order mark) is not
there.
"""

from __future__ import annotations

import re
import unicodedata

_UNSEEN = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u3164\ufe00-\ufe0f\uffa0]")
_SIGNS = "\u2062\u2063"
"""Invisible signs of a product and a list."""
_INITIAL = re.compile(r"(?<=\b[a-z]\.)\s+(?=[a-z]\.)")
_SIGN = re.compile(r"(?<![^\s($])[-\u2212](?=\.?[0-9])")
_BETWEEN = re.compile(r"(?<=[0-9])\s?([-\u2010-\u2015\u2212]|[.:/^=*+])(?=[0-9])")
_POINT = re.compile(r"(?<![\w.])\.(?=[0-9])")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9])")
_DECIMAL = re.compile(r"(?<![0-9.])[0-9]+\.[0-9]+(?![0-9.])")
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_BOUND = re.compile(r"[<>](?=\s?[0-9])")
_MARKED = re.compile(r"(?<![^\W_])([a-z]{1,2})(\+\+|\+|#|[-\u2212](?!\S))(?![^\W_])")
_LETTERS = str.maketrans("\u00f8\u0142\u0111\u00f0\u0127\u0131", "olddhi") | {
    ord(letter): letters
    for letter, letters in (("\u00e6", "ae"), ("\u0153", "oe"), ("\u00fe", "th"))
}
"""Letters that Unicode does not take apart."""
_KEPT = {chr(0xE000 + number): sign for number, sign in enumerate("-.:/<>+#^=*")}
"""Private characters that stand for what is kept while punctuation is removed."""
_PRIVATE = str.maketrans({kept: private for private, kept in _KEPT.items()})


def visible(text: str) -> str:
    """Drop characters without width: soft hyphens, joiners, marks of direction and byte order."""
    if text.isascii():
        return text
    characters = (c for c in text if unicodedata.category(c) != "Cf" or c in _SIGNS)
    return _UNSEEN.sub("", "".join(characters))


def normalise(text: str) -> str:
    """Normalise as the head of this file says.

    A text of which nothing would be left ("The The" is a band) loses only case and spaces.
    """
    text = " ".join(visible(text).casefold().replace("&", " and ").split())
    text = _INITIAL.sub("", text)
    plain = unicodedata.normalize("NFKD", text.translate(_LETTERS))
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    plain = _COMMA.sub(" ", _THOUSANDS.sub("", _POINT.sub("0.", plain)))
    plain = _DECIMAL.sub(lambda match: match[0].rstrip("0").rstrip("."), plain)
    plain = _BETWEEN.sub(_kept_between, _SIGN.sub("\ue000", plain))
    plain = _BOUND.sub(lambda match: match[0].translate(_PRIVATE), plain)
    plain = _MARKED.sub(lambda match: match[1] + _private(match[2]), plain)
    plain = "".join(_KEPT.get(c, c) for c in plain if not _is_punctuation(c))
    return " ".join(_ARTICLE.sub(" ", plain).split()) or text


def _kept_between(match: re.Match[str]) -> str:
    return _private(match[1])


def _private(signs: str) -> str:
    """Return the private characters of signs, of all dashes the same."""
    return "".join(sign if sign in ".:/+#^=*" else "-" for sign in signs).translate(_PRIVATE)


def _is_punctuation(character: str) -> bool:
    return unicodedata.category(character)[0] == "P" or character in "$+<=>^`|~"
