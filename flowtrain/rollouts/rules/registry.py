"""The rules by name: built-in ones, those of other packages behind the entry point groups
`flowtrain.prompt_filters`, `flowtrain.group_filters` and `flowtrain.selectors`, and those of users'
files, `dataflow.selector = "mine.py:Mine"`.

A name stands for a callable that takes the rule's options, [plugins.NAME], as keyword arguments and
returns the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

from pydantic import ValidationError

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.rollouts.rules.base import GroupFilter, PromptFilter, Selector
from flowtrain.utils import plugins
from flowtrain.utils.errors import foreign

BUILT_IN = {
    "prompt_filter": {
        "all": "builtin:AllPrompts",
        "greso": "greso:Greso",
        "curriculum": "curriculum:Curriculum",
    },
    "group_filter": {"all": "builtin:AllGroups", "mixed": "builtin:Mixed"},
    "selector": {
        "deadline": "builtin:EarliestDeadline",
        "arrival": "builtin:Arrival",
        "latest": "builtin:Latest",
        "weighted": "weighted:Weighted",
    },
}
"""By kind of rule and name: module of this package, ":", class."""
METHODS = {
    "prompt_filter": ("admits", "observe", "on_version"),
    "group_filter": ("keeps",),
    "selector": ("select",),
}
"""By kind: what a rule must have."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one run. The prompt filter has a state: its observations."""

    prompt_filter: PromptFilter
    group_filter: GroupFilter
    selector: Selector
    replay_selector: Selector


def load(config: Config) -> Rules:
    """Make the rules that the config names, with nothing observed yet. UserError for an unknown
    name and for a bad option.
    """
    options = config.dataflow
    return Rules(
        _make("prompt_filter", options.prompt_filter, config),
        _make("group_filter", options.group_filter, config),
        _make("selector", options.selector, config),
        _make("replay_selector", options.replay_selector, config),
    )


def _make(key: str, name: str, config: Config) -> Any:
    kind = key.removeprefix("replay_")
    origin, group = f"dataflow.{key}={name!r}", f"flowtrain.{kind}s"
    built_in = plugins.built_in(group, "flowtrain.rollouts.rules", BUILT_IN[kind])
    factory: Any = plugins.load(name, origin, kind.replace("_", " "), group, built_in)
    with nullcontext() if name in built_in else foreign(f"{origin} cannot be constructed"):
        rule = _call(name.rpartition(":")[2], factory, config.options_of(name))
    if missing := [name for name in METHODS[kind] if not callable(getattr(rule, name, None))]:
        raise UserError(f"{origin} has no method {missing[0]}; it needs {', '.join(METHODS[kind])}")
    return rule


def _call(name: str, make: Callable[..., Any], options: dict[str, Any]) -> Any:
    parameters = signature(make)
    try:
        parameters.bind(**options)
    except TypeError as error:
        names = ", ".join(parameters.parameters) or "no options"
        raise UserError(f"plugins.{name}: {error}; it takes {names}") from None
    try:
        return make(**options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("plugins", name, *problem["loc"])))
        reason = problem["msg"].removeprefix("Value error, ")
        raise UserError(f"{where}={problem['input']!r}: {reason}") from None
