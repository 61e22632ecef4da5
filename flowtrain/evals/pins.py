"""Pins decide the outcome of an evaluation: its manifest holds them, and a resumed run compares
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.types import UserError

_DECIDING = ("model", "tiny", "tasks", "agent", "roles", "engines", "plugins", "rollout", "vllm")
_NOT_DECIDING = (
    "rollout.max_in_flight",
    "rollout.num_questions",
    "rollout.group_size",
    "agent.max_turns",
    "agent.eval_max_turns",
    "tasks.num_train",
)
_SHOWN = 3


def config_pins(config: Config) -> dict[str, Any]:
    """Return the options that an evaluation reads, as JSON, by dotted key."""
    values = config.model_dump(mode="json", include=set(_DECIDING))
    return {key: value for key, value in flat(values).items() if key not in _NOT_DECIDING}


def check_same(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError that names the first differences, unless both pins are the same."""
    then, now = flat(begun), flat(now)
    changes = [
        f"{key} was {_text(then, key)}, is {_text(now, key)}"
        for key in sorted({*then, *now})
        if _text(then, key) != _text(now, key)
    ]
    if changes:
        shown = "; ".join(changes[:_SHOWN])
        raise UserError(
            f"{folder} was begun with other settings: {shown}; go back to them or choose another "
            "--out"
        )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_table = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return found


def _text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
