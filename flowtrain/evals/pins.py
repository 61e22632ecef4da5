"""Pins decide the outcome of an evaluation: its manifest holds them, and a resumed run compares
them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
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
    "tasks.num_train",
)
_SHOWN = 3


def config_pins(config: Config) -> dict[str, Any]:
    """Return the options that an evaluation reads, as JSON, by dotted key."""
    values = json.loads(
        json.dumps({section: config.model_dump()[section] for section in _DECIDING})
    )
    return {key: value for key, value in flat(values).items() if key not in _NOT_DECIDING}


def check_same(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError that names the first difference, unless both pins are the same."""
    then, now = flat(begun), flat(now)
    changes = [
        f"{key} was {_text(then, key)}, is {_text(now, key)}"
        for key in sorted({*then, *now})
        if _text(then, key) != _text(now, key)
    ]
    if changes:
        shown = "; ".join(changes[:_SHOWN]) + (
            f" and {len(changes) - _SHOWN} more" if len(changes) > _SHOWN else ""
        )
        raise UserError(
            f"{folder} was begun with other settings: {shown}; go back to them or choose another "
            "--out"
        )


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested tables to dotted keys."""
    return dict(_leaves("", values))


def _leaves(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", value


def _text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
