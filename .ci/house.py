"""Lines by room:  python .ci/house.py [CHECKOUT [CHECKOUT]] [--since [TAG]] [--prose] [--json F]

Two checkouts are counted side by side, or one and what it was at a tag. Counted are all lines of
Python and C++ sources, those of a test apart from what it tests. The core is what a reader of the
trainer must know; the product is what users install. `--prose` counts sentences in place of lines.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("records", "config", "trainer", "algorithms", "logging", "train.py")
"""Rooms of flowtrain/; the loop itself is a file."""
PRODUCT = ("flowtrain", "kernels", "csrc")
OTHERS = ("bench", "examples", "tests", ".ci")
_SOURCES = (".py", ".cpp", ".h")
PROSE = {
    "README": ("README.md",),
    "docs": ("docs/**/*.md", "CONTRIBUTING.md", "kernels/README.md", "examples/README.md"),
    "docstrings": ("flowtrain/**/*.py", "kernels/**/*.py"),
}
_NO_PROSE = re.compile(
    r"^<!-- site: (\w+).*?^<!-- end of \1 -->$|^(```|~~~).*?^\2$|^(#| {4,}|\||>>>|<|\[?!\[).*?$",
    re.MULTILINE | re.DOTALL,
)
"""Generated parts, fences, headings, indented code, tables, images."""
_VAGUE = re.compile(r"(it|that|those|what|one)\b", re.IGNORECASE)
_PASSIVE = re.compile(
    r"\b(is|are|was|were|be|been|being|gets?)( not| never| also| only| still| then)*"
    r" (\w+ed|\w+[wtse]n|made|kept|left|sent|held|read|told|built|put|cut|set|lost|run|said)\b"
)
"""A form of "be" before a participle, by its ending: an estimate that misses and invents a few."""


def rooms(root: Path) -> dict[str, int]:
    """Lines by room: flowtrain's packages and loose files, then the other folders."""
    if not (root / "flowtrain" / "train.py").exists():
        raise SystemExit(f"{root} is no checkout of flowtrain")
    found = {
        f"flowtrain/{path.name}": num_lines(path)
        for path in sorted((root / "flowtrain").iterdir())
        if path.is_dir() or path.suffix == ".py"
    }
    found |= {name: num_lines(root / name) for name in (*PRODUCT[1:], *OTHERS)}
    return {name: number for name, number in found.items() if number}


def rooms_at(tag: str, root: Path) -> dict[str, int]:
    """Lines by room at a tag; "": at the last one, and none where nothing was tagged yet."""
    tag = tag or _git(root, "tag", "--sort=creatordate").decode().split("\n")[-2:][0]
    if not tag:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", tag))) as archive:
            archive.extractall(folder, filter="data")
        return rooms(Path(folder))


def _git(root: Path, *words: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True).stdout


def num_lines(path: Path) -> int:
    """Lines of a file, or of the sources of a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    sources = [file for file in files if file.suffix in _SOURCES and file.is_file()]
    return sum(len(file.read_bytes().splitlines()) for file in sources)


def totals(found: Mapping[str, int]) -> dict[str, int]:
    """Sums of rooms that have a name of their own."""
    core = {f"flowtrain/{name}" for name in CORE}
    product = [name for name in found if name.partition("/")[0] in PRODUCT]
    return {
        "the core": sum(found[name] for name in core & found.keys()),
        "the product": sum(found[name] for name in product),
        "all": sum(found.values()),
    }


def prose(root: Path) -> dict[str, tuple[int, float, float, float]]:
    """Sentences, words in each, and the percentages that begin vaguely or are passive."""
    found = {}
    for name, patterns in PROSE.items():
        paths = sorted(path for pattern in patterns for path in root.glob(pattern))
        if all_of := [each for path in paths for text in texts(path) for each in sentences(text)]:
            found[name] = (
                len(all_of),
                sum(len(each.split()) for each in all_of) / len(all_of),
                100 * sum(bool(_VAGUE.match(each)) for each in all_of) / len(all_of),
                100 * sum(bool(_PASSIVE.search(each)) for each in all_of) / len(all_of),
            )
    return found


def texts(path: Path) -> Iterator[str]:
    """A page, or the docstrings of a module, those of attributes too."""
    if path.suffix != ".py":
        yield path.read_text(encoding="utf-8")
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield inspect.cleandoc(value.value)


def sentences(text: str) -> list[str]:
    """The sentences of at least three words of a text, without its code and tables."""
    text = re.sub(r"\]\([^)]*\)|[*\[>]", "", _NO_PROSE.sub("\n", text))
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:-|\d+\.) )|(?<=[.!?])\s+(?=[A-Z`])", text)
    found = [re.sub(r"^(-|\d+\.) ", "", " ".join(part.split())) for part in parts]
    return [each for each in found if len(each.split()) > 2]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Lines by room.")
    parser.add_argument("path", nargs="*", type=Path, default=[ROOT], help="one or two checkouts")
    parser.add_argument("--since", nargs="?", const="", help="a tag; without its name the last one")
    parser.add_argument("--prose", action="store_true", help="count sentences, not lines")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args(argv)
    if len(args.path) > (1 if args.since is not None else 2):
        parser.error("takes one or two checkouts, or one and --since")
    if args.prose:
        print(f"{'':<12}{'sentences':>10}{'words each':>12}{'% vague':>10}{'% passive':>12}")
        for name, (number, words, vague, passive) in prose(args.path[0].resolve()).items():
            print(f"{name:<12}{number:>10,}{words:>12.1f}{vague:>10.1f}{passive:>12.1f}")
        return
    columns = [rooms(path.resolve()) for path in args.path]
    if args.since is not None:
        columns.insert(0, rooms_at(args.since, args.path[0]))
    columns = [{**found, **totals(found)} for found in columns]
    names = list(dict.fromkeys(name for column in reversed(columns) for name in column))
    names.sort(key=lambda name: name in totals({}))  # sums come last
    headings = ["before", "after"] if len(columns) == 2 else ["lines"]
    core = {f"flowtrain/{name}" for name in CORE}
    for name, *cells in [["", *headings], *([name, *_cells(name, columns)] for name in names)]:
        mark = "*" if name in core else " "
        print(f"{mark} {name:<28}" + "".join(f"{cell:>10}" for cell in cells))
    print("* of the core")
    if args.json:
        args.json.write_text(json.dumps(dict(zip(headings, columns, strict=True)), indent=1))


def _cells(name: str, columns: Sequence[Mapping[str, int]]) -> list[str]:
    return [f"{column.get(name, 0):,}" for column in columns]


if __name__ == "__main__":
    main()
