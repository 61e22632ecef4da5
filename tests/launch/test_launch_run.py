"""A run from a plan: service, weights, trainer and two nodes, one of them behind an `ssh` that
runs commands on this machine. Trainer and nodes are forks of a process that has imported them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import Server
from plans import PLAN, ROOT, fake_ssh, forking_python, write_plan
from ports import free_port

from flowtrain.dataflow.ledger import audit_database

pytest_plugins = ("cli_runs",)


@pytest.fixture
def python(tmp_path: Path, server: Server) -> Iterator[str]:
    """A `python` that has the server fork what imports much."""
    lock = threading.Lock()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "forks"))
        listening.listen()

        def serve() -> None:
            while True:
                try:
                    asked = listening.accept()[0]
                except OSError:  # the test is over
                    return
                threading.Thread(target=fork, args=(asked,)).start()

        def fork(asked: socket.socket) -> None:
            with asked, asked.makefile("rw") as lines:
                job = json.loads(lines.readline())
                pipe = f"os.open('/proc/{job['pid']}/fd/1', os.O_WRONLY)"
                options = {"before": f"os.dup2(os.dup2({pipe}, 1), 2)", "env": job["env"]}
                with lock:
                    process = server.start(*job["argv"], cwd=Path(job["cwd"]), **options)
                print(process.pid, file=lines, flush=True)
                while True:
                    with lock:
                        code = process.poll()
                    if code is not None:
                        break
                    time.sleep(0.02)
                print(code, file=lines, flush=True)

        threading.Thread(target=serve).start()
        yield forking_python(tmp_path)
        listening.shutdown(socket.SHUT_RDWR)


def test_a_plan_trains_to_its_end(tmp_path: Path, python: str) -> None:
    record, path = fake_ssh(tmp_path)
    plan = PLAN.replace("count = 2", "count = 1").replace("{python}", python)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "flowtrain.launch",
            str(write_plan(tmp_path, (free_port(), free_port()), plan)),
        ],
        cwd=tmp_path,
        env={**os.environ, **path, "A_TOKEN": "of-the-tests", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("cpu-0", "eu-0", "trainer-planner"):
        assert f"[launch] {name} ended with code 0" in done.stdout.replace("as asked, ", "")
        assert (tmp_path / "logs" / f"{name}.log").read_text()
    for line in ("[weights-planner] serving runs/planner/weights", "[trainer-planner] step 2/2"):
        assert line in done.stdout
    audit = audit_database(str(tmp_path / "flow.sqlite"))
    assert audit.problems == () and audit.counts["planner.assigned"] == 4
    summary = json.loads((tmp_path / "runs" / "planner" / "summary.json").read_text())
    assert summary, "the trainer wrote what it leaves"
    assert "of-the-tests" not in record.read_text() + done.stdout
