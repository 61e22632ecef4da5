"""What a token budget costs on trees:  python -m bench.packing [--time] [--json F]

A group of 8 rollouts of AgentFlow's shape (`bench/agentflow_shape.py`), with 3 and with 10 turns,
cut into rows of several budgets: by `pack_rows`, and each row filled before the next is begun.
"auto" is what the memory plan gives a 0.5B model, alone on a GPU of 141 GB and beside a vLLM that
has 0.4 of it. Tokens are counted. "h200_ms" is predicted for that model from two steps in
`bench/results/h200/steps.json`: a row takes as long per token as one row with a whole tree of 10
turns did, and at least what one of at most 8,192 tokens did on average, which was the host's time.
The other four steps there took 0.90 to 1.14 of that. --time also measures whole steps of a small
model on the CPU, at a quarter of all lengths and budgets, in turn. The second table has the plan of
the steps that were measured with a whole tree in a row beside their peak.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from flowkernels import LossSpec

from bench.agentflow_shape import agentflow_samples, random_model
from bench.measure import report, time_in_turn
from flowtrain.config import Config
from flowtrain.run.memory_plan import MemoryPlan, plan_memory
from flowtrain.run.token_budget import largest_budget
from flowtrain.training import tree
from flowtrain.training.sharding import ShardSpec, shard
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import PackedRow, pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample

GPU_BYTES = 141 * 10**9
MEASURED = Path(__file__).parent / "results" / "h200" / "steps.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    parser.add_argument("--time", action="store_true", help="measure steps on the CPU, minutes")
    parser.add_argument("--repeats", type=int, default=2, help="timed steps (default: 2)")
    args = parser.parse_args()
    budgets = {"8192": 8192, "16384": 16384, "32768": 32768}
    budgets |= {"auto, beside vLLM": auto("vllm"), "auto": auto("torch")}
    rows = []
    for num_turns in (3, 10):
        seconds = timed(num_turns, budgets, args.repeats) if args.time else {}
        samples = agentflow_samples(num_turns, 1.0)
        for (name, budget), way in itertools.product(budgets.items(), WAYS):
            packed = packed_by(way, samples, budget)
            lengths = [len(row.input_ids_N) for row in packed]
            row: dict[str, Any] = {"turns": num_turns, "budget": name, "most": budget, "rows": way}
            row |= {"number": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
            row["repeated"] = sum(row.num_repeated_tokens for row in packed) / sum(lengths)
            row["h200_ms"] = predicted_ms(lengths)
            if found := seconds.get(f"{name} {way}"):
                row["cpu_s"] = median(found)
            rows.append(row)
    report(args.json, rows, [plan_row(case) for case in steps() if "whole" in case])


def filled(lengths: Sequence[int], shared: Sequence[int], token_budget: int) -> list[int]:
    """Begin a row where the one before is full."""
    starts: list[int] = []
    num_tokens = token_budget
    for index, (length, common) in enumerate(zip(lengths, shared, strict=True)):
        num_tokens += length - common
        if num_tokens > token_budget:
            starts.append(index)
            num_tokens = length
    return starts


WAYS = {"filled": filled, "pack_rows": tree._row_starts}


def packed_by(way: str, samples: Sequence[Sample], budget: int) -> list[PackedRow]:
    with patch.object(tree, "_row_starts", WAYS[way]):
        return pack_rows(samples, budget)


def auto(engine: str) -> int:
    """Return the budget that the plan has room for on one GPU."""
    plans = [planned("0.5b", budget, engine) for budget in (1024, 65536)]
    return largest_budget(*(plan.room(config, 0) for config, plan in plans))


def planned(
    shape: str, budget: int, engine: str = "torch", recompute: bool = False
) -> tuple[Config, MemoryPlan]:
    with torch.device("meta"):
        model = random_model(shape, 8192)
    config = Config.model_validate(
        {
            "model": {"dtype": "bfloat16"},
            "train": {"token_budget": budget, "recompute": recompute},
            "rollout": {"engine": engine},
        }
    )
    sampled = [model.num_parameters()]
    ranks: dict[str, Any] = {"num_ranks": 1, "has_reference": False, "gpu_bytes": GPU_BYTES}
    return config, plan_memory(config, model, sampled, **ranks)


def plan_row(case: str) -> dict[str, Any]:
    """Plan a measured step on one row, which published nothing and had no engine."""
    step = steps()[case]
    _, plan = planned(case[:4], step["tokens"], recompute=case.endswith("recompute"))
    not_there = plan.parts["published"] + plan.parts["engine"]
    gb = (plan.num_bytes - not_there) / 1e9
    return {"case": case, "gb": step["peak_gb"], "planned": gb, "of": gb / step["peak_gb"]}


def steps() -> dict[str, dict[str, Any]]:
    """Steps that were measured on an H200, by case."""
    return {row["case"]: row for row in json.loads(MEASURED.read_text())["rows"]}


def predicted_ms(lengths: Sequence[int]) -> float:
    """Predict a step of the 0.5B model on rows of these lengths, on an H200."""
    whole, cut = (steps()[f"0.5b, 10 turns: {name}"] for name in ("whole trees", "budget 8192"))
    per_token, least = whole["ms"] / whole["tokens"], cut["ms"] / cut["rows"]
    return float(sum(max(least, per_token * length) for length in lengths))


def timed(num_turns: int, budgets: dict[str, int], repeats: int) -> dict[str, list[float]]:
    """Seconds of steps on the same samples and model, the ways in turn."""
    torch.set_num_threads(1)
    world, samples = World.join("cpu"), agentflow_samples(num_turns, 0.25)
    model = shard(random_model("small", 8192), world, ShardSpec(torch.float32))
    trainer = Trainer(model, world, LossSpec(), OptimSpec(lr=1e-5))
    packed = {
        f"{name} {way}": packed_by(way, samples, budget // 4)
        for (name, budget), way in itertools.product(budgets.items(), WAYS)
    }
    runs = {name: (lambda rows=rows: trainer.step([rows])) for name, rows in packed.items()}
    found = time_in_turn(runs, repeats, warmup=0)
    world.leave()
    return found


if __name__ == "__main__":
    main()
