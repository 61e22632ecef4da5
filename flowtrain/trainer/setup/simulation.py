"""Simulation of the activation memory of a step, without allocating it.

torch's own `MemTracker` counts while two and three of the model's layers run, forward and backward,
on tensors that have shapes and no memory; layers are alike but for those without experts that a
mixture begins with, so two points give the line. (`FSDPMemTracker` would count the gathered weights
too, but wants a process group of the run's size and the whole model.) Bytes everywhere.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoModelForCausalLM, PreTrainedConfig

from flowtrain.config import Lora
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.model import delta_net
from flowtrain.trainer.model.experts import IMPLEMENTATION, find_routers
from flowtrain.trainer.model.fused_layers import fuse_layers
from flowtrain.trainer.model.lora import add_adapter
from flowtrain.trainer.sharding import recompute_layers

_RECURRENT_TOKENS = 1024


def activations(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    num_tokens: int,
    recompute: bool,
    *,
    lora: Lora | None = None,
    fused: bool = True,
) -> tuple[int, int]:
    """Return the bytes that all layers hold at the head, and their peak early in the backward pass.
    `lora`: of the adapter, if one is all that is trained. `fused`: as `ShardSpec.fused`.
    """
    first_layers, repeated = _few_layers(config)
    is_recurrent = attention.RECURRENT in (getattr(config, "layer_types", None) or ())
    # A recurrent layer runs through a row step by step; all that is kept grows with the tokens.
    num_simulated = min(num_tokens, _RECURRENT_TOKENS) if is_recurrent else num_tokens

    def simulate(layers: list[int]) -> tuple[int, int]:
        options: dict[str, Any] = {"layers": layers, "lora": lora, "fused": fused}
        return _simulate(config, dtype, num_simulated, recompute, **options)

    base = at_head, peak = simulate(first_layers)
    for layer, num_more in repeated:
        extended = simulate([*first_layers, layer])
        at_head += num_more * (extended[0] - base[0])
        peak += num_more * (extended[1] - base[1])
    return at_head * num_tokens // num_simulated, peak * num_tokens // num_simulated


def _few_layers(config: PreTrainedConfig) -> tuple[list[int], list[tuple[int, int]]]:
    """Return layers with all that the model has, and which are as many more as it takes."""
    layer_types, num_layers = getattr(config, "layer_types", None) or [], config.num_hidden_layers
    num_recurrent = layer_types.count(attention.RECURRENT)
    if 0 < num_recurrent < num_layers:
        recurrent = layer_types.index(attention.RECURRENT)
        attending = next(i for i, kind in enumerate(layer_types) if kind != attention.RECURRENT)
        repeated = [(recurrent, num_recurrent - 1), (attending, num_layers - num_recurrent - 1)]
        return [recurrent, attending], repeated
    num_dense = getattr(config, "first_k_dense_replace", 0)  # layers before those with experts
    return [*range(num_dense + 2)], [(num_dense + 2, num_layers - num_dense - 2)]


def _simulate(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    num_tokens: int,
    recompute: bool,
    *,
    layers: list[int],
    lora: Lora | None,
    fused: bool,
) -> tuple[int, int]:
    config = copy.deepcopy(config)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # one per layer
            setattr(config, name, [value[i % len(value)] for i in layers])
    config.num_hidden_layers = len(layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=False
        ).train()
    if lora is not None:
        add_adapter(model, lora, "")
        model.to(dtype)  # as FSDP gathers an adapter
        # MemTracker bears no frozen weights. They keep the same inputs for the adapter's sake.
        model.requires_grad_(True)
    dtype_scale = 1.0
    if find_routers(model):  # products of experts have no shapes but in bf16
        dtype_scale = dtype.itemsize / torch.bfloat16.itemsize
        model.to(torch.bfloat16).set_experts_implementation(IMPLEMENTATION)
    delta_net.equip(model)
    if fused:
        fuse_layers(model)
    if recompute:
        recompute_layers(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    ids = torch.empty(1, num_tokens, dtype=torch.int64, device="meta")
    recurrence = delta_net.recurrence_of(model, torch.full((num_tokens,), num_tokens))
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        hidden = model.get_decoder()(
            input_ids=ids, position_ids=ids, use_cache=False, forest=_Attention(), **recurrence
        ).last_hidden_state
        at_head = _activation_bytes(tracker.get_tracker_snapshot("current"))
        hidden.backward(torch.empty_like(hidden))
    peak = _activation_bytes(tracker.get_tracker_snapshot("peak"))
    return round(dtype_scale * at_head), round(dtype_scale * peak)


def _activation_bytes(snapshot: dict[torch.device, dict[Any, int]]) -> int:
    """Sum all but parameters, their gradients and buffers."""
    return sum(
        num_bytes
        for by_kind in snapshot.values()
        for kind, num_bytes in by_kind.items()
        if getattr(kind, "name", "") in ("ACT", "TEMP", "OTH")
    )


class _Attention:
    """In the place of a row's structure: keeps what attention keeps, and computes nothing."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, *, sink_H: Tensor | None, **_: Any
    ) -> Tensor:
        out: Tensor = _SavedTensors.apply(query, key, value)
        if sink_H is not None:  # each output is scaled
            out = out * sink_H.sigmoid()[:, None, None]
        return out.transpose(1, 2).contiguous()


class _SavedTensors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Not laid out as the query is: what comes out of attention is copied once more.
        out = query.new_empty((*query.shape[:3], value.shape[3]))
        ctx.save_for_backward(
            query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
