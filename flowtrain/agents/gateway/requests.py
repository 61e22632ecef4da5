"""OpenAI's requests, checked and brought into one plain form.

What is not supported is refused by name, as is every value that would be ignored where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

Message = Mapping[str, Any]
MAX_STOPS = 4
"""Stop strings of a request, as OpenAI has it."""
_MAX_SHOWN = 300
_DEEPEST = 100
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("temperature", "top_p", "seed"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
"""Parameters that change nothing here; sampling and seeds are those of the rollout."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
"""The values that a parameter may have."""


class Refusal(Exception):
    """A request is answered with an error, in OpenAI's form."""

    def __init__(
        self,
        text: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(text)
        self.status, self.param, self.code = status, param, code
        self.headers = {"x-should-retry": "false"} if headers is None else headers

    def body(self) -> bytes:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    model: str
    messages: tuple[Message, ...]
    """Plain: role and content; tool_calls, tool_call_id and name where there are any."""
    tools: tuple[Message, ...]
    reads_calls: bool
    """Calls of tools are read out of the response."""
    max_new_tokens: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_chat(body: bytes) -> ChatRequest:
    """Read a request to /chat/completions. Raises Refusal."""
    try:
        given = _Request.model_validate(_parameters(body))
    except ValidationError as error:
        raise _refusal_of(error) from None
    return ChatRequest(
        model=given.model[:_MAX_SHOWN],
        messages=tuple(_message(each) for each in given.messages),
        tools=tuple(_tool(each) for each in given.tools),
        reads_calls=bool(given.tools) and given.tool_choice == "auto",
        max_new_tokens=given.max_completion_tokens or given.max_tokens,
        stop=tuple(map(_text, [given.stop] if isinstance(given.stop, str) else given.stop)),
        stream=given.stream,
        include_usage=given.stream_options.include_usage,
    )


# ---- their form


class _Part(BaseModel):
    type: Literal["text", "refusal"]
    text: str = ""
    refusal: str = ""


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _Call(BaseModel):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: None = None
    audio: None = None

    @model_validator(mode="after")
    def _check(self) -> _Message:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of the role {self.role!r} needs content")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("a message of the role 'tool' needs a tool_call_id")
        return self


class _Function(BaseModel):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> _Function:
        if not self.name.isprintable():
            raise ValueError("its name must have printable characters only")
        if _depth(self.parameters) > _DEEPEST:
            raise ValueError("its parameters are nested too deep")
        return self


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function


class _StreamOptions(BaseModel):
    include_usage: bool = False


_Stop = Annotated[str, Field(min_length=1)]
_Limit = Annotated[int, Field(ge=1)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str = ""
    messages: list[_Message] = Field(min_length=1)
    tools: list[_Tool] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] = []
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()


def _parameters(body: bytes) -> dict[str, Any]:
    """Parse a body; refuse parameters that are not supported. A null is as good as nothing."""
    # RecursionError: brackets nested too deep.
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal("the request is no JSON") from None
    if not isinstance(found, dict):
        raise Refusal("the request must be a JSON object")
    given = {name: value for name, value in found.items() if value is not None}
    for name, value in given.items():
        if name in _Request.model_fields or name in _IGNORED:
            continue
        if name not in _DEFAULTS:
            shown = name[:_MAX_SHOWN]
            raise Refusal(f"{shown!r} is not supported", param=shown, code="unsupported_parameter")
        if not any(value == allowed for allowed in _DEFAULTS[name]):
            allowed = " or ".join(json.dumps(each) for each in _DEFAULTS[name])
            raise Refusal(
                f"{name}={json.dumps(value)[:_MAX_SHOWN]} is not supported, only {allowed}",
                param=name,
                code="unsupported_value",
            )
    return given


def _refusal_of(error: ValidationError) -> Refusal:
    """Tell the first problem."""
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    return Refusal(f"{place}: {first['msg']}"[:_MAX_SHOWN], param=str(first["loc"][0]))


# ---- the plain form


def _message(given: _Message) -> Message:
    content = given.content or ""
    if not isinstance(content, str):
        content = "".join(part.text or part.refusal for part in content)
    role = "system" if given.role == "developer" else given.role
    message: dict[str, Any] = {"role": role, "content": _text(content)}
    if role == "assistant" and given.tool_calls:
        message["tool_calls"] = [_asked(each) for each in given.tool_calls]
    named = {"tool_call_id": given.tool_call_id, "name": given.name}
    return message | {name: _text(value) for name, value in named.items() if value}


def _asked(call: _Call) -> Message:
    function = call.function
    named = {"name": _text(function.name), "arguments": _text(function.arguments)}
    return {"id": _text(call.id), "type": "function", "function": named}


def _tool(tool: _Tool) -> Message:
    function = tool.function
    described = {
        "name": function.name,
        "description": _text(function.description or ""),
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": described}


def _depth(value: Any) -> int:
    """How deep objects and lists are nested, counted level by level."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [x for each in level for x in (each.values() if isinstance(each, dict) else each)]
    return depth


def _text(text: str) -> str:
    """Replace halves of surrogate pairs, which tokenizers do not take."""
    return text.encode(errors="replace").decode()
