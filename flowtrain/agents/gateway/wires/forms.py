"""Reading requests: what is not supported is refused by name, as is every value that would be
ignored where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from flowtrain.agents.gateway.plain import Asked, Message, Refusal, Reply

MAX_SHOWN = 300
MAX_STOPS = 4
"""Stop strings of a request, as OpenAI has it."""
_DEEPEST = 100


class Wire(Protocol):
    """An API. Raises Refusal, of whatever wire, in `read`."""

    def read(self, body: bytes) -> Asked: ...

    def write(self, asked: Asked, reply: Reply) -> bytes:
        """Write the answer; with `stream` as events."""
        ...

    def error(self, refusal: Refusal) -> bytes: ...


STRICT = ConfigDict(strict=True)
F = TypeVar("F", bound=BaseModel)


class Form(BaseModel):
    """An object within a request. A key that it does not know is refused, unless it says nothing:
    null, false or empty.
    """

    model_config = ConfigDict(extra="allow")

    ignored: ClassVar[Collection[str]] = ()
    """Keys that change nothing here."""

    @model_validator(mode="after")
    def _refuse_others(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value and name not in self.ignored:
                told = {"name": repr(name[:MAX_SHOWN])}
                raise PydanticCustomError("unsupported", "{name} is not supported", told)
        return self


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError("its name must have printable characters only")
    return name


def _shallow(schema: dict[str, Any]) -> dict[str, Any]:
    if _depth(schema) > _DEEPEST:
        raise ValueError("its parameters are nested too deep")
    return schema


ToolName = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_printable)]
Schema = Annotated[dict[str, Any], AfterValidator(_shallow)]
Stop = Annotated[str, Field(min_length=1)]
Limit = Annotated[int, Field(ge=1)]


def read_form(
    form: type[F],
    body: bytes,
    ignored: Collection[str] = (),
    defaults: Mapping[str, tuple[Any, ...]] | None = None,
) -> F:
    """Read a body. Raises Refusal.

    Args:
        form: has the parameters that are used.
        ignored: parameters that change nothing here.
        defaults: the values that other parameters may have. A null is as good as nothing.
    """
    given = _parameters(body)
    for name, value in given.items():
        if name in form.model_fields or name in ignored:
            continue
        allowed = (defaults or {}).get(name, ())
        if not allowed:
            shown = name[:MAX_SHOWN]
            raise Refusal(f"{shown!r} is not supported", param=shown, code="unsupported_parameter")
        if value not in allowed:
            told = " or ".join(json.dumps(each) for each in allowed)
            raise Refusal(
                f"{name}={json.dumps(value)[:MAX_SHOWN]} is not supported, only {told}",
                param=name,
                code="unsupported_value",
            )
    try:
        return form.model_validate(given)
    except ValidationError as error:
        raise _refusal_of(error, given) from None


def plain_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Message:
    described = {
        "name": name,
        "description": plain_text(description or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": described}


def plain_call(id: str, name: str, arguments: str) -> Message:
    named = {"name": plain_text(name), "arguments": plain_text(arguments)}
    return {"id": plain_text(id), "type": "function", "function": named}


def between(role: str) -> str:
    """Return what stands between the parts of a message: a new line, but nothing in a reply, which
    is what was sampled.
    """
    return "" if role == "assistant" else "\n"


def plain_text(text: str) -> str:
    """Replace halves of surrogate pairs, which tokenizers do not take."""
    return text.encode(errors="replace").decode()


def event(kind: str, **data: Any) -> str:
    """Write an event of a stream that names its kind twice, as both vendors' newer ones do."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n"


def _parameters(body: bytes) -> dict[str, Any]:
    # RecursionError: brackets nested too deep.
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("the request is no JSON") from None
    if not isinstance(found, dict):
        raise Refusal("the request must be a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def _refusal_of(error: ValidationError, given: Mapping[str, Any]) -> Refusal:
    """Tell the innermost problem: of forms that a value might have, that of the likeliest."""
    found = max(
        error.errors(include_url=False),
        key=lambda each: (len(_place(each, given)), not each["type"].endswith("_type")),
    )
    place, text = ".".join(map(str, _place(found, given))), found["msg"]
    if found["type"] in ("literal_error", "union_tag_invalid"):
        value = found["input"]
        if isinstance(value, dict):
            value = value.get("type", value.get("role"))
        text = f"{json.dumps(value)[:MAX_SHOWN]} is not supported"
    return Refusal(f"{place}: {text}"[: 2 * MAX_SHOWN], param=str(found["loc"][0]))


def _place(problem: ErrorDetails, given: Any) -> list[int | str]:
    """Return the place of a problem in the request, without the names of forms in it."""
    found: list[int | str] = []
    lacks = problem["loc"][-1] if problem["type"] == "missing" else None
    for step in problem["loc"]:
        if isinstance(given, list) and isinstance(step, int) and step < len(given):
            given = given[step]
        elif isinstance(given, dict) and (step in given or step == lacks):
            given = given.get(str(step))
        else:
            continue
        found.append(step)
    return found


def _depth(value: Any) -> int:
    """How deep objects and lists are nested, counted level by level."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return depth
