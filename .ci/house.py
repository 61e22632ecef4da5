"""Lines by room:  python .ci/house.py [CHECKOUT [CHECKOUT]] [--since [TAG]] [--json F]

Two checkouts are counted side by side, or one and what it was at a tag. Counted are all lines of
Python and C++ sources, those of a test apart from what it tests. The core is what a reader of the
trainer must know; the product is what users install.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ("records", "config", "trainer", "algorithms", "logging", "train.py")
"""Rooms of flowtrain/; the loop itself is a file."""
PRODUCT = ("flowtrain", "kernels", "csrc")
OTHERS = ("bench", "examples", "tests", ".ci")
_SOURCES = (".py", ".cpp", ".h")


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


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Lines by room.")
    parser.add_argument("path", nargs="*", type=Path, default=[ROOT], help="one or two checkouts")
    parser.add_argument("--since", nargs="?", const="", help="a tag; without its name the last one")
    parser.add_argument("--json", type=Path, help="also write the lines to this file")
    args = parser.parse_args(argv)
    if len(args.path) > (1 if args.since is not None else 2):
        parser.error("takes one or two checkouts, or one and --since")
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
