"""Every kernel, compiled for GPUs that are not here: registers, and no spills."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""KiB of shared memory that a program may have there."""
KERNELS = {"score", "gradient", "loss", "scale", "statistics", "scan", "branching"} | {
    f"delta {name}" for name in ("count", "compact", "scatter", "digest")
}


@dataclass(frozen=True, slots=True)
class Report:
    exit_code: int
    output: str
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """`python -m bench.aot` with Triton's compiler in place of its interpreter, and nothing
    compiled before.
    """
    folder = tmp_path_factory.mktemp("aot")
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", "bench.aot", "--json", str(folder / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (folder / "rows.json").exists(), done.stderr
    return Report(
        done.returncode,
        done.stdout + done.stderr,
        json.loads((folder / "rows.json").read_text())["rows"],
    )


def test_every_kernel_compiles_for_every_target_in_every_variant(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{report.output}")
    targets: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        targets.setdefault((row["kernel"], row["variant"]), []).append(row["target"])
    assert {kernel for kernel, _ in targets} == KERNELS
    assert all(sorted(found) == sorted(TARGETS) for found in targets.values())
    for kernel in ("score", "gradient", "loss"):
        assert {(kernel, variant) for variant in ("bf16", "bf16 all", "fp32", "fp32 all")} <= set(
            targets
        )
    assert all(
        row["kernel"] in report.output and row["target"] in report.output for row in report.rows
    )


def test_no_kernel_spills_and_each_uses_registers(report: Report) -> None:
    assert [row for row in report.rows if row["spills"]] == []
    assert report.exit_code == 0, report.output
    assert all(
        0 < row["registers"] <= (512 if row["target"] == "gfx942" else 255) for row in report.rows
    )
    assert all(0 <= row["shared"] <= TARGETS[row["target"]] * 1024 for row in report.rows)


def test_the_table_has_every_kernel_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Function by function, so that a new one cannot be left out."""
    monkeypatch.syspath_prepend(str(ROOT))
    from flowkernels import (
        branching_triton,
        logprobs_triton,
        policy_loss_triton,
        sparse_delta_triton,
    )

    from bench import aot

    modules = (branching_triton, logprobs_triton, policy_loss_triton, sparse_delta_triton)
    kernels = {
        f"{m.__name__}.{n}": k for m in modules for n, k in vars(m).items() if n.endswith("_kernel")
    }
    compiled = [kernel for _, _, kernel, _, _, _ in aot.variants()]
    assert len(kernels) == len(KERNELS)
    assert [name for name, kernel in kernels.items() if kernel not in compiled] == []


def test_a_spill_is_an_error_that_names_its_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    from bench import aot

    rows = [
        {
            "kernel": kernel,
            "variant": "bf16 all",
            "target": "sm_90",
            "registers": 128,
            "spills": spills,
            "shared": 0,
        }
        for kernel, spills in (("score", 0), ("loss", 8))
    ]
    monkeypatch.setattr(aot, "table", lambda targets: rows if targets == ["sm_90"] else rows[:1])
    monkeypatch.setattr(sys, "argv", ["aot", "--targets", "sm_90"])
    with pytest.raises(SystemExit) as stopped:
        aot.main()
    assert stopped.value.code == "spills: loss bf16 all on sm_90"  # a text makes the exit code 1
    assert "score" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["aot"])
    aot.main()
