"""Tools with a model inside, scripted here; the sandbox is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

import pytest
from make import Chat

from flowtrain.config import Config
from flowtrain.inference.protocol import EngineError
from flowtrain.records import ToolResult, UserError
from flowtrain.tools import Tool, ToolContext, ToolError, base_generator, python_coder, run_tool
from flowtrain.tools.base_generator import BaseGenerator, GuessGenerator
from flowtrain.tools.python_coder import ModelCoder, PythonCoder, strip_fence

CONFIG = Config.model_validate({"agent": {"tool_timeout_s": 7.0, "code_timeout_s": 3.0}})


def run(tool: Tool, query: str, timeout_s: float = 10.0) -> ToolResult:
    return asyncio.run(run_tool(tool, {"query": query}, timeout_s, 2000))


# ---- the base generator


def test_with_a_model_the_base_generator_asks_it_once() -> None:
    chat = Chat("Oslo")
    tool = base_generator.make(ToolContext(CONFIG, guesses=("7",), chat=chat))
    assert run(tool, "capital of {Norway}?").output == "Oslo"
    assert chat.asked == [("capital of {Norway}?", 0, 7.0)]
    assert run(tool, " \n").error == "empty query" and len(chat.asked) == 1
    assert tool.card.name == GuessGenerator.card.name == "Base_Generator"
    assert tool.card != GuessGenerator.card


def test_a_model_that_fails_is_an_error_of_the_tool() -> None:
    found = run(BaseGenerator(Chat(EngineError("429 for 60 s")), 1.0), "q").error
    assert found == "the model did not answer: 429 for 60 s"


def test_base_generator_guesses_deterministically() -> None:
    tool = base_generator.make(ToolContext(CONFIG, guesses=("red", "green", "blue")))
    answers = [run(tool, f"What colour is item {i}? \ud800").output for i in range(40)]
    assert answers == [run(tool, f"What colour is item {i}? \ud800").output for i in range(40)]
    assert set(answers) == {"red", "green", "blue"}
    assert "without looking" in tool.card.description
    with pytest.raises(UserError, match=r"needs a model \(roles\.tools\) or values to guess from"):
        base_generator.make(ToolContext(CONFIG))


# ---- the Python coder


@pytest.fixture(scope="module")
def coder() -> Iterator[PythonCoder]:
    tool = python_coder.make(ToolContext(CONFIG))
    assert isinstance(tool, PythonCoder)
    yield tool
    tool.close()


def model_coder(coder: PythonCoder, reply: str | EngineError) -> tuple[ModelCoder, Chat]:
    chat = Chat(reply)
    return ModelCoder(coder, chat, 7.0, 3.0), chat


FENCED: Mapping[str, str] = {
    "6*7": "6*7",
    "```python\n6*7\n```": "6*7",
    "Here it is:\n```py\nprint(42)\n```\nand\n```python\n1\n```": "print(42)",
    "  ```\n    x = 42\n    print(x)": "x = 42\nprint(x)",
    "```Python\nprint('```')\n```": "print('",
    "say ```6*7``` inline": "say ```6*7``` inline",
    "```python\n```": "",
    "```\r\nprint(1)\r\n```": "print(1)",
    "~~~python\nprint(1)\n~~~": "print(1)",
    "````python\nprint('```')\n````": "print('```')",
    "```6*7```": "6*7",
    "```python 6*7```": "6*7",
    "```print(1)\nprint(2)\n```": "print(1)\nprint(2)",
    "```x = 1\nprint(x)\n```": "x = 1\nprint(x)",
    "```import os\nprint(2)\n```": "import os\nprint(2)",
    **{
        f"```{tag}\nprint(1)\n```": "print(1)"
        for tag in (
            *("python3", "Python3", " python", "python ", "ipython", "py3", "tool_code", "repl"),
            *("python:main.py", "{python}", "{.python .numberLines}", 'python title="x"', "text"),
        )
    },
}


@pytest.mark.parametrize("text", FENCED)
def test_the_code_is_what_the_first_fence_holds(text: str) -> None:
    assert strip_fence(text) == FENCED[text]


@pytest.mark.parametrize(
    ("query", "output", "error"),
    [
        ("6*7", "42", None),
        ("x = 6\nprint(x * 7)", "42", None),
        ("```python\nprint(42, end='  ')\n```", "42", None),
        ("```python\n```", "", "no code given"),
        (" ", "", "no code given"),
        ("x = 1", "", "the code ran and printed nothing"),
        (
            "print('before')\nx = [1]\nx[2]",
            "before",
            "IndexError: list index out of range (line 3: x[2])",
        ),
        (
            "def f(n):\n  return 1 / n\n\nprint(f(1))\nprint(f(0))",
            "1.0",
            "ZeroDivisionError: division by zero (line 2: return 1 / n)",
        ),
        (
            "import json\njson.loads('{')",
            "",
            "JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 "
            "(char 1) (line 2: json.loads('{'))",
        ),
        ("x = 1\ny = = 2", "", "SyntaxError: invalid syntax (<code>, line 2)"),
        ("print(42)\nexit()\nprint(43)", "42", None),
        ("print(42)\nquit(3)", "42", "SystemExit: 3 (line 2: quit(3))"),
        ("print('a', end='')\n1/0", "a", "ZeroDivisionError: division by zero (line 2: 1/0)"),
        (
            "print('1\\n2')\nraise KeyboardInterrupt",
            "1\n2",
            "KeyboardInterrupt (line 2: raise KeyboardInterrupt)",
        ),
    ],
)
def test_without_a_model_the_query_is_the_program(
    coder: PythonCoder, query: str, output: str, error: str | None
) -> None:
    result = run(coder, query)
    assert (result.output, result.error) == (output, error)
    told = [output] * bool(output) + [f"Error: {error}"] * (error is not None)
    assert result.text == "\n".join(told)


def test_model_coder_runs_program_of_reply(coder: PythonCoder) -> None:
    tool, chat = model_coder(
        coder, "Sure!\n```python\nprint('sum', sum(range(5)))\n```\nThat adds {them} up."
    )
    assert run(tool, " add {0..4} up ").output == "sum 10"
    ((prompt, _, deadline_s),) = chat.asked
    assert "Task: add {0..4} up\n" in prompt
    assert "fractions" in prompt
    assert "3 seconds" in prompt
    assert deadline_s == 7.0
    assert tool.card.name == coder.card.name and tool.card != coder.card


@pytest.mark.parametrize(
    ("query", "reply", "error"),
    [
        (" ", "1", "empty query"),
        ("q", EngineError("no reply within 7 s"), "the model did not answer: no reply within 7 s"),
        ("q", "", "no code given"),
        ("q", "```python\nx = 1\n```", "the code ran and printed nothing"),
        ("q", "I cannot do that.", "SyntaxError: invalid syntax"),
        ("q", "```python\nimport os\nprint(os.listdir('/'))\n```", "PermissionError"),
    ],
)
def test_what_goes_wrong_with_a_written_program_is_said(
    coder: PythonCoder, query: str, reply: str | EngineError, error: str
) -> None:
    tool, _ = model_coder(coder, reply)
    assert (run(tool, query).error or "").startswith(error)


def test_make_passes_model_and_shorter_timeout() -> None:
    tool = python_coder.make(ToolContext(CONFIG, chat=Chat("```python\nwhile True: pass\n```")))
    assert isinstance(tool, ModelCoder)
    # On busy cores three seconds of CPU take many more.
    assert run(tool, "loop", 120.0).error == "CPU time limit of 3 s exceeded"
    tool.close()
    tool.close()
    with pytest.raises(ToolError, match="the sandbox is closed"):
        asyncio.run(tool.coder.execute("1"))


@pytest.mark.parametrize("max_chars", [60, 400, 100_000])
def test_a_loop_that_prints_much_keeps_both_ends(max_chars: int) -> None:
    config = Config.model_validate({"agent": {"max_result_chars": max_chars}})
    tool = python_coder.make(ToolContext(config))
    code = {"query": "for i in range(10_000): print(i)"}
    result = asyncio.run(run_tool(tool, code, 10.0, max_chars))
    tool.close()
    lines = result.output.split("\n")
    assert result.error is None and len(result.output) <= max_chars
    assert (lines[0], lines[-1]) == ("0", "9999")
    notes = [line for line in lines if not line.isdecimal()]
    assert len(notes) == (max_chars < 48_889) and all("characters left out" in n for n in notes)
