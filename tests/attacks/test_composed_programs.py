"""The sandbox against programs that are put together at random."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flowtrain.tools.sandbox import filters
from flowtrain.tools.sandbox.host import CodeResult, ProcessSandbox
from tests.attacks import sandboxes
from tests.attacks.composer import MARK, WON, compose
from tests.attacks.sandboxes import KINDS, outcome, server_pid
from tests.attacks.tally import Tally

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="seccomp is Linux's")

NUM_PROGRAMS = 14
TIMEOUT_S = 0.2
MAX_CHARS = 2000


def denied_calls(has_files: bool) -> list[int]:
    """The numbers of system calls that the filter refuses."""
    column = int(os.uname().machine == "aarch64")
    tables = [
        filters.SYSCALLS,
        filters.NO_EXEC_SYSCALLS,
        *([filters.FILE_SYSCALLS] if has_files else []),
    ]
    granted = {numbers[column] for table in tables for numbers in table.values()}
    # 335, 336 on x86_64: uretprobe and uprobe, which recent kernels hide from filters.
    return sorted({*range(500)} - granted - {335, 336})


def hostile_files(places: list[str]) -> list[Path]:
    return [path for place in places for path in Path(place).glob(f"*{MARK}*")]


def runs_left(mark: str) -> list[str]:
    """Pids of processes under the filter of the sandbox whose command line has the mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_ours = mark.encode() in (folder / "cmdline").read_bytes()
            if is_ours and "Seccomp:\t2" in (folder / "status").read_text():
                found.append(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


@pytest.fixture(params=KINDS)
def marked(request: pytest.FixtureRequest) -> Iterator[tuple[ProcessSandbox, str]]:
    """A sandbox, and a word that stands in the command lines of its processes."""
    if request.param == "limits" and os.geteuid() != 0:
        pytest.skip("as the same user such code could harm the tests' own files")
    mark = uuid.uuid4().hex
    sandboxes.make(request.param).close()  # checks that there is a filter
    backend = sandboxes.backend(request.param)
    backend = replace(backend, path=(*backend.path, f"/{mark}"))
    box = ProcessSandbox(backend, 1, TIMEOUT_S, memory_mb=128, max_output_chars=MAX_CHARS)
    outcome(box, "1")
    yield box, mark
    box.close()


def broken_promises(box: ProcessSandbox, mark: str, code: str, places: list[str]) -> list[str]:
    """Run a program; return what the sandbox should have prevented."""
    server = server_pid(box)
    ran: CodeResult = asyncio.run(box.run(code))
    text = ran.output if ran.error is None else ran.error
    checks = {
        "something denied succeeded": WON not in text,
        "the output is too long": isinstance(text, str) and len(text) <= MAX_CHARS,
        "it computed beyond its limit": ran.cpu_s < TIMEOUT_S + 2.0,
        "its server has died": "died" not in text and "not start" not in text,
        "a process is left": not runs_left(mark),
        "the next run fails": outcome(box, "print(6 * 7)") == "42\n",
        "the server is another": bool(box.backend.scratch) or server_pid(box) == server,
        "there is a file": not hostile_files(places),
    }
    return [f"{problem}: {text[:200]!r}" for problem, holds in checks.items() if not holds]


def test_composed_programs_get_nowhere(
    marked: tuple[ProcessSandbox, str], campaign: Iterator[int], tally: Tally
) -> None:
    box, mark = marked
    kind, has_files = box.backend.name, bool(box.backend.scratch)
    numbers = denied_calls(has_files)
    places = ["/etc", "/usr/lib", "/", str(Path.cwd()), str(Path.home())]
    places += ["/tmp", "/dev/shm", "/var/tmp"] if kind != "limits" else []
    for seed in campaign:
        rng = random.Random(f"{kind} {seed}")
        for index in range(NUM_PROGRAMS):
            code = compose(rng, numbers, has_files)
            problems = broken_promises(box, mark, code, places)
            tally.add(f"programs in the sandbox ({kind})", 1, int(bool(problems)))
            assert not problems, f"seed {seed}, program {index}: {problems}\n{code}"
