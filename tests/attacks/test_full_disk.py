"""The disk gets full at any write of a run: one line, nothing torn, and on when there is room."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.tally import Tally

STRIDE = 17
HERE = Path(__file__).parents[2]
CURE = "; free some space and continue with --resume auto"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What fills the disk, to be preloaded."""
    path = tmp_path_factory.mktemp("library") / "full_disk.so"
    source = Path(__file__).with_name("full_disk.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(source)]
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    subprocess.run(command, check=True)
    return path


def test_a_run_gets_over_a_full_disk_at_any_write(
    library: Path, campaign: Iterator[int], tmp_path: Path, tally: Tally
) -> None:
    """One seed tries every STRIDE-th write."""
    env = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "FULL_DISK_ROOT": str(tmp_path),
        "PYTHONPATH": f"{HERE}:{HERE / 'kernels'}",
    }
    for seed in campaign:
        command = ["-m", "tests.attacks.test_full_disk", str(tmp_path / str(seed)), str(seed)]
        done = subprocess.run(
            [sys.executable, *command],
            env=env,
            cwd=HERE,
            check=True,
            capture_output=True,
            text=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        tally.add("writes to a full disk", found["tried"], len(found["problems"]))
        assert found["tried"] > 12 and not found["problems"], "\n".join(found["problems"][:5])
        shutil.rmtree(tmp_path / str(seed))


def _fill_up(root: Path, seed: int) -> dict[str, object]:
    """Let each write of a begun and of a new run fail; returns what went wrong."""
    from flowtrain.records import UserError
    from flowtrain.trainer import checkpoint
    from tests.attacks.durable_run import DurableRun, play, tiny
    from tests.attacks.test_power_cuts import Promised, problem_of

    disk, parts, problems, tried = ctypes.CDLL(None), tiny(), [], 0
    begun, run = root / "begun", root / "run"
    play(begun, parts, ends=(2,))
    for is_begun in (False, True):
        for place in itertools.count(1 + seed % STRIDE, STRIDE):
            shutil.rmtree(run, ignore_errors=True)
            if is_begun:
                shutil.copytree(begun, run)
            disk.full_disk_at(place)
            line = ""
            try:
                play(run, parts, ends=(4,))
            except UserError as error:
                line = str(error)
            num_seen = disk.full_disk_count()
            disk.full_disk_at(0)
            if num_seen < place:
                break
            tried += 1
            where = f"{'begun' if is_begun else 'new'} run, operation {place}"
            if not (line.startswith(f"cannot write {run}") and line.endswith(CURE)) or "\n" in line:
                problems.append(f"{where}: {line or 'nothing was said'}")
            left = [*run.rglob("*.writing")]
            if left and left != [checkpoint.latest(run / "checkpoints")]:
                problems.append(f"{where}: {left} is left")
            resumed = DurableRun(run, parts)
            start = resumed.step
            resumed.close()
            if is_begun and start < 2:
                problems.append(f"{where}: it is back at step {start}")
            play(run, parts, ends=(4,))
            if found := problem_of(run, Promised(True, 4, 4)):
                problems.append(f"{where}: {found}")
    return {"tried": tried, "problems": problems}


if __name__ == "__main__":
    print(json.dumps(_fill_up(Path(sys.argv[1]), int(sys.argv[2]))))
