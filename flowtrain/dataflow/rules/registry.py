"""The rules by name: those of this package, and those that other packages bring through entry
points.

An entry point names a callable that takes the rule's options as keyword arguments and returns the
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from inspect import signature
from typing import Any

from pydantic import ValidationError

from flowtrain.config.dataflow import Dataflow
from flowtrain.dataflow.rules.base import Curator, Filter, Selector
from flowtrain.types import UserError
from flowtrain.utils import plugins


@dataclass(frozen=True, slots=True)
class Rules:
    """Those of one run. The curator has a state: what it observed."""

    curator: Curator
    filter: Filter
    selector: Selector


@dataclass(frozen=True, slots=True)
class Point:
    """One of the three places where a rule decides."""

    key: str
    """In [dataflow]; the options' key is this one with "_options" behind it."""
    group: str
    """Of entry points."""
    built_in: Mapping[str, str]
    methods: tuple[str, ...]
    """What a rule has."""


_CURATORS = Point(
    "curator",
    "flowtrain.curators",
    {"all": "all:AllPrompts", "greso": "greso:Greso", "curriculum": "curriculum:Curriculum"},
    ("admits", "observe", "on_version"),
)
_FILTERS = Point(
    "filter", "flowtrain.filters", {"all": "all:AllGroups", "mixed": "mixed:Mixed"}, ("keeps",)
)
_SELECTORS = Point(
    "selector",
    "flowtrain.selectors",
    {
        "deadline": "deadline:EarliestDeadline",
        "arrival": "arrival:Arrival",
        "weighted": "weighted:Weighted",
    },
    ("select",),
)

POINTS = (_CURATORS, _FILTERS, _SELECTORS)


def load(options: Dataflow) -> Rules:
    """The rules that the options name, new: with nothing observed. UserError for a name that nobody
    offers and for a bad option.
    """
    return Rules(
        curator=_make(_CURATORS, options.curator, options.curator_options),
        filter=_make(_FILTERS, options.filter, options.filter_options),
        selector=_make(_SELECTORS, options.selector, options.selector_options),
    )


def _make(point: Point, name: str, options: Mapping[str, Any]) -> Any:
    offered = _offered(point)
    if name not in offered:
        raise UserError(
            f"dataflow.{point.key}: no {point.key} {name!r}; there are {', '.join(offered)}"
        )
    entry = offered[name]
    if entry.dist is None:
        return _called(point, name, entry.load(), options)
    try:
        rule = _called(point, name, entry.load(), options)
    except UserError:
        raise
    # Foreign code may fail in any way, and the traceback would show our lines before its own.
    except Exception as error:
        raise UserError(
            f"{point.key} {name!r} of package {plugins.package(entry)} cannot be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    if missing := [method for method in point.methods if not callable(getattr(rule, method, None))]:
        needs = ", ".join(point.methods)
        raise UserError(
            f"{point.key} {name!r} of package {plugins.package(entry)} has no method {missing[0]}; "
            f"it needs {needs}"
        )
    return rule


def _called(point: Point, name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    takes = signature(make)
    try:
        takes.bind(**options)
    except TypeError as error:
        known = ", ".join(takes.parameters) or "no options"
        raise UserError(
            f"dataflow.{point.key}_options: {name}: {error}; it takes {known}"
        ) from None
    try:
        return make(**options)
    except ValidationError as error:
        raise UserError(_explained(point, name, error)) from None


def _explained(point: Point, name: str, error: ValidationError) -> str:
    """Example: dataflow.curator_options.floor_easy=0: Input should be greater than 0 (greso)."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, (f"dataflow.{point.key}_options", *first["loc"])))
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}={first['input']!r}: {message} ({name})"


def _offered(point: Point) -> dict[str, EntryPoint]:
    """By name."""
    built_in = {
        name: EntryPoint(name, f"flowtrain.dataflow.rules.{value}", point.group)
        for name, value in point.built_in.items()
    }
    return plugins.offered(point.key, point.group, built_in)
