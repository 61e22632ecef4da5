"""A tree beyond the token budget, walked and in one pass:  python -m bench.walk [--json F]

The tree of 8 rollouts of AgentFlow's shape. Each way takes one forward and backward pass over all
of it, in turn, and gives the same loss; memory is what a pass takes at its peak beyond what was
there before. `read again` are the tokens of trunks, which a walk reads once more without a
gradient. One thread on a CPU.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from flowkernels import LossSpec

from bench.agentflow_shape import SHAPES, agentflow_samples, random_model
from bench.measure import extra_bytes, new_parser, report, seconds_in_turn
from flowtrain.trainer import sharding
from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import PackedRow, pack_row
from flowtrain.trainer.step_metrics import StepMetrics
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.trainer.walk import Kind, passes

_WAYS = ("walk", "whole row")


def main() -> None:
    budgets = [2048, 4096, 8192, 16384, 32768]
    parser = new_parser(__doc__, scale=0.1, turns=[3, 10, 30], budgets=budgets)
    add = parser.add_argument
    add("--turns", type=int, nargs="+", default=[10], help="of a rollout")
    add("--budgets", type=int, nargs="+", default=[8192], help="tokens, before --scale")
    add("--ways", nargs="+", choices=_WAYS, default=_WAYS, help="a whole row may not fit")
    add("--scale", type=float, default=0.1, help="of AgentFlow's lengths")
    add("--shape", choices=SHAPES, default="small", help="the model")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where all ways run")
    add("--dtype", choices=("float32", "bfloat16"), help="of the passes; none: bfloat16 on a GPU")
    add("--repeats", type=int, default=2, help="timed passes of each way")
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = World.join(args.device)
    report(args.json, _rows(args, world))
    world.leave()


def _rows(args: argparse.Namespace, world: World) -> Iterator[dict[str, Any]]:
    for num_turns in args.turns:
        samples = agentflow_samples(num_turns, args.scale)
        whole = pack_row(samples)
        longest = max(len(each.prompt_ids) + len(each.response_ids) for each in samples)
        for unscaled in args.budgets:
            budget = round(args.scale * unscaled)
            budget_of = {"walk": budget, "whole row": None}
            runs = {way: _pass(args, world, whole, budget_of[way]) for way in args.ways}
            losses = [run() for run in runs.values()]
            assert all(math.isclose(loss, losses[0], rel_tol=1e-4) for loss in losses), losses
            peaks = {way: extra_bytes(run, world.device) for way, run in runs.items()}
            seconds = seconds_in_turn(runs, args.repeats, warmup=0)
            least = {way: min(each) for way, each in seconds.items()}
            for way in args.ways:
                row = {
                    "turns": num_turns,
                    "tokens": len(whole.input_ids_N),
                    "budget": budget,
                    "way": way,
                    **_counts(whole, budget_of[way]),
                    "longest sample": longest,
                    "s": least[way],
                    "MB": peaks[way] / 1e6,
                }
                if "whole row" in least:
                    row["time to the row's"] = least[way] / least["whole row"]
                yield row


def _counts(row: PackedRow, budget: int | None) -> dict[str, int]:
    steps = passes(row, budget)
    trunks = [len(s.trunk_P) for s in steps if s.trunk_P is not None and s.kind is Kind.ENTER]
    return {"passes": len(steps), "read again": sum(trunks)}


def _pass(
    args: argparse.Namespace, world: World, row: PackedRow, budget: int | None
) -> Callable[[], float]:
    on_gpu = world.device.type == "cuda"
    dtype = getattr(torch, args.dtype or ("bfloat16" if on_gpu else "float32"))
    model = random_model(args.shape, int(row.position_ids_N.max()) + 1)
    model = sharding.shard(model, world, sharding.ShardSpec(dtype))
    trainer = Trainer(model, world, LossSpec(), OptimSpec(lr=1e-6), token_budget=budget)
    normaliser = float(row.loss_weight_T.sum())

    def run() -> float:
        loss = trainer.forward_backward([row], normaliser, StepMetrics())
        trainer.optimizer.zero_grad()
        return float(loss)

    return run


if __name__ == "__main__":
    main()
