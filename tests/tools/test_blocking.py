"""Blocking calls of tools: off the loop, bounded, and no matter to anybody else when they hang."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from flowtrain.records import ToolResult
from flowtrain.tools import BlockingPool, ToolCard, ToolError, run_tool


class Blocking:
    """A tool that blocks until the test lets it go."""

    card = ToolCard("Blocking", "Blocks.")

    def __init__(self, num_threads: int) -> None:
        self.pool = BlockingPool(num_threads)
        self.release = threading.Event()
        self.started: list[str] = []

    async def execute(self, query: str) -> str:
        return await self.pool.run(lambda: self._block(query))

    def _block(self, query: str) -> str:
        self.started.append(query)
        assert self.release.wait(60.0)
        return f"<{query}>"

    def close(self) -> None:
        self.pool.close()


async def call(tool: Blocking, query: str, timeout_s: float = 5.0) -> ToolResult:
    return await run_tool(tool, {"query": query}, timeout_s, 100)


async def until_started(tool: Blocking, number: int) -> None:
    async with asyncio.timeout(60.0):
        while len(tool.started) < number:
            await asyncio.sleep(0.001)


def test_pool_bounds_concurrent_calls_without_blocking_loop() -> None:
    async def main() -> None:
        tool = Blocking(2)
        calls = [asyncio.create_task(call(tool, str(n))) for n in range(5)]
        await until_started(tool, 2)
        for _ in range(100):  # turns of the loop, which nothing holds up
            await asyncio.sleep(0)
        assert tool.started == ["0", "1"]
        tool.release.set()
        found = [result.output for result in await asyncio.gather(*calls)]
        assert found == [f"<{n}>" for n in range(5)]
        tool.close()

    asyncio.run(main())


def test_deadline_abandons_running_call_and_drops_waiting_call() -> None:
    async def main() -> None:
        tool = Blocking(1)
        hung = asyncio.create_task(call(tool, "hung", 1.0))
        await until_started(tool, 1)
        assert (await call(tool, "waiting", 0.1)).error == "timed out after 0.1 s"
        assert (await hung).error == "timed out after 1 s"
        tool.release.set()
        assert (await call(tool, "next")).output == "<next>"
        assert tool.started == ["hung", "next"]
        tool.close()

    asyncio.run(main())


def test_exception_reaches_caller_and_thread_survives() -> None:
    async def main() -> None:
        pool = BlockingPool(1)

        def fail(error: BaseException) -> None:
            raise error

        for error in (ToolError("no such page"), SystemExit(3), KeyError("x")):
            with pytest.raises(type(error)) as raised:
                await pool.run(lambda error=error: fail(error))
            assert raised.value is error
        assert await pool.run(lambda: threading.current_thread().daemon)
        pool.close()

    asyncio.run(main())


def test_it_works_until_it_is_closed() -> None:
    pool = BlockingPool(2)
    assert [asyncio.run(pool.run(lambda n=n: n * n)) for n in range(4)] == [0, 1, 4, 9]
    pool.close()
    pool.close()
    with pytest.raises(ToolError, match="the tool is closed"):
        asyncio.run(pool.run(lambda: 1))
    for thread in pool._threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_hung_call_does_not_block_process_exit() -> None:
    program = """
import asyncio, threading
from flowtrain.tools import BlockingPool
async def main():
    task = asyncio.ensure_future(BlockingPool(1).run(threading.Event().wait))
    await asyncio.wait({task}, timeout=0.05)
    task.cancel()
asyncio.run(main())
print("over")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "over\n"
