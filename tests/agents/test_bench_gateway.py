"""`bench.gateway` plays whole conversations by every wire, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gateway as bench
from bench.gateway_clients import WIRES, Seen
from bench.simulated_chat import SimulatedEngine


def test_a_small_run_of_all_wires(tmp_path: Path) -> None:
    path = tmp_path / "gateway.json"
    small = ("--in-flight", "4", "--engine-s", "0.1", "--seconds", "1", "--saturated-s", "0.5")
    bench.main([*small, "--json", str(path)])
    found = json.loads(path.read_text())
    assert found["facts"]["torch"]
    assert [(row["load"], row["wire"]) for row in found["rows"]] == [
        (load, wire) for load in ("steady", "saturated") for wire in WIRES
    ]
    for row in found["rows"]:
        assert row["cpu_ms"] > row["http_cpu_ms"] > 0
        assert 0 < row["added_p50_ms"] <= row["added_p99_ms"]
    assert {row["simulated_engine_s"] for row in found["rows"]} == {0.1, 0.0}
    assert all(2000 < row["longest_prompt"] < 2300 for row in found["rows"])


def test_the_time_of_the_engine_is_subtracted_and_its_lateness_is_not() -> None:
    load = bench.Load("steady", 1, 2.0, 10.0)
    engine = SimulatedEngine((1,), (2,), late=[(101.0, 0.5), (111.0, 7.0)])
    calls = [(99.0, 9.0), (100.0, 2.002), (105.0, 2.004), (109.0, 2.006), (110.0, 9.0)]
    seen = Seen(calls, cpu_s=[1.0, 2.0], late=[(99.0, 3.0), (105.0, 0.001)])
    window = bench.Window(100.0, 110.0, 0.9, 0.3, [99.0, 99.5, 101.0, 101.25])
    row = bench.row_of("chat", load, engine, seen, window)
    assert row["calls"] == 3 and row["calls_per_s"] == pytest.approx(0.3)
    assert row["cpu_ms"] == pytest.approx(300.0) and row["http_cpu_ms"] == pytest.approx(100.0)
    assert row["added_p50_ms"] == pytest.approx(4.0) and row["added_p99_ms"] == pytest.approx(6.0)
    assert row["late_p99_ms"] == 500.0 and row["longest_gc_ms"] == 250.0
    assert row["noise_p99_ms"] == 1.0
    assert row["busy"] == pytest.approx(0.09) and row["clients_busy"] == pytest.approx(0.1)
