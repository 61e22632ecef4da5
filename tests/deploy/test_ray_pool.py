"""A run on a Ray cluster of this machine: it learns though a node is killed (`make test-ray`)."""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Unavailable
from flowtrain.rollouts.ledger import audit_database

ray = pytest.importorskip("ray", reason="make test-ray")
TOKEN = "a-token-of-the-tests"
_OPTIONS = """
--cpu --nodes 1 --every 5 --config configs/quickstart.toml --model.path quickstart
--run.device cpu --run.threads 1 --train.num_steps 20 --dataflow.max_staleness 2
--dataflow.lease_s 10 --eval.num_tasks 50 --eval.every 0
"""
_WAIT_S = 600.0


def wait_for(client: Client, run: threading.Thread, is_it: Any) -> dict[str, Any]:
    """The first status of which `is_it` is true, during a run."""
    while run.is_alive():
        with suppress(Unavailable):  # it starts
            if is_it(status := client.status()):
                return status
        time.sleep(0.2)
    raise AssertionError("the run has ended")


def step_of(status: dict[str, Any]) -> int:
    return int(status["policies"].get("planner", {}).get("step", 0))


@pytest.mark.timeout(1200)
def test_a_run_learns_though_its_node_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deploy.ray import pool

    monkeypatch.setenv("FLOWTRAIN_TOKEN", TOKEN)
    # Ray gives way to all other programs of a machine, and takes none that is slow.
    monkeypatch.setenv("RAY_worker_niceness", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    database, port, codes = str(tmp_path / "flow.sqlite"), free_port(), []
    own = ["--database", database, "--port", str(port), "--run.dir", str(tmp_path / "run")]
    run = threading.Thread(target=lambda: codes.append(pool.main([*_OPTIONS.split(), *own])))
    run.start()
    try:
        url = f"http://{ray.util.get_node_ip_address()}:{port}"
        with closing(Client(url, TOKEN, wait_s=10.0)) as client:
            wait_for(client, run, lambda status: step_of(status) >= 3)
            ray.kill(ray.get_actor("node-0", namespace=pool.NAMESPACE), no_restart=False)
            wait_for(client, run, lambda status: status["lost_leases"])
        run.join(_WAIT_S)  # which ends, as Ray starts the only node again
    finally:
        ray.shutdown()
    assert codes == [0]
    assert audit_database(database).problems == ()
    found = json.loads((tmp_path / "run" / "summary.json").read_text())
    before, after = (found[name]["eval_reward_greedy"] for name in ("warm", "trained"))
    assert after > before + 0.3
