"""One optimizer step on trees, on packed samples and on padded ones:  python -m bench.step [--json
F] [--full] [--model FOLDER]

Batches: AgentFlow's shape with 3 and with 10 turns, and one of the main job
(`bench/step_batches.py`). Paths: our trees; our rows without sharing (what a packed trainer
computes); a plain transformers loop and TRL's loss over padded batches (`bench/step_rivals.py`).
All on the same samples and from the same weights: first a gradient of each, compared with that of
transformers, and the memory that it takes at its peak beyond what was there before; then whole
steps (forward, backward, clipping, AdamW), the paths in turn. FLOPs are those that a path's own
layout needs. One thread on a CPU; on a GPU: --shape 0.5b --scale 1.

--shape hybrid has Gated DeltaNet, 20 rollouts of a single turn in place of the main job, and one
path more: a chain, one sample of as many tokens as the tree.

--model takes one batch in place of these: 8 rollouts of that model on a sum,
with responses of at most 24 tokens. Every path has a model and moments of its own: SmolLM2-135M
takes 8 GB, and 2 minutes of one core with --repeats 2.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain

import torch

from bench import model_folder
from bench.agentflow_shape import SHAPES
from bench.measure import new_parser, report
from bench.step_batches import Batch, agentflow, main_job, recorded
from bench.step_paths import compare
from flowtrain.trainer.distributed import World


def main() -> None:
    parser = new_parser(__doc__, scale=0.1, repeats=3)
    model_folder.add_option(parser)
    add = parser.add_argument
    add("--repeats", type=int, default=1, help="timed steps of each path")
    add("--batch-size", type=int, default=8, help="samples of a padded batch")
    add("--scale", type=float, default=0.05, help="of AgentFlow's lengths")
    add("--shape", choices=SHAPES, default="small", help="their model")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where all paths run")
    add("--dtype", choices=("float32", "bfloat16"), help="of the passes; none: bfloat16 on a GPU")
    add("--token-budget", type=int, default=16384, help="tokens per row")
    add("--warm", default="quickstart", metavar="DIR", help="the main job's planner")
    add("--peak-tflops", type=float, default=0.0, help="of the device; 0: as it is known")
    add("--questions", type=int, default=1, help="groups of 8 of --model's batch")
    add("--new-tokens", type=int, default=24, help="of its responses, at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batches = list(_batches(args))  # the main job's has a world of its own
    world = World.join(args.device)
    rows = (compare(batch, world, args) for batch in batches)
    report(args.json, chain.from_iterable(rows))
    world.leave()


def _batches(args: argparse.Namespace) -> Iterator[Batch]:
    if args.model:
        yield recorded(args.model, args.questions, args.new_tokens)
    elif args.shape == "hybrid":
        for turns, size in ((3, 8), (10, 2), (1, 20)):
            yield agentflow(turns, "hybrid", args.scale, size)
    else:
        for turns in (3, 10):
            yield agentflow(turns, args.shape, args.scale)
        yield main_job(args.warm)


if __name__ == "__main__":
    main()
