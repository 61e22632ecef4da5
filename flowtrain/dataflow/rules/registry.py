"""The rules by name: built-in ones, and those of other packages, found by entry points.

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
from flowtrain.dataflow.rules.base import GroupFilter, PromptFilter, Selector
from flowtrain.types import UserError
from flowtrain.utils import plugins


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run. The prompt filter has a state: its observations."""

    prompt_filter: PromptFilter
    group_filter: GroupFilter
    selector: Selector


@dataclass(frozen=True, slots=True)
class RuleKind:
    key: str
    """Key in [dataflow]; the key of the rule's options is this one with "_options" behind it."""
    built_in: Mapping[str, str]
    """By name: module of this package, ":", class."""
    methods: tuple[str, ...]
    """Methods that a rule must have."""

    @property
    def text(self) -> str:
        return self.key.replace("_", " ")

    @property
    def entry_points(self) -> str:
        """Group of entry points."""
        return f"flowtrain.{self.key}s"


_PROMPT_FILTERS = RuleKind(
    "prompt_filter",
    {"all": "builtin:AllPrompts", "greso": "greso:Greso", "curriculum": "curriculum:Curriculum"},
    ("admits", "observe", "on_version"),
)
_GROUP_FILTERS = RuleKind(
    "group_filter", {"all": "builtin:AllGroups", "mixed": "builtin:Mixed"}, ("keeps",)
)
_SELECTORS = RuleKind(
    "selector",
    {
        "deadline": "builtin:EarliestDeadline",
        "arrival": "builtin:Arrival",
        "weighted": "weighted:Weighted",
    },
    ("select",),
)
KINDS = (_PROMPT_FILTERS, _GROUP_FILTERS, _SELECTORS)


def load(options: Dataflow) -> Rules:
    """Make the rules that the options name, with nothing observed yet. UserError for an unknown
    name and for a bad option.
    """
    return Rules(
        prompt_filter=_make(_PROMPT_FILTERS, options.prompt_filter, options.prompt_filter_options),
        group_filter=_make(_GROUP_FILTERS, options.group_filter, options.group_filter_options),
        selector=_make(_SELECTORS, options.selector, options.selector_options),
    )


def _make(kind: RuleKind, name: str, options: Mapping[str, Any]) -> Any:
    offered = _offered(kind)
    if name not in offered:
        raise UserError(
            f"dataflow.{kind.key}: no {kind.text} {name!r}; there are {', '.join(offered)}"
        )
    entry = offered[name]
    rule_of_package = f"{kind.text} {name!r} of package {plugins.package(entry)}"
    with plugins.guard(entry, f"{rule_of_package} cannot be made"):
        rule = _call(kind, name, entry.load(), options)
    for method in kind.methods:
        if not callable(getattr(rule, method, None)):
            needs = ", ".join(kind.methods)
            raise UserError(f"{rule_of_package} has no method {method}; it needs {needs}")
    return rule


def _call(kind: RuleKind, name: str, make: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    parameters = signature(make)
    try:
        parameters.bind(**options)
    except TypeError as error:
        known = ", ".join(parameters.parameters) or "no options"
        raise UserError(f"dataflow.{kind.key}_options: {name}: {error}; it takes {known}") from None
    try:
        return make(**options)
    except ValidationError as error:
        raise UserError(_explain(kind, name, error)) from None


def _explain(kind: RuleKind, name: str, error: ValidationError) -> str:
    """Example: dataflow.prompt_filter_options.floor_easy=0: Input should be greater than 0
    (greso).
    """
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, (f"dataflow.{kind.key}_options", *first["loc"])))
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}={first['input']!r}: {message} ({name})"


def _offered(kind: RuleKind) -> dict[str, EntryPoint]:
    """Every rule of this kind, by name."""
    built_in = plugins.built_in(kind.entry_points, "flowtrain.dataflow.rules", kind.built_in)
    return plugins.offered(kind.text, kind.entry_points, built_in)
