"""`bench.dataflow` rolls out as `bench.flow` does, time passes as it should, and rates are those of
the parts.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from bench import dataflow as bench
from bench.flow import simulated_flow
from bench.simulated_pool import Site, collect_s, course
from flowtrain.types import Task

SCALE = 200.0
TRAIN_S = 200.0


def test_a_course_is_the_rollout_of_the_real_flow() -> None:
    """As many turns, and as long, give or take what the event loop needs."""
    flow = simulated_flow(SCALE)
    flow = replace(flow, limits=replace(flow.limits, timeout_s=60.0))

    async def all_of_them() -> list[tuple[int, float]]:
        done = await asyncio.gather(*(flow.run(Task("t", "?", ("",)), seed) for seed in range(60)))
        return [(len(each.turns), each.seconds * SCALE) for each in done]

    slips = []
    for seed, (turns, seconds) in enumerate(asyncio.run(all_of_them())):
        found = course(seed)
        if found.end_s < 500:
            assert len(found.plans_s) == turns
            slips.append(seconds - found.end_s)
    assert -1.0 < min(slips) < 30.0, (
        "what slips is what the event loop takes, so many times faster than life"
    )


def test_the_synchronous_loop_waits_for_the_last_rollout() -> None:
    seeds = list(range(20))
    ends = sorted(course(seed).end_s for seed in seeds)
    assert collect_s(seeds, [Site("a", slots=12), Site("b", slots=8)]) == ends[-1]
    assert collect_s(seeds, [Site("a", slots=1)]) == pytest.approx(sum(ends))
    assert collect_s(seeds, [Site("a", slots=20)], share=0.9, patience_s=5.0) == min(
        ends[17] + 5.0, ends[-1]
    )


@pytest.fixture(scope="module")
def found() -> bench.Run:
    return bench.run(bench.SITES, TRAIN_S, 12)


def test_the_trainer_is_the_wall_once_the_pool_is_large_enough(found: bench.Run) -> None:
    assert found.step_s == pytest.approx(TRAIN_S, rel=0.01) and found.idle_share < 0.01
    assert all(step.asked <= step.served < step.trained for step in found.trainer.steps)
    assert all(
        later.asked == step.trained
        for step, later in zip(found.trainer.steps, found.trainer.steps[1:], strict=False)
    )


def test_the_same_simulation_comes_out_the_same(found: bench.Run) -> None:
    steps = bench.run(bench.SITES, TRAIN_S, 9).trainer.steps
    assert len(steps) == 9 and steps == found.trainer.steps[:9]


def test_rows_compare_with_the_synchronous_loop() -> None:
    rows = {row["path"]: row for row in bench.rate_rows(0.34, TRAIN_S, 386.0, 11)}
    sync, through = rows["synchronous"], rows["dataflow"]
    assert sync["step_s"] == 386.0 + bench.PUBLISH_S + TRAIN_S and sync["times_sync"] == 1
    assert through["times_sync"] == pytest.approx(sync["step_s"] / through["step_s"])
    assert through["times_sync"] > 2.7
    assert through["staleness_max"] <= bench.MAX_STALENESS


def test_far_pools_all_contribute() -> None:
    rows = bench.far_rows(120.0, 12)
    assert (
        sum(row["of_trained"] for row in rows)
        == pytest.approx(1)
        == sum(row["of_speed"] for row in rows)
    )
    assert all(row["of_trained"] == pytest.approx(row["of_speed"], abs=0.08) for row in rows)


def test_an_advised_pool_settles_where_the_trainer_does_not_wait() -> None:
    row = bench.advised_row(8, TRAIN_S, 16)
    assert row["idle_share"] <= 0.05 and len(row["late_sizes"].split()) <= 2


def test_the_service_is_measured_by_all_its_parts() -> None:
    alone, at_once = bench.dataflow_service.rows(64, 16, "")
    assert alone["ms_per_group"] == pytest.approx(
        alone["lease_ms"] + alone["push_ms"] + alone["batch_ms"]
    )
    assert 1 / at_once["groups_per_s"] == pytest.approx(
        sum(1 / at_once[f"{part}_per_s"] for part in ("lease", "push", "batch"))
    )
    assert 4000 < alone["bytes_per_group"] < 10000
