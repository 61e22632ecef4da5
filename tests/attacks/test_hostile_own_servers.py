"""A weight store and a dataflow that answer as ours never would: clients end as documented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.contract import Refused, Unavailable
from flowtrain.weights import RemoteStore, StoreError
from flowtrain.weights.stores.http import HttpObjects
from tests.attacks.hostile_answers import BODIES
from tests.attacks.raw_server import RawServer
from tests.attacks.tally import Tally

pytestmark = pytest.mark.usefixtures("plain_http")
SURFACE = "hostile answers of stores and dataflows"


def read_head(server: RawServer, _cache: Path) -> object:
    return RemoteStore(HttpObjects(server.url, timeout_s=0.15, retries=0), _cache).head()


def read_manifest(server: RawServer, cache: Path) -> object:
    store = RemoteStore(HttpObjects(server.url, timeout_s=0.15, retries=0), cache)
    store._newest = 5
    return store.manifest(5)


def ask_dataflow(server: RawServer, _cache: Path) -> object:
    with Client(server.url, wait_s=0.2, attempt_s=0.15) as client:
        return client.status()


CLIENTS: dict[str, Callable[[RawServer, Path], object]] = {
    "head": read_head,
    "manifest": read_manifest,
    "dataflow": ask_dataflow,
}


@pytest.mark.parametrize("client", CLIENTS)
def test_no_answer_breaks_a_client(
    client: str, server: RawServer, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowtrain.weights.stores.remote.MAX_MANIFEST", 1 << 20)
    monkeypatch.setattr("flowtrain.weights.stores.http.SLOWEST", 16 << 20)
    monkeypatch.setattr("flowtrain.rollouts.client._MAX_BYTES", 1 << 20)
    through = {}
    for name, pieces in BODIES.items():
        server.pieces = pieces
        if problem := outcome(CLIENTS[client], server, tmp_path):
            through[name] = problem
    tally.add(SURFACE, len(BODIES), len(through))
    assert through == {}


def outcome(ask: Callable[[RawServer, Path], object], server: RawServer, cache: Path) -> str:
    """Ask once, and return what got through: "" for a documented error of reasonable length."""
    try:
        ask(server, cache)
    except (StoreError, Refused, Unavailable) as error:
        return f"an error of {len(str(error))} characters" if len(str(error)) > 1000 else ""
    except Exception as error:  # noqa: BLE001 - that is what must not come through
        return f"{type(error).__name__}: {str(error)[:200]}"
    return "was taken for an answer"
