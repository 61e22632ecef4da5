"""Stages that need flowtrain and transformers: optimizer steps on whole trees, their time by class
of kernel, memory, experts.

A step has three times. `ms` is what it takes. `device_ms` is how long the device computes, the
union of its kernels' times in a profile. `host_ms` is the same step on a tree of a fiftieth of the
tokens, which has as many launches and leaves a GPU next to nothing to do. The largest of the last
two bounds the first.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from bench.gpu.cases import Cases, Row
from bench.measure import time_in_turn

if TYPE_CHECKING:
    from flowtrain.trainer.packing import PackedRow
    from flowtrain.trainer.trainer import Trainer

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "layers not fused": {"fused": False},
    "one FSDP group": {"one_group": True},
    "four groups of rollouts": {"num_groups": 4},
    "rectangles": {"attention": "rectangles"},
    "walked": {"token_budget": 8192},
    "walked, rectangles": {"token_budget": 8192, "attention": "rectangles"},
}
"""Of one optimizer step on whole trees."""
_STEPS = {
    ("0.5b", 3): ("default", "layers not fused", "one FSDP group", "four groups of rollouts"),
    ("0.5b", 10): ("default", "layers not fused", "rectangles", "walked", "walked, rectangles"),
    ("1.5b", 3): ("default", "layers not fused", "one FSDP group"),
}
_SCALE = 0.02
"""Of the tokens of a step that has little to compute."""
_CLASSES = (
    ("attention, backward", r"flex_attention_backward|sdpa.*(bwd|bprop|backward)|flash_bwd"),
    ("attention, forward", r"flex_attention|sdpa|flash_fwd|fmha"),
    ("products", r"gemm|cutlass|nvjet|xmma|cublas|splitK"),
    ("optimizer", r"multi_tensor|adam|foreach|fused_adam"),
    ("copies", r"memcpy|memset|copy_|CatArray|chunk_cat|split_with_sizes|nccl"),
    ("reductions, elementwise", r"reduce|elementwise|triton_|index|gather|scatter|softmax|norm"),
)
"""Classes of kernels by their names, the first that fits; flowkernels' own come before."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One run of a kernel on the device."""

    name: str
    begin_us: float
    end_us: float


def profile(cases: Cases) -> None:
    """Where one step's time goes, by class of kernel; a trace and a table of kernels beside it."""
    shape = "small" if cases.is_small else "0.5b"
    for num_turns in (3,) if cases.is_small else (3, 10):
        cases.run(f"{shape}, {num_turns} turns", partial(_profile, cases, shape, num_turns))


def _profile(cases: Cases, shape: str, num_turns: int) -> list[Row]:
    trainer, rows, _ = _step(cases, shape, num_turns)
    for _ in range(1 if cases.is_small else 3):
        trainer.step([rows])
    cases.folder.mkdir(exist_ok=True)
    found = _profiled(partial(trainer.step, [rows]))
    name = f"{shape}-{num_turns}"
    found.export_chrome_trace(str(cases.folder / f"{name}.json.gz"))
    order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = found.key_averages().table(sort_by=order, row_limit=80, max_name_column_width=90)
    (cases.folder / f"{name}.txt").write_text(table)
    return by_class(_kernels(found))


def _profiled(run: Callable[[], Any]) -> torch.profiler.profile:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return profiler


def _kernels(profiler: torch.profiler.profile) -> list[Kernel]:
    """Return what ran on the device; without a GPU the operators of the outermost level."""
    on_gpu = torch.cuda.is_available()
    kinds: Any = torch.autograd
    wanted = kinds.DeviceType.CUDA if on_gpu else kinds.DeviceType.CPU
    events: Any = profiler.events()
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted
        and (on_gpu or event.cpu_parent is None)
        # Ranges that a program has named span kernels and are none.
        and not getattr(event, "is_user_annotation", False)
    ]


def by_class(kernels: Iterable[Kernel]) -> list[Row]:
    """Sum kernels by class, the largest first; then the share of the time in which none ran."""
    kernels = list(kernels)
    begin, end = min(k.begin_us for k in kernels), max(k.end_us for k in kernels)
    sums: dict[str, list[float]] = {}
    for kernel in kernels:
        sums.setdefault(class_of(kernel.name), []).append(kernel.end_us - kernel.begin_us)
    rows: list[Row] = [
        {"class": name, "ms": sum(times) / 1e3, "calls": len(times)}
        for name, times in sorted(sums.items(), key=lambda item: -sum(item[1]))
    ]
    idle_us = end - begin - busy_us(kernels)
    rows.append({"class": "idle", "ms": idle_us / 1e3, "calls": 0})
    return [{**row, "share": row["ms"] * 1e3 / (end - begin)} for row in rows]


def busy_us(kernels: Iterable[Kernel]) -> float:
    """Return the microseconds in which at least one kernel runs."""
    total, until = 0.0, 0.0
    for kernel in sorted(kernels, key=lambda k: k.begin_us):
        total += max(0.0, kernel.end_us - max(until, kernel.begin_us))
        until = max(until, kernel.end_us)
    return total


def class_of(name: str) -> str:
    """Return the class of a kernel by its name."""
    if found := _ours().get(name.partition("(")[0]):
        return f"flowkernels, {found}"
    return next((kind for kind, form in _CLASSES if re.search(form, name, re.I)), "other")


@functools.cache
def _ours() -> dict[str, str]:
    """Kernels of flowkernels by name, with the file that has each."""
    files = ["branching", "distillation", "layers", "logprobs", "policy_loss", "rows"]
    files.append("sparse_delta")
    modules = [importlib.import_module(f"flowkernels.{name}_triton") for name in files]
    functions = [x.fn for module in modules for x in vars(module).values() if hasattr(x, "fn")]
    return {f.__name__: f.__module__.rpartition(".")[2].removesuffix("_triton") for f in functions}


def steps(cases: Cases) -> None:
    """Variants of a step on whole trees, the smaller model first."""
    shapes = {("small", 3): tuple(VARIANTS)} if cases.is_small else _STEPS
    for (shape, num_turns), names in shapes.items():
        for name in names:
            run = partial(_measure_step, cases, shape, num_turns, **VARIANTS[name])
            cases.run(f"{shape}, {num_turns} turns: {name}", run)


def hybrid(cases: Cases) -> None:
    """A step of a model with Gated DeltaNet, which runs by what is installed."""
    shape = "small hybrid" if cases.is_small else "hybrid"
    for num_turns in (3,) if cases.is_small else (3, 10):
        cases.run(f"{num_turns} turns", partial(_measure_step, cases, shape, num_turns))


def _measure_step(
    cases: Cases, shape: str, num_turns: int, num_groups: int = 1, **options: Any
) -> Row:
    from flowtrain.trainer.devices import peak_tflops

    trainer, rows, flops = _step(cases, shape, num_turns, **options)
    rows, flops = rows * num_groups, flops * num_groups
    run = partial(trainer.step, [rows])
    repeats, warmups = (1, 0) if cases.is_small else (3, 2)
    seconds = statistics.median(time_in_turn({"step": run}, repeats, warmups)["step"])
    row: Row = {
        "rows": len(rows),
        "tokens": sum(len(each.input_ids_N) for each in rows),
        "ms": 1e3 * seconds,
    }
    if cases.device == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        peak = peak_tflops(torch.cuda.get_device_name())
        row |= {"useful_mfu": flops / 1e12 / seconds / peak} if peak else {}
    row["device_ms"] = busy_us(_kernels(_profiled(run))) / 1e3
    few = partial(trainer.step, [_rows(num_turns, _SCALE) * num_groups])
    row["host_ms"] = 1e3 * min(time_in_turn({"few": few}, repeats, warmups)["few"])
    return row


def _step(
    cases: Cases,
    shape: str,
    num_turns: int,
    one_group: bool = False,
    token_budget: int | None = None,
    **sharding: Any,
) -> tuple[Trainer, list[PackedRow], float]:
    """A trainer of a random model made on the device, the rows of one step, and the FLOPs that it
    would take if each token of the tree were computed once. `one_group`: FSDP gathers the model
    whole and not layer by layer.
    """
    from flowkernels import LossSpec

    from bench.agentflow_shape import random_model
    from flowtrain.trainer import sharding as sharded
    from flowtrain.trainer.cost import ForwardCost
    from flowtrain.trainer.trainer import OptimSpec, Trainer

    world = _world()
    on_gpu = cases.device == "cuda"
    rows = _rows(num_turns, _SCALE if cases.is_small else 1.0)
    longest = max(int(row.position_ids_N.max()) for row in rows) + 1
    with torch.device(cases.device):
        model = random_model(shape, longest)
    cost = ForwardCost.of(model)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if not on_gpu:
        sharding.pop("attention", None)  # a CPU trains by one kind alone
    # As a run has it: a GPU keeps logits in fp32.
    spec = sharded.ShardSpec(dtype, fp32_logits=on_gpu, **sharding)
    with patch.object(sharded, "_SMALL", 10**12 if one_group else sharded._SMALL):
        model = sharded.shard(model, world, spec)
    if token_budget is not None and cases.is_small:
        token_budget = round(token_budget * _SCALE)
    optim = OptimSpec(lr=1e-5)
    trainer = Trainer(model, world, LossSpec(), optim, token_budget=token_budget)
    return trainer, rows, 3 * sum(map(cost.flops, rows))


def _rows(num_turns: int, scale: float) -> list[PackedRow]:
    """A group of 8 rollouts of AgentFlow's shape, whole."""
    from bench.agentflow_shape import agentflow_samples
    from flowtrain.trainer.packing import pack_row

    return [pack_row(agentflow_samples(num_turns, scale))]


@functools.cache
def _world() -> Any:
    from flowtrain.trainer.distributed import World

    return World.join("auto")


def memory(cases: Cases) -> None:
    """The plan of memory against the measured peak, each case in a process of its own."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # as `bench.memory` says

    def measure(index: int) -> Row:
        from bench import memory as bench

        all_cases = (*bench.GPU_CASES, bench.option_cases(True)[2])
        case = bench.FIRST if cases.is_small else all_cases[index]
        with multiprocessing.get_context("spawn").Pool(1) as processes:
            return processes.apply(bench.measure, (case,))

    for index in range(1 if cases.is_small else 4):
        cases.run(f"case {index}", partial(measure, index))


def experts(cases: Cases) -> None:
    """A layer of experts by each way, beside its bare products."""
    for name in ("small",) if cases.is_small else ("30b-a3b", "gpt-oss-20b"):
        cases.run(name, partial(_experts, cases, name))


def _experts(cases: Cases, name: str) -> list[Row]:
    from bench import experts as bench

    dtype = torch.float32 if cases.is_small else torch.bfloat16
    shape = (bench.SHAPES | bench.SMALL)[name]
    return bench.measure(shape, 64 if cases.is_small else 16384, dtype, cases.device)
