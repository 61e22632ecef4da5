"""One optimizer step on each path: our trees, our rows without sharing, and the rivals' padded
batches. FLOPs and tokens by counting, then gradients, memory and times.
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

from bench.measure import extra_bytes, median_ratio, time_in_turn
from bench.step_batches import Batch, chain
from bench.step_rivals import Transformers, Trl
from flowtrain.records import Sample
from flowtrain.trainer.cost import ForwardCost
from flowtrain.trainer.devices import peak_tflops
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.delta_net import find_layers
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.sharding import ShardSpec, shard
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer

RIVALS: dict[str, type[Transformers]] = {"transformers": Transformers, "trl": Trl}


@dataclass(frozen=True, slots=True)
class Work:
    """Measurements of one step on one path."""

    num_tokens: int
    """Padding included."""
    flops: float
    """Of the walk's trunks once."""


@dataclass(frozen=True, slots=True)
class Path:
    """One way to compute the step."""

    model: nn.Module
    backward: Callable[[Sequence[Sample]], None]
    step: Callable[[Sequence[Sample]], Any]


def work(batch: Batch, args: argparse.Namespace) -> dict[str, Work]:
    """Count FLOPs by path; a backward pass takes twice as many as a forward pass."""
    cost, samples = ForwardCost.of(batch.model), batch.samples
    num_targets = sum(len(s.response_ids) for s in samples)
    tree = pack_row(samples)
    # Without sharing, how samples fall into rows changes nothing.
    lengths = [(1, len(s.prompt_ids) + len(s.response_ids) - 1) for s in samples]
    num_tokens, flops = len(tree.input_ids_N), 3 * cost.flops(tree)
    found = {
        "tree": Work(num_tokens, flops),
        "packed": _work(cost, lengths, num_targets),
    }
    if find_layers(batch.model):
        found["chain"] = _work(cost, [(1, found["tree"].num_tokens)], num_targets)
    for path, rival in _installed().items():
        shapes = rival.shapes(samples, args.batch_size)
        num_tokens = sum(n * t for n, t in shapes)
        found[path] = _work(cost, shapes, num_tokens if rival.scores_all else num_targets)
    return found


def _work(cost: ForwardCost, shapes: Sequence[tuple[int, int]], num_scored: int) -> Work:
    """A step on plain sequences: (how many, tokens of each)."""
    num_tokens = sum(n * t for n, t in shapes)
    num_pairs = sum(n * t * (t + 1) // 2 for n, t in shapes)
    flops = cost.per_token * num_tokens + cost.per_pair * num_pairs + cost.per_target * num_scored
    return Work(num_tokens, 3 * flops)


def compare(batch: Batch, world: World, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row of the table for each path."""
    works, paths = work(batch, args), _paths(batch, world, args)
    truth = torch.zeros(())
    extra, differences, steps = {}, {}, {}
    for name in sorted(paths, key=lambda name: name != "transformers"):  # whose gradient is kept
        path = paths[name]
        path.backward(batch.samples[:2])  # or the first would pay for what all load
        path.model.zero_grad()
        extra[name] = extra_bytes(partial(path.backward, batch.samples), world.device)
        gradient = _gradient(path.model)
        if name == "transformers":
            truth = gradient
        if name != "chain":
            differences[name] = float((gradient - truth).abs().max() / truth.abs().max())
        steps[name] = partial(path.step, batch.samples)
    del gradient, truth
    # Whole steps before the timed ones; on a CPU the gradient will do.
    warmups = 2 if world.device.type == "cuda" else 0
    seconds = time_in_turn({name: steps[name] for name in paths}, args.repeats, warmups)
    peak = args.peak_tflops or (
        peak_tflops(torch.cuda.get_device_name()) if world.device.type == "cuda" else None
    )
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
            "grad_difference": differences.get(name),
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
        token_budget=args.token_budget,
    )
    paths = {}
    packs: dict[str, Callable[[Sequence[Sample]], PackedRow]]
    packs = {"tree": pack_row, "packed": partial(pack_row, share=False)}
    if find_layers(batch.model):  # as if there were neither branches nor anything to share
        one = chain(batch.samples, len(pack_row(batch.samples).input_ids_N))
        packs["chain"] = lambda samples: pack_row([one])
    for name, pack in packs.items():
        paths[name] = Path(
            trainer.model, partial(_backward, trainer, pack), partial(_step, trainer, pack)
        )
    for name, kind in _installed().items():
        rival = kind(batch.model, world.device, args.batch_size, dtype)
        paths[name] = Path(rival.model, rival.backward, rival.step)
    return paths


def _installed() -> dict[str, type[Transformers]]:
    return {path: rival for path, rival in RIVALS.items() if importlib.util.find_spec(path)}


def _step(
    trainer: Trainer, pack: Callable[[Sequence[Sample]], PackedRow], samples: Sequence[Sample]
) -> None:
    trainer.step([[pack(samples)]])


def _backward(
    trainer: Trainer, pack: Callable[[Sequence[Sample]], PackedRow], samples: Sequence[Sample]
) -> None:
    row = pack(samples)
    trainer.forward_backward([row], float(row.loss_weight_T.sum()), StepMetrics())


def _gradient(model: nn.Module) -> Tensor:
    """All of it in fp32 on the CPU; the model has none afterwards."""
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    whole = torch.cat(
        [(g.full_tensor() if isinstance(g, DTensor) else g).float().cpu().flatten() for g in grads]
    )
    model.zero_grad()
    return whole
