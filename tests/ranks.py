"""Ranks of torch.distributed for tests, forked from a warm process. A test file launches itself as
a script, which calls `fork`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import forks
from ports import free_port

World = tuple[int, Sequence[str]]
"""(number of ranks, arguments of each)"""


RUN = """
os.setsid()
sys.path[:], sys.argv = job["path"], job["argv"]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def launch(script: str, worlds: Sequence[World], timeout_s: float = 240.0) -> None:
    """Run a script that calls `fork` in several worlds side by side; fails with what they wrote
    when one of them does.

    The tests' own process cannot fork them: autograd refuses to go on in a fork of one that used
    it.
    """
    with tempfile.NamedTemporaryFile("r") as file:
        out, deadline = Path(file.name), time.monotonic() + timeout_s
        argv = [script, json.dumps(worlds)]
        pid = forks.ask(code=RUN, out=out, err=out, path=sys.path, argv=argv)
        while (code := forks.ask(poll=pid)) is None:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)
        assert code == 0, f"exit code {code}: {file.read()[-12000:]}"


def fork(run: Callable[..., None]) -> None:
    """Call `run` with the arguments of its world in a process per rank, and exit."""
    pids = [
        _start(run, arguments, size, rank, port)
        for size, arguments in json.loads(sys.argv[1])
        for port in [free_port()]
        for rank in range(size)
    ]
    code = 0
    while pids:
        pid, status = os.wait()
        pids.remove(pid)
        if status and not code:
            code = 1
            for other in pids:  # they would wait for the one that ended
                os.kill(other, signal.SIGKILL)
    raise SystemExit(code)


def _start(
    run: Callable[..., None], arguments: Sequence[str], size: int, rank: int, port: int
) -> int:
    if pid := os.fork():
        return pid
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    try:
        run(*arguments)
    except SystemExit as end:
        os._exit(int(end.code or 0))
    except BaseException:  # noqa: BLE001 - nothing may go on in a fork of the script
        traceback.print_exc()
        os._exit(1)
    os._exit(0)
