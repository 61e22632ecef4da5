"""What other installed packages offer by entry points, beside what is built in."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from flowtrain.types import UserError


def offered(kind: str, group: str, built_in: Mapping[str, EntryPoint]) -> dict[str, EntryPoint]:
    """Every `kind` of thing that can be asked for, by name; built-in ones first. UserError where
    two packages offer one name.
    """
    found = dict(built_in)
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, package(entry))):
        if (other := found.setdefault(entry.name, entry)) != entry:
            raise UserError(
                f"{kind} {entry.name!r} is offered by {package(other)} and by {package(entry)}; "
                "uninstall one of them"
            )
    return found


def package(entry: EntryPoint) -> str:
    """Who offers it, for messages."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "flowtrain itself"
