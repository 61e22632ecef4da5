"""The fuzz program of the delta reader, under AddressSanitizer and UBSan, for some cases."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "build" / "fuzz"
"""The program by a hash of all that it is made of: it takes longer to compile than to run."""
FLAGS = [
    "-std=c++17",
    "-O1",
    "-g",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
    "-pthread",
]
FLAGS += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
CASES = int(os.environ.get("FLOWTRAIN_FUZZ_CASES", "1500"))
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


def name_of(sources: Sequence[Path]) -> str:
    """A hash of the sources, the headers beside them, and how they are compiled."""
    made_of = hashlib.sha256(repr((os.environ.get("CXX"), FLAGS)).encode())
    for path in sorted({*sources, *(ROOT / "csrc").glob("*.h")}):
        made_of.update(path.name.encode() + path.read_bytes())
    return f"delta-{made_of.hexdigest()[:16]}"


def fuzz_program(folder: Path) -> Path:
    """Compile the program, unless that was done; `folder` is for what is not kept."""
    sources = [
        path for path in sorted((ROOT / "csrc").glob("*.cpp")) if path.name != "bindings.cpp"
    ]
    sources.append(ROOT / "tests" / "weights" / "fuzz_delta.cpp")
    program = PROGRAMS / name_of(sources)
    if program.exists():
        return program
    built = subprocess.run(
        [compiler(folder), *FLAGS, *sources, "-o", folder / "fuzz_delta"],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    shutil.rmtree(PROGRAMS, ignore_errors=True)
    PROGRAMS.mkdir(parents=True)
    whole = shutil.copy(folder / "fuzz_delta", program.with_suffix(".writing"))
    return Path(whole).rename(program)


@pytest.mark.timeout(600)
def test_mutated_deltas_are_refused_or_right(tmp_path: Path) -> None:
    program = fuzz_program(tmp_path)
    done = subprocess.run([program, str(CASES), SEED], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    counts = {name: int(count) for name, count in re.findall(r"([a-z][a-z ]*) (\d+)", done.stdout)}
    assert counts["cases"] >= CASES
    assert all(
        counts.get(name, 0) > 0
        for name in ("not a delta", "newer format", "corrupt", "wrong base", "wrong layout")
    ), counts
    assert counts["applied"] > 0, counts
