"""The memory plan: activations counted on shapes against those of a real pass, and against the layers' own sums."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from flowkernels import LossSpec
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from flowtrain.training import attention
from flowtrain.training import model as models
from flowtrain.training.attention import Forest
from flowtrain.training.devices import PEAK_TFLOPS, MemoryPeak, peak_tflops
from flowtrain.training.memory import activations, plan_memory
from flowtrain.training.model import ShardSpec
from flowtrain.training.trainer import OptimSpec, Trainer
from flowtrain.training.tree import pack_rows
from flowtrain.training.world import World
from flowtrain.types import Sample

SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_hidden_layers": 5}
CONFIGS = {
    "Qwen3": Qwen3Config(**SHAPE, num_key_value_heads=4, head_dim=16),
    "Qwen3, two key heads": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
    "Qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "Llama": LlamaConfig(**SHAPE, num_key_value_heads=4),
}
NUM_TOKENS = 96


def with_layers(number: int) -> Qwen3Config:
    return Qwen3Config(**{**SHAPE, "num_hidden_layers": number}, num_key_value_heads=4, head_dim=16)


def kept_bytes(config: Any) -> int:
    """What autograd keeps of a real forward pass on one chain of tokens, parameters and the row's own tensors left out."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME).train()
    forest = Forest.of(torch.full((NUM_TOKENS,), NUM_TOKENS))
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    ids = torch.arange(NUM_TOKENS)[None] % 64
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, forest=forest)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_activations_are_those_of_a_real_pass(name: str) -> None:
    at_head, peak = activations(CONFIGS[name], torch.float32, NUM_TOKENS, recompute=False)
    assert at_head == pytest.approx(kept_bytes(CONFIGS[name]), rel=0.02)
    assert at_head < peak < 1.5 * at_head


def test_a_layer_of_qwen3_keeps_what_can_be_counted_by_hand() -> None:
    """Per token and in numbers of fp32: around each of two norms the input, the normalised and the weighted one; queries and keys before
    and after their norms and after rotation; values; attention's output twice, and one number per head; four of the MLP's width."""
    four, five = (activations(with_layers(num), torch.float32, NUM_TOKENS, False)[0] for num in (4, 5))
    by_hand = 2 * 3 * 64 + 2 * 3 * 64 + 64 + 2 * 64 + 4 + 4 * 160
    norms = 2 + 2 * 4  # the reciprocal deviation of each
    assert (five - four) / 4 / NUM_TOKENS == pytest.approx(by_hand + norms, rel=0.01)


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer_whole() -> None:
    config = CONFIGS["Qwen3"]
    at_head, peak = activations(config, torch.float32, NUM_TOKENS, recompute=True)
    whole, whole_peak = activations(config, torch.float32, NUM_TOKENS, recompute=False)
    assert at_head == pytest.approx(4 * NUM_TOKENS * 64 * (config.num_hidden_layers + 3), rel=0.25)
    one_layer = whole - activations(with_layers(4), torch.float32, NUM_TOKENS, recompute=False)[0]
    assert peak == pytest.approx(at_head + one_layer + (whole_peak - whole), rel=0.15)


def test_bf16_takes_less_and_more_tokens_take_more() -> None:
    config = CONFIGS["Qwen2"]
    full, half, twice = (
        activations(config, dtype, n, False)[1] for dtype, n in ((torch.float32, 96), (torch.bfloat16, 96), (torch.float32, 192))
    )
    assert 0.5 * full < half < 0.8 * full and twice == pytest.approx(2 * full, rel=0.02)


def test_shares_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["Llama"]
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    num = model.num_parameters()
    options: dict[str, Any] = {"token_budget": 96, "on_gpu": False}
    fp32, bf16 = ShardSpec(torch.float32), ShardSpec(torch.bfloat16)
    alone = plan_memory(model, fp32, num_ranks=1, has_reference=False, **options).parts
    assert (alone["weights"], alone["gradients"], alone["moments"]) == (4 * num, 4 * num, 8 * num)
    assert alone["reference"] == alone["gathered"] == 0
    whole = plan_memory(model, bf16, num_ranks=2, has_reference=True, **options).parts
    assert (whole["weights"], whole["moments"], whole["reference"], whole["gathered"]) == (2 * num, 4 * num, 2 * num, 2 * num)
    monkeypatch.setattr(models, "_SMALL", 0)
    layers = plan_memory(model, bf16, num_ranks=2, has_reference=True, **options).parts
    num_layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert layers["gathered"] == 2 * (num - 3 * num_layer)
    kept = plan_memory(model, replace(bf16, reshard=False), num_ranks=2, has_reference=True, **options).parts
    assert kept["gathered"] == 2 * num
    options = {"token_budget": 96, "on_gpu": True, "num_ranks": 2, "has_reference": True}
    away = plan_memory(model, replace(bf16, offload=True), **options).parts
    assert (away["weights"], away["gradients"], away["moments"], away["reference"]) == (0, 0, 0, 0)
    assert away["gathered"] == layers["gathered"] and away["activations"] == layers["activations"]


def test_the_plan_is_told_in_a_line() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["Llama"], attn_implementation=attention.NAME)
    plan = plan_memory(model, ShardSpec(torch.float32), num_ranks=1, token_budget=4096, has_reference=False, on_gpu=False)
    assert plan.num_bytes == sum(plan.parts.values())
    assert plan.text().startswith(f"memory of a rank at the peak of a step, predicted: {plan.num_bytes / 1e9:.3g} GB (weights ")
    assert "reference" not in plan.text()


def test_the_resident_set_grows_by_what_was_planned(alone: World) -> None:
    """A row of 8,192 tokens through 4 layers of width 128; glibc keeps some of what is given back to it, so at least the plan."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **{**SHAPE, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4}, num_key_value_heads=4, head_dim=32
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    spec, peak = ShardSpec(torch.float32), MemoryPeak(alone.device)
    plan = plan_memory(model, spec, num_ranks=1, token_budget=8192, has_reference=False, on_gpu=False)
    trainer = Trainer(models.shard(model, alone, spec), alone, LossSpec(), OptimSpec(lr=1e-4))
    ids = tuple(range(64)) * 8
    samples = [Sample((seed, *ids[seed : seed + 341]), ids[:171], (-4.0,) * 171, (1.0,) * 171, (1.0,) * 171) for seed in range(16)]
    trainer.step([pack_rows(samples, 8192, share=False)])
    assert 0.8 * plan.num_bytes < peak.num_bytes() < 4 * plan.num_bytes


def test_devices_are_known_by_name() -> None:
    names = {
        "NVIDIA H200": 989.0,
        "NVIDIA H100 80GB HBM3": 989.0,
        "NVIDIA H100 PCIe": 756.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA GeForce RTX 4090": 165.2,
        "NVIDIA L4": 121.0,
        "NVIDIA L40S": 362.0,
        "NVIDIA A10": 125.0,
    }
    assert {name: peak_tflops(name) for name in names} == names
    assert peak_tflops("NVIDIA GeForce GTX 1080") is None and peak_tflops("Tesla A1000") is None
    assert all(math.isfinite(peak) and peak > 0 for peak in PEAK_TFLOPS.values())
