"""Kernels, compiled for a GPU that is not here: registers, shared memory, and no spills. With
FLOWTRAIN_AOT=all every one of them; `python -m bench.aot` does so for all targets and variants.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flowkernels import (
    branching_triton,
    distillation_triton,
    layers_triton,
    logprobs_triton,
    policy_loss_triton,
    sparse_delta_triton,
)

from bench import aot

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on sm_90, for which the tests compile."""
LEFT_OUT = ("fp16 odd", "fp16 all", "fp16 odd all", "fp32 odd all", "bf16 16 warps")
"""Variants of the kernels of rows that say no more: the code of fp16 is that of bf16 but for the
conversions, `bf16 odd all` takes at least the registers of `fp32 odd all`, and 16 warps lie between
8 and 32.
"""
KERNELS = {
    "score",
    "gradient",
    "loss",
    "scale",
    "statistics",
    "merge",
    "scan",
    "branching",
    "divergence",
} | {
    *(f"delta {name}" for name in ("count", "compact", "scatter", "digest")),
    *("norm", "norm gradient", "rotary", "gated"),
}
IS_WHOLE = os.environ.get("FLOWTRAIN_AOT") == "all"
"""Compile all, which takes a second or two for each of some fifty."""
FEW = ("score", "gradient", "loss", "norm gradient")
"""The kernels that are compiled otherwise, in the variants that need the most registers."""
OF_FEW = ("bf16 odd all", "bf16 3584")


@dataclass(frozen=True, slots=True)
class Report:
    exit_code: int
    output: str
    rows: list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """`python -m bench.aot` with Triton's compiler, and nothing compiled before."""
    folder = tmp_path_factory.mktemp("aot")
    environment = {
        name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
    } | {"TRITON_CACHE_DIR": str(folder / "cache")}
    options = ["--without", ",".join(LEFT_OUT)]
    if not IS_WHOLE:
        others = {variant.name for variant in aot.variants()}.difference(OF_FEW)
        options = ["--kernels", ",".join(FEW), "--without", ",".join(others)]
    command = [sys.executable, "-m", "bench.aot", "--targets", "sm_90", *options]
    command += ["--json", str(folder / "rows.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (folder / "rows.json").exists(), done.stderr
    return Report(
        done.returncode,
        done.stdout + done.stderr,
        json.loads((folder / "rows.json").read_text())["rows"],
    )


def test_every_kernel_compiles_in_every_variant(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    with capsys.disabled():
        print(f"\n{report.output}")
    compiled = {(row["kernel"], row["variant"]) for row in report.rows}
    kernels = [variant for variant in aot.variants() if IS_WHOLE or variant.kernel in FEW]
    without = LEFT_OUT if IS_WHOLE else {x.name for x in kernels}.difference(OF_FEW)
    assert {kernel for kernel, _ in compiled} == (KERNELS if IS_WHOLE else set(FEW))
    assert compiled == {(x.kernel, x.name) for x in kernels if x.name not in without}
    assert all(row["kernel"] in report.output for row in report.rows)


def test_the_kernels_of_rows_have_every_variant() -> None:
    named = {(variant.kernel, variant.name) for variant in aot.variants()}
    assert {kernel for kernel, _ in named} == KERNELS
    for kernel in ("score", "gradient", "loss"):
        for dtype in ("bf16", "fp16", "fp32"):
            for shape in ("", " odd", " all", " odd all"):
                assert (kernel, dtype + shape) in named


def test_no_kernel_spills_and_each_uses_registers(report: Report) -> None:
    assert [row for row in report.rows if row["spills"]] == []
    assert all(0 < row["registers"] <= 255 and row["shared"] <= SHARED for row in report.rows)
    assert report.exit_code == 0, report.output


def test_the_table_has_every_kernel_of_the_package() -> None:
    """Function by function, so that a new one cannot be left out."""
    modules = (
        *(branching_triton, layers_triton, logprobs_triton, policy_loss_triton),
        *(distillation_triton, sparse_delta_triton),
    )
    kernels = {
        f"{m.__name__}.{n}": k for m in modules for n, k in vars(m).items() if n.endswith("_kernel")
    }
    compiled = [variant.function for variant in aot.variants()]
    assert len(kernels) == len(KERNELS)
    assert [name for name, kernel in kernels.items() if kernel not in compiled] == []


def test_a_spill_is_an_error_that_names_its_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"kernel": "score", "variant": "bf16", "target": "sm_90", "spills": 0}
    bad = {**row, "kernel": "loss", "spills": 8}
    monkeypatch.setattr(aot, "table", lambda *_, **__: [row, bad])
    monkeypatch.setattr(sys, "argv", ["aot"])
    with pytest.raises(SystemExit) as stopped:
        aot.main()
    assert stopped.value.code == "loss bf16 on sm_90: spills 8 bytes"  # so the exit code is 1
    assert "score" in capsys.readouterr().out
    monkeypatch.setattr(aot, "table", lambda *_, **__: [row])
    aot.main()


def test_no_kernel_is_compiled_again_for_another_number_of_rows() -> None:
    """Triton makes one program for 1, one for multiples of 16 and one for the rest, seconds each,
    whenever a row first has so many tokens.
    """
    code = (
        "import importlib, json, triton\n"
        "found = {}\n"
        "for name in ('layers', 'logprobs', 'policy_loss'):\n"
        "    for kernel in vars(importlib.import_module(f'flowkernels.{name}_triton')).values():\n"
        "        for param in getattr(kernel, 'params', ()):\n"
        "            names = ('num_rows', 'temperature_stride')\n"
        "            if param.name in names and kernel.__name__.endswith('_kernel'):\n"
        "                found[f'{kernel.__name__} {param.name}'] = param.do_not_specialize\n"
        "print(json.dumps(found))"
    )
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=plain,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert {name for name in found if name.endswith("num_rows")} >= {
        f"{kernel}_kernel num_rows"
        for kernel in ("score", "gradient", "loss", "norm", "statistics")
    }
    assert all(found.values()), found
