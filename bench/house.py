"""The size and shape of the code:  python -m bench.house [BEFORE [AFTER]] [--json F]

Prints one row per measure and one column per checkout (default: this one). Where nothing else is
said, a row counts flowtrain/ and kernels/. Lines are counted in a copy formatted at 100 columns, in
which a line that is still longer counts as the lines that it would fill, so that checkouts of
different widths compare. Needs the standard library and ruff, and imports nothing that it measures.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
HOUSE = ("flowtrain", "kernels")
OTHERS = ("bench", "examples", "tests")
_UNCOUNTED = (tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER)
_PRAGMA = re.compile(r"\s*#\s*(noqa|type:|fmt:|pragma:).*")
_FRAGMENT = re.compile(r"\s*(Of|What|Where)\b")


@dataclass(frozen=True)
class Edge:
    """An import: `importer` names `target`, a module as exactly as the text tells."""

    importer: str
    target: str
    line: int
    is_for_types: bool
    """It stands under `if TYPE_CHECKING`."""


class Checkout:
    """The Python files of a checkout, and those of its house as modules."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.modules = {
            ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__"): path
            for base in (root, root / "kernels")
            for path in sorted(base.glob("flow*/**/*.py"))
        }
        """The files of flowtrain and flowkernels by their dotted names."""
        if "flowtrain" not in self.modules:
            raise SystemExit(f"{root} is no checkout of flowtrain")

    def files(self, folders: Sequence[str]) -> list[Path]:
        return [path for folder in folders for path in sorted((self.root / folder).rglob("*.py"))]

    @functools.cached_property
    def edges(self) -> list[Edge]:
        """The imports of all modules, those inside functions included."""
        return [edge for name in self.modules for edge in self._edges(name)]

    def _edges(self, name: str) -> Iterator[Edge]:
        for_types = {
            id(inner)
            for node in nodes(self.modules[name])
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
            for statement in node.body
            for inner in ast.walk(statement)
        }
        for node in nodes(self.modules[name]):
            for target in self._targets(node, name):
                yield Edge(name, target, getattr(node, "lineno", 0), id(node) in for_types)

    def _targets(self, node: ast.AST, importer: str) -> set[str]:
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            return set()
        parts = importer.split(".")
        depth = len(parts) - node.level + (self.modules[importer].name == "__init__.py")
        base = parts[:depth] if node.level else []
        package = ".".join([*base, *([node.module] if node.module else [])])
        # `from package import name` means the submodule of that name where there is one.
        names = {f"{package}.{alias.name}" for alias in node.names}
        return {name if name in self.modules else package for name in names}


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """The syntax tree of a file, the module itself first."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """(name, lines) of every function of a file."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def num_lines(path: Path) -> int:
    """Lines of a file; a longer one, which ruff does not break, counts as those it would fill."""
    total = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        indent = len(line) - len(line.lstrip())
        total += max(1, -(-(len(line) - indent) // max(1, WIDTH - indent)))
    return total


def docstrings(path: Path) -> Iterator[ast.Expr]:
    """Strings that stand alone as a statement: those of modules, classes, functions, attributes."""
    for node in nodes(path):
        match node:
            case ast.Expr(ast.Constant(str())):
                yield node


def num_tokens(path: Path) -> int:
    """Tokens of the code, without comments, docstrings and blank lines."""
    spans = [
        ((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for node in docstrings(path)
    ]
    in_docstring = {line for (first, _), (last, _) in spans for line in range(first, last + 1)}

    def is_code(token: tokenize.TokenInfo) -> bool:
        if token.type in _UNCOUNTED:
            return False
        return token.start[0] not in in_docstring or not any(
            start <= token.start <= end for start, end in spans
        )

    text = io.StringIO(path.read_text(encoding="utf-8"))
    return sum(map(is_code, tokenize.generate_tokens(text.readline)))


def fragments(paths: Sequence[Path]) -> list[str]:
    """Docstrings that begin with Of, What or Where."""
    return [
        f"{path}:{node.lineno}"
        for path in paths
        for node in docstrings(path)
        if isinstance(node.value, ast.Constant) and _FRAGMENT.match(str(node.value.value))
    ]


def long_lines(paths: Sequence[Path]) -> list[str]:
    """Lines of more than WIDTH columns; as ruff counts, without comments to tools, nor one word."""
    return [
        f"{path}:{number}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > WIDTH and len(_PRAGMA.sub("", line)) > WIDTH and " " in line.strip()
    ]


def name_tests(paths: Sequence[Path]) -> list[str]:
    """Places that compare or match the name of an algorithm."""

    def is_name(node: ast.AST) -> bool:
        match node:
            case ast.Attribute(attr="name", value=ast.Name("algorithm")):
                return True
            case ast.Attribute(attr="name", value=ast.Attribute(attr="algorithm")):
                return True
            case ast.Name("algorithm_name") | ast.Attribute(attr="algorithm_name"):
                return True
        return False

    found = []
    for path in paths:
        for node in nodes(path):
            operands: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.Match):
                operands = [node.subject]
            if any(is_name(inner) for operand in operands for inner in ast.walk(operand)):
                found.append(f"{path}:{getattr(node, 'lineno', 0)}")
    return found


def reached(house: Checkout, start: str = "flowtrain.train") -> set[str]:
    """Modules that `start` can load, imports inside functions included."""
    imports: dict[str, set[str]] = {name: set() for name in house.modules}
    for edge in house.edges:
        if not edge.is_for_types:
            imports[edge.importer].add(edge.target)
    found: set[str] = set()
    left = [start]
    while left:
        parts = left.pop().split(".")
        # a.b.c loads a, a.b and a.b.c.
        for name in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
            if name in imports and name not in found:
                found.add(name)
                left += imports[name]
    return found


def fan_out(house: Checkout) -> dict[str, int]:
    """The number of flowtrain's modules that each module imports."""
    targets: dict[str, set[str]] = {name: set() for name in house.modules}
    for edge in house.edges:
        if edge.target in house.modules and edge.target.startswith("flowtrain"):
            targets[edge.importer].add(edge.target)
    return {name: len(found - {name}) for name, found in targets.items()}


def package_cycles(house: Checkout) -> list[list[str]]:
    """Packages of flowtrain, loose modules included, that reach each other by imports."""

    def package(module: str) -> str:
        return module.split(".")[1] if module.startswith("flowtrain.") else ""

    imports: dict[str, set[str]] = {}
    for edge in house.edges:
        importer, target = package(edge.importer), package(edge.target)
        if importer and target and importer != target:
            imports.setdefault(importer, set()).add(target)
    return strong_components(imports)


def strong_components(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of more than one node that all reach each other."""

    def reach(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            for target in graph.get(left.pop(), set()) - found:
                found.add(target)
                left.append(target)
        return found

    reach_of = {name: reach(name) for name in graph}
    groups = {
        tuple(sorted(other for other in found if name in reach_of.get(other, set())))
        for name, found in reach_of.items()
    }
    return sorted([*group] for group in groups if len(group) > 1)


def num_options(house: Checkout) -> int:
    """Keys of the config: the fields of all sections that `Config` has."""
    classes: dict[str, ast.ClassDef] = {}
    # Where two classes share a name, the one in config/ counts.
    for path in house.files(["flowtrain/config", "flowtrain"]):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, node)
    names = {name: {ast.unparse(base) for base in node.bases} for name, node in classes.items()}
    sections = {"Section"}
    while more := {name for name, bases in names.items() if bases & sections} - sections:
        sections |= more

    def count(name: str) -> int:
        node = classes[name]
        total = sum(count(base) for base in names[name] & sections - {"Section"})
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                words = set(re.findall(r"\w+", ast.unparse(field.annotation)))
                # A field of Config that is no section is a table of the user's own keys.
                total += sum(map(count, words & sections)) or name != "Config"
        return total

    return count("Config")


def largest(sizes: Mapping[str, int]) -> str:
    name = max(sizes, key=lambda name: sizes[name])
    return f"{sizes[name]} ({name})"


def formatted(root: Path, folder: Path) -> Checkout:
    """A copy of the house of a checkout, formatted at WIDTH columns."""
    for name in HOUSE:
        shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    options = ("--isolated", "--no-cache", "--line-length", str(WIDTH), "--target-version", "py311")
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--quiet", *options, str(folder)], check=True
    )
    return Checkout(folder)


def measure(root: Path) -> dict[str, int | float | str]:
    """All measures of a checkout by the names of their rows."""
    house = Checkout(root)
    files = house.files(HOUSE)
    with tempfile.TemporaryDirectory() as folder:
        at_width = formatted(root, Path(folder))
        lines = {name: num_lines(path) for name, path in at_width.modules.items()}
        function_lines = {
            f"{module}.{name}": size
            for module, path in at_width.modules.items()
            for name, size in functions(path)
        }
    total = sum(lines.values())
    reach = reached(house)
    num_excepts = sum(isinstance(node, ast.ExceptHandler) for path in files for node in nodes(path))
    outside = [
        path
        for path in house.files(["flowtrain"])
        if path.relative_to(root / "flowtrain").parts[0] not in ("algorithms", "config")
    ]
    cycles = package_cycles(house)
    return {
        "files": len(files),
        "lines": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files),
        "lines at 100 columns": total,
        "tokens": sum(map(num_tokens, files)),
        "largest file": largest(lines),
        "largest function": largest(function_lines),
        "files that train.py reaches": len(reach),
        "lines that train.py reaches": sum(lines[name] for name in reach),
        "largest fan-out": largest(fan_out(house)),
        "`except` per 1,000 lines": round(1000 * num_excepts / total, 1),
        "package cycles": len(cycles),
        "packages in cycles": sum(map(len, cycles)),
        "tests of algorithm.name outside algorithms/ and config/": len(name_tests(outside)),
        "docstrings from Of, What, Where": len(fragments(files)),
        "... in bench/, examples/, tests/": len(fragments(house.files(OTHERS))),
        "lines over 100 columns": len(long_lines(files)),
        "... of bench/, examples/, tests/": len(long_lines(house.files(OTHERS))),
        "options in the config": num_options(house),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.house")
    parser.add_argument("path", nargs="*", type=Path, default=[ROOT], help="one or two checkouts")
    parser.add_argument("--json", type=Path, help="also write the measures to this file")
    args = parser.parse_args(argv)
    paths = [path.resolve() for path in args.path]
    if len(paths) > 2:
        parser.error("takes one or two checkouts")
    columns = [measure(path) for path in paths]
    headings = ["", *(["before", "after"] if len(paths) == 2 else ["now"])]
    table = [headings, *([name, *(str(column[name]) for column in columns)] for name in columns[0])]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for name, *cells in table:
        right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *right]))
    if args.json:
        args.json.write_text(json.dumps(dict(zip(headings[1:], columns, strict=True)), indent=1))


if __name__ == "__main__":
    main()
