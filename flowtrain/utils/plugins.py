"""Code of users: entry points of installed packages, and objects of their own files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from flowtrain.records import UserError
from flowtrain.utils.errors import foreign, on_failure

OBJECT = "FILE.py:NAME or PACKAGE.MODULE:NAME"
"""The form of a name that `load_object` takes, for messages."""


def built_in(group: str, root: str, targets: Mapping[str, str]) -> dict[str, EntryPoint]:
    """Return entry points of our own by name, imported when they are loaded; each target is
    MODULE:NAME within the package `root`.
    """
    return {name: EntryPoint(name, f"{root}.{target}", group) for name, target in targets.items()}


def offered(kind: str, group: str, built_in: Mapping[str, EntryPoint]) -> dict[str, EntryPoint]:
    """Return every entry point of the group by name, built-in ones first. Raises UserError when two
    packages offer one name for a `kind` of thing.
    """
    entries = dict(built_in)
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, package(entry))):
        if (other := entries.setdefault(entry.name, entry)) != entry:
            raise UserError(
                f"{kind} {entry.name!r} is defined by both {package(other)} and {package(entry)}; "
                "uninstall one of them"
            )
    return entries


def package(entry: EntryPoint) -> str:
    """Name the package that offers it, for messages."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "flowtrain itself"


def guard(entry: EntryPoint, problem: str) -> AbstractContextManager[None]:
    """Surround what runs the code behind an entry point with `errors.foreign`; built-in code is
    not foreign: our own mistakes keep their traceback.
    """
    return nullcontext() if entry.dist is None else foreign(problem)


def load(
    name: str, origin: str, kind: str, group: str, built_in: Mapping[str, EntryPoint]
) -> object:
    """Load what a name stands for: an object as `load_object` does, else what is `offered`.

    Raises UserError, which begins with `origin`, where that is not there or cannot be imported.
    """
    if names_object(name):
        return load_object(name, origin)[1]
    entries = offered(kind, group, built_in)
    if name not in entries:
        raise UserError(
            f"{origin}: there is no such {kind}; there are {', '.join(entries)}, and {OBJECT} "
            "names a custom one"
        )
    entry = entries[name]
    with guard(entry, f"{origin} of package {package(entry)} cannot be imported"):
        return entry.load()


def names_object(name: str) -> bool:
    """Return whether a name has the form of OBJECT."""
    source, _, attribute = name.rpartition(":")
    return bool(source and attribute)


def load_object(name: str, origin: str) -> tuple[str, object]:
    """Load what FILE.py:NAME or PACKAGE.MODULE:NAME names; return NAME and the object.

    A file is run once per process. Raises UserError, which begins with `origin`, for a name of
    another form, where there is no such file, module or object, and where importing it fails.
    """
    if not names_object(name):
        raise UserError(f"{origin} must be {OBJECT}")
    source, _, attribute = name.rpartition(":")
    with foreign(origin):
        module = _import(source)
    if attribute not in vars(module):
        raise UserError(f"{origin}: {source} has no {attribute!r}")
    return attribute, vars(module)[attribute]


def _import(source: str) -> ModuleType:
    """Import a file, once, or a module."""
    if not source.endswith(".py"):
        return importlib.import_module(source)
    path = Path(source).resolve()
    return sys.modules.get(str(path)) or _run_file(path)


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(str(path), path)
    assert spec is not None and spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[str(path)] = module  # where its dataclasses look it up
    with on_failure(lambda: sys.modules.pop(str(path))):
        spec.loader.exec_module(module)
    return module
