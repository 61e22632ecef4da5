"""Statistics of rollouts whose responses call tools."""

from __future__ import annotations

from dataclasses import replace

import make
from make import rollout

from flowtrain.logging.rollouts import RolloutStats, count_rollouts
from flowtrain.records import ToolCall, ToolResult, Turn


def used(name: str, error: str | None = None) -> ToolCall:
    return ToolCall(name, "{}", ToolResult("x", error))


def turn(*calls: ToolCall, problem: str = "", tool: str | None = None) -> Turn:
    return make.turn(act=tool, problem=problem, tool_calls=calls)


TRAJECTORY = rollout(
    turn(used("Search"), used("Search", "failed")),
    turn(used("Python_Coder")),
    turn(used("Search"), problem="no valid JSON"),
    turn(problem="no valid JSON"),
    turn(used("Look", "no such tool"), problem="there is no tool 'Look'"),
    turn(used("Search", "failed"), tool="Search"),
    turn(tool="No matched tool given: Look", problem="not found"),
    turn(),
    reward=1.0,
)
TOOLS = ("Search", "Python_Coder", "Base_Generator")


def test_calls_are_counted_by_tool_and_what_could_not_be_read_is_malformed() -> None:
    stats = RolloutStats.of_counts(count_rollouts([TRAJECTORY], TOOLS), TOOLS)
    assert stats.tool_shares == {"Search": 4 / 8, "Python_Coder": 1 / 8, "Base_Generator": 0.0}
    assert stats.malformed_share == 4 / 8
    assert stats.tool_error_share == 2 / 8


def test_tools_that_no_list_names_are_an_environments() -> None:
    trajectory = replace(TRAJECTORY, turns=(turn(used("cancel")), turn(used("cancel", "sent"))))
    stats = RolloutStats.of_counts(count_rollouts([trajectory], ()), ())
    assert (stats.malformed_share, stats.tool_error_share) == (0.0, 1 / 2)
