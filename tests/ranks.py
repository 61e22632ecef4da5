"""Ranks of torch.distributed for tests, forked from one process that has imported everything once:
importing takes longer than what most of them do. A test file launches itself as a script, which
calls `fork`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence

from ports import free_port

World = tuple[int, Sequence[str]]
"""(number of ranks, arguments of each)"""


WARM = """
import gc, json, os, runpy, sys, traceback
import flowtrain.run.run

gc.collect()
gc.freeze()
for line in sys.stdin:
    job = json.loads(line)
    if not (pid := os.fork()):
        break
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    os._exit(0)
os.setsid()
os.dup2(os.open(job["out"], os.O_WRONLY | os.O_CREAT), 1)
os.dup2(1, 2)
sys.path[:], sys.argv = job["path"], job["argv"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
    code = 0
except SystemExit as end:
    code = end.code
except BaseException:
    traceback.print_exc()
    code = 1
sys.stdout.flush()
os._exit(code)
"""
"""Reads jobs, one JSON line each, runs the script of each in a fork, and answers with the number of
the fork and its exit code."""


@functools.cache
def _warm() -> subprocess.Popen[str]:
    """The process that forks; it ends with this one, which closes its input."""
    return subprocess.Popen(
        [sys.executable, "-c", WARM],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def launch(script: str, worlds: Sequence[World], timeout_s: float = 240.0) -> None:
    """Run a script that calls `fork` in several worlds side by side; fails with what they wrote
    when one of them does.

    The tests' own process cannot fork them: autograd refuses to go on in a fork of one that used
    it.
    """
    warm = _warm()
    with tempfile.NamedTemporaryFile("r") as out:
        job = {"path": sys.path, "argv": [script, json.dumps(worlds)], "out": out.name}
        print(json.dumps(job), file=warm.stdin, flush=True)
        pid = int(warm.stdout.readline())
        late = threading.Timer(timeout_s, os.killpg, (pid, signal.SIGKILL))
        late.start()
        code = int(warm.stdout.readline())
        late.cancel()
        assert code == 0, f"exit code {code}: {out.read()[-12000:]}"


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
