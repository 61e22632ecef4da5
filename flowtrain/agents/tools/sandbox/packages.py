"""Installed packages that the code may import."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from flowtrain.types import UserError


def folders(packages: Sequence[str]) -> tuple[str, ...]:
    """The folders that the packages are installed in; whatever else is installed there can be imported too."""
    found: dict[str, None] = {}
    for name in packages:
        spec = find_spec(name) if name.isidentifier() else None
        if spec is None or not spec.has_location or spec.origin is None:
            raise UserError(f"agent.python_packages: no package {name!r} is installed that could be imported by this name")
        place = Path(spec.origin).resolve()
        found[str(place.parents[1] if spec.submodule_search_locations else place.parent)] = None
    return tuple(found)
