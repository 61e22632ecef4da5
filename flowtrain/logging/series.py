"""Read the metrics of a run back, by key and step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from flowtrain.logging.jsonl import read_lines
from flowtrain.records import TokenAccount, UserError, account_of

Series = tuple[list[int], list[float]]
"""(steps, values) of one metric."""


def read_series(run_dir: Path) -> dict[str, Series]:
    """Read every numeric metric of a run by key, steps ascending. The later of two lines for a step
    counts.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: name the folder of a run that has logged a step")
    values: dict[str, dict[int, float]] = {}
    for record in read_lines(path):
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(key, {})[record["step"]] = value
    if not values:
        raise UserError(f"{path} holds no metrics yet: wait for the first step of the run")
    return {
        key: (sorted(by_step), [by_step[step] for step in sorted(by_step)])
        for key, by_step in values.items()
    }


def total_seconds(series: Mapping[str, Series]) -> dict[str, float]:
    """Sum the seconds of all steps, by what took them."""
    return {
        key.removesuffix("_s"): round(sum(values), 3)
        for key, (_, values) in series.items()
        if key.endswith("_s") and key != "tokens_per_s"
    }


def total_tokens(series: Mapping[str, Series]) -> TokenAccount:
    """Add up what became of the tokens of all steps."""
    return account_of({key: sum(values) for key, (_, values) in series.items()})
