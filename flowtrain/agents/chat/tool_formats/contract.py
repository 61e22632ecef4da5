"""The contract of tool formats: what a call is, and what reads and writes calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from flowtrain.utils.text import THINK_END, encodable

MAX_CALLS = 16
"""Calls of one response that are read; a response with more is malformed."""
_THINK = "<think>"


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """A call of a tool as a response writes it."""

    name: str
    """"" where it could not be read."""
    arguments: str
    """A JSON object; the text of the call where that could not be read."""
    problem: str = ""
    """Why it could not be read, for the model; else ""."""

    @property
    def values(self) -> dict[str, Any]:
        """Return the arguments of a call without a problem."""
        return dict(json.loads(self.arguments))


Read = tuple[str, list[WrittenCall]]
"""The text before the calls, and the calls."""
Schemas = Mapping[str, Any]
"""JSON schemas of the arguments of tools, by the name of the tool."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    read: Callable[[str, Schemas], Read]
    """Split a response behind its thinking; the schemas tell "5" from 5 where a format does not."""
    write: Callable[[Sequence[WrittenCall]], str]
    example: WrittenCall

    @property
    def shape(self) -> str:
        """Return a call as the model is shown it."""
        return self.write([self.example])

    def parse(
        self, text: str, tools: Iterable[Mapping[str, Any]] = ()
    ) -> tuple[str, tuple[WrittenCall, ...]]:
        """Return the text without calls, thinking included, and the calls; never raises.

        Args:
            tools: as OpenAI's chat completions have them.
        """
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        content, calls = self.read(text, schemas)
        start = 0
        for _ in range(MAX_CALLS):  # thoughts of one response
            if (end := text.find(THINK_END, start)) < 0:
                break
            # What looks like the end of a thought is none in a call that is whole with it alone.
            _, cut = self.read(text[start:end], schemas)
            whole = calls[len(cut) - 1] if 0 < len(cut) <= len(calls) else None
            if whole and cut[-1].problem and not whole.problem:
                break
            start = end + len(THINK_END)
            content, calls = self.read(text[start:], schemas)
        if _THINK in content and THINK_END not in content:  # it was cut while it thought
            return text, ()
        if len(calls) > MAX_CALLS:
            calls = [broken(text[start:], f"more than {MAX_CALLS} calls in one response")]
        return text[:start] + content, tuple(calls)

    def describe(self, tools: Iterable[Mapping[str, Any]]) -> str:
        """Describe tools, given as OpenAI's chat completions have them, and how to call them."""
        lines = [f"- {json.dumps(tool['function'], ensure_ascii=False)}" for tool in tools]
        return "\n".join(
            [
                "You can call tools. The arguments of each are described as a JSON schema:",
                *lines,
                f"To call one, write nothing but this, and wait for the result:\n{self.shape}",
                "Give your answer without a call.",
            ]
        )


def make_format(
    name: str,
    opening: str,
    calls_at: Callable[[str, re.Match[str], Schemas], tuple[list[WrittenCall], int]],
    written: Callable[[WrittenCall, int], str],
    around: tuple[str, str, str],
    *,
    bare: str = "(?!)",
    content: Callable[[str], str] = str,
    example: str = '{"ARGUMENT": "..."}',
) -> ToolFormat:
    """Make a format of calls that begin with marks.

    Args:
        opening: the pattern of the marks, with the `name` of the tool where it stands there.
        calls_at: reads the calls behind a mark; returns the place behind them, too.
        written: writes a call, whose number is given.
        around: what is written before, between and after calls.
        bare: how a response begins that has calls without marks, and nothing else.
        content: makes of the text before calls what the model has said.
        example: the arguments of the call that the model is shown.
    """
    opens, begins_bare = re.compile(opening), re.compile(rf"\s*(?={bare})")
    before, between, after = around

    def read(text: str, schemas: Schemas) -> Read:
        match = begins_bare.match(text) or opens.search(text)
        said = text[: match.start()] if match else text
        calls: list[WrittenCall] = []
        while match and len(calls) <= MAX_CALLS:
            new_calls, place = calls_at(text, match, schemas)
            calls += new_calls
            match = opens.search(text, place)
        return content(said), calls

    def write(calls: Sequence[WrittenCall]) -> str:
        return before + between.join(map(written, calls, count())) + after

    return ToolFormat(name, read, write, WrittenCall("NAME", example))


def name_in(match: re.Match[str]) -> str:
    """Return the name of the tool that stands in an opening mark; "" where there is none."""
    return (match.groupdict().get("name") or "").strip()


def called(name: str, arguments: Any, raw: str) -> WrittenCall:
    """Return a call, a broken one unless the arguments are an object."""
    if not isinstance(arguments, dict):
        return broken(raw, "the arguments are no JSON object")
    if not name:
        return broken(raw, "the call has no name")
    # JSON can spell half a surrogate pair, which no tokenizer takes.
    return WrittenCall(encodable(name), encodable(json.dumps(arguments, ensure_ascii=False)))


def broken(raw: str, problem: str) -> WrittenCall:
    """Return a call that could not be read, with the reason."""
    return WrittenCall("", encodable(raw), encodable(problem))
