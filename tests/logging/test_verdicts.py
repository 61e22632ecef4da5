"""Shares of verdicts, by hand."""

from __future__ import annotations

from dataclasses import replace

import make
import pytest
from make import call, rollout

from flowtrain.logging.rollout_parts import count_evidence, count_verdicts, part_metrics
from flowtrain.logging.tally import Tally
from flowtrain.records import BranchPoint, Task, ToolCall, ToolResult, Trajectory, Turn, Verdict


def turn(tool: str, text: str, verdict: Verdict, is_asked: bool = True) -> Turn:
    calls = {"planner": call(), **({"verifier": call()} if is_asked else {})}
    found = ToolResult("The area of Chad is 1284.")
    return make.turn(act=tool, calls=calls, result=found, verdict=verdict, verdict_text=text)


TASK = Task("t", "What is the area of Chad?", ("1284",), rules="facts")
ROLLOUTS = [
    rollout(
        # The rule wants a passage.
        turn("Python_Coder", "Conclusion: CONTINUE", Verdict.CONTINUE),
        # Malformed, and the rule stops at a passage.
        turn("Search", "Conclusion: stop", Verdict.CONTINUE),
        # The rule takes a guess at its word.
        turn("Base_Generator", "Conclusion: STOP", Verdict.STOP),
        task=TASK,
    ),
    rollout(turn("Python_Coder", "Conclusion: STOP", Verdict.STOP), task=TASK),
    rollout(turn("Search", "", Verdict.STOP, is_asked=False), task=TASK),
]


def verdict_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    tally = Tally()
    count_verdicts(tally, trajectories)
    return part_metrics(tally)


def test_shares_by_hand() -> None:
    assert verdict_metrics(ROLLOUTS) == pytest.approx(
        {
            "verifier/malformed_share": 1 / 4,
            "verifier/stop_share": 2 / 4,
            "verifier/agreement_share": 2 / 4,
            "verifier/num_sampled_tokens": 4,
        }
    )
    assert verdict_metrics(ROLLOUTS[1:2])["verifier/stop_share"] == 1.0


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "[" * 100_000])
def test_what_no_node_of_ours_writes_is_counted_too(arguments: str) -> None:
    used = ToolCall("Search", arguments, ToolResult("1"))
    calls = {"planner": call(), "verifier": call(), "refiner": call()}
    odd = make.turn(act="Search", calls=calls, tool_calls=(used, used), evidence="x")
    none = make.turn(act="Search", calls=calls, tool_calls=(), evidence="x")
    rollouts = [rollout(odd, none, task=TASK)]
    assert verdict_metrics(rollouts)["verifier/num_sampled_tokens"] == 2
    tally = Tally()
    count_evidence(tally, rollouts)
    assert part_metrics(tally)["refiner/kept_share"] == 1.0


def test_a_branch_sampled_no_verdict_before_it_left() -> None:
    branch = replace(ROLLOUTS[0], branch=BranchPoint(parent=0, turn=1, token=0, score=0.0))
    found = verdict_metrics([ROLLOUTS[0], branch])
    assert found["verifier/num_sampled_tokens"] == 3 + 2


def test_tasks_without_a_rule_have_nothing_to_agree_with() -> None:
    others = [replace(each, task=replace(TASK, rules="")) for each in ROLLOUTS]
    expected = {"verifier/malformed_share", "verifier/stop_share", "verifier/num_sampled_tokens"}
    assert set(verdict_metrics(others)) == expected
    assert set(verdict_metrics([]).values()) == {0.0}
