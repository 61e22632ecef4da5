"""Peak memory of a training step, predicted and measured:  python -m bench.memory [--json F]

Each case in a process of its own: what `plan_memory` says of a model and a token budget, and how
the process grows from before the model is built to the peak of its second step on full rows (on a
GPU: what tensors took). On a CPU glibc is told to give back what is freed: by itself it keeps
blocks of up to 32 MB, and a process is up to twice as large as its tensors ever were.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
from dataclasses import asdict, dataclass
from typing import Any

import torch
from flowkernels import LossSpec
from transformers import AutoModelForCausalLM, Qwen3Config

from bench.measure import print_table, write_json
from flowtrain.config import Config
from flowtrain.run.memory_plan import plan_memory
from flowtrain.training import attention
from flowtrain.training.devices import MemoryPeak
from flowtrain.training.model import ShardSpec, shard
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder, and the rows it is trained on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    token_budget: int
    recompute: bool = False

    def config(self) -> Qwen3Config:
        return Qwen3Config(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.hidden_size * 8 // 3,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_heads,
            head_dim=self.hidden_size // self.num_heads,
            max_position_embeddings=65536,
            tie_word_embeddings=True,
        )


FIRST = Case(2, 32, 2, 64, 64)
"""Loads what the first step of a process loads."""
CPU_CASES = (
    Case(4, 256, 4, 2000, 2048),
    Case(8, 512, 8, 32000, 512),
    Case(8, 512, 8, 32000, 2048, recompute=True),
)
GPU_CASES = (
    Case(24, 896, 14, 151936, 16384),
    Case(24, 896, 14, 151936, 16384, recompute=True),
    Case(28, 1536, 12, 151936, 16384, recompute=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the rows to this file")
    args = parser.parse_args()
    cases = GPU_CASES if torch.cuda.is_available() else CPU_CASES
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read when a process starts
    # Spawned, so that none starts with memory that another has freed.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        rows = processes.map(measure, cases, chunksize=1)
    print_table(rows)
    if args.json:
        write_json(args.json, rows)


def measure(case: Case) -> dict[str, Any]:
    """The plan, and the process's peak beside it."""
    torch.set_num_threads(1)
    world = World.join("auto")
    _train(FIRST, world)
    peak = MemoryPeak(world.device)
    parts = _train(case, world)
    predicted, measured = sum(parts.values()), peak.num_bytes()
    world.leave()
    return {
        "device": world.device.type,
        **asdict(case),
        **{f"{part}_mb": num_bytes / 1e6 for part, num_bytes in parts.items() if num_bytes},
        "predicted_mb": predicted / 1e6,
        "measured_mb": measured / 1e6,
        "predicted_of_measured": predicted / measured,
    }


def _train(case: Case, world: World) -> dict[str, int]:
    """Two steps on two rows each; returns what was planned for them, by part. Nothing is published
    here.
    """
    gpu_bytes = (
        torch.cuda.get_device_properties(world.device).total_memory
        if world.device.type == "cuda"
        else 0
    )
    dtype = torch.bfloat16 if gpu_bytes else torch.float32
    options = {
        "model": {"dtype": str(dtype).removeprefix("torch.")},
        "train": {"token_budget": case.token_budget, "recompute": case.recompute},
        "algorithm": {"kl_coef": 0.0},
    }
    model = AutoModelForCausalLM.from_config(case.config(), attn_implementation=attention.NAME)
    plan = plan_memory(
        Config.model_validate(options),
        model,
        [],
        num_ranks=1,
        has_reference=False,
        gpu_bytes=gpu_bytes,
    )
    trainer = Trainer(
        shard(model, world, ShardSpec(dtype, case.recompute)), world, LossSpec(), OptimSpec(lr=1e-4)
    )
    rows = pack_rows(
        [_sample(case.vocab_size, case.token_budget // 2, seed) for seed in range(4)],
        case.token_budget,
    )
    assert [len(row.input_ids_N) for row in rows] == [case.token_budget] * 2
    for _ in range(2):
        trainer.step([rows])
    return {name: number for name, number in plan.parts.items() if name != "published"}


def _sample(vocab_size: int, num_tokens: int, seed: int) -> Sample:
    """A third of it is a response."""
    rng = random.Random(seed)
    ids = tuple(rng.randrange(vocab_size) for _ in range(num_tokens + 1))
    start = num_tokens * 2 // 3
    response = ids[start:]
    return Sample(
        ids[:start],
        response,
        (-7.0,) * len(response),
        (1.0 - seed,) * len(response),
        (1.0,) * len(response),
    )


if __name__ == "__main__":
    main()
