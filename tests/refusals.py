"""Refusals as data: TOML tables of what is asked and what the answer says; "…" is anything."""

from __future__ import annotations

import tomllib
from pathlib import Path


def rows(path: Path, table: str) -> list[tuple[str, str]]:
    """The rows of a table."""
    return list(tomllib.loads(path.read_text(encoding="utf-8"))[table].items())


def check_parts(message: str, parts: str) -> None:
    """Check that a message is one line that has these parts, in their order."""
    assert "\n" not in message
    rest = message
    for part in parts.split(" … "):
        _, found, rest = rest.partition(part)
        assert found, f"no {part!r} at its place in {message!r}"
