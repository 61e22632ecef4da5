"""What Prometheus gets from a real server of weights."""

from __future__ import annotations

import httpx2
import pytest
from http_servers import running
from http_stores import LAST, TOKEN
from prometheus_text import samples

from flowtrain.utils.net.credentials import Access
from flowtrain.weights import WeightStore
from flowtrain.weights.stores.serve import make_app, monitor

pytest_plugins = ("http_stores",)
pytestmark = pytest.mark.usefixtures("clean_environment")
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def test_requests_bytes_and_the_newest_version(filled: WeightStore) -> None:
    watching = monitor(filled, Access(TOKEN)).watching(make_app(filled, TOKEN))
    path = "/v00000000/anchor-r0.safetensors"
    with running(watching) as url, httpx2.Client(headers=HEADERS) as client:
        assert client.get(f"{url}/metrics", headers={"Authorization": ""}).status_code == 401
        num_bytes = len(client.get(f"{url}{path}").content)
        client.get(f"{url}/HEAD")
        client.get(f"{url}/v00000000/manifest.json")
        client.get(f"{url}/v00000099/../../etc/passwd")
        found = samples(client.get(f"{url}/metrics").text)
    name = "flowtrain_weights"
    assert found[f"{name}_head_version"] == LAST
    assert found[f"{name}_requests_total{{file=data,status=200}}"] == 1
    assert found[f"{name}_sent_bytes_total{{file=data}}"] == num_bytes > 1000
    assert found[f"{name}_requests_open{{file=data}}"] == 0
    assert found[f"{name}_requests_total{{file=head,status=200}}"] == 1
    assert found[f"{name}_requests_total{{file=manifest,status=200}}"] == 1
    assert found[f"{name}_requests_total{{file=other,status=404}}"] == 1
    assert "passwd" not in " ".join(found)


def test_a_store_without_a_version_has_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = WeightStore(tmp_path_factory.mktemp("empty"))
    found = samples(monitor(store, None).text())
    assert "flowtrain_weights_head_version" not in found
