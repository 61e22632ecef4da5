"""Strip the notation around a mathematical answer: boxes, dollar signs, spaces, \\text, ..."""

from __future__ import annotations

import re

from flowtrain.utils.text import marked_answer

SIGNS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013\u2014", "-"),
        **dict.fromkeys("\u00d7\u22c5\u00b7\u2217", "*"),
        **dict.fromkeys("\u00f7\u2044\u2215", "/"),
    }
)
"""The signs of arithmetic in Unicode."""
_UNICODE = SIGNS | str.maketrans(
    {
        "\u03c0": "\\pi ",
        "\u221e": "\\infty ",
        "\u00b2": "^2",
        "\u00b3": "^3",
        "\u00b0": " degrees",
        "\u222a": "\\cup ",
        "\u00b1": "\\pm ",
        "\u2264": "\\le ",
        "\u2265": "\\ge ",
        "\u00bd": " 1/2",
        "\u00bc": " 1/4",
        "\u00be": " 3/4",
        "\u00a0": " ",
    }
)
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\^\{?\\circ\}?|\\degree(?![A-Za-z])", " degrees"),
        (
            r"\\(?:left|right|[bB]igl?|[bB]igr?|displaystyle|limits|quad|qquad)(?![A-Za-z])"
            r"|(?<!\\)\\[!,;:> ]|~",
            " ",
        ),
        (
            r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|"
            r"mathit|mbox|operatorname)\s*\{([^{}]*)\}",
            r" \1 ",
        ),
        (r"(?<![A-Za-z\\])(?:positive )?infinity(?![A-Za-z])", r"\\infty "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r" \^", "^"),
        (r"_\{([A-Za-z0-9])\}", r"_\1"),
        (r"\{,\}", ","),
        (r"\\%", "%"),
        (r"(?<=[0-9A-Za-z)}])\*\*(?=[0-9A-Za-z({-])", "^"),
        (r"(?<!\\)\\[()\[\]]|\*\*|`", " "),
        (r"\\frac\s*([0-9a-z])\s*([0-9a-z])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9a-z])\s*\{", r"\\frac{\1}{"),
        (r"\\sqrt\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"\u221a\s*([0-9]+|[a-z])", r"\\sqrt{\1}"),
        (r"\u221a\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![0-9.^_])([0-9]{1,9})\s*\\frac\{([0-9]{1,9})\}\{([0-9]{1,9})\}", r"(\1+\2/\3)"),
        (r"(?<![0-9.^_/])([0-9]{1,9})\s+([0-9]{1,9})/([0-9]{1,9})(?![0-9.])", r"(\1+\2/\3)"),
    )
)


def tidy(text: str) -> str:
    """Normalise what `marked_answer` finds, else the whole text; a currency's dollar sign stays."""
    marked = marked_answer(text)
    text = (text if marked is None else marked).translate(_UNICODE).replace("\\$", "\ue000")
    if text.count("$") != 1:
        text = text.replace("$", " ")
    text = " ".join(text.split())
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text.replace("\ue000", "$").strip().rstrip(".").strip()
