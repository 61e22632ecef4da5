"""Through the example's proxy a node joins and fetches weights, with a certificate of our CA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import fake_groups
import pytest
import torch
import trustme
from http_servers import running
from nginx import needs_nginx, nginx

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Join, LeaseRequest, NotAllowed, Unavailable
from flowtrain.rollouts.service import Service
from flowtrain.utils.net.credentials import Role, TokenFile, issue
from flowtrain.weights import (
    Publisher,
    PublishOptions,
    RemoteStore,
    StoreError,
    WeightStore,
    open_source,
)
from flowtrain.weights.stores.http import HttpObjects
from flowtrain.weights.stores.serve import make_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx.conf"
pytestmark = needs_nginx


@contextlib.contextmanager
def proxy(folder: Path, dataflow: str, weights: str) -> Iterator[tuple[str, Path]]:
    """Run the example before two servers; yields its URL and the certificate of its CA."""
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    pair.private_key_pem.write_to_path(folder / "key.pem")
    for part in pair.cert_chain_pems:
        part.write_to_path(folder / "certificate.pem", append=True)
    ours = {
        "/etc/flowtrain/certificate.pem": f"{folder}/certificate.pem",
        "/etc/flowtrain/key.pem": f"{folder}/key.pem",
        "http://127.0.0.1:8400": dataflow,
        "http://127.0.0.1:8321": weights,
    }
    with nginx(folder, EXAMPLE, "443", ours) as port:
        yield f"https://127.0.0.1:{port}", folder / "ca.pem"


def test_a_node_joins_and_fetches_weights_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = WeightStore(tmp_path / "weights")
    Publisher(store, PublishOptions()).publish({"weight": torch.arange(1 << 20).float()}, 0)
    ledger = fake_groups.ledger(tmp_path / "flow.sqlite")
    path = tmp_path / "tokens.json"
    token = issue(path, "eu-1", Role.NODE)
    tokens = TokenFile(path)
    with (
        running(Service(ledger, ledger.run, "", tokens)) as dataflow,
        running(make_app(store, "", tokens)) as weights,
        proxy(tmp_path, dataflow, weights) as (url, authority),
    ):
        with (
            Client(f"{url}/dataflow", token, wait_s=1.0) as client,
            pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.join(Join("eu-1", "a"))
        remote = RemoteStore(HttpObjects(f"{url}/weights", token, retries=0), tmp_path / "cache")
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            remote.head()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        with Client(f"{url}/dataflow", token, wait_s=60.0) as client:
            assert client.join(Join("eu-1", "a")).run == ledger.run
            assert client.lease(LeaseRequest("eu-1", "a", 1)).reason == "no trainer"
            with pytest.raises(NotAllowed, match="HTTP 403"):
                client.join(Join("us-1", "a"))
        remote = open_source(f"{url}/weights", tmp_path / "cache", token)
        (file,) = (each for each in remote.manifest(0).files)
        assert remote.fetch(0, file).stat().st_size == file.num_bytes > 4 << 20
        with pytest.raises(StoreError, match="refuses the token"):
            open_source(f"{url}/weights", tmp_path / "cache", "wrong").head()
    ledger.close()
