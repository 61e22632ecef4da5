"""`bench.flow` keeps its simulated latencies, and both of its designs do the same work."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace

import pytest

from bench import flow as bench
from flowtrain.agents.agentflow.flow import Flow
from flowtrain.agents.collect import collect
from flowtrain.types import Task, Trajectory

SCALE = 20_000.0


def test_a_simulated_rollout_takes_150_s_and_two_turns_on_average() -> None:
    latencies = bench.Latencies(1.0)
    chat = [latencies.chat_s(str(n), "plan") for n in range(4000)]
    tool = [min(latencies.tool_s(str(n)), bench.TOOL_TIMEOUT_S) for n in range(4000)]
    turns = statistics.mean(len(done.turns) for done in rollouts(300))
    assert turns == pytest.approx(2.05, abs=0.15)
    assert (2 + 3 * turns) * statistics.mean(chat) + turns * statistics.mean(tool) == pytest.approx(
        150, rel=0.1
    )
    assert max(chat) > 8 * statistics.median(chat), "no long tail"


def test_latencies_depend_on_what_they_are_for_alone() -> None:
    latencies = bench.Latencies(2.0)
    assert (
        latencies.chat_s("1 0", "plan")
        == latencies.chat_s("1 0", "plan")
        == bench.Latencies(1.0).chat_s("1 0", "plan") / 2
    )
    assert (
        len(
            {
                latencies.chat_s(key, purpose)
                for key in ("1 0", "1 1", "2 0")
                for purpose in ("plan", "verdict")
            }
        )
        == 6
    )


def rollouts(number: int) -> list[Trajectory]:
    tasks = [Task(str(n), "?", ("answer",)) for n in range(number)]
    return [
        group.trajectories[0] for group in collect(unhurried_flow(), tasks, group_size=1, seed=0)
    ]


def unhurried_flow() -> Flow:
    """So fast that the time limit, which is that of the clock, must not scale along."""
    flow = bench.simulated_flow(SCALE)
    return replace(flow, limits=replace(flow.limits, timeout_s=60.0))


def test_a_worker_rolls_out_what_the_event_loop_does() -> None:
    together = rollouts(20)
    alone = [asyncio.run(unhurried_flow().run(done.task, done.seed)) for done in together]
    assert [[turn.action for turn in done.turns] for done in alone] == [
        [turn.action for turn in done.turns] for done in together
    ]


def test_the_rows_are_those_of_the_table() -> None:
    loop, workers = bench.rate_rows(24, 24, SCALE)
    assert (loop["in_flight"], workers["in_flight"], workers["times_workers"]) == (24, 16, 1.0)
    assert loop["rollouts_per_min"] == pytest.approx(60 * 24 / (loop["seconds"] * SCALE))
    assert 0 < bench.overhead_row(8, 3)["ms_per_turn"] < 100
    name, make, code = bench.sandboxes()[0]
    row = bench.sandbox_row(name, make, code, 5)
    assert row["sandbox"] == "seccomp" and 0 < row["median_ms"] <= row["p95_ms"]
