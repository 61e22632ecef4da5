"""Code of users: entry points of installed packages, and objects of their own files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from flowtrain.types import UserError
from flowtrain.utils.text import encodable

OBJECT = "FILE.py:NAME or PACKAGE.MODULE:NAME"
"""The form of a name that `load_object` takes, for messages."""
_MAX_ERROR = 300


def built_in(group: str, root: str, targets: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Return entry points of our own by name, imported when they are loaded; each target is
    MODULE:NAME within the package `root`.
    """
    return {name: EntryPoint(name, f"{root}.{target}", group) for name, target in targets.items()}


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


def names_object(name: str) -> bool:
    """Return whether a name has the form of OBJECT."""
    where, _, attribute = name.rpartition(":")
    return bool(where and attribute)


def load_object(name: str, origin: str) -> tuple[str, object]:
    """Load what FILE.py:NAME or PACKAGE.MODULE:NAME names; return NAME and the object.

    A file is run once per process. Raises UserError, which begins with `origin`, where there is no
    such file, module or object, or importing it fails.
    """
    where, _, attribute = name.rpartition(":")
    module = _import(where, origin)
    if attribute not in vars(module):
        raise UserError(f"{origin}: {where} has no {attribute!r}")
    return attribute, vars(module)[attribute]


def _import(where: str, origin: str) -> ModuleType:
    """Import a file, once, or a module."""
    try:
        if not where.endswith(".py"):
            return importlib.import_module(where)
        path = Path(where).resolve()
        return sys.modules.get(str(path)) or _run_file(path)
    # Foreign code may fail in any way.
    except (Exception, SystemExit) as error:
        reason = encodable(" ".join(f"{type(error).__name__}: {error}".split()))[:_MAX_ERROR]
        raise UserError(f"{origin}: {reason}") from error


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # where its dataclasses look it up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[str(path)]
        raise
    return module
