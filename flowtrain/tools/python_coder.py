"""The tool that runs Python in a sandbox, given as it is or written by a model."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass

from flowtrain.inference.chat import ChatEngine
from flowtrain.records import ToolResult
from flowtrain.tools.base import Parameter, Tool, ToolCard, ToolError, schema_of
from flowtrain.tools.base_generator import ask_model
from flowtrain.tools.registry import ToolContext
from flowtrain.tools.sandbox import make_sandbox
from flowtrain.tools.sandbox.host import ProcessSandbox

FENCE = re.compile(
    r"^[ \t]*(?P<fence>`{3,}|~{3,})[ \t]*"
    # A tag ends its line, with a file or attributes behind it, or is a name of Python.
    r"(?:(?:\{[^}\n]*\}|[a-z][\w.+#-]*(?::\S+)?(?:[ \t]+[\w-]+=\S[^\n]*)?)?[ \t]*(?=\r?\n|\Z)"
    r"|(?:python|py)\b)?"
    r"(?P<code>.*?)(?:(?P=fence)|\Z)",
    re.DOTALL | re.IGNORECASE | re.MULTILINE,
)

PROMPT = """Write a short Python program that does the task below and prints what it finds.

Task: {task}

The program runs by itself: it has no input, no network and no files to read, so write every \
number and name that it needs into it. It can
import {offers}. It has {timeout_s:g} seconds. Print each result with a word that says what it \
is, and nothing else.

Reply with the program in one ```python block."""

_NOTHING = "the code ran and printed nothing"


@dataclass(frozen=True, slots=True)
class PythonCoder:
    """Runs the query as Python, an expression or a program. The tool owns the sandbox and closes
    it.
    """

    sandbox: ProcessSandbox

    card = ToolCard(
        "Python_Coder",
        "Runs Python code or evaluates an expression; prints the result.",
        keeps_time=True,
        aliases=("Python_Code_Generator_Tool",),
    )

    async def execute(self, query: str) -> ToolResult:
        """Return what the code prints, without trailing space, its error, and its times; raises
        ToolError where there is no code.
        """
        code = strip_fence(query)
        if not code.strip():
            raise ToolError("no code given")
        result = await self.sandbox.run(code)
        output = result.output.rstrip()
        error = _NOTHING if result.error is None and not output else result.error
        return ToolResult(output, error, wall_s=result.wall_s, cpu_s=result.cpu_s)

    def close(self) -> None:
        """End the processes of the sandbox."""
        self.sandbox.close()


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
    coder = PythonCoder(make_sandbox(agent, agent.max_result_chars))
    if context.chat is None:
        return coder
    return ModelCoder(
        coder,
        context.chat,
        timeout_s=agent.tool_timeout_s,
        code_timeout_s=min(agent.code_timeout_s, agent.tool_timeout_s),
    )


def strip_fence(text: str) -> str:
    """Return the code of the first fence, whatever its tag is, or the whole text, dedented."""
    fence = FENCE.search(text)
    return textwrap.dedent(fence["code"] if fence else text).strip("\r\n")
