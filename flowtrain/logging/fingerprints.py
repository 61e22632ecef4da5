"""Pins: options that decide a run's outcome, stored in its manifest and compared on resume."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flowtrain.config import Config
from flowtrain.records import UserError

_SHOWN = 3


def check_same(
    folder: Path, recorded: Mapping[str, Any], current: Mapping[str, Any], key: str = "--out"
) -> None:
    """Raise UserError with the first differences of the pins; `key` is the folder's option."""
    initial, current = flat(recorded), flat(current)
    changes = [
        f"{name} was {_text(initial, name)}, is {_text(current, name)}"
        for name in sorted({*initial, *current})
        if _text(initial, name) != _text(current, name)
    ]
    if changes:
        text = "; ".join(changes[:_SHOWN])
        raise UserError(
            f"{folder} was started with other settings: {text}; restore them or choose another "
            f"{key}"
        )


def changes(folder: Path, config: Config) -> str:
    """Return the options that differ from the start of the run in `folder`: "train.lr: 0.0001 ->
    1e-05". Options that its file lacks had their defaults.
    """
    recorded: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a file that was edited since
        recorded = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    default, current = (
        flat(options.model_dump(mode="json", exclude_none=True)) for options in (Config(), config)
    )
    initial = default | flat(recorded) if recorded else current
    return ", ".join(
        f"{key}: {_text(initial, key)} -> {_text(current, key)}"
        for key in sorted({*initial, *current} - {"run.dir", "run.resume"})
        if initial.get(key) != current.get(key)
    )


def pinned(config: Config, sections: Collection[str], excluded: Collection[str]) -> dict[str, Any]:
    """Return the options of some sections as JSON, by dotted key, without irrelevant ones."""
    values = flat(config.model_dump(mode="json", include=set(sections)))
    return {key: value for key, value in values.items() if key not in excluded}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys."""
    flattened: dict[str, Any] = {}
    for key, value in values.items():
        is_table = isinstance(value, Mapping)
        flattened |= flat(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return flattened


def _text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
