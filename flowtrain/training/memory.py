"""The memory that a rank's training step takes at its peak, predicted from the model's shape before anything is allocated.

Activations are counted by running two and three of the model's layers, forward and backward, on tensors that have shapes and no memory;
layers are alike, so two points give the line. Bytes everywhere. D: hidden size, V: vocabulary.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from flowtrain.training import attention
from flowtrain.training.model import ShardSpec, is_sharded_by_layer, recompute_layers

_CPU_CHUNK = 2**25
"""Logits that the head has at a time on a CPU; on a GPU it is 4096 rows."""
_GPU_CHUNK_ROWS = 4096
_TARGET_SHARE = 1 / 3
"""Of a row's tokens, those whose hidden states go to the head: a guess, and a small part of the whole."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes at the peak of a step, by what they are for."""

    parts: dict[str, int]

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def text(self) -> str:
        parts = ", ".join(f"{name} {num_bytes / 1e9:.3g}" for name, num_bytes in self.parts.items() if num_bytes)
        return f"memory of a rank at the peak of a step, predicted: {self.num_bytes / 1e9:.3g} GB ({parts})"


def plan_memory(
    model: PreTrainedModel, spec: ShardSpec, *, num_ranks: int, token_budget: int, has_reference: bool, on_gpu: bool
) -> MemoryPlan:
    """For a model that is not sharded yet and rows of `token_budget` tokens; a sample that is longer takes more.

    What samples is not in it, nor what the publisher keeps of the last version, nor what a GPU's rank has in the memory of the CPU.
    """
    size = spec.dtype.itemsize
    is_sharded = num_ranks > 1 or spec.dtype != torch.float32 or spec.offload
    own = 0.0 if spec.offload and on_gpu else 4 * model.num_parameters() / num_ranks
    at_head, in_layers = activations(model.config, spec.dtype, token_budget, spec.recompute)
    head_weights, head_transient = _head(model, size, token_budget, on_gpu)
    return MemoryPlan(
        {
            "weights": round(own),
            "gradients": round(own),
            "moments": round(2 * own),
            "reference": round(own) if has_reference else 0,
            "gathered": _gathered(model, size, spec.reshard) if is_sharded else 0,
            "activations": max(at_head, in_layers),
            "head": head_weights + max(0, head_transient - max(0, in_layers - at_head)),
        }
    )


def activations(config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, recompute: bool) -> tuple[int, int]:
    """What all layers hold when the head is reached, and at most (early in the backward pass)."""
    two, three = (_simulate(config, dtype, num_tokens, recompute, num_layers) for num_layers in (2, 3))
    at_head, peak = (b + (config.num_hidden_layers - 3) * (b - a) for a, b in zip(two, three, strict=True))
    return at_head, peak


def _head(model: PreTrainedModel, size: int, num_tokens: int, on_gpu: bool) -> tuple[int, int]:
    """(the head's gradient in fp32, held until it is added up; a chunk of logits and the targets' hidden states, there and back)"""
    config = model.config
    num_targets = round(_TARGET_SHARE * num_tokens)
    row = config.vocab_size * size
    chunk = min(_GPU_CHUNK_ROWS * row, num_targets * row) if on_gpu else min(_CPU_CHUNK, num_targets * row)
    return 4 * config.vocab_size * config.hidden_size, chunk + 2 * num_targets * config.hidden_size * size


def _gathered(model: PreTrainedModel, size: int, reshard: bool) -> int:
    """Weights that a rank holds whole: all of them, or two layers and what is no layer."""
    num_all = model.num_parameters()
    if not (reshard and is_sharded_by_layer(model)):
        return size * num_all
    layers = model.get_decoder().layers
    num_layer = sum(p.numel() for p in layers[0].parameters())
    return size * (num_all - num_layer * (len(layers) - 2))


def _simulate(config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int, recompute: bool, num_layers: int) -> tuple[int, int]:
    config = copy.deepcopy(config)
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1] * num_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME).train()
    if recompute:
        recompute_layers(model)
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    ids = torch.empty(1, num_tokens, dtype=torch.int64, device="meta")
    with _LiveBytes([*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]) as live:
        hidden = model.get_decoder()(input_ids=ids, position_ids=ids, use_cache=False, forest=_Attention()).last_hidden_state
        at_head = live.num_bytes
        hidden.backward(torch.empty_like(hidden))
    return at_head, live.peak


class _Attention:
    """In the place of a row's structure: keeps what attention keeps, and computes nothing."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
        out: Tensor = _Kept.apply(query, key, value)
        return out.transpose(1, 2).contiguous()


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(query.shape)  # not laid out as the query is: what comes out of attention is copied once more
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


class _LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made within and are still alive, and the most that were at a time."""

    def __init__(self, others: Iterable[Tensor]) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._others = {id(tensor.untyped_storage()) for tensor in others}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = id(storage), storage.nbytes()
        if key in self._known or key in self._others:
            return
        self._known.add(key)
        self.num_bytes += num_bytes
        self.peak = max(self.peak, self.num_bytes)
        weakref.finalize(storage, self._remove, key, num_bytes)

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.num_bytes -= num_bytes
