"""The event loop that tests run timers in."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests import virtual_time


def test_timers_fire_in_their_order_at_their_times() -> None:
    async def main() -> list[tuple[str, float]]:
        began, seen = time.monotonic(), list[tuple[str, float]]()

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, time.monotonic() - began))

        await asyncio.gather(note("day", 86400.0), note("blink", 0.001), note("hour", 3600.0))
        return seen

    found = virtual_time.run(main())
    assert [name for name, _ in found] == ["blink", "hour", "day"]
    assert [seconds for _, seconds in found] == pytest.approx([0.001, 3600.0, 86400.0])


def test_a_deadline_cuts_what_takes_longer_and_nothing_else() -> None:
    async def main() -> None:
        await asyncio.wait_for(asyncio.sleep(9.999), 10.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10.001), 10.0)

    virtual_time.run(main())


def test_the_clock_stands_still_while_a_function_runs_in_an_executor() -> None:
    async def main() -> float:
        begins, ends = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def work() -> str:
            loop.call_soon_threadsafe(begins.set)
            assert ends.wait(60)
            return "done"

        began = loop.time()
        working = asyncio.create_task(asyncio.wait_for(asyncio.to_thread(work), 0.001))
        await begins.wait()
        ends.set()
        assert await working == "done"
        return loop.time() - began

    assert virtual_time.run(main()) == 0.0


def test_the_clock_of_the_process_comes_back() -> None:
    before = time.monotonic

    async def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        virtual_time.run(fail())
    assert time.monotonic is before


def test_who_waits_for_what_never_comes_is_told() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="all wait for what no timer"):
        virtual_time.run(main())


def test_a_loop_on_another_thread_keeps_its_own_time() -> None:
    """One that went to sleep by a clock ahead of its own would not wake up again."""
    ticks: list[float] = []
    is_over = threading.Event()

    async def tick() -> None:
        while not is_over.is_set():
            await asyncio.sleep(0.001)
            ticks.append(time.monotonic())

    thread = threading.Thread(target=asyncio.run, args=(tick(),), daemon=True)
    thread.start()
    with virtual_time.clock() as clock:
        clock.now = time.monotonic() + 1e6
        assert time.monotonic() > 1e6
        before, most = len(ticks), 5000
        while len(ticks) < before + 3 and (most := most - 1):
            is_over.wait(0.001)
    is_over.set()
    assert most, "it sleeps"
    thread.join()
    assert max(ticks) < 1e6 + ticks[0]
