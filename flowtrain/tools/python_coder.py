"""The tool that runs Python in a sandbox, given as it is or written by a model."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flowtrain.engines.chat import ChatEngine
from flowtrain.tools.base import Parameter, Tool, ToolCard, ToolError, schema_of
from flowtrain.tools.base_generator import ask_model
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.sandbox import make_sandbox
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.types import ToolCall, ToolResult, UserError

FENCE = re.compile(
    r"^[ \t]*```(?:python\b|py\b)?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE | re.MULTILINE
)

PROMPT = """Write a short Python program that does the task below and prints what it finds.

Task: {task}

The program runs by itself: it has no input, no network and no files to read, so write every \
number and name that it needs into it. It can
import {offers}. It has {timeout_s:g} seconds. Print each result with a word that says what it \
is, and nothing else.

Reply with the program in one ```python block."""

_NOTHING = "the code ran and printed nothing"
_RAISED = re.compile(r"\w+(:| \(line |\Z)")
"""How the error of code begins that has raised an exception, and no other."""


@dataclass(frozen=True, slots=True)
class PythonCoder:
    """Runs the query as Python, an expression or a program. It owns the sandbox and closes it."""

    sandbox: ProcessSandbox

    card = ToolCard(
        "Python_Coder",
        "Runs Python code or evaluates an expression; prints the result.",
        keeps_time=True,
        aliases=("Python_Code_Generator_Tool",),
    )

    async def execute(self, query: str) -> ToolResult:
        """Return what the code prints, without trailing space, or its error, and its times."""
        result = await _run(self.sandbox, query)
        if result.error is None and not result.output:
            return replace(result, error=_NOTHING)
        return result

    def close(self) -> None:
        """End the processes of the sandbox."""
        self.sandbox.close()


@dataclass(frozen=True, slots=True)
class PythonSession:
    """The programs of one rollout, which run again before each new one."""

    sandbox: ProcessSandbox
    before: list[str]

    async def execute(self, query: str) -> ToolResult:
        """As `PythonCoder.execute`; code that only sets variables need not print."""
        result = await _run(self.sandbox, query, self.before)
        if _lasts(result):
            self.before.append(strip_fence(query))
        if result.error is None and not result.output:
            return replace(result, output=_NOTHING)
        return result

    def close(self) -> None:
        """Release nothing: between two calls there is no process."""


class SessionCoder(PythonCoder):
    """Runs the query as Python in the session of its rollout, whose variables last."""

    card = ToolCard(
        "Python_Coder",
        "Runs Python code or evaluates an expression; prints the result. Variables, functions and "
        "imports of earlier calls are still there.",
        is_stateful=True,
        keeps_time=True,
        aliases=("Python_Code_Generator_Tool",),
    )

    async def open_session(self, history: Sequence[ToolCall]) -> PythonSession:
        done = [json.loads(call.arguments)["query"] for call in history if _lasts(call.result)]
        return PythonSession(self.sandbox, [strip_fence(query) for query in done])


@dataclass(frozen=True, slots=True)
class ModelCoder:
    """Lets a model write the program that the query describes, and runs it."""

    coder: PythonCoder
    chat: ChatEngine
    timeout_s: float
    """Time limit of the model; the sandbox has the program's."""
    code_timeout_s: float

    card = ToolCard(
        "Python_Coder",
        "Writes and runs a Python program for a task given in words; returns what it prints.",
        schema_of(
            Parameter("query", "the task in words, with every number and name that it needs")
        ),
        output="what the program prints, or the error and its line",
        limits="It computes only: no network, no files, and no knowledge of the question or of "
        "earlier steps.",
        advice="Put all numbers into the query and ask for one thing; for facts, use a search tool "
        "first.",
        examples=({"query": "Print the sum of the prime numbers below 100."},),
        keeps_time=True,
        aliases=("Python_Code_Generator_Tool",),
    )

    async def execute(self, query: str) -> ToolResult:
        """Return what the program prints, or its error; raises ToolError when there is none."""
        if not query.strip():
            raise ToolError("empty query")
        prompt = PROMPT.format(
            task=query.strip(),
            offers=self.coder.sandbox.backend.offers,
            timeout_s=self.code_timeout_s,
        )
        return await self.coder.execute(await ask_model(self.chat, prompt, self.timeout_s))

    def close(self) -> None:
        """End the processes of the sandbox; the model is not the tool's own."""
        self.coder.close()


def make(context: ToolContext) -> Tool:
    agent = context.config.agent
    if agent.python_session:
        if context.chat is not None:
            raise UserError(
                "agent.python_session=true runs code that the policy writes itself; leave "
                "roles.tools and agent.tool_engines of Python_Coder unset"
            )
        return SessionCoder(make_sandbox(agent, agent.max_result_chars))
    coder = PythonCoder(make_sandbox(agent, agent.max_result_chars))
    if context.chat is None:
        return coder
    return ModelCoder(
        coder,
        context.chat,
        timeout_s=agent.tool_timeout_s,
        code_timeout_s=min(agent.code_timeout_s, agent.tool_timeout_s),
    )


async def _run(sandbox: ProcessSandbox, query: str, before: Sequence[str] = ()) -> ToolResult:
    """Run the code in a query; raises ToolError where there is none."""
    code = strip_fence(query)
    if not code.strip():
        raise ToolError("no code given")
    ran = await sandbox.run(code, before)
    return ToolResult(ran.output.rstrip(), ran.error, wall_s=ran.wall_s, cpu_s=ran.cpu_s)


def _lasts(result: ToolResult) -> bool:
    """Return whether a session goes on with what the code has set: not where it met a limit or took
    its process down, which it would do again.
    """
    return result.error is None or _RAISED.match(result.error) is not None


def strip_fence(text: str) -> str:
    """Return the code of the first ``` or ```python fence, or the whole text, dedented."""
    fence = FENCE.search(text)
    return textwrap.dedent(fence[1] if fence else text).strip("\n")
