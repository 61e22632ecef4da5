"""`bench.dataflow` measures the service by all its parts, and counts what its nodes did."""

from __future__ import annotations

import pytest

from bench import dataflow as bench


def test_the_service_is_measured_by_all_its_parts() -> None:
    alone, at_once = bench.service_rows("", 64, 16)
    assert alone["ms_per_group"] == pytest.approx(
        alone["lease_ms"] + alone["push_ms"] + alone["batch_ms"]
    )
    assert 1 / at_once["groups_per_s"] == pytest.approx(
        sum(1 / at_once[f"{part}_per_s"] for part in ("lease", "push", "batch"))
    )
    assert 4000 < alone["bytes_per_group"] < 10000


def test_idle_nodes_ask_and_are_not_refused() -> None:
    [row] = bench.idle_rows("", [4], 1.5)
    assert row["idle nodes"] == 4 and row["requests_per_s"] * 1.5 >= 4 and row["refused"] == 0


def test_groups_of_busy_nodes_are_those_of_the_work_items() -> None:
    """The service takes what was packed for a service before it."""
    groups = bench.packed(2, 1.0, [0.5])
    row = bench.busy_row("", 2, 0.5, 1.0, groups)
    assert row["offered_per_s"] == 4 and row["pushed_per_s"] > 0 and row["refused"] == 0
    assert row["push_p50_ms"] > 0 and row["service_ms_per_group"] >= 0
