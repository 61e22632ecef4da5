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
import atexit, contextlib, faulthandler, gc, json, os, resource, runpy, selectors, socket, sys
import threading, traceback
import flowtrain.trainer.run.opening, flowtrain.agents.agentflow.scripts
import flowtrain.logging.page.curves, flowtrain.evaluation.benchmarks
import flowtrain.trainer.setup.memory_plan, flowtrain.trainer.run.run_logger
import flowtrain.algorithms.flow_grpo, flowtrain.trainer.run.dry_run, flowtrain.logging.mismatch
import flowtrain.tools.search, flowtrain.utils.waiting, bm25s, encodings.utf_8_sig, numpy.ctypeslib
import transformers.models.qwen3.modeling_qwen3, transformers.tokenization_python
import transformers.processing_utils, transformers.conversion_mapping as mapping
with contextlib.suppress(ImportError):
    import peft
mapping.get_checkpoint_conversion_mapping("qwen3")  # which is made once, out of 700 patterns

def serve():
    # The job, in a fork for it; none when the last client has gone.
    clients = selectors.DefaultSelector()
    clients.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in clients.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                clients.register(client, selectors.EVENT_READ, client.makefile("rw"))
                continue
            line = ""
            with contextlib.suppress(OSError):  # of a client that was killed
                line = key.data.readline()
            if not line:
                clients.unregister(key.fileobj)
                key.fileobj.close()
                if len(clients.get_map()) == 1:
                    return None
                continue
            job = json.loads(line)
            if "poll" in job:
                pid, status = os.waitpid(job["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            elif not (answer := os.fork()):
                # By their objects: what a collection closes later would be another file by then.
                for each in list(clients.get_map().values()):
                    if each.data is not None:
                        each.data.close()
                    each.fileobj.close()
                clients.close()
                return job
            with contextlib.suppress(OSError):
                print(json.dumps(answer), file=key.data, flush=True)

gc.collect()
gc.freeze()
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
if (job := serve()) is None:
    sys.exit()
for number, path in enumerate((os.devnull, job["out"], job["err"])):
    os.dup2(os.open(path, os.O_WRONLY if number else os.O_RDONLY), number)
faulthandler.enable()  # SIGABRT shows what a process that does not end is doing
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
"""Forks for a job, a line of JSON, and answers with its number; a poll asks for an exit code."""


def ask(**job: Any) -> Any:
    """Run Python, `code`, which finds `job` with files `out` and `err`, in a fork; its number. Or
    `poll` one for its exit code, which is None before its end.
    """
    print(json.dumps(job, default=str), file=connection(), flush=True)
    return json.loads(connection().readline())


@functools.cache
def connection() -> Any:
    """What goes to the process and comes from it, which ends when nobody is connected any more."""
    address = folder / "forks"
    with (folder / "forks.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = socket.socket(socket.AF_UNIX)
        if process.connect_ex(str(address)):
            address.unlink(missing_ok=True)
            words, env = [sys.executable, "-c", PROGRAM, str(address)], {**os.environ, **ENV}
            started = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=env)
            while process.connect_ex(str(address)):
                assert started.poll() is None
                time.sleep(0.05)
    return process.makefile("rw")
