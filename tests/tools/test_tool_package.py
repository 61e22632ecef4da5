"""The package in examples/tool_package, installed by pip and run in the flow by another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packages import installed, printed

FLOW = """
import asyncio, json
from flowtrain.agents.agentflow.flow import Flow, FlowLimits
from flowtrain.tools.registry import make_tools
from flowtrain.agents.agentflow.executor import Executor
from flowtrain.agents.agentflow.generator import Generator
from flowtrain.agents.agentflow.planner import Plan
from flowtrain.agents.agentflow.verifier import RuleVerifier
from flowtrain.config.options import parse
from flowtrain.tasks.sets import TaskSet
from flowtrain.records import Action, Call, FinishReason, Task

class Planner:
    async def plan(self, task, memory, turn, seed, deadline_s):
        # The tool does not understand the first one.
        sub_goal = ("3 miles into km", "3 mile to km")[turn]
        call = Call((), (), (), (), FinishReason.STOP)
        return Plan(call, Action("", "", sub_goal, "Length_Converter"))

config = parse(["--agent.tools", '["Length_Converter"]', "--plugins.Length_Converter.digits", "3"])
tools = make_tools(config, TaskSet((), {}, ()))
executor = Executor(tools, config.agent.tool_timeout_s, config.agent.max_result_chars)
verifier = RuleVerifier()
flow = Flow(Planner(), executor, verifier, Generator(), FlowLimits(3, 60.0))
done = asyncio.run(flow.run(Task("t", "How many km are three miles?", ("4.83 km",)), 0))
description = tools["Length_Converter"].card.description
found = [turn.tool_calls[0].result.text for turn in done.turns]
print(json.dumps([found, done.answer, description]))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("tool_package", tmp_path_factory.mktemp("package"))


def test_installed_tool_runs_in_flow_with_its_options(site: Path) -> None:
    (wrong, right), answer, description = printed(FLOW, site)
    assert wrong.startswith("Error: write '3 mile to km', with units of mm, cm")
    assert right == answer == "4.83 km"
    assert description == "Converts a length from one unit to another."
