"""Plain-text tables and the summary file of a finished run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.logging.jsonl import json_value
from flowtrain.logging.run_dir import atomic_write_text
from flowtrain.utils.text import printable

Row = tuple[str, str, str, str]


def comparison_table(warm: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """Show the policy before and after training side by side; "-" where one was not measured.

    Both hold `splits` {split: {"sampled", "greedy"}}, `by_num_turns`, `by_kind`, `tool_shares`
    (name -> number each) and `turns_mean`, and may hold `eval_reward_error` and `benchmarks`.
    """
    rows = [
        (f"  {name}" if any(cells) else name, *cells)
        for name, *cells in comparison_rows(warm, trained)
    ]
    return aligned([("", "before", "after", "difference"), *rows])


def comparison_rows(warm: Mapping[str, Any], trained: Mapping[str, Any]) -> list[Row]:
    """List (name, before, after, difference) of every row; that of a section's title has only a
    name. A section whose one row has no name of its own is left out: it tells what the mean does.
    """
    table: list[Row] = []
    after_by_title = _sections(trained)
    for title, before in _sections(warm).items():
        after = after_by_title[title]
        rows = [_row(title, name, before, after) for name in {**before, **after}]
        if [name for name, *_ in rows] not in ([], [""], ["0"]):
            table += [(title, "", "", ""), *rows]
    return table


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write `summary` as JSON; a number that is not finite becomes null."""
    text = json.dumps(json_value(summary), indent=2, ensure_ascii=False, allow_nan=False)
    atomic_write_text(path, text + "\n")


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Write rows of equally many cells as text: the first is the heading, the first column flush
    left, all others flush right. Characters that break a line or are invisible are escaped.
    """
    rows = [[printable(cell, keep="") for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [
            name.ljust(widths[0]),
            *(number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines) + "\n"


def markdown(table: Sequence[Sequence[str]]) -> str:
    """Write rows of equally many cells as a table in Markdown: the first is the heading, the first
    column flush left, all others flush right. Characters that break a row or are invisible are
    escaped.
    """
    rows = [[printable(cell, keep="").replace("|", "\\|") for cell in row] for row in table]
    rule = ["---", *["---:"] * (len(rows[0]) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (rows[0], rule, *rows[1:])) + "\n"


def _sections(side: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the numbers of one side by section and name."""
    return {
        "held-out reward": {
            f"{split}, {mode}": reward
            for split, rewards in side.get("splits", {}).items()
            for mode, reward in rewards.items()
            if mode in ("sampled", "greedy")
        },
        "standard error": {"texts, sampled": side["eval_reward_error"]}
        if "eval_reward_error" in side
        else {},
        "by turns needed (sampled)": side.get("by_num_turns", {}),
        "by kind (sampled)": side.get("by_kind", {}),
        "benchmarks": {
            name.removeprefix("eval_"): number
            for name, number in side.get("benchmarks", {}).items()
        },
        "tool use": side.get("tool_shares", {}),
        "rollouts": {"turns per rollout": side["turns_mean"]} if "turns_mean" in side else {},
    }


def _row(title: str, name: str, before: Mapping[str, float], after: Mapping[str, float]) -> Row:
    """Return a row; a side that measured other tools did not use this one."""
    first, last = (
        side.get(name, 0.0 if title == "tool use" and side else None) for side in (before, after)
    )
    difference = None if first is None or last is None else last - first
    return name, _number(title, first), _number(title, last), _number(title, difference, "+")


def _number(title: str, value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    if title == "tool use":
        return f"{100 * value:{sign}.1f} {'pp' if sign else '%'}"
    return f"{value:{sign}.3f}"
