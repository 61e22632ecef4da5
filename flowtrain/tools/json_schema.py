"""Checks of a call's arguments by a JSON schema, which may be a stranger's.

What could take time without end is left to the tool itself: patterns, and what depends on which
parts of the arguments other rules have seen. References are followed within the schema only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from flowtrain.utils.errors import user_error

MAX_REFERENCES = 1000
"""References that are followed in one check."""
_MAX_PROBLEM = 300
_UNCHECKED = (
    *("pattern", "patternProperties", "unevaluatedProperties", "unevaluatedItems"),
    *("$dynamicRef", "$recursiveRef"),
)
_references_left: ContextVar[int] = ContextVar("references_left")


class _TooManyReferences(Exception):
    """The check would take too long."""


def check_schema(schema: str) -> None:
    """Raise ValueError for a text that is no JSON schema of an object, and UserError where the
    package that reads schemas is missing.
    """
    try:
        _validator(schema)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def problem(schema: str, arguments: Mapping[str, object]) -> str:
    """Say what is wrong with the arguments; "" if nothing."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    _references_left.set(MAX_REFERENCES)
    try:
        error = best_match(_validator(schema).iter_errors(dict(arguments)))
    except (_TooManyReferences, RecursionError):
        return "they, or the tool's schema, are nested too deep to be checked"
    except Unresolvable as unknown:
        return f"the tool's schema refers to what it does not hold: {str(unknown)[:_MAX_PROBLEM]}"
    if error is None:
        return ""
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"{place} {error.message}".strip()[:_MAX_PROBLEM]


@lru_cache(512)
def _validator(schema: str) -> Any:
    with user_error(
        "a tool with a JSON schema needs a package: pip install 'flowtrain[mcp]'", ImportError
    ):
        from jsonschema import Draft202012Validator, SchemaError
        from jsonschema.validators import extend, validator_for
        from referencing import Registry
    parsed = json.loads(schema)
    if not isinstance(parsed, dict) or parsed.get("type", "object") != "object":
        raise ValueError("it does not describe an object")
    kind = validator_for(parsed, default=Draft202012Validator)
    try:
        kind.check_schema(parsed)
    except SchemaError as error:
        raise ValueError(error.message[:_MAX_PROBLEM]) from None
    has_patterns = "patternProperties" in schema  # they allow additional properties, unchecked
    unchecked = (*_UNCHECKED, "additionalProperties") if has_patterns else _UNCHECKED
    rules = {name: _accept for name in unchecked if name in kind.VALIDATORS}
    if "$ref" in kind.VALIDATORS:
        rules["$ref"] = _counted(kind.VALIDATORS["$ref"])
    return extend(kind, rules)(parsed, registry=Registry())


def _accept(*_: Any) -> None:
    """Accept anything."""


def _counted(rule: Any) -> Any:
    def follow(*of: Any) -> Iterator[Any]:
        left = _references_left.get()
        if not left:
            raise _TooManyReferences
        _references_left.set(left - 1)
        yield from rule(*of) or ()

    return follow
