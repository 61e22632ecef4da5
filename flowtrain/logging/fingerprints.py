"""Pins decide the outcome of a run: its manifest holds them, and a resumed run compares them."""

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
    folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any], key: str = "--out"
) -> None:
    """Raise UserError that names the first differences, unless both pins are the same; `key` is the
    option of the folder.
    """
    then, now = flat(begun), flat(now)
    changes = [
        f"{name} was {_text(then, name)}, is {_text(now, name)}"
        for name in sorted({*then, *now})
        if _text(then, name) != _text(now, name)
    ]
    if changes:
        shown = "; ".join(changes[:_SHOWN])
        raise UserError(
            f"{folder} was begun with other settings: {shown}; go back to them or choose another "
            f"{key}"
        )


def changes(folder: Path, config: Config) -> str:
    """List the options that are not those with which the run in `folder` began: "train.lr: 0.0001
    -> 1e-05"; those that its file lacks had their defaults.
    """
    begun: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # a file that was edited since
        begun = tomllib.loads((folder / "config.toml").read_text(encoding="utf-8"))
    default, now = (
        flat(each.model_dump(mode="json", exclude_none=True)) for each in (Config(), config)
    )
    then = default | flat(begun) if begun else now
    return ", ".join(
        f"{key}: {_text(then, key)} -> {_text(now, key)}"
        for key in sorted({*then, *now} - {"run.dir", "run.resume"})
        if then.get(key) != now.get(key)
    )


def pinned(config: Config, sections: Collection[str], but: Collection[str]) -> dict[str, Any]:
    """Return the options of some sections as JSON, by dotted key, without those that decide
    nothing.
    """
    values = flat(config.model_dump(mode="json", include=set(sections)))
    return {key: value for key, value in values.items() if key not in but}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables to dotted keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        is_table = isinstance(value, Mapping)
        found |= flat(value, f"{prefix}{key}.") if is_table else {f"{prefix}{key}": value}
    return found


def _text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], ensure_ascii=False) if key in values else "absent"
