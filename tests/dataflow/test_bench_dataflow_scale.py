"""`bench.dataflow_scale` runs small, with real services, and counts what it says."""

from __future__ import annotations

import pytest

from bench import dataflow_scale as bench
from bench.dataflow_nodes import Load


def test_a_small_load_is_pushed_and_measured() -> None:
    load = Load(2, 20, 20_000, 0.0, 1.5, 1, num_processes=1, num_threads=2, in_folder=True)
    row = bench.row(load)
    assert row["leased"] >= 20 and row["groups"] > 5
    assert row["groups_per_min"] == pytest.approx(row["groups"] / 1.5 * 60, rel=0.5)
    assert 0 < row["lease_p50_ms"] <= row["lease_p99_ms"] and row["push_p50_ms"] > 0
    assert row["service_cpu_ms"] > row["decode_cpu_ms"] > 0 and row["nodes_cpu_ms"] > 0
    assert row["group_kb"] == pytest.approx(20, rel=0.3)
    assert row["folder_mb"] >= row["groups"] * row["group_kb"] / 1e3 * 0.5
