"""Strangers hold more connections than the servers may open files, and honest nodes are served."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.attacks.strangers import besieged, honest, servers
from tests.attacks.tally import Tally

NUM_FILES = 256
NUM_STRANGERS = 300
NUM_NODES = 8


def test_strangers_keep_nobody_out(
    tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places do not depend on where somebody comes from, so that one host is like many."""
    monkeypatch.setenv("no_proxy", "*")
    hosts = ["127.0.0.1", "127.0.0.2"]
    is_over = threading.Event()
    with (
        servers(tmp_path, (NUM_FILES, NUM_FILES)) as urls,
        besieged(urls, NUM_STRANGERS, hosts) as counts,
    ):
        threading.Timer(3.0, is_over.set).start()
        asked, fetched = honest(*urls, NUM_NODES, is_over)
    num_failed = asked.num_failed + fetched.num_failed
    tally.add("connections of slow strangers", counts["tried"], num_failed)
    assert num_failed == 0
    assert min(len(asked.seconds), len(fetched.seconds)) >= NUM_NODES
    assert counts["thrown out"] > 0
