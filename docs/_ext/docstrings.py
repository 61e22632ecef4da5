"""Reads docstrings as they are written here: prose with code in single backticks, and indented
lines that are code or formulas.
"""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

_PLAIN = ("attribute", "property", "data")
"""Things whose docstrings are prose alone. Napoleon would take what stands before a colon in their
first line for a type."""
_CODE = re.compile(r"(`[^`]*`)")


def as_rst(lines: list[str]) -> list[str]:
    """Return a docstring whose indented paragraphs are literal blocks, and whose bars are bars."""
    found: list[str] = []
    is_block = False
    for line in lines:
        if line.startswith("    ") and (is_block or (found and not found[-1].strip())):
            if not is_block:
                found += ["::", ""]
            is_block = True
        elif line.strip():
            is_block = False
        found.append(line if is_block else escaped(line))
    return found


def escaped(line: str) -> str:
    """Escape what has a meaning in reStructuredText alone."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([*|])", r"\\\1", part)
        for part in _CODE.split(line)
    )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register this with Sphinx, around napoleon, which reads sections such as "Raises:"."""
    prose: dict[str, list[str]] = {}

    def before(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        lines[:] = as_rst(lines)
        if what in _PLAIN:
            prose[name] = [*lines]

    def after(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        if what in _PLAIN:
            lines[:] = prose.pop(name)

    app.connect("autodoc-process-docstring", before, priority=400)
    app.connect("autodoc-process-docstring", after, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
