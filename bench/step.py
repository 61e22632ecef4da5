"""One optimizer step on trees, on packed samples and on padded ones:  python -m bench.step [--json
F]

Batches: AgentFlow's shape with 3 and with 10 turns, and one of the main job
(`bench/step_batches.py`). Paths: our trees; our rows without sharing (what a packed trainer
computes); a plain transformers loop and TRL's loss over padded batches (`bench/step_rivals.py`).
All on the same samples and from the same weights: first a gradient of each, compared with that of
transformers, and the memory that it takes at its peak beyond what was there before; then whole
steps (forward, backward, clipping, AdamW), the paths in turn. FLOPs are those that a path's own
layout needs. Minutes on one core; on a GPU: --shape 0.5b --scale 1.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from flowkernels import LossSpec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.measure import extra_bytes, median_ratio, print_table, time_in_turn, write_json
from bench.step_batches import SHAPES, Batch, agentflow, main_job
from bench.step_rivals import Transformers, Trl
from flowtrain.report import ProgressLine
from flowtrain.training.cost import ForwardCost
from flowtrain.training.devices import peak_tflops
from flowtrain.training.model import ShardSpec, shard
from flowtrain.training.step_metrics import StepMetrics
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import PackedRow, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample

RIVALS: dict[str, type[Transformers]] = {"transformers": Transformers, "trl": Trl}


@dataclass(frozen=True, slots=True)
class Work:
    """Measurements of one step on one path."""

    num_tokens: int
    """Padding included."""
    flops: float


@dataclass(frozen=True, slots=True)
class Path:
    """One way to compute the step."""

    model: nn.Module
    backward: Callable[[Sequence[Sample]], None]
    step: Callable[[Sequence[Sample]], Any]


class Meter:
    """How far the bench is, in FLOPs of all runs of all batches."""

    def __init__(self, total: float) -> None:
        self._line, self._done = ProgressLine(round(total / 1e9), 0, True, unit="GFLOP"), 0.0

    def count(self, run: Callable[[], Any], flops: float, text: str) -> None:
        """Run it, and show that it is done."""
        run()
        self._done += flops / 1e9
        self._line.show(round(self._done), text)

    def close(self) -> None:
        self._line.close()


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    batches = [
        *(agentflow(turns, args.shape, args.scale) for turns in (3, 10)),
        main_job(args.warm),
    ]
    works = [work(batch, args) for batch in batches]
    world = World.join(args.device)
    num_runs = 1 + _num_warmups(world) + args.repeats
    meter = Meter(num_runs * sum(each.flops for of_batch in works for each in of_batch.values()))
    rows = [
        row
        for batch, of_batch in zip(batches, works, strict=True)
        for row in compare(batch, of_batch, world, args, meter)
    ]
    meter.close()
    world.leave()
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument(
        "--repeats", type=int, default=3, help="timed steps of each path (default: 3)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="samples of a padded batch (default: 8)"
    )
    parser.add_argument(
        "--scale",
        type=float,
        default=0.1,
        help="lengths of AgentFlow-shaped batches against the real ones (default: 0.1)",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="small", help="their model (default: small)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="where all paths run (default: auto)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of forward and backward pass (default: bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--token-budget", type=int, default=16384, help="tokens per row (default: 16384)"
    )
    parser.add_argument(
        "--warm",
        default="",
        metavar="DIR",
        help="record a main job's planner, runs/warm/model (default: scripted expert)",
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=0.0,
        help="of the device, for MFU; 0: as the table of GPUs has it",
    )
    return parser.parse_args()


def work(batch: Batch, args: argparse.Namespace) -> dict[str, Work]:
    """Count FLOPs by path; a backward pass takes twice as many as a forward pass."""
    cost, samples = ForwardCost.of(batch.model), batch.samples
    found = {}
    for path, shares in (("tree", True), ("packed", False)):
        rows = pack_rows(samples, args.token_budget, shares)
        found[path] = Work(
            sum(len(row.input_ids_N) for row in rows), 3 * sum(map(cost.flops, rows))
        )
    for path, rival in _installed().items():
        shapes = rival.shapes(samples, args.batch_size)
        num_tokens, num_pairs = (
            sum(n * each for n, each in shapes)
            for shapes in (shapes, [(n, t * (t + 1) // 2) for n, t in shapes])
        )
        num_scored = num_tokens if rival.scores_all else sum(len(s.response_ids) for s in samples)
        found[path] = Work(
            num_tokens,
            3
            * (
                cost.per_token * num_tokens
                + cost.per_pair * num_pairs
                + cost.per_target * num_scored
            ),
        )
    return found


def compare(
    batch: Batch, works: dict[str, Work], world: World, args: argparse.Namespace, meter: Meter
) -> list[dict[str, Any]]:
    """A row of the table for each path."""
    grads: dict[str, Tensor] = {}
    extra, steps = {}, {}
    for name, path in _paths(batch, world, args).items():
        count = partial(meter.count, flops=works[name].flops, text=f"{batch.name}: {name}")
        path.backward(batch.samples[:2])  # or the first would pay for what all load
        path.model.zero_grad()
        extra[name] = extra_bytes(
            partial(count, partial(path.backward, batch.samples)), world.device
        )
        grads[name] = _gradient(path.model)
        steps[name] = partial(count, partial(path.step, batch.samples))
    seconds = time_in_turn(steps, args.repeats, _num_warmups(world))
    peak = args.peak_tflops or (
        peak_tflops(torch.cuda.get_device_name()) if world.device.type == "cuda" else None
    )
    truth = grads["transformers"]
    return [
        {
            "batch": batch.name,
            "path": name,
            "device": world.device.type,
            "samples": len(batch.samples),
            "tokens": works[name].num_tokens,
            "tokens_of_tree": works[name].num_tokens / works["tree"].num_tokens,
            "gflops": works[name].flops / 1e9,
            "ms": 1e3 * statistics.median(times),
            "time_of_tree": median_ratio(times, seconds["tree"]),
            **(
                {"mfu": works["tree"].flops / 1e12 / statistics.median(times) / peak}
                if peak
                else {}
            ),
            "extra_mb": extra[name] / 1e6,
            "grad_difference": float((grads[name] - truth).abs().max() / truth.abs().max()),
        }
        for name, times in seconds.items()
    ]


def _paths(batch: Batch, world: World, args: argparse.Namespace) -> dict[str, Path]:
    dtype = getattr(torch, args.dtype or ("bfloat16" if world.device.type == "cuda" else "float32"))
    trainer = Trainer(
        shard(copy.deepcopy(batch.model), world, ShardSpec(dtype)),
        world,
        LossSpec(),
        OptimSpec(lr=1e-4),
    )
    paths = {}
    for name, shares in (("tree", True), ("packed", False)):
        pack = partial(pack_rows, token_budget=args.token_budget, share=shares)
        paths[name] = Path(
            trainer.model, partial(_backward, trainer, pack), partial(_step, trainer, pack)
        )
    for name, kind in _installed().items():
        rival = kind(batch.model, world.device, args.batch_size, dtype)
        paths[name] = Path(rival.model, rival.backward, rival.step)
    return paths


def _installed() -> dict[str, type[Transformers]]:
    return {path: rival for path, rival in RIVALS.items() if importlib.util.find_spec(path)}


def _num_warmups(world: World) -> int:
    """Whole steps before the timed ones; on a CPU the gradient will do."""
    return 2 if world.device.type == "cuda" else 0


def _step(
    trainer: Trainer, pack: Callable[[Sequence[Sample]], list[PackedRow]], samples: Sequence[Sample]
) -> None:
    trainer.step([pack(samples)])


def _backward(
    trainer: Trainer, pack: Callable[[Sequence[Sample]], list[PackedRow]], samples: Sequence[Sample]
) -> None:
    rows = [row.to(torch.device(trainer.model.device)) for row in pack(samples)]
    trainer.forward_backward(
        rows, sum(float(row.loss_weight_T.sum()) for row in rows), StepMetrics()
    )


def _gradient(model: nn.Module) -> Tensor:
    """All of it in fp32 on the CPU; the model has none afterwards."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat(
        [(g.full_tensor() if isinstance(g, DTensor) else g).float().cpu().flatten() for g in grads]
    )
    model.zero_grad()
    return whole


if __name__ == "__main__":
    main()
