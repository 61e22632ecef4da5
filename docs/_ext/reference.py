"""The reference of Python names: Sphinx's directives for their docstrings."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

MARK = re.compile(
    r"^<!-- site: (?P<kind>\w+) ?(?P<words>[^\n]*?) -->$"
    r"(?:(?:(?!^<!-- site).)*?^<!-- end of (?P=kind) -->$)?",
    re.MULTILINE | re.DOTALL,
)
"""A part of a page that is generated: a comment, and all up to the comment that ends it."""


def api_page(names: Sequence[str]) -> str:
    """Return Markdown with the docstrings of objects; a module stands for its public names."""
    return "```{eval-rst}\n" + "\n".join(map(directive, public_names(names))) + "\n```\n"


def public_names(names: Sequence[str]) -> list[str]:
    """Return dotted names of objects, with a module's public names in its place."""
    return [each for name in names for each in _public(name)]


def directive(name: str) -> str:
    """Return the directive for an object with a dotted name."""
    thing = resolve(name)
    if inspect.isclass(thing):
        return f".. autoclass:: {name}\n   :members:\n"
    if inspect.isfunction(thing):
        return f".. autofunction:: {name}\n"
    return f".. autodata:: {origin(name)}\n"


def origin(name: str) -> str:
    """Return the dotted name of a constant where it is defined, and hence documented."""
    package, _, attribute = name.rpartition(".")
    source = inspect.getsource(importlib.import_module(package))
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and any(a.name == attribute for a in node.names):
            return f"{node.module}.{attribute}"
    return name


def resolve(name: str) -> Any:
    """Return the object with a dotted name."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def _public(name: str) -> list[str]:
    """Return the public names of a module, constants last, or the name of another object."""
    try:
        module: ModuleType = importlib.import_module(name)
    except ModuleNotFoundError:
        return [name]
    public = [f"{name}.{each}" for each in module.__all__]
    kinds = (inspect.isfunction, inspect.isclass)
    return sorted(public, key=lambda each: [not is_kind(resolve(each)) for is_kind in kinds])
