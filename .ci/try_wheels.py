"""Use the wheels of a folder as people will: flowkernels beside torch alone, then flowtrain, in a
new environment, in a path with a space, without a checkout.

    python .ci/try_wheels.py dist --torch torch==2.13.0
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

ALONE = """
import importlib.util, sys
import flowkernels, torch
assert "site-packages" in flowkernels.__file__, flowkernels.__file__
assert not {"transformers", "pydantic"} & set(sys.modules)
assert importlib.util.find_spec("flowtrain") is None
print(f"flowkernels {flowkernels.__version__} beside torch {torch.__version__}")
"""
CODEC = """
import numpy as np
import flowtrain
from flowtrain import _delta
assert "site-packages" in flowtrain.__file__, flowtrain.__file__
rng = np.random.default_rng(0)
old = rng.integers(0, 2**16, 200_000, dtype=np.uint16)
new = old.copy()
new[rng.choice(old.size, 2_000, replace=False)] += 1
made = {}
for name in filter(_delta.use_isa, ("scalar", "avx2", "avx512")):
    delta = _delta.encode(old, new)
    made[name] = bytes(delta)
    again = old.copy()
    _delta.apply([delta], [again])
    assert (again == new).all(), name
assert "scalar" in made and len(set(made.values())) == 1, list(made)
print("the codec makes the same bytes with", ", ".join(made))
"""
TRAIN = (
    *("--config", "quickstart", "--run.resume", "never", "--log.tensorboard", "false"),
    *("--rft.num_rollouts", "64", "--rft.num_steps", "4", "--train.num_steps", "1"),
    *("--eval.num_tasks", "4", "--rollout.num_questions", "2"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the wheels are")
    parser.add_argument("--torch", default="torch", help="requirement of torch, for pip")
    arguments = parser.parse_args()
    readme = Path(__file__).resolve().parents[1] / "kernels" / "README.md"
    block = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)[0]
    with tempfile.TemporaryDirectory(prefix="try wheels ") as name:
        place = Place(Path(name), arguments.folder.resolve())
        place.install(arguments.torch)
        place.install("flowkernels", only_ours=True)
        place.run("python", "-c", ALONE)
        place.run("python", "-c", block)
        place.install("flowtrain[search]")  # the tool Search of the quickstart
        place.run("python", "-c", CODEC)
        place.run("flowtrain", "rft", *TRAIN, "--run.dir", "warm")
        place.run("flowtrain", "train", *TRAIN, "--model.path", "warm/model", "--run.dir", "run")


class Place:
    """A new virtual environment and an empty folder to work in."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self._wheels = wheels
        self._bin = folder / "environment" / "bin"
        self._work = folder / "work"
        self._work.mkdir()
        venv.create(folder / "environment", with_pip=True)

    def install(self, requirement: str, only_ours: bool = False) -> None:
        """Install a requirement with the folder's wheels at hand.

        `only_ours`: nothing but such a wheel may be installed.
        """
        print(f"installing {requirement}", flush=True)
        options = ["--quiet", "--find-links", str(self._wheels)]
        if uv := shutil.which("uv"):
            command = [uv, "pip", "install", "--python", str(self._bin / "python")]
        else:
            command = [str(self._bin / "pip"), "install", "--no-compile"]
        options += ["--no-index"] if only_ours else []
        subprocess.run([*command, *options, requirement], check=True)

    def run(self, command: str, *arguments: str) -> None:
        """Run a command of the environment; its failure ends the try."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        }
        if len(arguments) > 2:
            print(command, *arguments, flush=True)
        subprocess.run(
            [str(self._bin / command), *arguments],
            cwd=self._work,
            env=variables | {"OMP_NUM_THREADS": "1"},
            check=True,
        )


if __name__ == "__main__":
    main()
