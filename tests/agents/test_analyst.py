"""A question is analysed once per group, on a node whose one loop lasts for a run, too."""

from __future__ import annotations

import asyncio
import gc

import pytest

from flowtrain.agents.agentflow.analyst import Analyst
from flowtrain.engines.protocol import EngineError
from flowtrain.types import Task


class Replies:
    """A chat engine that says these in turn, or fails where one is None."""

    name = "local"

    def __init__(self, *replies: str | None) -> None:
        self.left = list(replies)

    async def ask(self, prompt: str, *, seed: int, deadline_s: float) -> str:
        await asyncio.sleep(0)
        reply = self.left.pop(0)
        if reply is None:
            raise EngineError("away")
        return reply


def leased() -> Task:
    """The same question in another lease."""
    return Task("t", "What is the area of Chad?", ("1284",))


def test_a_failure_is_forgotten() -> None:
    async def run() -> str:
        analyst, task = Analyst(Replies(None, "an area"), "", 1.0), leased()  # type: ignore[arg-type]
        failed = await asyncio.gather(
            *(analyst.analyse(task) for _ in range(3)), return_exceptions=True
        )
        assert all(isinstance(each, EngineError) for each in failed)
        return await analyst.analyse(task)

    assert asyncio.run(run()) == "an area"


def test_a_later_group_asks_the_newer_weights_and_the_former_ones_leave_nothing() -> None:
    async def run() -> list[str]:
        analyst, said = Analyst(Replies("first", "second"), "", 1.0), []  # type: ignore[arg-type]
        for _ in range(2):
            task = leased()
            said += [await analyst.analyse(task) for _ in range(4)]
            del task
            gc.collect()
            assert not analyst._asked
        return said

    assert asyncio.run(run()) == ["first"] * 4 + ["second"] * 4


def test_a_rollout_that_is_cut_leaves_the_reply_to_the_others() -> None:
    async def run() -> str:
        analyst, task = Analyst(Replies("an area"), "", 1.0), leased()  # type: ignore[arg-type]
        cut, other = (asyncio.ensure_future(analyst.analyse(task)) for _ in range(2))
        await asyncio.sleep(0)
        cut.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cut
        return await other

    assert asyncio.run(run()) == "an area"
