"""Ranks of torch.distributed for tests, forked from one process that has imported everything once:
importing takes longer than what most of them do. A test file launches itself as a script, which
calls `fork`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence

World = tuple[int, Sequence[str]]
"""(number of ranks, arguments of each)"""


def launch(script: str, worlds: Sequence[World], timeout_s: float = 240.0) -> None:
    """Run worlds side by side in `script`, and fail with what they wrote when one of them does.

    The tests' own process cannot fork them: autograd refuses to go on in a fork of one that used
    it.
    """
    done = subprocess.run(
        [sys.executable, script, json.dumps(worlds)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-12000:]


def fork(run: Callable[..., None]) -> None:
    """Call `run` with the arguments of its world in a process per rank, and exit."""
    pids = [
        _start(run, arguments, size, rank, port)
        for size, arguments in json.loads(sys.argv[1])
        for port in [_free_port()]
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


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
