"""docs/gpu.md, made of the results that are kept under `bench/results/DEVICE/`.

Results of the plans lie in `plans/STAGE.json`. Beside that folder are older figures, of other
commands; each has its commit and date.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from bench.gpu.plans import PLANS, STAGES
from bench.gpu.report import findings, table
from bench.measure import write_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "gpu.md"
PIVOTS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "attention": (("heads", "layout", "tokens"), "way", ("forward_ms", "backward_ms")),
    "losses": (("path", "D", "V"), "impl", ("ms",)),
    "rivals": (("path", "D", "V"), "impl", ("ms",)),
}
"""Tables that are turned: columns that name a row, the one whose values are columns, and what
stands there. Others are shown as they are."""
_NOT_SHOWN = "launches"
"""Figures that chose the launches of kernels which are gone."""
_FACTS = ("device", "driver", "torch", "triton", "transformers")
_NOTHING = """\
**No plan has run on a GPU yet.** Only the older figures below were measured: no whole run, no vLLM,
no second GPU.

"""
_OLDER = """\
## Older figures: {device}

Measured before there were plans. Kernels, head and trainer have changed since, so these figures are
history. [bench/results/{folder}](../bench/results/{folder}) also has the row kernels by warps.

"""


def keep(source: Path) -> list[Path]:
    """File the results of a plan's folder, or of the `results.tar` in it; return the files.

    Raises:
        SystemExit: there are none, or they are those of a rehearsal.
    """
    with tempfile.TemporaryDirectory() as scratch:
        if not (source / "stages.json").exists() and (source / "results.tar").exists():
            with tarfile.open(source / "results.tar") as archive:
                archive.extractall(scratch, filter="data")
            source = Path(scratch)
        if not (source / "stages.json").exists():
            raise SystemExit(f"{source} has no stages.json: it is no folder of a plan's results")
        plan = json.loads((source / "stages.json").read_text())
        if plan["is_small"]:
            raise SystemExit(f"{source} has the results of a dry run, which say nothing of a GPU")
        kept = []
        for stage, outcome in plan["stages"].items():
            path = source / f"{stage}.json"
            if not path.exists():
                continue
            found = json.loads(path.read_text())
            facts = found["facts"]
            command = f"python -m bench.gpu --plan {plan['plan']}"
            facts |= {"command": command} | {k: outcome[k] for k in ("status", "seconds", "clocks")}
            device = facts["device"].split()[-1].lower()
            rows = [row for row in found["rows"] if "needs" not in row]
            kept.append(RESULTS / device / "plans" / f"{stage}.json")
            write_rows(kept[-1], facts, rows)
    return kept


def write() -> Path:
    """Write the page."""
    PAGE.write_text(text())
    return PAGE


def text() -> str:
    """The page as it should be."""
    devices = sorted(path for path in RESULTS.iterdir() if path.name != "cpu")
    new = [path for device in devices for path in _files(device / "plans")]
    old = [
        _OLDER.format(device=device.name.upper(), folder=device.name)
        + "\n".join(_section(path) for path in paths if path.stem != _NOT_SHOWN)
        for device in devices
        if (paths := _files(device))
    ]
    parts = {
        "nothing": "" if new else _NOTHING,
        "plans": "\n".join(_plans()),
        "new": "\n".join(["## Measured\n", *map(_section, new), ""]) if new else "",
        "old": "\n".join(old),
    }
    page = Template((Path(__file__).parent / "page.md").read_text())
    return page.substitute(parts).rstrip() + "\n"


def _files(folder: Path) -> list[Path]:
    """Results, those of stages in the order of the plans."""
    order = list(STAGES)
    return sorted(
        folder.glob("*.json"),
        key=lambda path: (order.index(path.stem) if path.stem in order else -1, path.stem),
    )


def _plans() -> Iterator[str]:
    yield "| plan | limit | stages |"
    yield "|---|---|---|"
    for name, plan in PLANS.items():
        stages = ", ".join(" + ".join(f"`{stage}`" for stage in group) for group in plan.groups)
        yield f"| `{name}` | {plan.seconds} s | {stages} |"
    yield ""


def _section(path: Path) -> str:
    """A file of results: under what it was measured, its goals, its rows."""
    found = json.loads(path.read_text())
    facts, rows = found["facts"], found["rows"]
    under = ", ".join(f"{key} {facts[key]}" for key in _FACTS if facts.get(key))
    clocks = f", {facts['clocks']}" if facts.get("clocks") else ""
    lines = [
        f"### {path.stem.replace('_', ' ')}",
        "",
        f"{facts['date']}, commit {facts['commit']}, `{facts['command']}`: {under}{clocks}.",
    ]
    if facts.get("status") not in (None, "done"):
        lines.append(f"The stage ended {facts['status']} after {facts['seconds']:.0f} s.")
    if note := facts.get("note"):
        lines.append(note)
    lines.append("")
    goals = findings({path.stem: rows}) if "status" in facts else ()
    if judged := [goal.line(True) for goal in goals]:
        lines += ["| goal | figure | goal | verdict |", "|---|---|---|---|", *judged, ""]
    good = [row for row in rows if "error" not in row]
    lines += _pivot(good, *PIVOTS[path.stem]) if path.stem in PIVOTS else table(good)[1:]
    lines += ["", *(f"- failed: {row['case']}: {row['error']}" for row in rows if "error" in row)]
    return "\n".join(lines).rstrip() + "\n"


def _pivot(
    rows: Sequence[Mapping[str, Any]], index: Sequence[str], column: str, values: Sequence[str]
) -> list[str]:
    """A table with a column for each value of one column of the rows."""
    cells: dict[tuple[Any, ...], dict[Any, str]] = {}
    for row in rows:
        shown = "; ".join(f"{row[value]:.3g}" for value in values if row.get(value) is not None)
        cells.setdefault(tuple(row.get(key, "") for key in index), {})[row[column]] = shown
    heads = list(dict.fromkeys(row[column] for row in rows))
    unit = "; ".join(values)
    lines = [
        f"`{unit}` by `{column}`:",
        "",
        f"| {' | '.join([*index, *map(str, heads)])} |",
        f"|{'---|' * (len(index) + len(heads))}",
    ]
    return lines + [
        f"| {' | '.join([*map(str, key), *(found.get(head, '') for head in heads)])} |"
        for key, found in cells.items()
    ]
