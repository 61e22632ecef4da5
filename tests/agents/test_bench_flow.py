"""`bench.flow` measures the flow's own modules, and each sandbox that works here."""

from __future__ import annotations

from bench import flow as bench


def test_the_rows_are_those_of_the_table() -> None:
    row = bench.overhead_row(8, 3)
    assert (row["rollouts"], row["turns"]) == (8, 3) and row["ms_per_turn"] > 0
    name, make, code = bench.sandboxes()[0]
    row = bench.sandbox_row(name, make, code, 5)
    assert row["sandbox"] == "seccomp" and 0 < row["median_ms"] <= row["p95_ms"]
