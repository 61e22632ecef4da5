"""The report of `bench.gpu`: every goal with its figure and a verdict, what failed, and what became
of the stages.

Goals hold on a GPU, beside a copy and a bare product of the same run. A figure without a goal
stands in the stage's own table.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_PEERS = ("torch", "compile", "trl", "liger")
_HIDDEN = ("nvidia-smi", "case")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    text: str
    figure: float
    relation: str
    goal: float

    def line(self, is_judged: bool) -> str:
        is_met = _RELATIONS[self.relation](self.figure, self.goal)
        verdict = ("met" if is_met else "**missed**") if is_judged else "not judged"
        goal = f"{self.relation} {self.goal:.4g}"
        return f"| {self.text} | {self.figure:.4g} | {goal} | {verdict} |"


def write_report(folder: Path, outcomes: Mapping[str, Mapping[str, Any]], is_judged: bool) -> None:
    """Write `report.md` from the results in the folder."""
    lines = ["# Report of `python -m bench.gpu`", ""]
    if not is_judged:
        lines += ["**A dry run**: tiny shapes, and no goal is judged.", ""]
    lines += ["| stage | | seconds | | clocks |", "|---|---|---|---|---|"]
    for name, found in outcomes.items():
        cells = (name, found["status"], f"{found['seconds']:.0f}", found["reason"], found["clocks"])
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| goal | figure | goal | verdict |", "|---|---|---|---|"]
    rows = {name: _rows(folder, name) for name in outcomes}
    lines += [finding.line(is_judged) for finding in findings(rows)]
    for name, all_rows in rows.items():
        good = [row for row in all_rows if "error" not in row]
        failed = [f"- **failed**: {x['case']}: {x['error']}" for x in all_rows if "error" in x]
        lines += ["", f"## {name}", *table(good), "", *failed]
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def findings(rows: Mapping[str, Sequence[Row]]) -> Iterator[Finding]:
    """The figures that have a goal, in the order of the stages."""
    readers: dict[str, Callable[[Row], Iterator[Finding]]] = {
        "gpu_tests": _tests,
        "kernel_tests": _tests,
        "steps": _steps,
        "head_chunks": _head_chunks,
        "layers": _layers,
        "experts": _experts,
        "delta": _delta,
        "memory": _memory,
        "checkpoint": _checkpoint,
    }
    for stage, read in readers.items():
        for row in rows.get(stage, ()):
            if not row.keys() & {"error", "needs"}:
                yield from read(row)
    good = {name: [row for row in found if "error" not in row] for name, found in rows.items()}
    for stage in ("quickstart", "resume", "vllm_planner", "vllm_random"):
        yield from _run(stage, good.get(stage, ()))
    yield from _attention(good.get("attention", ()))
    yield from _rivals(good.get("rivals", ()))


def _tests(row: Row) -> Iterator[Finding]:
    failed = row["failures"] + row["errors"]
    yield Finding(
        f"{row['case']}: failures in {row['tests'] - row['skipped']} tests", failed, "=", 0
    )


def _steps(row: Row) -> Iterator[Finding]:
    if "useful_mfu" in row and row["case"].endswith(": default"):
        yield Finding(f"step, useful MFU, {row['case']}", row["useful_mfu"], ">=", 0.35)


def _head_chunks(row: Row) -> Iterator[Finding]:
    if row["chunk_rows"] == row["T"] and row["D"] in (896, 3584):
        text = f"linear loss in one chunk, times its bare products, D={row['D']}"
        yield Finding(text, row["of gemm"], "<=", 1.15 if row["D"] == 896 else 1.05)


def _layers(row: Row) -> Iterator[Finding]:
    if row["path"] == "flowkernels":
        text = f"{row['layer']}, share of a copy, D={row['D']}"
        yield Finding(text, row["of copy"], ">=", 0.8)


def _experts(row: Row) -> Iterator[Finding]:
    if row["way"] == "flowtrain":
        text = f"experts, share of their bare products, D={row['D']}"
        yield Finding(text, row["of products"], ">=", 0.8)


def _delta(row: Row) -> Iterator[Finding]:
    if row["kernel"] in ("diff", "digest"):
        text = f"sparse delta, {row['kernel']}, share of a copy"
        yield Finding(text, row["of copy"], ">=", 0.8)


def _memory(row: Row) -> Iterator[Finding]:
    if "predicted_of_measured" in row:
        text = f"memory, predicted over measured, {row['case']}"
        yield Finding(text, row["predicted_of_measured"], ">=", 0.9)


def _checkpoint(row: Row) -> Iterator[Finding]:
    yield Finding(f"checkpoint, {row['case']}: the same bits", row["same bits"], "=", 1)


def _run(stage: str, rows: Sequence[Row]) -> Iterator[Finding]:
    """The trainer reads what the sampler sampled, by the weights that were published."""
    if found := [row["logprob_mismatch"] for row in rows if row.get("num_tokens")]:
        yield Finding(f"{stage}, trainer and sampler apart, nats, at most", max(found), "<=", 0.05)
    if damaged := [row["weights_damaged"] for row in rows if "weights_damaged" in row]:
        yield Finding(f"{stage}, damaged tensors of {len(damaged)} loads", sum(damaged), "=", 0)


def _attention(rows: Sequence[Row]) -> Iterator[Finding]:
    """Flex on a chain beside torch's own causal attention; other ways on trees beside Flex."""
    ms = {
        (row["heads"], row["layout"], row["way"]): row["forward_ms"] + row["backward_ms"]
        for row in rows
        if "backward_ms" in row
    }
    for (heads, layout, way), taken in ms.items():
        other, goal = ("causal", 1.5) if way == "flex" else ("flex", 1.0)
        if way in ("flex", "rectangles", "split") and (heads, layout, other) in ms:
            text = f"attention, {way} over {other}, {heads}, {layout}"
            yield Finding(text, taken / ms[heads, layout, other], "<=", goal)


def _rivals(rows: Sequence[Row]) -> Iterator[Finding]:
    """Ours beside a copy, and beside the rival that was timed in turn with it."""
    ours = {
        (row["case"], row.get("path")): row["ms"]
        for row in rows
        if row.get("impl") == "flowkernels"
    }
    goals = {"logprobs": 0.88, "policy_loss": 1 / 1.3}
    for row in rows:
        key = (row["case"], row.get("path"))
        if row["case"] == "logits: torch" and key[1] in goals and row["impl"] == "flowkernels":
            text = f"`{row['path']}`, share of a copy, V={row['V']}"
            yield Finding(text, row["of copy"], ">=", goals[row["path"]])
        if row.get("impl") in _PEERS and key in ours:
            text = f"`{row['path']}`, times faster than {row['impl']}, D={row['D']} V={row['V']}"
            yield Finding(text, row["ms"] / ours[key], ">=", 1.0)


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows in Markdown, with a new head where the columns change."""
    lines: list[str] = []
    head: list[str] = []
    for row in rows:
        names = ["case", *(name for name in row if name not in _HIDDEN)]
        if names != head:
            head = names
            lines += ["", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
        cells = [f"{x:.4g}" if isinstance(x, float) else str(x) for x in map(row.get, head)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    path = folder / f"{stage}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found
