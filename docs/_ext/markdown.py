"""Writes the reference into docs/reference, for those who read it in the repository:

    python -m docs._ext.markdown

The generated part of a page stands between `<!-- site: KIND ... -->` and
`<!-- end of KIND -->`. Objects are shown as stubs: signatures and docstrings without the code.
The site replaces these parts by its own, with links.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from docs._ext.options import option_list
from docs._ext.reference import MARK, origin, public_names, resolve

PAGES = Path(__file__).resolve().parents[1] / "reference"


def page(text: str) -> str:
    """Return a page whose generated parts are up to date."""
    for mark in MARK.finditer(text):
        names = public_names(mark["words"].split())
        parts = [option_list()] if mark["kind"] == "options" else [entry(each) for each in names]
        first = mark[0].partition("\n")[0]
        made = "\n".join([first, "", *parts, f"<!-- end of {mark['kind']} -->"])
        text = text.replace(mark[0], made)
    return text


def entry(name: str) -> str:
    """Return a heading and the stub of the object with this dotted name."""
    thing, short = resolve(name), name.rpartition(".")[2]
    is_alias = getattr(thing, "__name__", "") != short
    module = origin(name).rpartition(".")[0] if is_alias else thing.__module__
    source = inspect.getsource(importlib.import_module(module))
    kept = "\n".join(stub(ast.parse(source).body, source.splitlines(), short))
    return f"### {short}\n\n```py\n{re.sub('  # noqa.*', '', kept)}\n```\n"


def stub(body: Sequence[ast.stmt], code: Sequence[str], only: str = "") -> Iterator[str]:
    """Yield the lines of public definitions, or of the one named `only`: signatures, values and
    docstrings.
    """
    is_shown = False
    for place, node in enumerate(body):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if is_shown and place:
                yield from lines(code, node)
            continue
        name = name_of(node)
        is_shown = name == only if only else not name.startswith("_") or name == "__init__"
        if is_shown and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from [] if only else [""]
            yield from definition(node, code)
        elif is_shown:
            yield from lines(code, node)


def definition(
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, code: Sequence[str]
) -> Iterator[str]:
    """Yield the lines of a class or function, without the code of its functions."""
    start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    is_short = node.body[0].lineno == node.lineno
    head = code[start - 1 : node.body[0].lineno - (not is_short)]
    documented = ast.get_docstring(node) is not None
    if isinstance(node, ast.ClassDef):
        inner = [*stub(node.body, code)]
        yield from head
        if documented:
            yield from lines(code, node.body[0])
            yield from [""] if inner and inner[0] else []
        yield from inner
    elif documented:
        yield from (*head, *lines(code, node.body[0]))
    elif is_short:
        yield from head
    else:
        end = next(at for at, line in enumerate(head) if line.partition("  #")[0].endswith(":"))
        yield from (*head[:end], head[end].partition("  #")[0] + " ...")


def lines(code: Sequence[str], node: ast.stmt) -> Sequence[str]:
    """Return the lines of a node."""
    return code[node.lineno - 1 : node.end_lineno]


def name_of(node: ast.stmt) -> str:
    """Return the name that a statement defines; "_" for none."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return targets[0].id if isinstance(targets[0], ast.Name) else "_"


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
