"""Finds the options that code reads, by the paths over which it gets at their sections."""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from flowtrain.config import Config, Section

Sections = dict[str, type[Section]]


def sections() -> Sections:
    """Every section of `Config` by name; of a section of named tables, the class of a table."""
    found: Sections = {}
    for name, field in Config.model_fields.items():
        kind: Any = field.annotation
        kind = typing.get_args(kind)[1] if typing.get_origin(kind) is dict else kind
        if isinstance(kind, type) and issubclass(kind, Section):
            found[name] = kind
    return found


def unread_options(sources: Mapping[str, str]) -> list[str]:
    """The options, as "section.option", that no source reads."""
    reads = {read for text in sources.values() for read in _Reads(ast.parse(text)).found}
    return [
        f"{name}.{option}"
        for name, kind in sections().items()
        for option in kind.model_fields
        if (name, option) not in reads
    ]


class _Reads:
    """The (section, option) pairs that a module reads.

    An expression is a section when it is `config.NAME` or `....config.NAME`, an entry of such a
    section of named tables, a parameter or attribute annotated with the section's class, or a
    variable or attribute that one of these was assigned to. `model_dump` and iteration read all of
    a section; `getattr` reads the names that its function spells out.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: set[tuple[str, str]] = set()
        self._sections = sections()
        self._classes = {
            alias.asname or alias.name: name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flowtrain.conf")
            for alias in node.names
            for name, kind in self._sections.items()
            if kind.__name__ == alias.name
        }
        self._attributes: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                self._note_fields(node)
        # Twice: a method may use an attribute that a later one assigns.
        for _ in range(2):
            self._visit(tree, {})

    def _note_fields(self, node: ast.ClassDef) -> None:
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                self._bind(field.target, self._annotated(field.annotation), self._attributes)

    def _visit(self, scope: ast.AST, outer: Mapping[str, str]) -> None:
        """Read a scope: a module, class or function, whose variables start as those outside it."""
        names = dict(outer)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = scope.args
            for each in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
                names.pop(each.arg, None)
                self._bind(ast.Name(each.arg), self._annotated(each.annotation), names)
        nodes = list(_within(scope))
        for node in nodes:
            for target, value in _assignments(node):
                self._bind(target, self._section(value, names), names)
        for node in nodes:
            self._note_reads(node, names, scope)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._visit(node, names)

    def _note_reads(self, node: ast.AST, names: Mapping[str, str], scope: ast.AST) -> None:
        if isinstance(node, ast.Attribute) and (section := self._section(node.value, names)):
            fields = self._sections[section].model_fields
            self._note(section, fields if node.attr == "model_dump" else [node.attr])
        elif isinstance(node, ast.For | ast.comprehension):
            if section := self._section(node.iter, names):
                self._note(section, self._sections[section].model_fields)
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) == "getattr"
            and (section := self._section(node.args[0], names))
        ):
            self._note(section, [n.value for n in ast.walk(scope) if isinstance(n, ast.Constant)])

    def _note(self, section: str, options: Iterable[Any]) -> None:
        self.found |= {(section, option) for option in options}

    def _bind(self, target: ast.expr, section: str | None, names: dict[str, str]) -> None:
        if section is not None and isinstance(target, ast.Name):
            names[target.id] = section
        elif section is not None and isinstance(target, ast.Attribute):
            self._attributes[target.attr] = section

    def _annotated(self, annotation: ast.expr | None) -> str | None:
        names = (n.id for n in ast.walk(annotation or ast.Pass()) if isinstance(n, ast.Name))
        return next((self._classes[name] for name in names if name in self._classes), None)

    def _section(self, node: ast.expr, names: Mapping[str, str]) -> str | None:
        """The section that an expression is, if it is one."""
        if isinstance(node, ast.Name):
            return names.get(node.id)
        if isinstance(node, ast.Subscript):
            return self._section(node.value, names)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            is_entry = node.func.attr in ("get", "values", "items")
            return self._section(node.func.value, names) if is_entry else None
        if isinstance(node, ast.Attribute):
            owner = getattr(node.value, "id", None) or getattr(node.value, "attr", "")
            if owner.lstrip("_") == "config" and node.attr in self._sections:
                return node.attr
            return self._attributes.get(node.attr)
        return None


def _within(scope: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope, without the insides of scopes in it."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _within(child)


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """(target, value) of every assignment that a node makes."""
    if isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
