"""Plain-text tables and the summary file: what a person reads when a run has ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowtrain.report.jsonl import json_value
from flowtrain.report.run_dir import atomic_write_text
from flowtrain.types import Task, Trajectory, Turn

_LONGEST_TEXT = 1200
_LABEL_WIDTH = 11

Row = tuple[str, str, str, str]


def comparison_table(warm: Mapping[str, Any], trained: Mapping[str, Any]) -> str:
    """The planner before and after training, side by side; "-" where one of them was not measured.

    Both hold `eval_reward`, `eval_reward_greedy`, `splits` {split: {"sampled", "greedy"}},
    `by_num_turns`, `by_kind`, `tool_shares` (name -> number each) and `turns_mean`.
    """
    return aligned(
        [("", "frozen", "trained", "difference"), *comparison_rows(warm, trained, indent="  ")]
    )


def comparison_rows(
    warm: Mapping[str, Any], trained: Mapping[str, Any], indent: str = ""
) -> list[Row]:
    """(name, frozen, trained, difference) of every row; that of a section's title has nothing but a
    name.
    """
    sections = (
        ("held-out reward", _reward_rows(warm, trained)),
        ("by turns needed (sampled)", _rows(warm, trained, "by_num_turns", _reward)),
        ("by kind (sampled)", _rows(warm, trained, "by_kind", _reward)),
        ("tool use", _rows(warm, trained, "tool_shares", _share, absent=0.0)),
        (
            "rollouts",
            [_row("turns per rollout", warm.get("turns_mean"), trained.get("turns_mean"), _turns)],
        ),
    )
    table: list[Row] = []
    for title, rows in sections:
        if rows:
            table += [
                (title, "", "", ""),
                *(
                    (indent + name, before, after, difference)
                    for name, before, after, difference in rows
                ),
            ]
    return table


def rollout_text(trajectory: Trajectory) -> str:
    """One rollout to read: the question, what the planner did turn by turn, the answer and its
    reward.
    """
    lines = _field("question", trajectory.task.question)
    for number, turn in enumerate(trajectory.turns, 1):
        lines += [
            "",
            f"turn {number} ({len(turn.calls['planner'].response_ids)} tokens, {turn.seconds:.1f} "
            "s)",
            *_turn_lines(turn),
        ]
    reward = "not scored" if trajectory.reward is None else f"{trajectory.reward:.3f}"
    ended = f", cut off: {trajectory.truncated}" if trajectory.truncated else ""
    lines += [
        "",
        *_field("answer", trajectory.answer),
        *_field("accepted", _accepted(trajectory.task)),
    ]
    lines += _field(
        "reward", f"{reward} ({len(trajectory.turns)} turns, {trajectory.seconds:.1f} s{ended})"
    )
    return "\n".join(lines) + "\n"


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Writes `summary` as JSON: single values before nested ones, each sorted by name with numbers
    in numeric order.
    """
    atomic_write_text(
        path,
        json.dumps(_sorted(json_value(summary)), indent=2, ensure_ascii=False, allow_nan=False)
        + "\n",
    )


def _reward_rows(warm: Mapping[str, Any], trained: Mapping[str, Any]) -> list[Row]:
    rows = [
        _row("texts, sampled", warm.get("eval_reward"), trained.get("eval_reward"), _reward),
        _row(
            "texts, greedy",
            warm.get("eval_reward_greedy"),
            trained.get("eval_reward_greedy"),
            _reward,
        ),
    ]
    before, after = warm.get("splits", {}), trained.get("splits", {})
    for split in _names(before, after):
        if split != "texts":
            for mode in ("sampled", "greedy"):
                rows.append(
                    _row(
                        f"{split}, {mode}",
                        before.get(split, {}).get(mode),
                        after.get(split, {}).get(mode),
                        _reward,
                    )
                )
    return rows


def _rows(
    warm: Mapping[str, Any],
    trained: Mapping[str, Any],
    key: str,
    form: Callable[[float, str], str],
    absent: float | None = None,
) -> list[Row]:
    """One row per name either side measured; `absent` is the value of a name that a side which
    measured others lacks.
    """
    before, after = warm.get(key) or {}, trained.get(key) or {}
    missing_before, missing_after = absent if before else None, absent if after else None
    names = _names(before, after)
    return [
        _row(name, before.get(name, missing_before), after.get(name, missing_after), form)
        for name in names
    ]


def _row(
    name: str, before: float | None, after: float | None, form: Callable[[float, str], str]
) -> Row:
    difference = "-" if before is None or after is None else form(after - before, "+")
    return (
        name,
        "-" if before is None else form(before, ""),
        "-" if after is None else form(after, ""),
        difference,
    )


def _reward(value: float, sign: str) -> str:
    return f"{value:{sign}.3f}"


def _turns(value: float, sign: str) -> str:
    return f"{value:{sign}.2f}"


def _share(value: float, sign: str) -> str:
    return f"{100 * value:{sign}.1f} {'pp' if sign else '%'}"


def aligned(table: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as text: the first is the heading, the first column flush left,
    all others flush right.
    """
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *numbers in table:
        cells = [
            name.ljust(widths[0]),
            *(number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)),
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * (sum(widths) + 2 * (len(widths) - 1)))
    return "\n".join(lines) + "\n"


def _turn_lines(turn: Turn) -> list[str]:
    if turn.action is None:
        lines = [*_field("malformed", turn.calls["planner"].text), *_field("", turn.command)]
    else:
        lines = [
            *_field("sub-goal", turn.action.sub_goal),
            *_field("tool", turn.action.tool_name),
            *_field("command", turn.command),
            *_field("result", turn.result.text),
        ]
    return [f"  {line}" for line in (*lines, *_field("verdict", turn.verdict.value))]


def _field(label: str, text: str) -> list[str]:
    """`label` and the text beside it; further lines of the text stay in its column, and a very long
    text is cut.
    """
    if len(text) > _LONGEST_TEXT:
        text = f"{text[:_LONGEST_TEXT]} ... ({len(text) - _LONGEST_TEXT} more characters)"
    first, *more = text.splitlines() or ["(empty)"]
    return [label.ljust(_LABEL_WIDTH) + first, *(" " * _LABEL_WIDTH + line for line in more)]


def _accepted(task: Task) -> str:
    if task.scorer == "gameof24":
        return f"any expression of {' '.join(task.answers)} that makes 24"
    return " | ".join(task.answers)


def _names(before: Iterable[str], after: Iterable[str]) -> list[str]:
    return sorted({*before, *after}, key=_natural)


def _sorted(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    keys = sorted(value, key=lambda key: (isinstance(value[key], dict | list), _natural(key)))
    return {key: _sorted(value[key]) for key in keys}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts "2" before "10" and letters as usual."""
    return [
        (int(part), "") if part.isdigit() else (-1, part) for part in re.findall(r"\d+|\D+", name)
    ]
