"""The report of `bench.gpu`: every goal with its figure and a verdict, and what became of the
stages.

Goals hold on a GPU. Bytes and FLOPs are those that must move and be done, beside a copy and a bare
product of the same run.
"""

from __future__ import annotations

import json
import operator
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.linear_cost import linear_cost

Row = Mapping[str, Any]
Rows = Sequence[Row]
_RELATIONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
}
_PEERS = ("torch", "compile", "trl", "liger", "cce")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    stage: str
    text: str
    figure: float
    relation: str = ""
    goal: float | None = None
    """None: a figure without a goal."""

    def verdict(self, is_judged: bool) -> str:
        if self.goal is None:
            return ""
        if not is_judged:
            return "not judged"
        return "met" if _RELATIONS[self.relation](self.figure, self.goal) else "**missed**"


def write_report(folder: Path, outcomes: Mapping[str, Mapping[str, Any]], on_gpu: bool) -> None:
    """Write `report.md` from the results in the folder."""
    lines = ["# Report of `python -m bench.gpu`", "", *_facts(folder), ""]
    if not on_gpu:
        lines += ["**No GPU**: stages ran at a small size on the CPU, and no goal is judged.", ""]
    lines += ["| | figure | goal | verdict |", "|---|---|---|---|"]
    for finding in findings(folder):
        goal = "" if finding.goal is None else f"{finding.relation} {finding.goal:.4g}"
        cells = (finding.text, f"{finding.figure:.4g}", goal, finding.verdict(on_gpu))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| stage | | seconds | |", "|---|---|---|---|"]
    for name, outcome in outcomes.items():
        cells = (name, outcome["status"], f"{outcome['seconds']:.0f}", outcome["reason"])
        lines.append(f"| {' | '.join(cells)} |")
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def findings(folder: Path) -> Iterator[Finding]:
    """What the results in the folder say, in the order of the stages."""
    readers: dict[str, Callable[[Rows], Iterator[Finding]]] = {
        "logits": _logits,
        "heads": _heads,
        "attention": _attention,
        "delta": _delta,
        "step_05b": _step,
        "memory": _memory,
        "step_15b": _step,
        "l2": _l2,
        "quickstart": _quickstart,
        "vllm_pause": _pause,
    }
    for stage in ("gpu_tests", "kernel_tests"):
        if (folder / f"{stage}.xml").exists():
            yield from _tests(stage, folder / f"{stage}.xml")
    for stage, read in readers.items():
        if rows := _rows(folder, stage):
            yield from read(rows)


def _tests(stage: str, path: Path) -> Iterator[Finding]:
    root = ET.parse(path).getroot()  # of our own test run
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in root.iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    ran = counts["tests"] - counts["skipped"]
    failed = counts["failures"] + counts["errors"]
    yield Finding(stage, f"{stage}: failures in {ran} tests", failed, "=", 0)


def _logits(rows: Rows) -> Iterator[Finding]:
    """Every size; the goals are those of T = 8192 and V = 151,936 or 128,256."""
    copies = {_case(row): row for row in rows if row["path"] == "copy"}
    for row in copies.values():
        yield Finding("logits", f"copy, GB/s, {_name(row)}", row["gb_s"])
    for path, goal in (("logprobs", 0.88), ("policy_loss", 1 / 1.3)):
        for row in rows:
            if row["path"] == path and row["impl"] == "flowkernels":
                judged = goal if row["T"] >= 8192 and row["V"] > 1e5 else None
                text = f"`{path}`, share of a copy, {_name(row)}"
                yield Finding("logits", text, row["of copy"], ">=", judged)
                yield from _against_peers("logits", row, rows)
    for row in rows:
        if row["path"] == "branching":
            yield Finding("logits", f"`branching_score`, ms, {_name(row)}", row["ms"])


def _heads(rows: Rows) -> Iterator[Finding]:
    """The time of the linear loss beside the sum of its parts, and what fp32 logits cost."""
    bare = {
        _case(row): row["ms"]
        for row in rows
        if row["path"] == "linear_policy_loss" and row["impl"] == "gemm"
    }
    for row in rows:
        if row["path"] != "linear_policy_loss":
            continue
        name, case = _name(row), _case(row)
        if row["impl"] == "flowkernels":
            yield from _against_peers("heads", row, rows)
            if case in bare and row["device"] == "cuda":
                products = 6e-9 * row["T"] * row["D"] * row["V"] / bare[case]
                cost = linear_cost(row["T"], row["D"], row["V"], tflops=products)
                text = f"`linear_policy_loss`, time over the sum of its parts, {name}"
                yield Finding("heads", text, row["ms"] / cost["sum"], "<=", 1.1)
        if row["impl"] == "flowkernels fp32":
            plain = next(
                x["ms"]
                for x in rows
                if _case(x) == case and x["path"] == row["path"] and x["impl"] == "flowkernels"
            )
            text = f"`fp32_logits`, time over 16-bit logits, {name}"
            yield Finding("heads", text, row["ms"] / plain, "<=", 1.1 if row["D"] > 1000 else None)


def _against_peers(stage: str, ours: Row, rows: Rows) -> Iterator[Finding]:
    peers = {
        row["impl"]: row["ms"]
        for row in rows
        if row["path"] == ours["path"] and _case(row) == _case(ours) and row["impl"] in _PEERS
    }
    if peers:
        best = min(peers, key=peers.__getitem__)
        text = f"`{ours['path']}`, times faster than the best peer ({best}), {_name(ours)}"
        yield Finding(stage, text, peers[best] / ours["ms"], ">=", 1.0)


def _attention(rows: Rows) -> Iterator[Finding]:
    """Ours on a chain beside torch's own causal attention, and the ways beside each other."""
    for row in rows:
        where = f"{row['heads']}, {row['layout']}"
        for part in ("forward", "backward"):
            text = f"attention `{row['way']}`, {part}, TFLOP/s, {where}"
            yield Finding("attention", text, row[f"{part}_tflops"])
    for causal in rows:
        if causal["way"] != "causal":
            continue
        same = [
            row
            for row in rows
            if (row["heads"], row["layout"]) == (causal["heads"], causal["layout"])
            and row["way"] != "causal"
        ]
        if not same:
            continue
        best = min(same, key=_both_ms)
        text = (
            f"attention `{best['way']}`, time over causal SDPA's, "
            f"{causal['heads']}, {causal['layout']}"
        )
        yield Finding("attention", text, _both_ms(best) / _both_ms(causal), "<=", 1.5)


def _both_ms(row: Row) -> float:
    return float(row["forward_ms"] + row["backward_ms"])


def _delta(rows: Rows) -> Iterator[Finding]:
    for row in rows:
        if row["kernel"] in ("diff", "digest"):
            text = f"sparse delta, {row['kernel']}, share of a copy"
            yield Finding("delta", text, row["of copy"], ">=", 0.8)
        else:
            yield Finding("delta", f"sparse delta, {row['kernel']}, ms", row["ms"])


def _step(rows: Rows) -> Iterator[Finding]:
    for row in rows:
        if row["path"] == "tree":
            if "mfu" in row:
                yield Finding("step", f"step, MFU, {row['batch']}", row["mfu"], ">=", 0.35)
            yield Finding("step", f"step, ms, {row['batch']}", row["ms"])
        else:
            text = f"step, time of {row['path']} over the tree's, {row['batch']}"
            yield Finding("step", text, row["time_of_tree"], ">=", 1.0)


def _memory(rows: Rows) -> Iterator[Finding]:
    for row in rows:
        shape = f"{row['num_layers']} layers of {row['hidden_size']}"
        recompute = ", recompute" if row["recompute"] else ""
        text = f"memory, predicted over measured, {shape}{recompute}"
        yield Finding("memory", text, row["predicted_of_measured"], ">=", 0.9)


def _l2(rows: Rows) -> Iterator[Finding]:
    for row in rows:
        yield Finding("l2", f"L2 hit rate of reads, `{row['kernel']}`", row["hit_rate"])
        text = f"DRAM bytes per bf16 logit, `{row['kernel']}`"
        yield Finding("l2", text, row["dram_bytes_per_element"])


def _quickstart(rows: Rows) -> Iterator[Finding]:
    first, last = rows[0], rows[-1]
    yield Finding("quickstart", "quickstart, held-out reward before", first["eval_reward"])
    yield Finding("quickstart", "quickstart, held-out reward after", last["eval_reward"], ">=", 0.9)


def _pause(rows: Rows) -> Iterator[Finding]:
    for row in rows:
        for key, value in row.items():
            if isinstance(value, float) and "pause" in key:
                yield Finding("vllm_pause", f"vLLM, {key}, {row.get('path', '')}", value)


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("T", "D", "V", "dtype"))


def _name(row: Row) -> str:
    head = f" D={row['D']}" if row["D"] else ""
    return f"T={row['T']}{head} V={row['V']} {row['dtype']}"


def _facts(folder: Path) -> list[str]:
    path = folder / "environment.json"
    if not path.exists():
        return []
    rows = json.loads(path.read_text())["rows"]
    return [", ".join(f"{row['fact']} {row['value']}" for row in rows)]


def _rows(folder: Path, stage: str) -> list[dict[str, Any]]:
    path = folder / f"{stage}.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"] if path.exists() else []
    return found
