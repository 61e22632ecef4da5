"""Exact log-probs (`train.exact`): samplers against trainers in random packings, then the
quickstart with and without, in turn:  python -m bench.exact [--packings 1000] [--json F]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.exact_cases import (
    DTYPES,
    FAMILIES,
    Difference,
    Pair,
    compare,
    draw_calls,
    draw_sampling,
    tiny_model,
    tiny_tokenizer,
)
from bench.families import TRAINED, config_of
from bench.measure import print_table, write_json
from flowtrain.config.options import parse
from flowtrain.rft import rft
from flowtrain.train import train
from flowtrain.training import attention
from flowtrain.training.world import World
from flowtrain.types import UserError

QUICKSTART = ("--config", "configs/quickstart.toml")
SAMPLED = TRAINED.keys() - {"minicpm3"}
"""Families that the torch engine samples: it holds keys and values of one size."""
_SEGMENT = 10
"""Steps that one of the two runs takes before it is the other's turn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--packings", type=int, default=1000, help="in all (default: 1000)")
    parser.add_argument("--steps", type=int, default=40, help="of the quickstart (default: 40)")
    parser.add_argument("--model", metavar="DIR", help="of a warm-up; default: a short one is made")
    parser.add_argument("--families", action="store_true", help="all that train, and no more")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    if args.families:
        print_table([family_row(family, args.threads) for family in sorted(SAMPLED)])
        return
    rows = packing_rows(args.packings, args.threads) if args.packings else []
    print_table(rows)
    if args.steps:
        with tempfile.TemporaryDirectory() as folder:
            steps = step_rows(args.steps, Path(folder), args.model, args.threads)
        print()
        print_table(steps)
        rows += steps
    if args.json:
        write_json(args.json, rows)


def packing_rows(num_packings: int, num_threads: int) -> list[dict[str, Any]]:
    """Compare random packings of every family and dtype, and a few without the option."""
    torch.set_num_threads(num_threads)
    world = World.join("cpu")
    kinds = [(family, dtype) for family in FAMILIES for dtype in DTYPES]
    rows = []
    for exact, number in ((True, -(-num_packings // len(kinds))), (False, 10)):
        for family, dtype in kinds:
            model = tiny_model(family, tiny_tokenizer())
            both = Pair.of(model, DTYPES[dtype], world, exact)
            found = [_difference(both, seed) for seed in range(number)]
            rows.append(
                {
                    "exact": exact,
                    "family": family,
                    "dtype": dtype,
                    "threads": num_threads,
                    "packings": number,
                    "tokens": sum(each.num_tokens for each in found),
                    "different": sum(each.num_different for each in found),
                    "largest": max(each.largest for each in found),
                }
            )
    world.leave()
    return rows


def family_row(family: str, num_threads: int) -> dict[str, Any]:
    """Compare eight packings of a family in fp32, or say why it is refused."""
    torch.set_num_threads(num_threads)
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    config = config_of(family, {**TRAINED[family], **sizes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2)
    try:
        both = Pair.of(model, torch.float32, World(0, 1, torch.device("cpu")), True)
    except UserError as error:
        return {"family": family, "tokens": 0, "different": 0, "refused": str(error)}
    found = [_difference(both, seed) for seed in range(8)]
    num_tokens, num_different = (
        sum(getattr(each, name) for each in found) for name in ("num_tokens", "num_different")
    )
    return {"family": family, "tokens": num_tokens, "different": num_different, "refused": ""}


def _difference(both: Pair, seed: int) -> Difference:
    rng = random.Random(seed)
    sampling = draw_sampling(rng)
    return compare(both.model, draw_calls(both.engine, sampling, rng), sampling, rng)


def step_rows(
    num_steps: int, folder: Path, model: str | None, num_threads: int
) -> list[dict[str, Any]]:
    """Train the quickstart with and without the option, a few steps of each in turn."""
    options = [*QUICKSTART, "--run.threads", str(num_threads)]
    if model is None:
        short = ["--rft.num_rollouts", "4000", "--rft.num_steps", "500", "--eval.num_tasks", "20"]
        _run(rft, [*options, *short, "--run.dir", f"{folder}/warm"])
        model = f"{folder}/warm/model"
    options += ["--model.path", model, "--run.resume", "auto", "--checkpoint.every", "0"]
    # the mode that drops no group
    options += ["--eval.every", "0", "--eval.at_ends", "false", "--algorithm.mode", "released"]
    cpu_s = {False: 0.0, True: 0.0}
    for until in range(_SEGMENT, num_steps + _SEGMENT, _SEGMENT):
        for exact in cpu_s:
            how = ["--train.exact", str(exact).lower(), "--run.dir", f"{folder}/{exact}"]
            last = ["--train.num_steps", str(min(until, num_steps))]
            started = time.process_time()
            _run(train, [*options, *how, *last])
            cpu_s[exact] += time.process_time() - started
    return [_summary(folder / str(exact), exact, cpu_s[exact]) for exact in cpu_s]


def _summary(run: Path, exact: bool, cpu_s: float) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    return {
        "exact": exact,
        "steps": len(steps),
        "steps with mismatch 0": sum(line["logprob_mismatch"] == 0 for line in steps),
        "largest logprob_mismatch": max(line["logprob_mismatch"] for line in steps),
        "collect_s": statistics.median(line["collect_s"] for line in steps),
        "train_s": statistics.median(line["train_s"] for line in steps),
        "step_s": statistics.median(line["step_s"] for line in steps),
        "cpu_s of the run": cpu_s,
    }


def _run(command: Any, argv: Sequence[str]) -> None:
    config = parse(argv)
    assert config is not None
    command(config)


if __name__ == "__main__":
    main()
