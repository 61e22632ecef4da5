"""Real vLLM loads the model of a checkpoint, with every token that ends a response."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from checkpoints import save
from flowkernels import LossSpec

from flowtrain.config import Config
from flowtrain.inference.factory import ModelSpec, make_engine
from flowtrain.records import Sample, Sampling
from flowtrain.trainer import toy
from flowtrain.trainer.distributed import World
from flowtrain.trainer.packing import pack_rows
from flowtrain.trainer.trainer import OptimSpec, Trainer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
PROMPT = tuple(range(30, 50))
ENGINES = {"mine": {"kind": "vllm", "model": "unused"}}


def test_vllm_samples_from_the_model_of_a_checkpoint(tmp_path: Path) -> None:
    """The optimizer's tensors lie elsewhere: vLLM reads every *.safetensors of a folder."""
    alone = World(0, 1, torch.device("cpu"))
    torch.manual_seed(0)
    tokenizer = toy.new_tokenizer(["What is the capital of Chad?"], vocab_size=280)
    model = toy.new_model(tokenizer, 64, 2, 2, max_positions=128)
    trainer = Trainer(model, alone, LossSpec(), OptimSpec(lr=1e-2))
    ones = (1.0,) * 4
    trainer.step([pack_rows([Sample(PROMPT, (7, 8, 9, 10), (-5.6,) * 4, ones, ones)], 64)])
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        greedy = model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)
    ids = greedy[0, len(PROMPT) :].tolist()
    ending = ids[5]
    model.generation_config.eos_token_id = [int(tokenizer.eos_token_id), ending]
    path = save(tmp_path, 1, trainer, tokenizer, alone) / "model"
    config = Config.model_validate(
        {
            "model": {"dtype": "float32"},
            "vllm": {"kv_cache_gb": 0.125, "max_num_seqs": 8},
            "engines": ENGINES,
        }
    )
    spec = ModelSpec.load("engines.mine.model", str(path))
    engine = make_engine(config, spec, alone.device, chat=config.engines["mine"])
    try:
        done = asyncio.run(engine.generate(PROMPT, Sampling(12, 0.0, seed=0)))
    finally:
        engine.close()
    first = ids.index(ending)
    assert done.response_ids == tuple(ids[: first + 1]), "the second stop token counts"
