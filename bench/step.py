"""One optimizer step on trees, on packed samples and on padded ones:  python -m bench.step [--json
F] [--model FOLDER]

Batches: AgentFlow's shape with 3 and with 10 turns, and one of the main job
(`bench/step_batches.py`). Paths: our trees; our rows without sharing (what a packed trainer
computes); a plain transformers loop and TRL's loss over padded batches (`bench/step_rivals.py`).
All on the same samples and from the same weights: first a gradient of each, compared with that of
transformers, and the memory that it takes at its peak beyond what was there before; then whole
steps (forward, backward, clipping, AdamW), the paths in turn. FLOPs are those that a path's own
layout needs. Minutes on one core; on a GPU: --shape 0.5b --scale 1.

--shape hybrid has Gated DeltaNet, 20 rollouts of a single turn in place of the main job, and one
path more: a chain, one sample of as many tokens as the tree.

--model takes one batch in place of these: 8 rollouts of that model on a question of reasoning-gym,
with responses of at most 24 tokens. Every path has a model and moments of its own: SmolLM2-135M
takes 8 GB, and 2 minutes of one core with --repeats 2.
"""

from __future__ import annotations

import argparse

import torch

from bench import model_folder
from bench.agentflow_shape import SHAPES
from bench.measure import report
from bench.step_batches import agentflow, main_job, recorded
from bench.step_paths import measure
from flowtrain.training.world import World


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    if args.model:
        batches = [recorded(args.model, args.questions, args.new_tokens)]
    elif args.shape == "hybrid":
        groups = ((3, 8), (10, 2), (1, 20))
        batches = [agentflow(turns, "hybrid", args.scale, size) for turns, size in groups]
    else:
        batches = [
            *(agentflow(turns, args.shape, args.scale) for turns in (3, 10)),
            main_job(args.warm),
        ]
    world = World.join(args.device)
    rows = measure(batches, world, args)
    world.leave()
    report(args.json, rows)


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
    model_folder.add_option(parser)
    parser.add_argument(
        "--questions", type=int, default=1, help="groups of 8 of --model's batch (default: 1)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=24, help="of its responses, at most (default: 24)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
