"""What ranks hold while a model is loaded and in a step, against the memory plan. Run as a script,
this file is the ranks: they have no memory to use again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from flowkernels import LossSpec
from ranks import fork, launch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from flowtrain.config import Config
from flowtrain.records import Sample
from flowtrain.trainer import sharding
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.devices import MemoryPeak
from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import pack_row
from flowtrain.trainer.setup.memory_plan import plan_memory
from flowtrain.trainer.sharding import ShardSpec, named_tensors, shard, skeleton
from flowtrain.trainer.trainer import OptimSpec, Trainer
from flowtrain.utils.commands import end_process

pytestmark = pytest.mark.dist

SHAPE = Qwen3Config(
    vocab_size=8000, hidden_size=512, intermediate_size=1536, num_hidden_layers=16, head_dim=64,
    num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
)  # fmt: skip
CONFIG = Config.model_validate(
    {"model": {"dtype": "bfloat16"}, "train": {"token_budget": 64}, "algorithm": {"kl_coef": 0.1}}
)
SIZE = 4


def build() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(SHAPE, dtype=torch.float32)


def load(out: Path) -> None:
    """Load a policy and its reference, as a run does."""
    torch.set_num_threads(1)
    world = World.join("cpu")
    sharding._SMALL = 0
    with torch.device("meta"):
        plan = plan_memory(CONFIG, build(), [], num_ranks=world.size, has_reference=True)
    spec = ShardSpec(torch.bfloat16)
    peak = MemoryPeak(world.device)
    with torch.device("cpu" if world.is_main else "meta"):
        model = build()
    frozen = skeleton(model).requires_grad_(False)
    of_reference = ShardSpec(torch.bfloat16, weight_dtype=torch.bfloat16)
    reference = shard(frozen, world, of_reference, dict(named_tensors(model)))
    model = shard(model, world, spec)
    found = {
        "grown": peak.num_bytes(),
        "loading": plan.loading,
        "host": plan.host,
        "whole": 4 * build_size(),
        "is_meta": any(p.is_meta for each in (model, reference) for p in each.parameters()),
    }
    (out / f"{world.rank}.json").write_text(json.dumps(found))
    world.barrier()
    end_process(0)


def build_size() -> int:
    with torch.device("meta"):
        return int(build().num_parameters())


def step(out: Path) -> None:
    """Take a step on a row of 8,192 tokens through 4 layers of width 128."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    alone = World(0, 1, torch.device("cpu"))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    peak = MemoryPeak(alone.device)
    options = Config.model_validate(
        {"model": {"dtype": "float32"}, "train": {"token_budget": 8192}}
    )
    parts = plan_memory(options, model, [], num_ranks=1, has_reference=False).parts
    planned = sum(number for name, number in parts.items() if name != "published")
    sharded = shard(model, alone, ShardSpec(torch.float32))
    trainer = Trainer(sharded, alone, LossSpec(), OptimSpec(lr=1e-4))
    ids = tuple(range(64)) * 8
    whole = (-4.0,) * 171, (1.0,) * 171, (1.0,) * 171
    samples = [Sample((i, *ids[i : i + 341]), ids[:171], *whole) for i in range(16)]
    trainer.step([[pack_row(samples, share=False)]])
    found = {"planned": planned, "grown": peak.num_bytes()}
    (out / "step.json").write_text(json.dumps(found))


RANKS: dict[str, Callable[[Path], None]] = {"load": load, "step": step}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all ranks wrote to."""
    out = tmp_path_factory.mktemp("ranks")
    launch(__file__, [(SIZE, ("load", str(out))), (1, ("step", str(out)))])
    return out


def test_one_host_holds_the_model_once_and_the_others_their_shards(out: Path) -> None:
    main, *others = (json.loads((out / f"{rank}.json").read_text()) for rank in range(SIZE))
    assert not main["is_meta"] and main["host"] == main["whole"]
    # glibc and gloo keep some of what is given back to them.
    for each in others:
        assert 0.8 * each["loading"] < each["grown"] < 1.6 * each["loading"] < each["whole"]
    assert 0.8 * main["host"] < main["grown"] < main["host"] + 1.6 * main["loading"]


def test_the_resident_set_grows_by_what_was_planned_for_a_step(out: Path) -> None:
    """glibc keeps some of what is given back to it, so at least the plan."""
    found = json.loads((out / "step.json").read_text())
    assert 0.8 * found["planned"] < found["grown"] < 4 * found["planned"]


if __name__ == "__main__":
    fork(lambda which, out: RANKS[which](Path(out)))
