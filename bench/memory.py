"""Peak memory of a training step, predicted and measured:  python -m bench.memory [--json F]
[--model FOLDER | --options]

Each case in a process of its own: what `plan_memory` says of a model and a token budget, and how
the process grows from before the model is built to the peak of its second step on full rows (on a
GPU: what tensors took). On a CPU glibc is told to give back what is freed: by itself it keeps
blocks of up to 32 MB, and a process is up to twice as large as its tensors ever were.

--model takes the model of a folder, with and without the linear loss, which makes logits a chunk at
a time where a head makes all of them. On a CPU, SmolLM2-135M takes 3 minutes of one core and 5 GB.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from flowkernels import LossSpec
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from bench import model_folder
from bench.measure import new_parser, report
from flowtrain.config import Config, Lora
from flowtrain.records import Sample
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.loading import load_model
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.optimizers import KINDS
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.setup.memory_plan import plan_memory
from flowtrain.trainer.sharding import ShardSpec, shard
from flowtrain.trainer.trainer import OptimSpec, Trainer


@dataclass(frozen=True, slots=True)
class Case:
    """A decoder, and the rows it is trained on."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    token_budget: int
    recompute: bool = False
    linear_loss: bool = True
    optimizer: str = "adamw"
    dtype: str = ""
    """Of the passes; "": fp32 on a CPU, bf16 on a GPU."""
    offload: str = "none"
    reference: str = ""
    """Where a reference policy's weights are: "device", "cpu"; "": there is none."""
    lora_rank: int = 0
    """Of the adapter that is trained; 0: all weights are."""
    model: str = ""
    """Folder of the decoder; "": it is made, and has the sizes above."""

    def make(self) -> PreTrainedModel:
        if self.model:
            return load_model(self.model, torch.float32, key="--model")
        config = Qwen3Config(
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
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


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


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"optimizer": "adamw_8bit"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "reference": "device"},
    {"dtype": "bfloat16", "optimizer": "adamw_bf16_sr"},
    {"lora_rank": 16},
    {"dtype": "bfloat16", "lora_rank": 16, "reference": "device"},
)
_OFFLOADED: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16", "reference": "cpu"},
    {"dtype": "bfloat16", "offload": "all"},
)
"""On a CPU these take what the others take: it is the same memory."""


def option_cases(on_gpu: bool) -> tuple[Case, ...]:
    """Each way to spare memory on one model."""
    ways = _OPTIONS + _OFFLOADED if on_gpu else _OPTIONS
    shape = (24, 896, 14, 151936, 4096) if on_gpu else (2, 512, 8, 16000, 128)
    return tuple(Case(*shape, **options) for options in ways)


def folder_cases(model: str, token_budget: int) -> list[Case]:
    """The model of a folder, with and without the linear loss."""
    return [
        Case(0, 0, 0, 0, token_budget, linear_loss=is_linear, model=model)
        for is_linear in (True, False)
    ]


def main() -> None:
    parser = new_parser(__doc__)
    model_folder.add_option(parser)
    add = parser.add_argument
    add("--token-budget", type=int, default=1024, help="of --model's rows")
    add("--options", action="store_true", help="the ways to spare memory, on one model")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    cases: Sequence[Case] = GPU_CASES if on_gpu else CPU_CASES
    if args.options:
        cases = option_cases(on_gpu)
    if args.model:
        cases = folder_cases(args.model, args.token_budget)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # read when a process starts
    # Spawned, so that none starts with memory that another has freed.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as processes:
        report(args.json, processes.imap(measure, cases))


def measure(case: Case) -> dict[str, Any]:
    """The plan, and the process's peak beside it. There is none without the linear loss."""
    torch.set_num_threads(1)
    world = World.join("auto")
    first = replace(FIRST, optimizer=case.optimizer, dtype=case.dtype, lora_rank=case.lora_rank)
    _train(first, world)
    peak = MemoryPeak(world.device)
    parts = _train(case, world)
    predicted, measured = sum(parts.values()), peak.num_bytes()
    world.leave()
    row = {"device": world.device.type, **asdict(case)}
    if case.model:
        row["model"] = Path(case.model).name
    if case.linear_loss:
        row |= {f"{part}_mb": num_bytes / 1e6 for part, num_bytes in parts.items() if num_bytes}
        row |= {"predicted_mb": predicted / 1e6, "predicted_of_measured": predicted / measured}
    return row | {"measured_mb": measured / 1e6}


def _train(case: Case, world: World) -> dict[str, int]:
    """Two steps on two rows each; returns what was planned for them, by part. Nothing is published
    here.
    """
    gpu_bytes = (
        torch.cuda.get_device_properties(world.device).total_memory
        if world.device.type == "cuda"
        else 0
    )
    name = case.dtype or ("bfloat16" if gpu_bytes else "float32")
    train = {
        "token_budget": case.token_budget,
        "recompute": case.recompute,
        "optimizer": case.optimizer,
        "offload": "frozen" if case.reference == "cpu" else case.offload,
    }
    synced = {"sync": "adapter"} if case.lora_rank else {}
    lora: dict[str, Any] = {"rank": case.lora_rank, **synced}
    options: dict[str, Any] = {
        "model": {"dtype": name, "path": "any"},
        "train": train,
        "algorithm": {"kl_coef": 0.0},
        "lora": lora,
    }
    model = case.make()
    if case.lora_rank:
        add_adapter(model.to(getattr(torch, name)), Lora.model_validate(lora), "any")
    plan = plan_memory(
        Config.model_validate(options),
        model,
        [],
        num_ranks=1,
        has_reference=bool(case.reference),
        gpu_bytes=gpu_bytes,
    )
    dtype = getattr(torch, name)
    weights = KINDS[case.optimizer].weight_dtype
    spec = ShardSpec(dtype, case.recompute, offload=case.offload == "all", weight_dtype=weights)
    reference = None
    if case.reference and not case.lora_rank:
        frozen = copy.deepcopy(model).requires_grad_(False).eval()
        of_reference = replace(spec, weight_dtype=dtype, offload=case.reference == "cpu")
        reference = shard(frozen, world, of_reference)
    sharded = shard(model, world, spec)
    if case.reference and case.lora_rank:
        reference = sharded
    if not case.linear_loss:
        sharded.get_output_embeddings().__class__ = nn.Linear  # as a head that cannot be fused has
    optim = OptimSpec(lr=1e-4, kind=case.optimizer)
    loss = LossSpec(kl_coef=0.1 if case.reference else 0.0)
    trainer = Trainer(sharded, world, loss, optim, reference=reference)
    halves = [_sample(model.config.vocab_size, case.token_budget // 2, n) for n in range(4)]
    rows = [pack_row(halves[:2]), pack_row(halves[2:])]
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
