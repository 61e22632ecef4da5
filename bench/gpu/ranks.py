"""Stages of one rank alone: collectives and checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.gpu.cases import Cases, Row
from bench.gpu.runs import program_rows


def collectives(cases: Cases) -> None:
    """What FSDP and a run ask of NCCL, on the one rank that there is; gloo without a GPU."""
    _join(cases.device)
    numbers = torch.arange(8, device=cases.device)
    runs: dict[str, Callable[[], Any]] = {
        "all_reduce fp32": lambda: dist.all_reduce(numbers.float()),
        "all_reduce fp64": lambda: dist.all_reduce(numbers.double()),
        "all_reduce max int64": lambda: dist.all_reduce(numbers, dist.ReduceOp.MAX),
        "all_reduce max bool": lambda: dist.all_reduce(numbers > 3, dist.ReduceOp.MAX),
        "all_gather bf16": lambda: dist.all_gather_into_tensor(
            numbers.bfloat16(), numbers.bfloat16()
        ),
        "all_gather uint8": lambda: dist.all_gather_into_tensor(numbers.byte(), numbers.byte()),
        "reduce_scatter fp32": lambda: dist.reduce_scatter_tensor(numbers.float(), numbers.float()),
        "broadcast bf16": lambda: dist.broadcast(numbers.bfloat16(), 0),
        "all_to_all int64": lambda: dist.all_to_all_single(numbers.clone(), numbers),
        "all_gather_object": lambda: dist.all_gather_object([None], {"a": 1}),
        "barrier": dist.barrier,
        "second group, gloo": lambda: dist.all_reduce(
            torch.ones(2), group=dist.new_group([0], backend="gloo")
        ),
        "FSDP2 step": lambda: _fsdp_step(cases.device),
    }
    for name, run in runs.items():
        cases.run(name, partial(_timed, run, cases.device))
    dist.destroy_process_group()


def _timed(run: Callable[[], Any], device: str) -> Row:
    run()  # makes the communicator
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return {"ms": 1e3 * (time.perf_counter() - started)}


def _join(device: str) -> None:
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def _sharded(device: str, width: int, num_layers: int) -> nn.Module:
    """Random layers under FSDP2, bf16 passes over fp32 weights."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(num_layers)))
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    for layer in (*model, model):
        fully_shard(layer, **options)
    return model


def _fsdp_step(device: str) -> None:
    model = _sharded(device, 64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(8, 64, device=device)).sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert float(norm.full_tensor()) > 0
    optimizer.step()


def checkpoint(cases: Cases) -> None:
    """A checkpoint of one rank as a run writes it: how long training stands still, how long until
    it is on the disk, and whether a new process resumes the same bits.
    """
    options = ("--ranks", "1", "--resume-ranks", "1", "--device", cases.device)
    options = (*options, *(("--layers", "1") if cases.is_small else ()))
    path = cases.folder.with_name("checkpoint-rows.json")
    cases.run("1 rank", partial(program_rows, path, "-m", "bench.checkpoint", *options))
