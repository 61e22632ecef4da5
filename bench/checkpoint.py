"""Load a model on several ranks and write its checkpoint:  python -m bench.checkpoint [--ranks 4]

Shows what each rank grows by (resident set), what it writes, how long training is held up and how
long the checkpoint takes beside it, and whether other ranks resume the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.measure import new_parser, report
from flowtrain.trainer import checkpoint, toy
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import loading as models
from flowtrain.trainer.optimizers import ShardOptimizer
from flowtrain.trainer.sharding import ShardSpec, shard
from flowtrain.utils.commands import end_process
from flowtrain.weights.format.manifest import checksum_of

_SHAPE: dict[str, Any] = {"hidden_size": 1024, "num_heads": 16, "max_positions": 64}
"""15 layers have 200 M parameters, with a vocabulary of a few hundred."""


def main() -> None:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=4, help="that write it")
    add("--resume-ranks", type=int, default=2, help="that resume it then")
    add("--device", default="cpu", help="cpu, cuda or auto")
    add("--layers", type=int, default=15, help="of the model")
    add("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        _run(Path(args.part), args.device, args.layers)
    with tempfile.TemporaryDirectory() as name:
        options = ["--device", args.device, "--layers", str(args.layers)]
        rows = _launch(args.ranks, Path(name), options)
        rows += _launch(args.resume_ranks, Path(name), options)
    is_same = len({row.pop("digest") for row in rows}) == 1
    report(args.json, [{**row, "same bits": is_same} for row in rows])


def _launch(num_ranks: int, folder: Path, options: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "-m", "bench.checkpoint", "--part", str(folder)]
    command += options
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [
        json.loads((folder / f"{num_ranks}.{rank}.json").read_text()) for rank in range(num_ranks)
    ]


def _run(folder: Path, device: str, num_layers: int) -> None:
    """Be a rank: load, step, save, and resume what was saved; the first ranks alone save."""
    world = World.join(device)
    row: dict[str, Any] = {"ranks": world.size, "rank": world.rank}
    tokenizer = toy.new_tokenizer(["a b"], vocab_size=300)
    peak, started = MemoryPeak(world.device), time.perf_counter()
    model = _load(tokenizer, world, num_layers)
    row["parameters"] = model.num_parameters()
    row |= {"load_s": time.perf_counter() - started, "load_peak_mb": peak.num_bytes() / 1e6}
    optimizer = ShardOptimizer(model, world, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    path = checkpoint.place(folder, 1)
    if not path.exists():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        world.barrier()
        row |= _save(folder, world, model, tokenizer, optimizer)
        model = _load(tokenizer, world, num_layers)  # with other weights
        optimizer = ShardOptimizer(model, world, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    started = time.perf_counter()
    checkpoint.restore(path, model, optimizer, world)
    row["resume_s"] = time.perf_counter() - started
    row["digest"] = _digest(model, world)
    (folder / f"{world.size}.{world.rank}.json").write_text(json.dumps(row))
    world.barrier()
    end_process(0)


def _load(tokenizer: Any, world: World, num_layers: int) -> Any:
    """Load a model as a run does: the main rank alone has weights."""
    with torch.device("cpu" if world.is_main else "meta"):
        model = toy.new_model(tokenizer, num_layers=num_layers, **_SHAPE)
    return shard(model, world, ShardSpec(torch.bfloat16))


def _save(
    folder: Path, world: World, model: Any, tokenizer: Any, optimizer: ShardOptimizer
) -> dict[str, float]:
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to what is resident now
    peak, started = MemoryPeak(world.device), time.perf_counter()
    checkpoints = checkpoint.Checkpoints(folder, world, keep=1)
    checkpoints.save(1, model, tokenizer, optimizer, {}, dtype=torch.bfloat16)
    held_s = time.perf_counter() - started
    checkpoints.wait()
    path = checkpoint.place(folder, 1)
    names = (f"state/shard-{world.rank + 1:05d}-*", f"model/model-{world.rank + 1:05d}-*")
    written = sum(file.stat().st_size for name in names for file in path.glob(name))
    return {
        "held_up_s": held_s,
        "save_s": time.perf_counter() - started,
        "save_peak_mb": peak.num_bytes() / 1e6,
        "written_mb": written / 1e6,
    }


def _digest(model: Any, world: World) -> str:
    """Hash weights of which each rank has its rows."""
    tensors = models.whole(models.named_weights(model))
    own = "".join(checksum_of(t.cpu().numpy().tobytes()) for t in tensors.values())
    return world.gather_text(own)[0]


if __name__ == "__main__":
    main()
