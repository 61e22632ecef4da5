"""What Prometheus gets from a node."""

from __future__ import annotations

import socket

import httpx2
import pytest
from prometheus_text import samples

from flowtrain.node.measures import MetricsAddress, answering
from flowtrain.node.progress import NodeProgress
from flowtrain.types import UserError

_NAME = "flowtrain_node"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_node_in_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    progress, port = NodeProgress(), free_port()
    url, token = f"http://127.0.0.1:{port}", {"Authorization": "Bearer t"}
    with answering(MetricsAddress("127.0.0.1", port, "t"), progress, lambda: {"planner": 40}):
        first = samples(httpx2.get(f"{url}/metrics", headers=token).text)
        progress.pushed()
        progress.show({"planner": 3}, 5, "for weights")
        found = samples(httpx2.get(f"{url}/metrics", headers=token).text)
        assert httpx2.get(f"{url}/metrics").status_code == 401
        assert httpx2.get(f"{url}/health").status_code == 200
    progress.close()
    assert (first[f"{_NAME}_groups_total"], first[f"{_NAME}_waiting"]) == (0, 0)
    assert (found[f"{_NAME}_groups_total"], found[f"{_NAME}_waiting"]) == (1, 1)
    assert found[f"{_NAME}_rollouts"] == 5
    assert found[f"{_NAME}_weights_version{{policy=planner}}"] == 3
    assert found[f"{_NAME}_sampled_tokens_total{{policy=planner}}"] == 40
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{url}/health")


def test_off_by_default_and_never_without_a_token() -> None:
    progress = NodeProgress()
    with answering(MetricsAddress("127.0.0.1", 0, ""), progress, dict):
        pass
    with (
        pytest.raises(UserError, match="FLOWTRAIN_TOKEN"),
        answering(MetricsAddress("127.0.0.1", free_port(), ""), progress, dict),
    ):
        pass
    progress.close()
