"""The memory that a rank's training step takes at its peak, predicted before anything is allocated;
a run that cannot fit is refused.

Bytes everywhere. D: hidden size, V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flowkernels import lm_head
from transformers import PreTrainedModel

from flowtrain.config import Config
from flowtrain.records import UserError
from flowtrain.trainer.cost import path_bytes
from flowtrain.trainer.optimizers import KINDS
from flowtrain.trainer.setup.simulation import activations
from flowtrain.trainer.sharding import is_sharded_by_layer, units_of

_TARGET_SHARE = 1 / 3
"""Share of a row's tokens whose hidden states go to the head: a guess about a small part of the
whole."""
_CPU_SLACK = 1.5
"""So many times the predicted bytes a process on a CPU may take."""
_GPU_SHARE, _CPU_SHARE = 0.85, 0.5
"""Share of all memory that an automatic token budget plans with: a GPU's allocator has holes and
its libraries buffers, and a CPU does other things besides."""
_CPU_COPIES = 1.5
"""So many times its activations come on top of a plan on a CPU, where attention copies the keys of
each segment of a tree: 1.0 on rows of 32k tokens, growing with them."""
_CERTAIN_PARTS = ("weights", "gradients", "moments", "reference", "published", "engine", "beside")
"""Parts that a step takes however short its rows are."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes at the peak of a step, by what they are for."""

    parts: dict[str, int]
    """Bytes of this process on the device that trains."""
    vllm: int = 0
    """Bytes that vLLM takes of the same GPU."""
    gpu_bytes: int = 0
    """0: there is no GPU."""
    loading: int = 0
    """Bytes of this process on its device at the peak of loading: shards, and what is whole before
    it is cut into the last of them."""
    host: int = 0
    """Bytes of the weights that the main rank reads into the memory of its host, once."""
    token_budget: int = 0
    """Tokens of each row of the step."""
    path: int = 0
    """Bytes that a walk keeps of each token of its open path."""
    moved: int = 0
    """Bytes of weights and gradients that a rank receives in a pass."""

    @property
    def num_bytes(self) -> int:
        return sum(self.parts.values())

    def text(self) -> str:
        """Return one line, which merges parts below a twentieth; the manifest has all."""
        # A CPU's heap has holes, and libraries take buffers of their own.
        upper = "" if self.gpu_bytes else f" to {_CPU_SLACK * self.num_bytes / 1e9:.3g}"
        threshold = self.num_bytes / 20
        shown_parts = {name: size for name, size in self.parts.items() if size > threshold}
        shown_parts["the rest"] = self.num_bytes - sum(shown_parts.values())
        other_peaks = {"while it loads": self.loading, "of the main rank's host": self.host}
        own = (
            f"memory of a rank at the peak of a step, predicted: {self.num_bytes / 1e9:.3g}{upper} "
            f"GB ({_listed(shown_parts)}) with train.token_budget = {self.token_budget}"
        )
        others = [f"{x / 1e9:.3g} GB {when}" for when, x in other_peaks.items() if x > threshold]
        if self.path:
            others.append(f"{self.path / 1e3:.3g} kB a token of the open path of a larger tree")
        if self.moved:
            others.append(f"each pass receives {self.moved / 1e9:.3g} GB from other ranks")
        return "; ".join([own, *others])

    def room(self, config: Config, host_bytes: int) -> float:
        """Count the bytes that are left, but for a margin: of the GPU beside a vLLM that does not
        sleep or, without a GPU, of `host_bytes`.
        """
        # A path as long as a pass, if samples may not be longer.
        needed = self.num_bytes + self.path * max(self.token_budget, config.vllm.max_model_len)
        if not self.gpu_bytes:
            return _CPU_SHARE * host_bytes - needed - _CPU_COPIES * self.parts["activations"]
        vllm = 0 if config.vllm.sleep else self.vllm
        return _GPU_SHARE * self.gpu_bytes - vllm - needed

    def check(self, config: Config) -> None:
        """Raise UserError, with the numbers and the keys, where even a step on the shortest rows is
        sure not to fit on the GPU.
        """
        certain_bytes = {**{name: self.parts[name] for name in _CERTAIN_PARTS}, "vLLM": self.vllm}
        # A vLLM that sleeps and the gradients are never there at the same time.
        needed = sum(certain_bytes.values()) - (
            min(certain_bytes["gradients"], self.vllm) if config.vllm.sleep else 0
        )
        if self.gpu_bytes and self.loading + self.vllm > self.gpu_bytes >= needed:
            raise UserError(
                f"the GPU of a rank has {self.gpu_bytes / 1e9:.3g} GB and takes "
                f"{self.loading / 1e9:.3g} GB while the model is loaded, beside vLLM's "
                f"{self.vllm / 1e9:.3g}: {', or '.join(_remedies(config, self.vllm > 0))}"
            )
        if self.gpu_bytes and needed > self.gpu_bytes:
            raise UserError(
                f"the GPU of a rank has {self.gpu_bytes / 1e9:.3g} GB and training needs "
                f"{needed / 1e9:.3g} GB before any activation "
                f"({_listed(certain_bytes)}): {', or '.join(_remedies(config, self.vllm > 0))}"
            )


def plan_memory(
    config: Config,
    model: PreTrainedModel,
    sampled: Sequence[int],
    *,
    num_ranks: int,
    has_reference: bool,
    gpu_bytes: int = 0,
    size_beside: int = 0,
) -> MemoryPlan:
    """Predict the peak of a rank that trains, for a model that is not sharded yet and full rows.

    A sample above the token budget takes more. Tensors of a GPU's rank in CPU memory are excluded.

    Args:
        sampled: the number of parameters of each policy that has an engine.
        num_ranks: how many ranks train.
        has_reference: a frozen copy of the policy stays beside it.
        gpu_bytes: all memory of the rank's GPU; 0 on a CPU.
        size_beside: parameters of the policies that are trained beside this one, of which stays
            what a step leaves.
    """
    train = config.train
    on_gpu = gpu_bytes > 0
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    itemsize = dtype.itemsize
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    num_frozen = model.num_parameters() - num_trained
    lora = config.lora if config.lora.rank else None
    optimizer = KINDS[train.optimizer]
    offloaded = train.offload == "all" and on_gpu
    keeps_frozen = train.offload == "none" or not on_gpu
    is_sharded = num_ranks > 1 or dtype != torch.float32 or train.offload == "all"
    num_local = 0 if offloaded else num_trained // num_ranks
    master_bytes = optimizer.weight_dtype.itemsize * num_local
    frozen_bytes = 0 if offloaded else itemsize * num_frozen // num_ranks
    moment_bytes = round(optimizer.moment_bytes * num_local)
    has_reference = has_reference and lora is None and keeps_frozen
    is_merged = lora is not None and lora.sync == "merged"
    num_published = num_frozen if is_merged else num_trained
    published = 0 if offloaded else itemsize * num_published // num_ranks
    engine_bytes = [] if config.rollout.num_engine_ranks else [itemsize * num for num in sampled]
    has_vllm = config.rollout.engine == "vllm"
    num_tokens = train.row_budget
    is_fused = train.fused_layers and not train.compile
    options: dict[str, Any] = {"lora": lora, "fused": is_fused}
    at_head, in_layers = activations(model.config, dtype, num_tokens, train.recompute, **options)
    head_weights, head_transient = head(model, itemsize, num_tokens, on_gpu, fp32_logits=on_gpu)
    head_bytes = head_weights + max(0, head_transient - max(0, in_layers - at_head))
    parts = {
        "weights": frozen_bytes + master_bytes,
        "gradients": master_bytes,
        "moments": moment_bytes,
        "reference": itemsize * num_local if has_reference else 0,
        "gathered": _gathered(model, itemsize, train.reshard, num_ranks) if is_sharded else 0,
        "activations": max(at_head, in_layers),
        "head": head_bytes,
        # What is merged to be published is there when the activations are not.
        "merged": max(0, published * is_merged - max(at_head, in_layers) - head_bytes),
        "published": published * keeps_frozen,
        "engine": 0 if has_vllm else sum(engine_bytes),
    }
    resident_bytes = sum(parts[name] for name in ("weights", "moments", "reference", "published"))
    parts["beside"] = resident_bytes * size_beside // model.num_parameters()
    vllm_bytes = 0
    if has_vllm and on_gpu:
        vllm_bytes = sum(_vllm_bytes(config, size, gpu_bytes) for size in engine_bytes)
    # Each parameter is whole for a moment, in the dtype of its master weights.
    num_whole = _whole_at_once(model, num_ranks) if is_sharded else 0
    whole_bytes = num_whole * (optimizer.weight_dtype.itemsize if lora is None else itemsize)
    loading_bytes = parts["weights"] + parts["reference"]
    loading_bytes += whole_bytes * (num_ranks - 1) // num_ranks
    host_bytes = 4 * num_trained + num_frozen * itemsize
    num_gathers = 1 + (train.reshard and is_sharded_by_layer(model))  # for the backward pass again
    moved = num_gathers * itemsize * model.num_parameters() + 4 * num_trained
    moved = moved * (num_ranks - 1) // num_ranks
    kept = path_bytes(model, itemsize)
    return MemoryPlan(
        parts, vllm_bytes, gpu_bytes, loading_bytes, host_bytes, num_tokens, kept, moved
    )


def _whole_at_once(model: PreTrainedModel, num_ranks: int) -> int:
    """Count the parameters that are whole on a device when the last of them are sharded."""
    if not is_sharded_by_layer(model):
        return model.num_parameters()
    sizes = _unit_sizes(model, num_ranks)
    return max(*sizes, model.num_parameters() - sum(sizes))


def _unit_sizes(model: PreTrainedModel, num_ranks: int) -> list[int]:
    """Count the parameters of the layers that are gathered at once."""
    units = units_of(model, num_ranks)
    return [sum(p.numel() for layer in unit for p in layer.parameters()) for unit in units]


def _vllm_bytes(config: Config, weight_bytes: int, gpu_bytes: int) -> int:
    options = config.vllm
    return round(
        weight_bytes / options.tensor_parallel_size + options.kv_cache_gb * 2**30
        if options.kv_cache_gb
        else options.gpu_memory_utilization * gpu_bytes
    )


def _remedies(config: Config, has_vllm: bool) -> list[str]:
    remedies = ["start more ranks"] + ["algorithm.kl_coef = 0"] * (config.algorithm.kl_coef > 0)
    train = config.train
    remedies += ["train.optimizer = 'adamw_8bit'"] * (train.optimizer == "adamw")
    remedies += ["train.offload = 'frozen'"] * (train.offload == "none")
    remedies += ["train.offload = 'all'"] * (train.offload != "all")
    if has_vllm:
        options = config.vllm
        key = "kv_cache_gb" if options.kv_cache_gb else "gpu_memory_utilization"
        remedies += [f"vllm.{key} < {getattr(options, key)}"] + ["vllm.sleep = true"] * (
            not options.sleep
        )
    return remedies


def _listed(parts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{name} {num_bytes / 1e9:.3g}" for name, num_bytes in parts.items() if num_bytes
    )


def head(
    model: PreTrainedModel, itemsize: int, num_tokens: int, on_gpu: bool, fp32_logits: bool = False
) -> tuple[int, int]:
    """Predict what the linear loss takes on a row of `num_tokens`, at `itemsize` bytes a number.

    Returns the gradient of the head's weight, if it is trained, held until it is added up; and what
    comes to it while the loss is taken: a chunk of logits, a sum in fp32 over chunks if there are
    several, and the targets' hidden states, there and back.
    """
    config = model.config
    is_trained = any(p.requires_grad for p in model.get_output_embeddings().parameters())
    num_targets = round(_TARGET_SHARE * num_tokens)
    row_bytes = lm_head.bytes_per_row(config.vocab_size, itemsize, fp32_logits)
    num_weights = config.vocab_size * config.hidden_size * is_trained
    num_rows = lm_head.default_rows(config.vocab_size, on_gpu)
    chunk_bytes = num_rows * row_bytes + (4 - itemsize) * num_weights
    state_bytes = 2 * num_targets * config.hidden_size * itemsize
    return itemsize * num_weights, min(num_targets * row_bytes, chunk_bytes) + state_bytes


def _gathered(model: PreTrainedModel, itemsize: int, reshard: bool, num_ranks: int) -> int:
    """Count the bytes of weights a rank holds whole: all, or two units of layers and what is in
    none.
    """
    num_parameters = model.num_parameters()
    if not (reshard and is_sharded_by_layer(model)):
        return itemsize * num_parameters
    sizes = _unit_sizes(model, num_ranks)
    return itemsize * (num_parameters - sum(sizes) + 2 * max(sizes))
