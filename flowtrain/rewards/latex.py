"""Strip the notation around a mathematical answer, and write what is ASCII as LaTeX."""

from __future__ import annotations

import re

from flowtrain.rewards.normal import visible
from flowtrain.utils.text import marked_answer

SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7\u2217\u2062", "*"),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
    }
)
"""The signs of arithmetic in Unicode."""
_SYMBOLS = (
    "\u03c0\\pi |\u221e\\infty |\u00b2^2|\u00b3^3|\u00b0 degrees |\u222a\\cup |\u00b1\\pm |"
    "\u2260\\ne |\u2264\\le |\u2265\\ge |\u2248\\approx |\u2208\\in |\u00bd 1/2|\u00bc 1/4|"
    "\u00be 3/4|\uff0c, |\uff1b; |\u3001, |\u2227\\land |\u2228\\lor |\u2063,"
)
_UNICODE = SIGNS | {ord(symbol[0]): symbol[1:] for symbol in _SYMBOLS.split("|")}
_NAMES = (
    "sin|cos|tan|cot|sec|csc|sinh|cosh|tanh|ln|log|exp|pi|alpha|beta|gamma|delta|theta|lambda|mu|"
    "phi|omega"
)


def _rows(text: str) -> str:
    """Write the rows of a matrix that Python prints."""
    return re.sub(r"\], ?\[", r"\\\\", text).replace(",", "&")


_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (
            r"(?<![\w.\\])([0-9]+(?:\.[0-9]+)?)[eE](\+?[0-9]{1,3}|-[0-9]{2,3})(?![\w.])",
            r"\1*10^{\2}",
        ),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\neq(?![A-Za-z])|(?<=\s)!=", r"\\ne "),
        (r"\\leq(?:slant)?(?![A-Za-z])|<=|\\leqslant", r"\\le "),
        (r"\\geq(?:slant)?(?![A-Za-z])|>=|\\geqslant", r"\\ge "),
        (r"\\(?:approxeq|simeq|doteq|thickapprox)(?![A-Za-z])", r"\\approx "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\^\{?\\circ\}?|\\degree(?![A-Za-z])", " degrees "),
        (
            r"(?<![0-9.,])[0-9]{1,3}(?:(?:,?\\!\s*|\\[,;:]\s*|\{,\}|~)[0-9]{3})+(?![0-9])",
            lambda match: re.sub(r"[^0-9]", "", match[0]),
        ),
        (
            r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|quad|qquad)(?![A-Za-z])"
            r"|(?<!\\)\\[!,;:> ]|~",
            " ",
        ),
        (
            r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|"
            r"mathit|mbox|operatorname)\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (
            r"[(\[]\s*\\begin\{array\}\s*\{[clr|]*\}(.*?)\\end\{array\}\s*[)\]]",
            r"\\begin{pmatrix}\1\\end{pmatrix}",
        ),
        (r"(?<![A-Za-z\\])(?:(?:positive )?infinity|oo|inf)(?![A-Za-z])", r"\\infty "),
        (r"(?<![A-Za-z\\])(?:Fraction|Rational)\(([-+0-9]+), ?([0-9]+)\)", r"(\1/\2)"),
        (r"(?<![A-Za-z\\])[Aa]bs\(([^()]*)\)", r"|\1|"),
        (r"(?<![A-Za-z\\])factorial\(([^()]*)\)", r"(\1)!"),
        (r"(?<![A-Za-z\\])binomial\(([^(),]*),([^(),]*)\)", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])floor\(([^()]*)\)", r"\\lfloor \1 \\rfloor "),
        (r"(?<![A-Za-z\\])EmptySet(?![A-Za-z])", r"\\emptyset"),
        (
            r"(?<![A-Za-z\\])Matrix\(\[\[(.*)\]\]\)",
            lambda match: r"\begin{pmatrix}" + _rows(match[1]) + r"\end{pmatrix}",
        ),
        (r"(?<![A-Za-z\\])a(?=(?:sin|cos|tan)\()", r"\\arc"),
        (r"(?<![A-Za-z\\])sqrt(?=\()", r"\\sqrt"),
        (rf"(?<![A-Za-z\\])({_NAMES})(?![A-Za-z])", r"\\\1 "),
        (r" \^", "^"),
        (r"_\{([A-Za-z0-9])\}", r"_\1"),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"\^\s*(-?[0-9]*\.[0-9]+|-?[0-9]{2,}|-[0-9a-z])", r"^{\1}"),
        (r"(?<!\\)\\[()\[\]]|\*\*|`", " "),
        (r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"\u221a\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"\u221a\s*(?=\()", r"\\sqrt"),
        (r"(?<![0-9.^_])([0-9]{1,9})\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}", r"(\1+\2/\3)"),
        (r"(?<![0-9.^_/])([0-9]{1,9})\s+([0-9]{1,9})/([0-9]{1,9})(?![0-9.])", r"(\1+\2/\3)"),
    )
)
_GROUP = re.compile(r"(?:\\sqrt|\^)\s*\(")


def tidy(text: str) -> str:
    """Normalise what `marked_answer` finds, else the whole text; a currency's dollar sign stays."""
    text = visible(text)
    marked = marked_answer(text)
    text = (text if marked is None else marked).translate(_UNICODE).replace("\\$", "\ue000")
    if text.count("$") != 1:
        text = text.replace("$", " ")
    text = " ".join(text.split())
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _braced(" ".join(text.replace("\ue000", "$").split()))
    return text.rstrip(".").strip()


def _braced(text: str) -> str:
    r"""Write \sqrt(2) as \sqrt{2}, and 2^(n+1) as 2^{n+1}."""
    pieces, start = [], 0
    while match := _GROUP.search(text, start):
        depth = 1
        end = match.end()
        while end < len(text) and depth:
            depth += (text[end] == "(") - (text[end] == ")")
            end += 1
        if depth:
            break
        inner = _braced(text[match.end() : end - 1])
        pieces += [text[start : match.end() - 1].rstrip(), "{", inner, "}"]
        start = end
    return "".join([*pieces, text[start:]])
