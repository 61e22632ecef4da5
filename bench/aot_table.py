"""All rows of the table of docs/kernels.md, from what `bench.aot --roofline --json` wrote:
python -m bench.aot_table bench/results/aot/triton-3.7.1.json bench/results/aot/triton-3.6.0.json

Figures are those of sm_90 in the first file; the last column is the worst of all other targets and
files.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SHOWN = [
    ("score", ("bf16", "bf16 odd", "fp32", "bf16 all")),
    ("gradient", ("bf16", "bf16 odd")),
    ("loss", ("bf16", "bf16 odd", "fp32", "bf16 all but softcap", "bf16 all")),
    ("scale", ("bf16",)),
    ("norm", ("bf16 896", "bf16 3584")),
    ("norm gradient", ("bf16 896", "bf16 3584")),
    ("rotary", ("bf16 896",)),
    ("gated", ("bf16", "bf16 gradient")),
    ("delta count", ("int16",)),
    ("delta compact", ("int16",)),
    ("delta scatter", ("int16",)),
    ("delta digest", ("int16",)),
    *((name, ("fp32",)) for name in ("statistics", "merge", "scan", "branching")),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    print("\n".join(table([json.loads(path.read_text()) for path in parser.parse_args().files])))


def table(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield (
        "| kernel | variant | instructions per element | loads in flight | waits | lowest bound, "
        "TB/s | goal, TB/s | worst elsewhere |"
    )
    yield "|" + "---|" * 8
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = defaultdict(dict)
    for report in reports:
        for row in report["rows"]:
            if "waits" in row:  # gfx942 has no machine code to read
                place = f"{row['target']}, {report['facts']['triton']}"
                rows[row["kernel"], row["variant"]][place] = row
    for kernel, variants in SHOWN:
        for variant in variants:
            yield _line(kernel, variant, rows[kernel, variant])


def _line(kernel: str, variant: str, places: dict[str, dict[str, Any]]) -> str:
    here = next(place for place in places if place.startswith("sm_90"))
    row = places[here]
    others = {place: other for place, other in places.items() if place != here}
    if "goal_tb_s" in row:
        worst = min(others, key=lambda place: bound(others[place]) / others[place]["goal_tb_s"])
        other = others[worst]
        figures = f"{bound(row):.1f} | {row['goal_tb_s']:.1f}"
        elsewhere = f"{bound(other):.1f} of {other['goal_tb_s']:.1f} ({worst})"
    else:
        worst = max(others, key=lambda place: others[place]["waits"])
        figures, elsewhere = " | ", f"{others[worst]['waits']:.2g} waits ({worst})"
    counts = f"{row['instructions']:.1f} | {row['loads_in_flight']:.2g} | {row['waits']:.2g}"
    return f"| {kernel} | {variant} | {counts} | {figures} | {elsewhere} |"


def bound(row: dict[str, Any]) -> float:
    """The lowest bound, in TB/s."""
    return min(x for name, x in row.items() if name.endswith("_tb_s") and name != "goal_tb_s")


if __name__ == "__main__":
    main()
