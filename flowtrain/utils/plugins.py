"""Entry points of other installed packages, beside the built-in ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points

from flowtrain.types import UserError


def offered(kind: str, group: str, built_in: Mapping[str, EntryPoint]) -> dict[str, EntryPoint]:
    """Return every entry point of the group by name, built-in ones first. Raises UserError when two
    packages offer one name for a `kind` of thing.
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
    """Name the package that offers it, for messages."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "flowtrain itself"
