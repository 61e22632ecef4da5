"""The processes behind the sandbox: locked while they run, replaced when they die, gone when the
sandbox or its host is.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from flowtrain.tools import ToolError
from flowtrain.tools.sandbox import host, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

TIMEOUT_S = 0.4
DEADLINE_S = 10.0


Sandbox = partial(ProcessSandbox, seccomp.backend())


def run(box: ProcessSandbox, code: str) -> str:
    return asyncio.run(box.run(code))


def children_of(parent: int) -> list[int]:
    """Pids of the living children of a process."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid = stat.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(ppid) == parent and state != "Z":
            pids.append(int(stat.parent.name))
    return pids


def servers() -> set[int]:
    """Pids of the fork servers of this process."""
    return {
        pid
        for pid in children_of(os.getpid())
        if b"sandbox/child.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def is_gone(pid: int) -> bool:
    """Return whether no such process runs."""
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition about other processes, which send us no event."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        await asyncio.sleep(0.005)


def test_the_process_of_a_run_is_under_all_locks() -> None:
    others = servers()
    box = Sandbox(num_workers=1, timeout_s=TIMEOUT_S, memory_mb=256)

    async def main() -> tuple[str, str]:
        await box.run("1")
        (server,) = servers() - others
        task = asyncio.create_task(box.run("print(1, flush=True)\nwhile True: pass"))
        await until(
            lambda: any(
                "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
                for pid in children_of(server)
            )
        )
        process = Path(f"/proc/{children_of(server)[0]}")
        found = (process / "status").read_text(), (process / "limits").read_text()
        with pytest.raises(ToolError, match="time limit"):
            await task
        return found

    status, limits = asyncio.run(main())
    box.close()
    assert "NoNewPrivs:\t1" in status
    caps = {line[:25].strip(): line[25:].split()[:2] for line in limits.splitlines()}
    expected = {
        "cpu time": 2,
        "address space": 256 << 20,
        "file size": 0,
        "open files": 3,
        "core file size": 0,
        "processes": 0,
    }
    assert {name: caps[f"Max {name}"] for name in expected} == {
        name: [str(cap)] * 2 for name, cap in expected.items()
    }


def test_a_run_that_hangs_does_not_stop_the_others() -> None:
    box = Sandbox(num_workers=2, timeout_s=TIMEOUT_S)

    async def main() -> list[str | BaseException]:
        codes = ["while True: pass", *(f"{i} * {i}" for i in range(19))]
        return await asyncio.gather(*map(box.run, codes), return_exceptions=True)

    hung, *others = asyncio.run(main())
    assert isinstance(hung, ToolError) and others == [f"{i * i}\n" for i in range(19)]
    box.close()


def test_a_cancelled_run_gives_its_worker_back() -> None:
    box = Sandbox(num_workers=1, timeout_s=TIMEOUT_S)

    async def main() -> str:
        for code in ("while True: pass", "1"):  # one under way, one still queued
            task = asyncio.create_task(box.run(code))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return await box.run("6 * 7")

    assert asyncio.run(main()) == "42\n"
    box.close()


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_fails_its_run_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, killer: signal.Signals
) -> None:
    others = servers()
    monkeypatch.setattr(host, "GRACE_S", 0.2)
    box = Sandbox(num_workers=1, timeout_s=TIMEOUT_S)

    async def main() -> str:
        await box.run("1")
        (server,) = servers() - others
        task = asyncio.create_task(box.run("while True: pass"))
        await until(lambda: bool(children_of(server)))
        (child,) = children_of(server)
        os.kill(server, killer)
        with pytest.raises(ToolError, match="died" if killer == signal.SIGKILL else "time limit"):
            await asyncio.wait_for(task, TIMEOUT_S + 2.0)
        await until(lambda: is_gone(server) and is_gone(child))
        return await box.run("6 * 7")

    assert asyncio.run(main()) == "42\n"
    box.close()
    assert servers() == others


def test_a_server_that_dies_between_runs_is_not_noticed() -> None:
    others, box = servers(), Sandbox(num_workers=1)
    assert run(box, "1") == "1\n"
    (server,) = servers() - others
    os.kill(server, signal.SIGKILL)
    asyncio.run(until(lambda: is_gone(server)))
    assert run(box, "6 * 7") == "42\n"
    box.close()


def test_close_ends_runs_and_processes_and_may_be_called_twice() -> None:
    others, num_threads = servers(), threading.active_count()
    box = Sandbox(num_workers=2, timeout_s=60.0)

    async def main() -> tuple[set[int], list[BaseException]]:
        tasks = [
            asyncio.create_task(box.run("while True: pass")) for _ in range(3)
        ]  # two under way, one queued
        await until(lambda: sum(len(children_of(pid)) for pid in servers() - others) == 2)
        mine = servers() - others
        pids = {*mine, *(child for pid in mine for child in children_of(pid))}
        box.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: all(map(is_gone, pids)))
        return pids, results

    pids, results = asyncio.run(main())
    assert len(pids) == 4
    asyncio.run(until(lambda: threading.active_count() == num_threads))
    assert [str(result) for result in results] == ["the sandbox is closed"] * 3
    box.close()
    with pytest.raises(ToolError, match="the sandbox is closed"):
        asyncio.run(box.run("1"))


def test_a_forgotten_sandbox_leaves_no_process() -> None:
    others, box = servers(), Sandbox(num_workers=1)
    assert run(box, "1") == "1\n"
    (server,) = servers() - others
    del box
    gc.collect()
    assert not Path(f"/proc/{server}").exists()


@pytest.mark.parametrize(
    "ending", ["pass", "os.kill(os.getpid(), 9)", "os._exit(1)", "raise SystemExit(3)"]
)
def test_no_process_survives_its_host(ending: str) -> None:
    timeout_s = 60.0 if "os." in ending else 0.6  # an orderly end waits for the run
    program = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_sandbox_processes import Sandbox, children_of, servers, until
async def main():
    task = asyncio.ensure_future(box.run("while True: pass"))
    await until(lambda: [child for pid in servers() for child in children_of(pid)])
    (server,) = servers()
    print(server, *children_of(server), flush=True)
    {ending}
box = Sandbox(num_workers=1, timeout_s={timeout_s})
asyncio.run(main())
"""
    host = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=False,
    )
    server, child = map(int, host.stdout.split())
    asyncio.run(until(lambda: is_gone(server) and is_gone(child)))
