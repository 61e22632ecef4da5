"""`bench.gateway` plays whole conversations by every wire, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

from bench import gateway as bench
from bench.gateway_clients import TURNS, WIRES


def test_every_rollout_makes_all_its_calls_by_every_wire(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    small = ("--in-flight", "4", "--rollouts", "6", "--engine-s", "0.01")
    bench.main([*small, "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [(row["load"], row["wire"]) for row in rows] == [
        (load, wire) for load in ("steady", "saturated") for wire in WIRES
    ]
    for row in rows:
        assert row["calls"] == 6 * TURNS and row["cpu_ms"] > 0
        assert 2000 < row["longest_prompt"] < 2300, "the last prompt has all turns before it"
    assert [row["simulated_engine_s"] for row in rows] == [0.01, 0.01, 0.0, 0.0]
