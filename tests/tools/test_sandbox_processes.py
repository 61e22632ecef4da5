"""The sandbox's processes: locked while they run, replaced when they die, gone with their host."""

from __future__ import annotations

import asyncio
import gc
import itertools
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
from flowtrain.tools.sandbox import server as fork_server
from flowtrain.tools.sandbox.host import CodeResult, ProcessSandbox
from flowtrain.tools.sandbox.server import Backend
from tests.attacks.sandboxes import children_of, outcome, server_pid

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

TIMEOUT_S = 0.4
DEADLINE_S = 60.0


Sandbox = partial(ProcessSandbox, seccomp.backend())


def servers() -> set[int]:
    """Pids of the fork servers of this process."""
    return {pid for pid in children_of(os.getpid()) if b"sandbox/child.py" in command_of(pid)}


def command_of(pid: int) -> bytes:
    """Return the command line of a process; b"" once it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


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
    box = Sandbox(num_workers=1, timeout_s=TIMEOUT_S, memory_mb=256)

    async def main() -> tuple[str, str]:
        await box.run("1")
        server = server_pid(box)
        task = asyncio.create_task(box.run("print(1, flush=True)\nwhile True: pass"))
        await until(
            lambda: any(
                "Seccomp:\t2" in Path(f"/proc/{pid}/status").read_text()
                for pid in children_of(server)
            )
        )
        process = Path(f"/proc/{children_of(server)[0]}")
        found = (process / "status").read_text(), (process / "limits").read_text()
        assert (await task).error == "CPU time limit of 0.4 s exceeded"
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
    seen = {name: caps[f"Max {name}"] for name in expected}
    assert seen == {name: [str(cap)] * 2 for name, cap in expected.items()}


def test_a_run_that_hangs_does_not_stop_the_others() -> None:
    box = Sandbox(num_workers=2, timeout_s=TIMEOUT_S)

    async def main() -> list[CodeResult]:
        codes = ["while True: pass", *(f"{i} * {i}" for i in range(19))]
        return await asyncio.gather(*map(box.run, codes))

    hung, *others = asyncio.run(main())
    assert hung.error == "CPU time limit of 0.4 s exceeded"
    assert [ran.output for ran in others] == [f"{i * i}\n" for i in range(19)]
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
        return (await box.run("6 * 7")).output

    assert asyncio.run(main()) == "42\n"
    box.close()


@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_fails_its_run_and_is_replaced(
    killer: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    others, box = servers(), Sandbox(num_workers=1, timeout_s=60.0)

    async def main() -> str:
        await box.run("1")
        server = server_pid(box)
        with monkeypatch.context() as patch:
            patch.setattr(fork_server, "START_S", 0.3)
            patch.setitem(box._workers.limits, "wall_s", 1.0)
            task = asyncio.create_task(box.run("while True: pass"))
            await until(lambda: bool(children_of(server)))
            (child,) = children_of(server)
            os.kill(server, killer)
            assert (await task).error == "the process that ran the code died"
        await until(lambda: is_gone(server) and is_gone(child))
        return (await box.run("6 * 7")).output

    assert asyncio.run(main()) == "42\n"
    box.close()
    asyncio.run(until(lambda: servers() <= others))


def test_a_server_that_is_lost_between_runs_is_not_noticed() -> None:
    box = Sandbox(num_workers=1)
    assert outcome(box, "1") == "1\n"
    server = server_pid(box)
    os.kill(server, signal.SIGKILL)
    asyncio.run(until(lambda: is_gone(server)))
    assert outcome(box, "6 * 7") == "42\n"
    asyncio.run(until(lambda: is_gone(server)))
    box.close()


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, str], None]:
    """Lets the first servers do something else than to start."""
    child = tmp_path / "child.py"

    def install(num: int, deed: str) -> None:
        child.write_text(deed)
        whole, numbers = fork_server.CHILD, itertools.count()

        def start(backend: Backend) -> fork_server.Server:
            monkeypatch.setattr(fork_server, "CHILD", child if next(numbers) < num else whole)
            return fork_server.Server(backend)

        monkeypatch.setattr(host, "Server", start)

    return install


def test_a_server_that_does_not_start_is_not_noticed(broken: Callable[[int, str], None]) -> None:
    broken(1, "raise SystemExit")
    box = Sandbox(num_workers=1)
    assert outcome(box, "6 * 7") == "42\n"
    box.close()


@pytest.mark.parametrize(
    ("deed", "error"),
    [
        ("import time\ntime.sleep(1000)", "the sandbox's process did not start: timed out"),
        ("", "the sandbox's process did not start: the fork server has closed its end"),
    ],
)
def test_servers_that_never_start_are_an_error_of_their_own(
    broken: Callable[[int, str], None], monkeypatch: pytest.MonkeyPatch, deed: str, error: str
) -> None:
    broken(99, deed)
    monkeypatch.setattr(fork_server, "START_S", 0.3 if deed else 30.0)
    box = Sandbox(num_workers=1)
    assert outcome(box, "1") == error
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
    assert outcome(box, "1") == "1\n"
    assert len(servers() - others) == 1
    del box
    gc.collect()
    asyncio.run(until(lambda: servers() <= others))


@pytest.mark.parametrize(
    "ending", ["pass", "os.kill(os.getpid(), 9)", "os._exit(1)", "raise SystemExit(3)"]
)
def test_no_process_survives_its_host(ending: str) -> None:
    timeout_s = 60.0 if "os." in ending else 0.6  # an orderly end waits for the run
    program = f"""
import asyncio, os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from test_sandbox_processes import Sandbox, children_of, servers, until
async def main():
    task = asyncio.ensure_future(box.run("while True: pass"))
    await until(lambda: [child for pid in servers() for child in children_of(pid)])
    print(*servers(), *(child for pid in servers() for child in children_of(pid)), flush=True)
    {ending}
box = Sandbox(num_workers=1, timeout_s={timeout_s})
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=DEADLINE_S,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) >= 2
    asyncio.run(until(lambda: all(map(is_gone, pids))))
