"""No bytes that a stranger or a token's owner sends make a server fail, hang or change its mind."""

from __future__ import annotations

import contextlib
import re
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from http_servers import running

from flowtrain.rollouts.client import Client
from flowtrain.rollouts.service import Service
from flowtrain.utils.net import protocol, serving
from flowtrain.weights import Publisher, PublishOptions, WeightStore
from flowtrain.weights.stores.remote import open_source
from flowtrain.weights.stores.serve import make_app
from tests.attacks.malformed import request
from tests.attacks.tally import Tally
from tests.rollouts.fake_groups import ledger as make_ledger

TOKEN = "a-token-of-the-tests"
NUM_REQUESTS = 120
"""Per seed, server and kind of peer."""
BOUND_S = 30.0
"""By far longer than the deadlines set below; a connection that lives longer is never ended."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(protocol, "_HEAD_S", 0.3)
    monkeypatch.setattr(serving, "BODY_S", 0.3)
    monkeypatch.setattr(serving, "_KEEP_ALIVE_S", 1)


@pytest.fixture(autouse=True)
def quiet(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nobody fills the log either."""
    yield
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> WeightStore:
    made = WeightStore(tmp_path_factory.mktemp("malformed") / "weights")
    Publisher(made, PublishOptions()).publish({"weight": torch.zeros(64)}, 0)
    return made


def statuses(url: str, raw: bytes) -> list[int]:
    """The statuses of a connection's answers, until the server ends it."""
    host, port = url.removeprefix("http://").split(":")
    answers = b""
    with (
        socket.create_connection((host, int(port)), timeout=BOUND_S) as connection,
        contextlib.suppress(ConnectionError),
    ):
        connection.sendall(raw)
        while data := connection.recv(1 << 16):
            answers += data
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers) if found != b"100"]


def besiege(url: str, seed: int, token: str | None) -> list[tuple[bytes, list[int]]]:
    """Send the requests of a seed; returns those whose answers are not allowed."""
    rng = Random(f"{seed} {token is None}")
    authorization = None if token is None else f"Bearer {token}".encode()
    requests = [request(rng, authorization) for _ in range(NUM_REQUESTS)]
    # Whoever announces more than there is memory for is told to come back.
    allowed = range(400, 500) if token is None else (*range(200, 500), 503)
    with ThreadPoolExecutor(16) as threads:
        found = zip(requests, threads.map(lambda raw: statuses(url, raw), requests), strict=True)
        return [(raw, codes) for raw, codes in found if not set(codes) <= set(allowed)]


@contextlib.contextmanager
def dataflow(folder: Path) -> Iterator[str]:
    """The URL of a service whose ledger is as it was when the block ends."""
    ledger = make_ledger(folder / "flow.sqlite")
    with running(Service(ledger, ledger.run, TOKEN)) as url:
        before = dump(folder / "flow.sqlite")
        yield url
        with Client(url, TOKEN, wait_s=60.0) as client:
            assert client.status()["nodes"] == {}
        assert dump(folder / "flow.sqlite") == before and ledger.audit().problems == ()
    ledger.close()


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return list(database.iterdump())


def hold(url: str, campaign: Iterator[int], tally: Tally, token: str | None) -> None:
    name = f"malformed requests {'without a' if token is None else 'with the'} token"
    for seed in campaign:
        through = besiege(url, seed, token)
        tally.add(name, NUM_REQUESTS, len(through))
        assert not through


@pytest.mark.parametrize("token", [None, TOKEN], ids=["stranger", "owner"])
def test_the_dataflow_bears_any_request(
    campaign: Iterator[int], tally: Tally, tmp_path: Path, token: str | None
) -> None:
    with dataflow(tmp_path) as url:
        hold(url, campaign, tally, token)


@pytest.mark.parametrize("token", [None, TOKEN], ids=["stranger", "owner"])
def test_the_weight_server_bears_any_request(
    campaign: Iterator[int], tally: Tally, tmp_path: Path, store: WeightStore, token: str | None
) -> None:
    with running(make_app(store, TOKEN)) as url:
        hold(url, campaign, tally, token)
        assert open_source(url, tmp_path, TOKEN).head() == 0
