"""Sandboxes of each kind, and what a run in them comes to."""

from __future__ import annotations

import asyncio
import warnings
from functools import partial
from pathlib import Path

import pytest

from flowtrain.tools import ToolError
from flowtrain.tools.sandbox import bubblewrap, limits, seccomp
from flowtrain.tools.sandbox.host import ProcessSandbox
from flowtrain.tools.sandbox.server import Backend

TIMEOUT_S = 0.3
WHY_NO_BUBBLEWRAP = bubblewrap.why_not(bubblewrap.backend(()))
needs_bubblewrap = pytest.mark.skipif(
    bool(WHY_NO_BUBBLEWRAP), reason=f"{WHY_NO_BUBBLEWRAP}; apt-get install bubblewrap"
)
KINDS = ["seccomp", pytest.param("bubblewrap", marks=needs_bubblewrap), "limits"]


def backend(kind: str) -> Backend:
    with warnings.catch_warnings(action="ignore"):
        return {
            "seccomp": seccomp.backend,
            "bubblewrap": partial(bubblewrap.backend, ()),
            "limits": partial(limits.backend, ()),
        }[kind]()


def make(kind: str) -> ProcessSandbox:
    """Make a sandbox of one worker, so that a run meets the server that the run before used."""
    box = ProcessSandbox(
        backend(kind), num_workers=1, timeout_s=TIMEOUT_S, memory_mb=128, max_output_chars=2000
    )
    # Nothing hostile may start with a filter that is not there: some of it would kill every process
    # of the machine.
    assert outcome(box, "import os; os.kill(0, 0)").startswith("PermissionError")
    assert outcome(box, "import os; os.fork()").startswith("PermissionError")
    return box


def outcome(box: ProcessSandbox, code: str) -> str:
    """Return the output of one run, or its error."""
    try:
        ran = asyncio.run(box.run(code))
    except ToolError as error:
        return str(error)
    return ran.output if ran.error is None else ran.error


def server_pid(box: ProcessSandbox) -> int:
    """The process that a sandbox of one worker uses next."""
    return box._workers.idle[-1]._process.pid


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
