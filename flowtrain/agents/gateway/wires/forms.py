"""Reading requests: what is not supported is refused by name, as is every value that would be
ignored where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from flowtrain.agents.gateway.plain import ChatRequest, Message, Refusal, Reply

MAX_SHOWN = 300
MAX_STOPS = 4
"""Stop strings of a request, as OpenAI has it."""
_DEEPEST = 100


class Wire(Protocol):
    """An API. Raises Refusal, of whatever wire, in `read`."""

    def read(self, body: bytes) -> ChatRequest: ...

    def write(self, request: ChatRequest, reply: Reply) -> bytes:
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
                context = {"name": repr(name[:MAX_SHOWN])}
                raise PydanticCustomError("unsupported", "{name} is not supported", context)
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
    parameters = _parameters(body)
    for name, value in parameters.items():
        if name in form.model_fields or name in ignored:
            continue
        allowed = (defaults or {}).get(name, ())
        if not allowed:
            key = name[:MAX_SHOWN]
            raise Refusal(f"{key!r} is not supported", param=key, code="unsupported_parameter")
        if value not in allowed:
            choices = " or ".join(json.dumps(choice) for choice in allowed)
            raise Refusal(
                f"{name}={json.dumps(value)[:MAX_SHOWN]} is not supported, only {choices}",
                param=name,
                code="unsupported_value",
            )
    try:
        return form.model_validate(parameters)
    except ValidationError as error:
        raise _refusal_of(error, parameters) from None


def plain_tool(name: str, description: str | None, parameters: dict[str, Any] | None) -> Message:
    function = {
        "name": name,
        "description": plain_text(description or ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def plain_call(id: str, name: str, arguments: str) -> Message:
    function = {"name": plain_text(name), "arguments": plain_text(arguments)}
    return {"id": plain_text(id), "type": "function", "function": function}


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
        document = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("the request is no JSON") from None
    if not isinstance(document, dict):
        raise Refusal("the request must be a JSON object")
    return {name: value for name, value in document.items() if value is not None}


def _refusal_of(error: ValidationError, parameters: Mapping[str, Any]) -> Refusal:
    """Tell the innermost problem: of forms that a value might have, that of the likeliest."""
    problem = max(
        error.errors(include_url=False),
        key=lambda detail: (len(_place(detail, parameters)), not detail["type"].endswith("_type")),
    )
    place, text = ".".join(map(str, _place(problem, parameters))), problem["msg"]
    if problem["type"] in ("literal_error", "union_tag_invalid"):
        value = problem["input"]
        if isinstance(value, dict):
            value = value.get("type", value.get("role"))
        text = f"{json.dumps(value)[:MAX_SHOWN]} is not supported"
    return Refusal(f"{place}: {text}"[: 2 * MAX_SHOWN], param=str(problem["loc"][0]))


def _place(problem: ErrorDetails, node: Any) -> list[int | str]:
    """Return the place of a problem in the request, without the names of forms in it."""
    path: list[int | str] = []
    lacks = problem["loc"][-1] if problem["type"] == "missing" else None
    for step in problem["loc"]:
        if isinstance(node, list) and isinstance(step, int) and step < len(node):
            node = node[step]
        elif isinstance(node, dict) and (step in node or step == lacks):
            node = node.get(str(step))
        else:
            continue
        path.append(step)
    return path


def _depth(value: Any) -> int:
    """Return how deep objects and lists are nested, counted level by level."""
    depth, level = 0, [value]
    while level := [node for node in level if isinstance(node, dict | list)]:
        depth += 1
        level = [x for node in level for x in (node.values() if isinstance(node, dict) else node)]
    return depth
