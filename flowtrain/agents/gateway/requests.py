"""OpenAI's requests, by the types of its own client library.

They are checked against those types and brought into one plain form. What is not supported is
refused by name, as is every value that would be ignored where it matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

Message = Mapping[str, Any]
MAX_STOPS = 4
"""Stop strings of a request, as OpenAI has it."""
_MAX_SHOWN = 300
_DEEPEST = 100
_IGNORED = {
    *("user", "metadata", "store", "service_tier", "seed", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
}
"""Parameters that change nothing here; seeds are those of the rollout."""
_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "echo": (False,),
    "suffix": ("",),
}
"""The values that a parameter may have."""
_USED = {"model", "temperature", "top_p", "stop", "max_tokens", "stream", "stream_options"} | {
    "logprobs"
}
_OF_CHATS = {"messages", "max_completion_tokens", "tools"}
_OF_TEXTS = {"prompt"}


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
class Options:
    """Options that chats and texts have in common."""

    model: str
    max_new_tokens: int | None
    stop: tuple[str, ...]
    temperature: float | None
    top_p: float | None
    logprobs: bool
    stream: bool
    include_usage: bool


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    options: Options
    messages: tuple[Message, ...]
    """Plain: role and content; tool_calls, tool_call_id and name where there are any."""
    tools: tuple[Mapping[str, Any], ...]
    reads_calls: bool
    """Calls of tools are read out of the response."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for what follows a text, or token ids."""

    options: Options
    prompt: str | tuple[int, ...]


def read_chat(body: bytes) -> ChatRequest:
    """Read a request to /chat/completions. Raises Refusal."""
    given = _parameters(body, _OF_CHATS, _known_of_chats())
    options = _options(given)
    if isinstance(given.get("messages"), list):
        given["messages"] = [_without_nulls(each) for each in given["messages"]]
    try:
        checked: Any = _chat_type().validate_python(given)
        messages = tuple(_message(each) for each in checked["messages"])
        tools = tuple(_tool(each) for each in checked.get("tools", ()))
    except ValidationError as error:
        raise _refusal_of(error) from None
    if not messages:
        raise Refusal("messages must hold at least one message", param="messages")
    reads_calls = bool(tools) and given.get("tool_choice", "auto") == "auto"
    return ChatRequest(options, messages, tools, reads_calls)


def read_text(body: bytes) -> TextRequest:
    """Read a request to /completions. Raises Refusal."""
    given = _parameters(body, _OF_TEXTS, _known_of_texts())
    options = _options(given)
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # a batch of one
    is_ids = isinstance(prompt, list) and all(type(each) is int for each in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise Refusal("prompt must be one text or one list of token ids", param="prompt")
    return TextRequest(options, _text(prompt) if isinstance(prompt, str) else tuple(prompt))


def _parameters(body: bytes, own: set[str], known: frozenset[str]) -> dict[str, Any]:
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
        if name in _USED or name in own or (name in _IGNORED and name in known):
            continue
        if name not in known or name not in _DEFAULTS:
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


def _options(given: Mapping[str, Any]) -> Options:
    limit = _number(given, "max_completion_tokens", int) or _number(given, "max_tokens", int)
    if limit is not None and limit < 1:
        raise Refusal(f"max_tokens={limit} must be at least 1", param="max_tokens")
    stop = given.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else stop
    is_texts = isinstance(stop, list | tuple) and all(isinstance(each, str) for each in stop)
    if not is_texts or len(stop) > MAX_STOPS or not all(stop):
        raise Refusal(f"stop must be 1 to {MAX_STOPS} texts", param="stop")
    stream_options = given.get("stream_options", {})
    if not isinstance(stream_options, dict):
        raise Refusal("stream_options must be an object", param="stream_options")
    return Options(
        model=str(given.get("model", ""))[:_MAX_SHOWN],
        max_new_tokens=limit,
        stop=tuple(map(_text, stop)),
        temperature=_number(given, "temperature", float),
        top_p=_number(given, "top_p", float),
        logprobs=bool(given.get("logprobs")),
        stream=given.get("stream") is True,
        include_usage=stream_options.get("include_usage") is True,
    )


def _number(given: Mapping[str, Any], name: str, kind: type) -> Any:
    value = given.get(name)
    is_right = type(value) is int or (kind is float and type(value) is float)
    if value is not None and not is_right:
        raise Refusal(f"{name} must be a number", param=name)
    return value


def _without_nulls(message: Any) -> Any:
    """Leave out the nulls that OpenAI's own objects have where they say nothing."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if value is not None}


def _message(given: Mapping[str, Any]) -> Message:
    """Bring a message into the plain form; its parts are checked as they are read."""
    role = "system" if given["role"] == "developer" else given["role"]
    if role == "function" or given.get("function_call") or given.get("audio"):
        raise Refusal("messages may hold texts and tool_calls", param="messages")
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"))}
    if role == "assistant" and (calls := [_asked(each) for each in given.get("tool_calls") or ()]):
        message["tool_calls"] = calls
    for name in ("tool_call_id", "name"):
        if given.get(name):
            message[name] = _text(given[name])
    return message


def _content(content: Any) -> str:
    if content is None or isinstance(content, str):
        return _text(content or "")
    parts = list(content)
    for part in parts:
        if part["type"] not in ("text", "refusal"):
            raise Refusal(
                f"a message's part of type {part['type']!r} is not supported, only text",
                param="messages",
                code="unsupported_value",
            )
    return _text("".join(part.get("text") or part.get("refusal") or "" for part in parts))


def _asked(call: Mapping[str, Any]) -> dict[str, Any]:
    function = _function_of(call, "messages")
    named = {"name": _text(function["name"]), "arguments": _text(function["arguments"])}
    return {"id": _text(call["id"]), "type": "function", "function": named}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = _function_of(tool, "tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not 0 < len(function["name"]) <= 64 or not function["name"].isprintable():
        raise Refusal("a tool's name must have 1 to 64 printable characters", param="tools")
    if _depth(parameters) > _DEEPEST:
        raise Refusal("the parameters of a tool are nested too deep", param="tools")
    described = {"name": function["name"], "description": _text(function.get("description") or "")}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _function_of(given: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    if given["type"] != "function":
        raise Refusal("only tools of the type function are supported", param=param)
    function: Mapping[str, Any] = given["function"]
    return function


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


def _refusal_of(error: ValidationError) -> Refusal:
    """Tell the first problem; of a message or a tool that may be of several kinds, under the kind
    that it says it is of.
    """
    errors = error.errors(include_url=False)
    others = {
        each["loc"][:2]
        for each in errors
        if each["type"] == "literal_error" and each["loc"][-1] in ("role", "type")
    }
    first = next((each for each in errors if each["loc"][:2] not in others), errors[0])
    top = str(first["loc"][0]) if isinstance(first["loc"][0], str) else "messages"
    path = [str(part) for part in first["loc"] if "Param" not in str(part)]
    place = ".".join(path if path[:1] == [top] else [top, *path])
    if first["loc"][:2] in others:
        return Refusal(f"{place}: it is none that is known", param=top)
    return Refusal(f"{place}: {first['msg']}"[:_MAX_SHOWN], param=top)


@cache
def _chat_type() -> TypeAdapter[Any]:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    return TypeAdapter(CompletionCreateParamsBase)


@cache
def _known_of_chats() -> frozenset[str]:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase

    return frozenset(CompletionCreateParamsBase.__annotations__)


@cache
def _known_of_texts() -> frozenset[str]:
    from openai.types.completion_create_params import CompletionCreateParamsBase

    return frozenset(CompletionCreateParamsBase.__annotations__)
