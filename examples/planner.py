"""Make the planner that comes with flowtrain, or check that it is still made:

    python -m examples.planner            # writes flowtrain/trainer/toy/planner
    python -m examples.planner --check    # makes it in a temporary folder, and compares

It is the warm-up of `make quickstart WARM=1` with seed 0, on two ranks of one thread, rounded to
bf16: some minutes on two cores. Another processor or torch may sum in another order, so `--check`
tells how much differs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from flowtrain.config.shipped import PLANNER
from flowtrain.trainer.model.loading import export, load_model, load_tokenizer


def make(folder: Path, out: Path) -> None:
    """Warm a planner up in `folder`, and write it to `out` in bf16."""
    ranks = ("-m", "flowtrain.torchrun", "--nproc_per_node", "2", "-m", "flowtrain.rft")
    config = ("--config", "quickstart", "--run.seed", "0", "--run.threads", "1")
    run = (sys.executable, *ranks, *config, "--run.dir", str(folder / "run"))
    subprocess.run(run, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    made = str(folder / "run" / "model")
    model = load_model(made, torch.bfloat16)
    export(model, load_tokenizer(made), dict(model.named_parameters()), out)


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a planner."""
    return load_file(folder / "model.safetensors")


def largest_difference(one: Path, other: Path) -> tuple[float, float]:
    """Return the largest difference of two weights, and the share of weights that differ at all."""
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys(), "they are other models"
    pairs = [(ours[name].float(), theirs[name].float()) for name in ours]
    largest = max(float((a - b).abs().max()) for a, b in pairs)
    num_other = sum(int((a != b).sum()) for a, b in pairs)
    return largest, num_other / sum(a.numel() for a, _ in pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "planner" if options.check else PLANNER
        make(Path(folder), out)
        if not options.check:
            print(f"written: {out}")
            return 0
        largest, share = largest_difference(out, PLANNER)
    print(f"of {PLANNER.name} {100 * share:.3g} % of the weights differ, by {largest:.3g} at most")
    return int(share > 0)


if __name__ == "__main__":
    sys.exit(main())
