"""A real run from a plan: service, weights, trainer and two nodes, one of them behind an `ssh`
that runs commands on this machine.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from plans import PLAN, ROOT, fake_ssh, write_plan

from flowtrain.dataflow.ledger import audit_database


def test_a_plan_trains_to_its_end(tmp_path: Path) -> None:
    record, path = fake_ssh(tmp_path)
    plan = write_plan(tmp_path, free_ports(), PLAN.replace("count = 2", "count = 1"))
    done = subprocess.run(
        [sys.executable, "-m", "flowtrain.launch", str(plan)],
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


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        for each in (one, two):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]
