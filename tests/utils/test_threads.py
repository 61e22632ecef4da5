"""Calls on threads of their own, and on the event loop of the process."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from flowtrain.utils.event_loop import run_to_end
from flowtrain.utils.threads import background


def test_a_call_in_the_background_cannot_be_cancelled() -> None:
    gate = threading.Event()
    names: list[str] = []

    def work() -> int:
        assert gate.wait(20)
        names.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        return 7

    future = background(work, "seven")
    assert not future.cancel()
    gate.set()
    assert future.result(20) == 7 and names == ["seven"]


def test_those_who_wait_get_whatever_it_raises() -> None:
    with pytest.raises(SystemExit):
        background(lambda: sys.exit(3), "exit").result(20)


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C does here what it does in a program of its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_leaves_no_task_behind_and_the_next_call_works() -> None:
    cleaned: list[int] = []

    async def child(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(number)

    async def work() -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(2):
                tasks.create_task(child(number))
            await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_to_end(work())
    assert sorted(cleaned) == [0, 1]
    run_to_end(asyncio.sleep(0))


@pytest.mark.usefixtures("interrupts")
def test_a_second_interrupt_does_not_wait() -> None:
    gate = threading.Event()

    async def blocking() -> None:
        for _ in range(2):
            gate.wait(0.2)
            os.kill(os.getpid(), signal.SIGINT)
        gate.wait(60)
        gate.set()

    with pytest.raises(KeyboardInterrupt):
        run_to_end(blocking())
    assert not gate.is_set()
    gate.set()


@pytest.mark.usefixtures("interrupts")
def test_a_signal_that_another_thread_receives_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowtrain.utils.threads._POLL_S", 0.1)
    ended: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0.05)  # the other side waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        await asyncio.sleep(10)
        ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        run_to_end(work())
    assert not ended


def test_what_ends_a_task_does_not_end_the_loop() -> None:
    async def exits() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.to_thread(sys.exit, 3))

    with pytest.raises(SystemExit):
        run_to_end(exits())
    run_to_end(asyncio.sleep(0))


def test_the_loop_does_not_wait_for_itself() -> None:
    async def nested() -> None:
        run_to_end(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="use await"):
        run_to_end(nested())


_ENDS = """
import asyncio, sys, time
from flowtrain.utils.event_loop import begin, run_to_end

async def waits():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("cleaned up", flush=True)
        raise ValueError("a bug") from None

async def blocks():
    time.sleep(60)

begin(waits())
run_to_end(asyncio.sleep(0))
if {blocks}:
    begin(blocks())
sys.exit(3)
"""


@pytest.mark.parametrize("blocks", [False, True])
def test_a_process_ends_at_once_and_without_noise(blocks: bool) -> None:
    command = [sys.executable, "-c", _ENDS.format(blocks=blocks)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == ("" if blocks else "cleaned up\n")
