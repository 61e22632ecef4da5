"""Through the proxy of the example a node joins and fetches weights, with a certificate of a CA of
our own.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import fake_groups
import pytest
import torch
import trustme
from http_servers import running

from flowtrain.dataflow.client import Client
from flowtrain.dataflow.contract import Join, LeaseRequest, NotAllowed, Unavailable
from flowtrain.dataflow.service import Service
from flowtrain.net.credentials import Role, TokenFile, issue
from flowtrain.weights import Publisher, PublishOptions, StoreError, WeightStore
from flowtrain.weights.remote import HttpStore
from flowtrain.weights.serve import make_app

EXAMPLE = Path(__file__).parents[2] / "examples" / "nginx.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")
PLACES = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


@contextlib.contextmanager
def nginx(folder: Path, dataflow: str, weights: str) -> Iterator[tuple[str, Path]]:
    """Run the example before two servers; yields its URL and the certificate of its CA."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    authority = trustme.CA()
    pair = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(folder / "ca.pem")
    pair.private_key_pem.write_to_path(folder / "key.pem")
    for part in pair.cert_chain_pems:
        part.write_to_path(folder / "certificate.pem", append=True)
    text = EXAMPLE.read_text()
    for given, ours in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("/etc/flowtrain/", f"{folder}/"),
        ("http://127.0.0.1:8400", dataflow),
        ("http://127.0.0.1:8321", weights),
    ):
        assert given in text
        text = text.replace(given, ours)
    (folder / "server.conf").write_text(text)
    paths = " ".join(f"{place}_temp_path {folder}/{place};" for place in PLACES)
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{ access_log off; {paths} include {folder}/server.conf; }}\n"
    )
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"https://127.0.0.1:{port}", folder / "ca.pem"
    finally:
        process.terminate()
        process.wait(20)


def test_a_node_joins_and_fetches_weights_through_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "*")
    store = WeightStore(tmp_path / "weights")
    Publisher(store, PublishOptions()).publish({"weight": torch.arange(1 << 20).float()}, 0)
    ledger = fake_groups.ledger(tmp_path / "flow.sqlite")
    path = tmp_path / "tokens.json"
    token = issue(path, "eu-1", Role.NODE)
    tokens = TokenFile(path)
    with (
        running(Service(ledger, ledger.run, "", tokens)) as dataflow,
        running(make_app(store, "", tokens)) as weights,
        nginx(tmp_path, dataflow, weights) as (url, authority),
    ):
        with (
            Client(f"{url}/dataflow", token, wait_s=1.0) as client,
            pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.join(Join("eu-1", "a"))
        remote = HttpStore(f"{url}/weights", tmp_path / "cache", token, retries=0)
        with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
            remote.head()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority))
        with Client(f"{url}/dataflow", token, wait_s=60.0) as client:
            assert client.join(Join("eu-1", "a")).run == ledger.run
            assert client.lease(LeaseRequest("eu-1", "a", 1)).reason == "no trainer"
            with pytest.raises(NotAllowed, match="HTTP 403"):
                client.join(Join("us-1", "a"))
        remote = HttpStore(f"{url}/weights", tmp_path / "cache", token)
        (file,) = (each for each in remote.manifest(0).files)
        assert remote.fetch(0, file).stat().st_size == file.num_bytes > 4 << 20
        with pytest.raises(StoreError, match="refuses the token"):
            HttpStore(f"{url}/weights", tmp_path / "cache", "wrong").head()
    ledger.close()
