"""Fused layers in a whole model: the gradients that it had, in every way to train it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from bench.families import SHAPE
from flowtrain.config import Lora
from flowtrain.trainer.attention.forest import Forest
from flowtrain.trainer.attention.registration import NAME
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model.fused_layers import fuse_layers, fused_text
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.sharding import ShardSpec, recompute_layers, shard

ALL = "9 norms, 2 rotary embeddings, 2 gated MLPs"
WAYS: dict[str, Callable[[PreTrainedModel], None]] = {
    "whole": lambda model: None,
    "recomputed": recompute_layers,
    "an adapter": lambda model: add_adapter(model, Lora(rank=2), "", torch.bfloat16),
}


def build(config: Any, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype).train()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    ids = torch.arange(12)[None]
    torch.manual_seed(0)
    found = model(input_ids=ids, position_ids=ids, forest=Forest.of(torch.full((12,), 12)))
    found.logits.float().log_softmax(-1)[..., 3].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", [Qwen3Config, Phi3Config])
@pytest.mark.parametrize("way", WAYS)
def test_a_model_has_the_gradients_it_had(way: str, kind: Any) -> None:
    config = kind(**SHAPE, **({"head_dim": 8} if kind is Qwen3Config else {}))
    model = build(config)
    WAYS[way](model)
    fused = copy.deepcopy(model)
    fuse_layers(fused)
    assert "gated MLPs" in fused_text(fused) and not fused_text(model)
    found, expected = gradients(fused), gradients(model)
    assert found.keys() == expected.keys() and len(found) > 14
    assert [name for name, x in expected.items() if not torch.equal(found[name], x)] == []


@pytest.mark.parametrize(
    ("how", "text"),
    [({}, ALL), ({"fused": False}, ""), ({"compile": True}, "")],
)
def test_compiled_layers_are_left_alone(how: dict[str, bool], text: str) -> None:
    model = build(Qwen3Config(**SHAPE, head_dim=8), torch.float32)
    sharded = shard(model, World(0, 1, torch.device("cpu")), ShardSpec(torch.float32, **how))
    assert fused_text(sharded) == text


class OtherNorm(LlamaRMSNorm):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden) * (1 + 2**-7)


def test_what_computes_something_else_is_left_alone() -> None:
    """By a bit of bf16, by its activation, or by a step more."""
    config = LlamaConfig(**SHAPE)
    gelu, more = LlamaMLP(LlamaConfig(**SHAPE, hidden_act="gelu")), LlamaMLP(config)
    more.norm = LlamaRMSNorm(48)
    norm = LlamaRMSNorm(32, 1e-8)
    norm.other = 1e-9  # a number that is not its eps
    layers = nn.ModuleList([OtherNorm(32), gelu, more, nn.LayerNorm(32, bias=False), norm])
    fuse_layers(layers)
    assert fused_text(layers) == "2 norms" and norm.eps_of_form == 1e-8
