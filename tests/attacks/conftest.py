"""Fixtures of the attacks: what they count, and for how long they go on.

Within the tests each attack runs once, from seed 0, and takes seconds. `make attack MINUTES=10`
runs them from one seed to the next until the time is over; the next such run goes on from there.
"""

from __future__ import annotations

import json
import os
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import httpcore2
import pytest

from tests.attacks.raw_server import RawServer, raw_server
from tests.attacks.tally import Tally

MINUTES = float(os.environ.get("ATTACK_MINUTES", "0"))
_PLACE = Path(__file__).parents[2] / ".hypothesis" / "attack-seeds"
"""A file per test, with the seed that is next; not part of the repository."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.attack)


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    return Tally(request.node)


@pytest.fixture(scope="module")
def server() -> Iterator[RawServer]:
    with raw_server() as running:
        yield running


@pytest.fixture
def plain_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of these servers need no certificates, which take longer to load than an answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(httpcore2, "default_ssl_context", lambda **_: context)


@pytest.fixture
def campaign(request: pytest.FixtureRequest) -> Iterator[int]:
    """The seeds to attack with: 0 alone, or as many as there is time for, shared equally."""
    if not MINUTES:
        return iter((0,))
    num = sum("campaign" in getattr(item, "fixturenames", ()) for item in request.session.items)
    return _seeds(request.node.name, 60 * MINUTES / num)


def _seeds(name: str, seconds: float) -> Iterator[int]:
    path = _PLACE / f"{name.replace('/', '-')[:100]}.json"
    end = time.monotonic() + seconds
    seed = json.loads(path.read_text()) if path.exists() else 0
    while time.monotonic() < end:
        yield seed
        seed += 1  # a seed that finds something is tried again until it no longer does
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(seed))
