"""Sharding of a model over the ranks by FSDP2, with weights distributed by the main rank.

Only the main rank reads the weights, into host memory; other ranks have a model without weights.
Each layer in turn is whole on every device until each rank has cut its shard: no device ever holds
the whole model, and one host holds it once, also for a frozen reference.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from flowtrain.trainer import loss
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import delta_net, experts
from flowtrain.trainer.model.fused_layers import fuse_layers

_SMALL = 50_000_000
"""Parameters up to which a model, or layers of a larger one, are gathered at once: collectives of
less would cost more than the memory they spare."""
_SMALL_ALONE = 4
"""So many times as many where one rank is alone: nothing travels there, and what FSDP asks of the
host for each unit is more than a row's kernels take."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The options of sharding a model and computing with it."""

    dtype: torch.dtype
    """The dtype of the forward and backward pass."""
    recompute: bool = False
    """Keep the inputs of layers alone for the backward pass."""
    compile: bool = False
    """Compile each layer."""
    reshard: bool = True
    """Free gathered weights after the forward pass, and gather them again for the backward pass."""
    offload: bool = False
    """Keep weights, gradients and moments in CPU memory."""
    attention: str = "auto"
    """Name of the attention, among `attention.NAMES`."""
    weight_dtype: torch.dtype = torch.float32
    """The dtype of master weights, and of their gradients once they are reduced."""
    fp32_logits: bool = False
    """Keep the head's logits in fp32 for log-probs, whatever `dtype` is."""
    fused: bool = True
    """Use the layers of `fused_layers`, unless layers are compiled."""


def shard(
    model: PreTrainedModel,
    world: World,
    spec: ShardSpec,
    weights: Mapping[str, Tensor] | None = None,
) -> PreTrainedModel:
    """Shard the master weights of a model over the ranks, in place; collective.

    The main rank's weights count; elsewhere the model may be on the meta device. A single rank in
    fp32 is not sharded.

    Args:
        weights: those of the main rank by name, which stay as they are, for a model on the meta
            device; None: the model's own, which it gives away one by one.
    """
    for parameter in model.parameters():
        dtype = spec.weight_dtype if parameter.requires_grad else spec.dtype
        parameter.data = parameter.data.to(dtype)
    loss.equip(model, spec.fp32_logits)
    experts.equip(model)
    delta_net.equip(model)
    model.set_attn_implementation(attention.name_of(spec.attention, world.device))
    if spec.fused and not spec.compile:
        fuse_layers(model)
    if spec.recompute:
        recompute_layers(model)
    if spec.compile:
        compile_layers(model)
    source = take_weights(model) if weights is None else weights
    giver = _Giver(model, world, source if world.is_main else {}, keeps=weights is not None)
    del source
    if world.size == 1 and spec.dtype == torch.float32 and not spec.offload:
        giver.fill(model)
        return model
    world.barrier()  # the main rank may have read for minutes, and FSDP's clock is short
    options: dict[str, Any] = {
        "mesh": world.mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=spec.dtype, reduce_dtype=torch.float32),
    }
    if spec.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    if is_sharded_by_layer(model):
        for unit in units_of(model, world.size):
            for layer in unit:
                giver.fill(layer)
            fully_shard(unit, reshard_after_forward=spec.reshard, **options)
    giver.fill(model)
    return fully_shard(model, **options)


def skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """Copy a model to the meta device: its shape, its options and no weights."""
    memo: dict[int, Any] = {id(tensor): _on_meta(tensor) for _, tensor in named_tensors(model)}
    return copy.deepcopy(model, memo)


def take_weights(model: nn.Module) -> dict[str, Tensor]:
    """Take weights and buffers out of a model, which is on the meta device then; a tied one once.

    They are those of `named_tensors`.
    """
    taken = dict(named_tensors(model))
    metas = {id(tensor): _on_meta(tensor) for tensor in taken.values()}
    for places, name, tensor in _places(model):
        places[name] = metas[id(tensor)]
    return {name: tensor.detach() for name, tensor in taken.items()}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, each once, also buffers that no file holds."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _on_meta(tensor: Tensor) -> Tensor:
    meta = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(meta, requires_grad=tensor.requires_grad)
    return meta


def _places(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield where a module and those in it have parameters and buffers: tied ones at each place."""
    for each in module.modules():
        for places in (each._parameters, each._buffers):
            for name, tensor in list(places.items()):
                if tensor is not None:
                    yield places, name, tensor


class _Giver:
    """Gives the main rank's tensors to all ranks."""

    def __init__(
        self, model: nn.Module, world: World, source: Mapping[str, Tensor], keeps: bool
    ) -> None:
        """`keeps`: the source is used afterwards, so its tensors are copied."""
        self._world, self._source, self._keeps = world, dict(source), keeps
        self._missing = {id(tensor): (name, tensor) for name, tensor in named_tensors(model)}
        self._num_places = Counter(id(tensor) for *_, tensor in _places(model))
        self._given: dict[int, Tensor] = {}
        """By what was in its place: tensors that have places left, because they are tied."""

    def fill(self, module: nn.Module) -> None:
        """Put weights into a module that has none yet; collective."""
        for places, name, tensor in _places(module):
            key = id(tensor)
            if key in self._missing:
                if key not in self._given:
                    self._given[key] = self._receive(*self._missing[key])
                places[name] = self._given[key]
                self._num_places[key] -= 1
                if not self._num_places[key]:
                    del self._given[key]

    def _receive(self, name: str, like: Tensor) -> Tensor:
        device = self._world.device
        if self._world.is_main:
            found = self._source.pop(name)
            tensor = found.to(device, like.dtype, copy=self._keeps).contiguous()
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype, device=device)
        if self._world.size > 1:
            dist.broadcast(tensor, group=self._world.group, group_src=0)
        if isinstance(like, nn.Parameter):
            return nn.Parameter(tensor, requires_grad=like.requires_grad)
        return tensor


def disable_dropout(model: nn.Module) -> None:
    """Disable dropout, so that a policy has one distribution and repeated reads agree."""
    for module in model.modules():
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def compile_layers(model: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile each layer, with one graph for all of them and any number of tokens."""
    for layer in model.get_decoder().layers:
        layer.compile(dynamic=True, backend=backend)


def recompute_layers(model: PreTrainedModel) -> None:
    """Keep the inputs of layers alone for the backward pass."""
    # The name changed within transformers 5.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def units_of(model: PreTrainedModel, num_ranks: int) -> list[list[nn.Module]]:
    """Cut the layers of a model into those that are gathered at once, in their order."""
    most = _SMALL * (_SMALL_ALONE if num_ranks == 1 else 1)
    units, room = list[list[nn.Module]](), 0
    for layer in model.get_decoder().layers:
        size = sum(parameter.numel() for parameter in layer.parameters())
        if not units or size > room:
            units.append([])
            room = most
        units[-1].append(layer)
        room -= size
    return units


def is_sharded_by_layer(model: PreTrainedModel) -> bool:
    """Return whether a model is gathered by its `units_of` layers; else it is gathered whole."""
    return model.num_parameters() > _SMALL
