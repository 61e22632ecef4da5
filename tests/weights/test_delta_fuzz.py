"""The fuzz program of the sparse-delta reader, compiled under AddressSanitizer and UBSan and run
for a while.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-pthread",
]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
SECONDS = float(os.environ.get("FLOWTRAIN_FUZZ_SECONDS", "3"))
SEED = os.environ.get("FLOWTRAIN_FUZZ_SEED", "1")


def compiler(folder: Path) -> str:
    """One that makes programs with sanitizers, or skip."""
    name = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if name is None:
        pytest.skip("there is no C++ compiler")
    source = folder / "probe.cpp"
    source.write_text("int main() { return 0; }\n")
    if (
        subprocess.run(
            [name, *FLAGS, source, "-o", folder / "probe"], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip(f"{name} has no sanitizers")
    return name


@pytest.mark.timeout(600)
def test_mutated_deltas_are_refused_or_right(tmp_path: Path) -> None:
    sources = [
        path for path in sorted((ROOT / "csrc").glob("*.cpp")) if path.name != "bindings.cpp"
    ]
    sources.append(ROOT / "tests" / "weights" / "fuzz_delta.cpp")
    program = tmp_path / "fuzz_delta"
    built = subprocess.run(
        [compiler(tmp_path), *FLAGS, *sources, "-o", program], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program, str(SECONDS), SEED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    counts = {name: int(count) for name, count in re.findall(r"([a-z][a-z ]*) (\d+)", done.stdout)}
    assert counts["cases"] > 800 * SECONDS, "too few to say anything"
    assert all(
        counts.get(name, 0) > 0
        for name in ("not a delta", "newer format", "corrupt", "wrong base", "wrong layout")
    ), counts
    assert counts["applied"] > 0, counts
