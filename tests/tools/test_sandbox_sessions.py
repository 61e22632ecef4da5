"""Sessions of Python: states that last and can be gone on from, limits, and what is left of them.

What hostile code makes of them is tests/attacks/test_session_programs.py.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_sandbox_processes import command_of, is_gone, until

from flowtrain.config import Config
from flowtrain.tools import ToolContext, ToolError, python_coder
from flowtrain.tools.sandbox import child, limits, seccomp, session_child, sessions
from flowtrain.tools.sandbox.host import Ran
from flowtrain.tools.sandbox.sessions import CodeSession, SessionSandbox
from flowtrain.types import UserError
from tests.attacks.sandboxes import children_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

TIMEOUT_S = 0.4
DEADLINE_S = 30.0


@pytest.fixture
def box() -> Iterator[SessionSandbox]:
    made = SessionSandbox(seccomp.backend(), timeout_s=TIMEOUT_S, memory_mb=128)
    yield made
    made.close()


def processes(parent: int | None = None) -> set[int]:
    """Pids of all servers of sessions under a process, their supervisors and what those run."""
    found: set[int] = set()
    for pid in children_of(os.getpid() if parent is None else parent):
        is_ours = b"session_child.py" in command_of(pid)
        if is_ours or parent is not None:
            found |= {pid, *processes(pid)}
    return found


async def says(session: CodeSession, code: str) -> str:
    ran = await session.run(code)
    return ran.error if ran.error is not None else ran.output.rstrip()


def test_branches_go_on_from_the_very_state(box: SessionSandbox) -> None:
    """Numbers, random state, a generator in the middle, an object's identity, a closure."""
    begin = """
import random, time
x, born = 1, time.time_ns()
squares = (i * i for i in range(10))
next(squares), random.random(), random.seed()
thing = object()
def counter():
    n = 0
    def count():
        nonlocal n
        n += 1
        return n
    return count
count = counter()
count()
"""
    look = "print(x, born, next(squares), random.random(), id(thing), count())"

    async def main() -> None:
        root = box.open()
        assert await says(root, begin) == ""
        state = root.snapshot()
        assert await says(root, "x = 2; born = 0; thing = None; random.random()") == ""
        siblings = [state.restore() for _ in range(3)]
        first, *others = [await says(each, look) for each in siblings]
        assert first.startswith("1 1") and others == [first] * 2
        for number, each in enumerate(siblings):
            assert await says(each, f"x = {10 + number}") == ""
        assert [await says(each, "x") for each in siblings] == ["10", "11", "12"]
        assert await says(root, "print(x, born, next(squares), count())") == "2 0 1 2"
        late = state.restore()
        assert await says(late, look) == first, "the state itself has not moved"
        grandchild = siblings[1].snapshot().restore()
        assert await says(grandchild, "print(x, next(squares))") == "11 4"

    asyncio.run(main())


def test_a_failed_run_keeps_what_it_set(box: SessionSandbox) -> None:
    async def main() -> list[str]:
        session = box.open()
        codes = ("x = 1\n1 / 0", "x", "raise SystemExit(3)", "x", "[0] * 10**9", "x", "import os")
        return [await says(session, code) for code in codes]

    error = "ZeroDivisionError: division by zero (line 2: 1 / 0)"
    memory = "memory limit of 128 MiB exceeded"
    assert asyncio.run(main()) == [error, "1", "SystemExit: 3", "1", memory, "1", ""]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("while True: pass", "CPU time limit of 0.4 s exceeded"),
        ("import time; time.sleep(60)", "time limit of 0.4 s exceeded, asleep"),
        ("while True: print('x' * 1000)", "output limit of 4000 characters exceeded"),
        ("import os; os._exit(3)", "exited with status 3"),
        ("import os; os.abort()", "killed by SIGSEGV"),  # it cannot send the signal that it means
    ],
)
def test_a_limit_ends_the_session_and_the_next_result_says_so(
    box: SessionSandbox, code: str, error: str
) -> None:
    async def main() -> list[str]:
        session = box.open()
        await session.run("x = 1")
        state = session.snapshot()
        return [
            await says(session, code),
            await says(session, "x = 2; print(x)"),
            await says(session, "x"),
            await says(state.restore(), "x"),
        ]

    note = f"(the session of the earlier runs ended with the error {error!r}: "
    found = asyncio.run(main())
    assert found[0] == error
    assert found[1] == f"{note}this run began without their variables)\n2"
    assert found[2:] == ["2", "1"], "a state before the end is still there"


def test_each_run_has_the_whole_time_limit(box: SessionSandbox) -> None:
    code = "import time\nend = time.process_time() + 0.25\nwhile time.process_time() < end: pass"

    async def main() -> list[Ran]:
        session = box.open()
        return [await session.run(code) for _ in range(3)]

    runs = asyncio.run(main())
    assert [ran.error for ran in runs] == [None] * 3
    assert all(0.2 < ran.cpu_s < TIMEOUT_S for ran in runs)


def test_the_processes_of_a_session_are_under_all_locks(box: SessionSandbox) -> None:
    async def main() -> str:
        session = box.open()
        await session.run("1")
        state = session._state
        status = Path(f"/proc/{state}/status").read_text()
        caps = Path(f"/proc/{state}/limits").read_text()
        assert len(list(Path(f"/proc/{state}/fd").iterdir())) == 3
        return status + caps

    found = asyncio.run(main())
    assert "NoNewPrivs:\t1" in found and "Seccomp_filters:\t2" in found
    caps = {line[:25].strip(): line[25:].split()[:2] for line in found.splitlines()}
    expected = {"cpu time": 2, "address space": 128 << 20, "file size": 0, "open files": 3}
    expected["core file size"] = 0
    assert {n: caps[f"Max {n}"] for n in expected} == {n: [str(c)] * 2 for n, c in expected.items()}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_lets_a_state_ask_for_a_copy_and_no_more(machine: str) -> None:
    """All other calls are decided as in a run without a session."""
    arch, column = child.MACHINES[machine]
    clone, prctl = (session_child.CALLS[name][column] for name in ("clone", "prctl"))
    plain, program = child.filter_program(machine), session_child.session_program(machine)
    for number in set(range(600)) - {clone, prctl}:
        for third in (0, 4):
            data = {0: number, 4: arch, 16: session_child.FORK, 24: 9, 32: third}
            assert decision(program, data) == decision(plain, data)
    allowed = {(clone, 0x8000 | 17, 0), (prctl, 1, 9)}
    flags = (0, 17, 0x8000, 0x8000 | 17, 0x100, 0x8111, 0x10000000 | 17, 0x01200011, 1, 4, 22)
    for number in (clone, prctl):
        for first in flags:
            for second in (0, 9, 15):
                got = decision(program, {0: number, 4: arch, 16: first, 24: second, 32: 0})
                is_allowed = (number, first, 0 if number == clone else second) in allowed
                assert got == (child.ALLOW if is_allowed else child.REFUSE)
    asked = decision(session_child.asking_program(machine), {0: clone, 4: arch})
    assert asked == session_child.USER_NOTIF
    assert decision(program, {0: 1, 4: arch ^ 1}) == child.KILL_PROCESS


def decision(program: bytes, data: dict[int, int]) -> int:
    """Return the verdict of the kernel's BPF machine."""
    instructions, position, value = list(struct.iter_unpack("HBBI", program)), 0, 0
    while True:
        code, if_true, if_false, operand = instructions[position]
        position += 1
        if code == child.LOAD:
            value = data[operand]
        elif code == child.RETURN:
            return operand
        else:
            hit = value == operand if code == child.JUMP_EQ else bool(value & operand)
            position += if_true if hit else if_false


def test_states_that_nobody_wants_are_freed(box: SessionSandbox) -> None:
    """A server, a supervisor and one process, however many runs there were; none in the end."""

    async def main() -> None:
        session = box.open()
        assert not processes(), "a session that runs nothing has no process"
        for _ in range(5):
            await session.run("x = 1")
        await until(lambda: len(processes()) == 3)
        states = [session.snapshot() for _ in range(3)]
        await session.run("x = 2")
        await until(lambda: len(processes()) == 4)
        branch = states[0].restore()
        for each in states:
            each.close()
        await until(lambda: len(processes()) == 4)
        assert await says(branch, "x") == "1"
        branch.close()
        await until(lambda: len(processes()) == 3)
        with pytest.raises(ToolError, match="the snapshot is closed"):
            states[0].restore()
        session.close()
        session.close()
        await until(lambda: len(processes()) == 1)
        with pytest.raises(ToolError, match="the session is closed"):
            await session.run("1")

    asyncio.run(main())
    box.close()
    asyncio.run(until(lambda: not processes()))


def test_a_session_that_is_closed_in_the_middle_of_a_run_leaves_nothing(
    box: SessionSandbox,
) -> None:
    async def main() -> None:
        session = box.open()
        await session.run("1")
        run = asyncio.create_task(session.run("while True: pass"))
        await until(lambda: len(processes()) == 4)
        run.cancel()
        session.close()
        await until(lambda: len(processes()) == 1)

    asyncio.run(main())


def test_a_lost_supervisor_costs_its_own_session_alone(box: SessionSandbox) -> None:
    """The server kills what it has left, and another session goes on."""

    async def main() -> None:
        one, other = box.open(), box.open()
        await one.run("x = 1")
        await other.run("x = 2")
        (server,) = processes() & set(children_of(os.getpid()))
        (supervisor,) = [pid for pid in children_of(server) if one._state in children_of(pid)]
        state = one._state
        os.kill(supervisor, signal.SIGKILL)
        await until(lambda: is_gone(state))
        assert await says(one, "x") == "the process that ran the code died"
        assert "this run began without their variables" in await says(one, "x")
        assert await says(other, "x") == "2"
        os.kill(server, signal.SIGKILL)
        await until(lambda: is_gone(server))
        assert await says(other, "x") == "2", "a session does without its server"
        assert await says(box.open(), "3") == "3"

    asyncio.run(main())


def test_close_ends_runs_and_processes(box: SessionSandbox) -> None:
    num_threads = threading.active_count()

    async def main() -> list[object]:
        sessions = [box.open() for _ in range(2)]
        for each in sessions:
            await each.run("1")
        runs = [asyncio.create_task(each.run("while True: pass")) for each in sessions]
        await until(lambda: len(processes()) == 7)
        box.close()
        return list(await asyncio.gather(*runs, return_exceptions=True))

    results = asyncio.run(main())
    assert [str(each) for each in results] == ["the sandbox is closed"] * 2
    asyncio.run(until(lambda: not processes() and threading.active_count() <= num_threads))


def test_a_forgotten_sandbox_leaves_no_process() -> None:
    made = SessionSandbox(seccomp.backend())
    asyncio.run(says(made.open(), "1"))
    assert processes()
    del made
    gc.collect()
    asyncio.run(until(lambda: not processes()))


def test_no_process_survives_a_host_that_is_killed() -> None:
    """States that wait, and code that runs and sleeps."""
    program = f"""
import asyncio, os, sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
from test_sandbox_sessions import SessionSandbox, processes, seccomp, until
async def main():
    sessions = [box.open() for _ in range(3)]
    for each in sessions:
        await each.run("x = 1")
    states = [each.snapshot() for each in sessions]
    codes = ("while True: pass", "import time; time.sleep(60)")
    runs = [asyncio.ensure_future(each.run(code)) for each, code in zip(sessions, codes)]
    await until(lambda: len(processes()) == 1 + 3 * 2 + 2)
    print(*processes(), flush=True)
    os.kill(os.getpid(), 9)
box = SessionSandbox(seccomp.backend(), timeout_s=60.0)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        timeout=DEADLINE_S,
        check=False,
    )
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 9
    asyncio.run(until(lambda: all(map(is_gone, pids))))


def test_a_snapshot_tells_the_memory_that_it_holds(box: SessionSandbox) -> None:
    async def main() -> tuple[int, int]:
        session = box.open()
        await session.run("x = 1")
        small = session.snapshot().num_bytes
        await session.run("x = b'x' * (20 << 20)")
        return small, session.snapshot().num_bytes

    small, large = asyncio.run(main())
    assert small < 8 << 20 and 20 << 20 <= large < small + (24 << 20)


# ---- the tool


def test_the_tool_keeps_variables_where_it_is_asked_to() -> None:
    tool = python_coder.make(
        ToolContext(Config.model_validate({"agent": {"python_session": True}}))
    )
    assert isinstance(tool, python_coder.SessionCoder) and tool.card.is_stateful

    async def main() -> list[str]:
        session = tool.open_session()
        results = [await session.execute(code) for code in ("x = 3", "```python\nx * 2\n```")]
        state = await session.snapshot()
        branch = await tool.restore(state)
        results.append(await branch.execute("x"))
        results.append(await tool.execute("x"))
        return [result.text for result in results]

    nothing, gone = "the code ran and printed nothing", "Error: NameError: name 'x' is not defined"
    assert asyncio.run(main()) == [nothing, "6", "3", gone]
    tool.close()


@pytest.mark.parametrize("kind", ["limits", "bubblewrap"])
def test_a_sandbox_with_files_has_no_sessions(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"scratch": "/scratch"}
    monkeypatch.setattr(
        "flowtrain.tools.sandbox._backend",
        lambda _: limits.Backend(kind, **made),  # type: ignore[arg-type]
    )
    agent = {"python_session": True, "sandbox": kind}
    with pytest.raises(UserError, match=f"needs agent.sandbox='seccomp': in '{kind}' code writes"):
        python_coder.make(ToolContext(Config.model_validate({"agent": agent})))


def test_a_model_inside_the_tool_has_no_session() -> None:
    config = Config.model_validate({"agent": {"python_session": True}})
    with pytest.raises(UserError, match=r"leave roles\.tools and agent\.tool_engines"):
        python_coder.make(ToolContext(config, chat=object()))  # type: ignore[arg-type]


def test_a_kernel_that_does_not_ask_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = "SET_MODE_FILTER, NEW_LISTENER = 1, 8"
    source = Path(session_child.__file__).read_text()
    assert source.count(old) == 1
    (tmp_path / "script.py").write_text(source.replace(old, f"{old} << 20"))
    (tmp_path / "child.py").write_text(Path(child.__file__).read_text())
    monkeypatch.setattr(sessions, "_SCRIPT", tmp_path / "script.py")
    with pytest.raises(UserError, match="does not work here: this kernel does not let a filter"):
        SessionSandbox(seccomp.backend()).check()
