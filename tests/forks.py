"""A process that has imported everything once, and runs jobs in forks: importing takes ten times as
long as what most of them do. All processes of a run of tests share it.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

folder = Path()
"""Where its socket is: a folder of all processes of this run of tests, which conftest.py names."""

ENV = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

PROGRAM = """
import atexit, contextlib, gc, json, os, resource, runpy, selectors, socket, sys, threading
import traceback
import flowtrain.run.run, flowtrain.agents.agentflow.expert, flowtrain.view.curves
import flowtrain.evaluation.benchmarks, flowtrain.setup.memory_plan, flowtrain.run.run_logger
import flowtrain.algorithms.flow_grpo, flowtrain.run.dry_run, flowtrain.metrics.mismatch
import bm25s, flowtrain.tools.search, flowtrain.utils.waiting
import encodings.utf_8_sig, numpy.ctypeslib
import transformers.models.qwen3.modeling_qwen3, transformers.tokenization_python
import transformers.processing_utils
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
with contextlib.suppress(ImportError):
    import peft

get_checkpoint_conversion_mapping("qwen3")  # which is made once, out of 700 patterns

def serve():
    # The job, in a fork for it; none when the last client has gone.
    clients = selectors.DefaultSelector()
    clients.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in clients.select():
            client, texts = key.fileobj, key.data
            if client is listener:
                client, _ = listener.accept()
                clients.register(client, selectors.EVENT_READ, client.makefile("rw"))
            elif line := read_line(texts):
                job = json.loads(line)
                if "poll" in job:
                    pid, status = os.waitpid(job["poll"], os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if pid else None
                elif not (answer := os.fork()):
                    for each in clients.get_map().values():
                        close(each)
                    return job
                with contextlib.suppress(OSError):
                    print(json.dumps(answer), file=texts, flush=True)
            else:
                clients.unregister(client)
                close(key)
                if len(clients.get_map()) == 1:
                    return None

def read_line(texts):
    with contextlib.suppress(OSError):
        return texts.readline()

def close(key):
    with contextlib.suppress(OSError):
        if key.data is not None:
            key.data.close()
    key.fileobj.close()

gc.collect()
gc.freeze()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1] + ".new")
listener.listen()
os.rename(sys.argv[1] + ".new", sys.argv[1])
job = serve()
if job is None:
    sys.exit()
files = (0, os.devnull, os.O_RDONLY), (1, job["out"], os.O_WRONLY), (2, job["err"], os.O_WRONLY)
for number, path, flags in files:
    os.dup2(os.open(path, flags), number)
try:
    exec(job["code"])
    code = 0
except SystemExit as end:
    code = end.code
except BaseException:
    traceback.print_exc()
    code = 1
# Python's own exit, without taking apart modules whose memory is shared.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
os._exit(code)
"""
"""Reads jobs, one JSON line each, forks a process for each and answers with its number; {"poll":
pid} asks for an exit code."""


def start(code: str, out: Path, err: Path, **job: Any) -> int:
    """Run Python, which finds `job` as a dict of that name, in a fork; return its number."""
    return int(_ask({"code": code, "out": str(out), "err": str(err), **job}))


def poll(pid: int) -> int | None:
    """The exit code of a fork that has ended."""
    return _ask({"poll": pid})


def _ask(job: dict[str, Any]) -> Any:
    process = connection()
    print(json.dumps(job), file=process, flush=True)
    return json.loads(process.readline())


@functools.cache
def connection() -> Any:
    """What goes to the process and comes from it, which ends when nobody is connected any more."""
    address = folder / "forks"
    with (folder / "forks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = socket.socket(socket.AF_UNIX)
        try:
            process.connect(str(address))
        except OSError:
            address.unlink(missing_ok=True)
            started = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(address)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ENV},
            )
            while not address.exists():
                assert started.poll() is None
                time.sleep(0.05)
            process.connect(str(address))
    return process.makefile("rw")
