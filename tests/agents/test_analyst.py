"""A question is analysed once per group, on a node whose one loop lasts for a run, too."""

from __future__ import annotations

import asyncio
import gc

import pytest
from make import Chat

from flowtrain.agents.agentflow.analyst import Analyst
from flowtrain.inference.protocol import EngineError
from flowtrain.records import Task


def leased() -> Task:
    """The same question in another lease."""
    return Task("t", "What is the area of Chad?", ("1284",))


def test_a_failure_is_forgotten() -> None:
    async def run() -> str:
        analyst, task = Analyst(Chat([EngineError("away"), "an area"]), "", 1.0), leased()
        failed = await asyncio.gather(
            *(analyst.analyse(task) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(each, EngineError) for each in failed)
        return await analyst.analyse(task)

    assert asyncio.run(run()) == "an area"


def test_a_later_group_asks_the_newer_weights_and_the_former_ones_leave_nothing() -> None:
    async def run() -> list[str]:
        analyst, said = Analyst(Chat(["first", "second"]), "", 1.0), []
        for _ in range(2):
            task = leased()
            said += [await analyst.analyse(task) for _ in range(4)]
            del task
            gc.collect()
            assert not analyst._requests
        return said

    assert asyncio.run(run()) == ["first"] * 4 + ["second"] * 4


def test_a_rollout_that_is_cut_leaves_the_reply_to_the_others() -> None:
    async def run() -> str:
        analyst, task = Analyst(Chat(["an area", AssertionError("asked twice")]), "", 1.0), leased()
        cut, other = (asyncio.ensure_future(analyst.analyse(task)) for _ in range(2))
        await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        return await other

    assert asyncio.run(run()) == "an area"
