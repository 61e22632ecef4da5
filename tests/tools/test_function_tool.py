"""Tools of a user's file: plain functions, whose cards come from signature and docstring."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from toy_options import toy

from flowtrain.agents.agentflow.commands import write_command
from flowtrain.agents.agentflow.executor import arguments_of
from flowtrain.agents.agentflow.prompts import tool_text
from flowtrain.config import Config
from flowtrain.records import ToolResult, UserError
from flowtrain.tools import Parameter, Tool, ToolCard, run_tool, schema_of
from flowtrain.tools.registry import make_tools
from flowtrain.trainer.distributed import World
from flowtrain.trainer.setup.components import RunComponents
from flowtrain.trainer.setup.placement import Placement
from tests.packages import check_shown

ABOUT_N = "'Does it.\\n\\nArgs:\\n    n: how often.'"
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_tool.py"


def made(tmp_path: Path, source: str, name: str = "f", **plugins: dict[str, object]) -> Tool:
    path = tmp_path / "mine.py"
    path.write_text(source)
    config = {"agent": {"tools": [f"{path}:{name}"]}, "plugins": plugins}
    (tool,) = make_tools(Config.model_validate(config)).values()
    return tool


def call(tool: Tool, timeout_s: float = 20.0, **arguments: object) -> ToolResult:
    result = asyncio.run(run_tool(tool, arguments, timeout_s, 400))
    tool.close()
    return result


def test_the_example_s_card_says_what_its_signature_and_docstring_say() -> None:
    config = Config.model_validate({"agent": {"tools": ["Python_Coder", f"{EXAMPLE}:convert"]}})
    tools = make_tools(config)
    assert list(tools) == ["Python_Coder", "convert"]
    assert tools["convert"].card == ToolCard(
        "convert",
        "Converts a length from one unit to another.",
        schema_of(
            Parameter("length", "how many of the unit.", float),
            Parameter("unit", "mm, cm, m, km, foot or mile."),
            Parameter("to", "another one of those.", is_required=False),
        ),
        examples=({"length": 3.0, "unit": "mile", "to": "km"},),
    )
    (example,) = tools["convert"].card.examples
    assert call(tools["convert"], **example).output == "4.82803 km"


@pytest.mark.parametrize(
    ("arguments", "output", "error"),
    [
        ({"length": 3, "unit": "km"}, "3000 m", None),
        ({"length": 3.0, "unit": "parsec"}, "", "there is no unit 'parsec'; there are mm, cm"),
        ({"length": "3", "unit": "km"}, "", "convert takes (length: float, unit: str, to: str"),
        ({"length": True, "unit": "km"}, "", "convert takes (length: float, unit: str, to: str"),
        ({"unit": "km"}, "", "convert takes (length: float"),
    ],
)
def test_calls_of_the_example(arguments: dict[str, object], output: str, error: str | None) -> None:
    (tool,) = make_tools(
        Config.model_validate({"agent": {"tools": [f"{EXAMPLE}:convert"]}})
    ).values()
    result = call(tool, **arguments)
    assert result.output == output
    assert result.error is error if error is None else str(result.error).startswith(error)


def test_meanings_may_go_on_in_further_lines(tmp_path: Path) -> None:
    source = """
def f(a: str, b: bool = False) -> str:
    '''Does it, in a first
    paragraph of two lines.

    And more for people.

    Args:
        a: what to do,
            at length

        b: whether.

    Returns:
        a: something.
    '''
    return a
"""
    tool = made(tmp_path, source)
    tool.close()
    assert tool.card.description == "Does it, in a first paragraph of two lines."
    expected = [("a", "what to do, at length"), ("b", "whether.")]
    assert [(each.name, each.meaning) for each in tool.card.parameters] == expected


def test_types_are_those_of_a_json_schema(tmp_path: Path) -> None:
    source = """
def f(numbers: list[int], unit: str, times: int | None = None) -> str:
    '''Adds.

    Args:
        numbers: to add.
        unit: of all. (choices: ["m", "km"])
        times: over.
    '''
    return f"{sum(numbers) * (times or 1)} {unit}"
"""
    tool = made(tmp_path, source)
    properties = tool.card.schema["properties"]
    assert properties["numbers"]["items"] == {"type": "integer"}
    assert properties["unit"]["enum"] == ["m", "km"]
    assert [each.kind for each in tool.card.parameters] == [list, str, int]
    assert "takes (numbers: list" in tool.card.check({"numbers": [1], "unit": "m", "other": 1})
    assert call(tool, numbers=[1, 2], unit="m").output == "3 m"


def test_a_function_that_blocks_holds_up_nobody_and_one_that_awaits_is_awaited(
    tmp_path: Path,
) -> None:
    released = threading.Event()
    tool = made(tmp_path, f"def f(n: int) -> int:\n    {ABOUT_N}\n    return wait(n)\n")
    tool._function.__globals__["wait"] = lambda n: released.wait(20.0) and n

    async def both() -> list[ToolResult]:
        waiting = asyncio.ensure_future(run_tool(tool, {"n": 7}, 20.0, 400))
        late = await run_tool(tool, {"n": 8}, 0.05, 400)
        released.set()
        return [await waiting, late]

    done, late = asyncio.run(both())
    tool.close()
    assert done.output == "7" and late.error == "timed out after 0.05 s"
    source = f'async def g(n: int | None = None) -> str:\n    {ABOUT_N}\n    return f"{{n}}"\n'
    assert call(made(tmp_path / "..", source, "g")).output == "None"


def test_an_exception_is_an_error_of_its_call(tmp_path: Path) -> None:
    tool = made(tmp_path, f"def f(n: int) -> int:\n    {ABOUT_N}\n    return 1 // n\n")
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert call(tool, n=0).error == error


def test_a_class_is_made_from_its_context(tmp_path: Path) -> None:
    source = """
from flowtrain.tools import ToolCard

class Shout:
    card = ToolCard("Shout", "Says it louder.")

    def __init__(self, context):
        self.mark = context.options["mark"]

    async def execute(self, query):
        return query.upper() + self.mark

    def close(self):
        pass
"""
    assert call(made(tmp_path, source, "Shout", Shout={"mark": "?"}), query="hi").output == "HI?"


def documented(signature: str, example: str = "", about: str = "Args:\n     a: it.") -> str:
    return f"def f({signature}):\n '''Does.\n\n {example}\n\n {about}\n '''"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def f(a: str) -> str: return a", "cannot be used as a tool: .* has no docstring"),
        (documented("a"), "cannot be used as a tool: .*Argument a is missing a type hint"),
        (documented("a: 'NoSuch'"), "cannot be used as a tool: NameError"),
        (documented("*a: str"), r"takes \*a: (')?str(')?; but models pass arguments by name"),
        (documented("a: str", about="Args:\n     b: it."), "has no description for .* 'a'"),
        (documented("a: str", ">>> f(b=1)"), r"its example 'f\(b=1\)' is not a call"),
        (documented("a: str", ">>> f(a=x)"), r"its example 'f\(a=x\)' is not a call"),
        (documented("a: str", ">>> f(a='') + 1"), "is not a call of this tool: it computes"),
        (documented("a: str", ">>> f(a=1)"), r"is invalid: f takes \(a: str\)"),
        ("f = 5", "is a int, not a function or a class"),
        ("g = 5", "has no 'f'"),
        ("1 / 0", "ZeroDivisionError"),
        ("class f:\n def __init__(self, context): raise KeyError('KEY')", "cannot be made: KeyErr"),
        (
            "from flowtrain.tools import ToolCard\nclass f:\n card = ToolCard('g', '')\n"
            " def __init__(self, context): ...",
            "calls itself 'g' on its card",
        ),
    ],
)
def test_what_is_no_tool_is_refused_in_one_line(tmp_path: Path, source: str, problem: str) -> None:
    with pytest.raises(UserError, match=rf"^agent\.tools='[^']*mine\.py:f'.*{problem}") as refused:
        made(tmp_path, source)
    assert "\n" not in str(refused.value)


def test_the_docs_show_the_example_as_it_is() -> None:
    check_shown("my_tool.py", "tools.md")


def test_a_run_takes_a_tool_of_a_file() -> None:
    """Planner, evaluation and nodes know it by its own name, and the config keeps the file's."""
    asked = ("Search", f"{EXAMPLE}:convert")
    values = {
        "agent": {"tools": asked},
        "tasks": {"num_train": 40},
        "eval": {"num_tasks": 4},
        "tiny": {"hidden_size": 24, "num_layers": 2},
        "run": {"threads": 1},
    }
    world = World(0, 1, torch.device("cpu"))
    components = RunComponents.prepare(toy(values), Placement.colocated(world))
    try:
        assert components.config.agent.tools == asked
        assert tuple(components.tools) == ("Search", "convert")
        agent = components.make_agent(components.make_policy_engines({}, ()), 2)
        assert agent.planner.tool_names == ("Search", "convert")
        card = components.tools["convert"].card
        given = '{"length": 2, "unit": "km", "to": "mile"}'
        command = write_command(arguments_of(card, given))
        assert command == 'execution = tool.execute(length=2, unit="km", to="mile")'
        assert 'tool.execute(length=3.0, unit="mile", to="km")' in tool_text(card)
    finally:
        components.close()


def test_a_name_that_is_there_already_is_refused(tmp_path: Path) -> None:
    config = {"agent": {"tools": [f"{EXAMPLE}:convert", f"{tmp_path}/mine.py:convert"]}}
    (tmp_path / "mine.py").write_text(EXAMPLE.read_text())
    with pytest.raises(UserError, match="'convert' is listed twice"):
        make_tools(Config.model_validate(config))
