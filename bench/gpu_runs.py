"""Stages of `bench.gpu` that need flowtrain and its packages: steps, memory, whole runs."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from bench.gpu_cases import Cases, Needs, Row
from bench.measure import time_in_turn

if TYPE_CHECKING:
    from flowtrain.training.trainer import Trainer
    from flowtrain.training.tree import PackedRow

VARIANTS: dict[str, dict[str, Any]] = {
    "eager": {},
    "budget 8192": {"token_budget": 8192},
    "whole trees": {"token_budget": 65536},
    "whole trees, recompute": {"token_budget": 65536, "recompute": True},
    "compile": {"compile": True},
    "layers not fused": {"fused": False},
    "recompute": {"recompute": True},
    "no reshard": {"reshard": False},
    "groups split": {"splits": True},
    "reference": {"kl_coef": 0.001},
}
"""Of one optimizer step on rows of 16,384 tokens."""
_SMALL = {"token_budget": 512}
QUICKSTART = ("--config", "configs/quickstart.toml", "--log.tensorboard", "false")
PLANNER = ("--model.path", "flowtrain/toy/planner")
"""The warmed-up planner of the quickstart."""


def profile(cases: Cases) -> None:
    """Where one step's time goes: torch's own table of kernels, and the trace beside it."""
    for num_turns in (3,) if cases.is_small else (3, 10):
        cases.run(f"0.5b, {num_turns} turns", partial(_profile, cases, "0.5b", num_turns))


def _profile(cases: Cases, shape: str, num_turns: int) -> list[Row]:
    from torch.profiler import ProfilerActivity, profile

    trainer, rows, _ = _step(cases, shape, num_turns)
    for _ in range(1 if cases.is_small else 3):
        trainer.step([rows])
    on_gpu = cases.device == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds, record_shapes=True) as profiler:
        trainer.step([rows])
        if on_gpu:
            torch.cuda.synchronize()
    folder = cases.folder
    folder.mkdir(exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{shape}-{num_turns}.json.gz"))
    found = profiler.key_averages()
    order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    table = found.table(sort_by=order, row_limit=80, max_name_column_width=90)
    (folder / f"{shape}-{num_turns}.txt").write_text(table)
    times = sorted(((getattr(x, order) / 1e3, x.count, x.key) for x in found), reverse=True)
    total = sum(ms for ms, *_ in times)
    return [
        {"operator": key[:120], "ms": ms, "calls": count, "share": ms / total}
        for ms, count, key in times[:25]
    ]


def steps(cases: Cases) -> None:
    """Variants of a step on trees, the smaller model first; a hybrid runs by what is installed."""
    shapes = ("small", "hybrid") if cases.is_small else ("0.5b", "1.5b", "hybrid")
    for shape in shapes:
        for num_turns in (3, 10):
            for name, options in VARIANTS.items():
                if cases.is_small and (name == "compile" or num_turns > 3):
                    continue
                if shape == "hybrid" and name != "eager":
                    continue
                given = {**options, **_SMALL} if cases.is_small else options
                run = partial(_measure_step, cases, shape, num_turns, **given)
                cases.run(f"{shape}, {num_turns} turns: {name}", run)


def _measure_step(
    cases: Cases, shape: str, num_turns: int, splits: bool = False, **options: Any
) -> Row:
    """`splits`: query heads of a group in batches of their own, as `bench.attention` has it."""
    from bench.attention import SplitTree
    from flowtrain.training.devices import peak_tflops
    from flowtrain.training.flex import FlexTree

    if splits:
        with patch.object(FlexTree, "of", SplitTree.of):
            return _measure_step(cases, shape, num_turns, **options)
    trainer, rows, flops = _step(cases, shape, num_turns, **options)
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
    return row


def experts(cases: Cases) -> None:
    """A layer of experts by each way, beside its bare products."""
    for name in ("small",) if cases.is_small else ("30b-a3b", "gpt-oss-20b"):
        cases.run(name, partial(_experts, cases, name))


def _experts(cases: Cases, name: str) -> list[Row]:
    from bench import experts as bench

    dtype = torch.float32 if cases.is_small else torch.bfloat16
    shape = (bench.SHAPES | bench.SMALL)[name]
    return bench.measure(shape, 64 if cases.is_small else 16384, dtype, cases.device)


def _step(
    cases: Cases,
    shape: str,
    num_turns: int,
    token_budget: int = 16384,
    kl_coef: float = 0.0,
    **sharding: Any,
) -> tuple[Trainer, list[PackedRow], float]:
    """A trainer of a random model made on the device, the rows of one step, and the FLOPs that it
    would take if each token of the tree were computed once.
    """
    from flowkernels import LossSpec

    from bench.agentflow_shape import agentflow_samples, random_model
    from flowtrain.training.cost import ForwardCost
    from flowtrain.training.sharding import ShardSpec, shard
    from flowtrain.training.trainer import OptimSpec, Trainer
    from flowtrain.training.tree import pack_rows

    world = _world()
    samples = agentflow_samples(num_turns, 0.02 if cases.is_small else 1.0)
    longest = max(len(s.prompt_ids) + len(s.response_ids) for s in samples)
    with torch.device(cases.device):
        is_scaled = cases.is_small and shape != "hybrid"
        model = random_model("small" if is_scaled else shape, longest)
    cost = ForwardCost.of(model)
    dtype = torch.float32 if cases.device == "cpu" else torch.bfloat16
    spec = ShardSpec(dtype, **sharding)
    reference = None
    if kl_coef:
        reference = shard(copy.deepcopy(model).requires_grad_(False).eval(), world, spec)
    sharded = shard(model, world, spec)
    loss = LossSpec(kl_coef=kl_coef)
    trainer = Trainer(sharded, world, loss, OptimSpec(lr=1e-5), reference=reference)
    rows = pack_rows(samples, token_budget)
    flops = 3 * sum(map(cost.flops, pack_rows(samples, 10**7)))
    return trainer, rows, flops


@functools.cache
def _world() -> Any:
    from flowtrain.training.world import World

    return World.join("auto")


def memory(cases: Cases) -> None:
    """The plan of memory against the measured peak, each case in a process of its own."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # as `bench.memory` says

    def measure(index: int) -> Row:
        from bench import memory as bench

        all_cases = (*bench.GPU_CASES, *bench.option_cases(True))
        case = bench.FIRST if cases.is_small else all_cases[index]
        with multiprocessing.get_context("spawn").Pool(1) as processes:
            return processes.apply(bench.measure, (case,))

    for index in range(1 if cases.is_small else 14):
        cases.run(f"case {index}", partial(measure, index))


def runs(cases: Cases) -> None:
    """Whole runs on one device: the quickstart, a real small model, a random one of 0.5B."""
    few = ("--train.num_steps", "2", "--eval.num_tasks", "10")
    short = few if cases.is_small else ()
    half = ("--tiny.hidden_size", "1280", "--tiny.num_layers", "24", "--tiny.num_heads", "20")
    smollm2 = os.environ.get("FLOWTRAIN_SMOLLM2", "models/SmolLM2-135M-Instruct")
    run = (*QUICKSTART, *PLANNER, *short)
    cases.run("quickstart", partial(_train, cases, "quickstart", *run), limit_s=480)
    if Path(smollm2).exists() and not cases.is_small:
        run = ("--config", "configs/smollm2.toml", "--model.path", smollm2, *short)
        cases.run("SmolLM2", partial(_train, cases, "SmolLM2", *run), limit_s=480)
    size = () if cases.is_small else half
    run = (*QUICKSTART, *size, *few)
    cases.run("random 0.5B", partial(_train, cases, "random", *run), limit_s=300)


def vllm(cases: Cases) -> None:
    """Runs that sample with vLLM, and the pause of a live vLLM for new weights."""
    options = (*QUICKSTART, "--rollout.engine", "vllm", "--train.num_steps")
    if cases.device == "cuda":  # on a CPU, vLLM has no heads of 16
        run = (*options, "40", *PLANNER, "--model.dtype", "bfloat16")
        cases.run("planner", partial(_with_vllm, partial(_train, cases, "planner", *run)), 300)
    run = (*options, "3", "--eval.num_tasks", "10", "--tiny.num_heads", "3")
    cases.run("random", partial(_with_vllm, partial(_train, cases, "random", *run)), 300)
    cases.run("pause", partial(_with_vllm, partial(_pause, cases)), limit_s=300)


def _with_vllm(run: Any) -> Any:
    if importlib.util.find_spec("vllm") is None:
        raise Needs("vllm")
    return run()


def _pause(cases: Cases) -> list[Row]:
    path = cases.folder.with_name("pause.json")
    _python("-m", "bench.weights", "--json", str(path))
    rows: list[Row] = json.loads(path.read_text())["rows"]
    return rows


def _train(cases: Cases, name: str, *options: str) -> list[Row]:
    """The log of a run of `flowtrain.train`: what each step took, and the evaluations."""
    folder = cases.folder / name
    _module("flowtrain.train", *options, "--run.dir", str(folder))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("step", "step_s", "reward", "tokens_per_s", "mfu")
    return [
        {key: x for key, x in line.items() if key in kept or key.startswith("eval")}
        for line in lines
    ]


def _module(name: str, *options: str) -> None:
    """Run it, unless a package that it needs is missing."""
    for package in ("transformers", "pydantic", "bm25s", "httpx2", "msgspec", "tomli_w"):
        if importlib.util.find_spec(package) is None:
            raise Needs(package)
    _python("-m", name, *options)


def _python(*arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], check=True)
