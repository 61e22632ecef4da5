"""What ranks hold while a model is loaded, against the memory plan. Run as a script, this file is
the ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks import fork, launch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from flowtrain.config import Config
from flowtrain.run.memory_plan import plan_memory
from flowtrain.training import sharding
from flowtrain.training.devices import MemoryPeak
from flowtrain.training.sharding import ShardSpec, named_tensors, shard, skeleton
from flowtrain.training.world import World, end_process

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


def run(out: Path) -> None:
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


def test_one_host_holds_the_model_once_and_the_others_their_shards(tmp_path: Path) -> None:
    launch(__file__, [(SIZE, (str(tmp_path),))])
    main, *others = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(SIZE))
    assert not main["is_meta"] and main["host"] == main["whole"]
    # glibc and gloo keep some of what is given back to them.
    for each in others:
        assert 0.8 * each["loading"] < each["grown"] < 1.6 * each["loading"] < each["whole"]
    assert 0.8 * main["host"] < main["grown"] < main["host"] + 1.6 * main["loading"]


if __name__ == "__main__":
    fork(lambda out: run(Path(out)))
