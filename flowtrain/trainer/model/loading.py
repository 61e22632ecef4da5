"""Loading and exporting Hugging Face causal language models."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from flowtrain.records import UserError
from flowtrain.trainer.attention import registration as attention
from flowtrain.trainer.distributed import World
from flowtrain.trainer.model import lora
from flowtrain.trainer.model.check import load_config
from flowtrain.trainer.model.files import reading, stored
from flowtrain.weights.format.manifest import layout_hash
from flowtrain.weights.format.tensor_shards import spec_of

# loading a model is not what a person waits for here
transformers.utils.logging.disable_progress_bar()

_log = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16")
_FILE_BYTES = 2**28
"""Bytes from which a model is written as several files."""


def load_tokenizer(path: str, key: str = "model.path") -> PreTrainedTokenizerFast:
    """The tokenizer of a model folder or hub name; it must know how a response ends. `key`: the
    option that names the path.
    """
    home = lora.home(path, key, "tokenizer_config.json")
    with reading(f"{key}={path!r} holds no tokenizer that transformers can load"):
        # One of `toy.new_tokenizer` is loaded as it is: AutoTokenizer would take the class of
        # the model's family, which has other rules and one token more than the model.
        is_plain = get_tokenizer_config(home).get("tokenizer_class") == "TokenizersBackend"
        kind = PreTrainedTokenizerFast if is_plain else AutoTokenizer
        tokenizer = kind.from_pretrained(home, trust_remote_code=False)
        ids = tokenizer.encode("a")
    if not ids:
        raise UserError(f"{key}={path!r} has no tokenizer next to its weights")
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {key}={path!r} has no end-of-sequence token")
    return tokenizer


def load_model(
    path: str, dtype: torch.dtype, attn: str = attention.NAME, key: str = "model.path"
) -> PreTrainedModel:
    """A causal language model on the CPU, with a saved adapter merged into it. `attn` is the
    attention of packed rows, or one of transformers' own. Unsupported models are rejected before
    weights are read. Of a model with a vision part, its text decoder.
    """
    if lora.is_adapter(path):
        base = load_model(lora.base_of(path, key), torch.float32, attn, key)
        model = lora.merge_saved(base, path, key).to(dtype)
        _check_finite(model, f"{key}={path!r}")
        return model
    config = load_config(path, key)
    with reading(f"{key}={path!r} is not a causal language model that transformers can load"):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            **_what_is_loaded(path, config),
            dtype=dtype,
            attn_implementation=attn,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    _check_loaded(model, found, path, key)
    return model


def _check_loaded(model: PreTrainedModel, found: Mapping[str, Any], path: str, key: str) -> None:
    """Raise UserError where files and config are of two models, or a number is none."""
    what = f"{key}={path!r}"
    if wrong := sorted(found["mismatched_keys"]):
        name, there, here = wrong[0]
        raise UserError(
            f"{what} holds {name} of shape {tuple(there)}, but its config says {tuple(here)}"
        )
    if missing := sorted(found["missing_keys"]):  # transformers would leave them random
        raise UserError(f"{what} lacks {len(missing)} of its tensors, such as {missing[0]}")
    if others := sorted(found["unexpected_keys"]):
        _log.warning("%s: %d tensors, such as %s, are not loaded", path, len(others), others[0])
    parents = {name for name, module in model.named_modules() if module._parameters}
    if extra := [name for name in others if name.rpartition(".")[0] in parents]:
        raise UserError(f"{what} holds {extra[0]}, which its config does not include")
    if getattr(model.config, "tie_word_embeddings", False) and not tied_names(model):
        raise UserError(
            f"{what} has a separate head, but its config says tie_word_embeddings=true: download "
            "it and use the folder"
        )
    weights = model.state_dict()
    for name, (_, dtype) in stored(path, key).items():
        if name in weights and dtype not in _FLOATS:
            raise UserError(f"{what} holds {name} as {dtype}, not one of {_FLOATS}")
    _check_finite(model, what)


def _check_finite(model: PreTrainedModel, what: str) -> None:
    for name, weight in model.named_parameters():
        # A sum is finite, but where fp16 ends.
        if not weight.sum().isfinite() and not weight.isfinite().all():
            raise UserError(f"{what} holds non-finite numbers in {name}")


def _what_is_loaded(path: str, config: PreTrainedConfig) -> dict[str, Any]:
    """Return the config by which a model is loaded, and the way to undo its quantisation."""
    stored = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if type(stored) is not type(config):
        _log.warning("%s: only the text decoder is loaded and saved", path)
    if not hasattr(stored, "quantization_config"):
        return {"config": config}
    _log.warning("%s holds mxfp4 weights, which are dequantised during loading", path)
    return {"config": stored, "quantization_config": Mxfp4Config(dequantize=True)}


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """The whole weights on the CPU of rank 0, a tied tensor once, with the adapter added if there
    is one; empty elsewhere. Collective: every rank must call it.
    """
    return whole(named_weights(model))


def whole(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gather tensors, sharded or not, on the CPU of rank 0; empty elsewhere. Collective."""
    gathered = {}
    for name, weight in weights.items():
        tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if not dist.is_initialized() or dist.get_rank() == 0:
            gathered[name] = tensor.detach().cpu()
    return gathered


def named_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name where they are, with the adapter added if there is one: shards (DTensors)
    under FSDP2; a tied tensor once. Collective for a model with an adapter.
    """
    if lora.has_adapter(model):
        return _untied(model, lora.merged_weights(model))
    return _untied(model, model.state_dict())


@torch.no_grad()
def weights_in_one_dtype(model: nn.Module) -> dict[str, Tensor]:
    """`named_weights` in the dtype of the first, in place, as a version holds them: transformers
    keeps a router's in fp32.
    """
    saved = model.state_dict()
    dtype = next(iter(saved.values())).dtype
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in saved:
            tensor.data = tensor.data.to(dtype)
    return named_weights(model)


def published_weights(model: nn.Module, sync: str) -> dict[str, Tensor]:
    """Return the tensors of a version, as `lora.sync` says; as collective as `named_weights`."""
    return lora.adapter_weights(model) if sync == "adapter" else named_weights(model)


def _untied(model: nn.Module, weights: Mapping[str, Any]) -> dict[str, Tensor]:
    tied = tied_names(model)
    return {
        name: weight
        for name, weight in weights.items()
        if name not in tied and isinstance(weight, Tensor)
    }


def layout_digest(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, dtype: torch.dtype, base: str = ""
) -> str:
    """Equal for policies whose weights and tokens are interchangeable: names, shapes and `dtype` of
    the weights, and the text of every token. 32 hex digits, the same on every rank.

    `base`: the `lora.fingerprint` of a model whose adapters alone are exchanged.
    """
    tensors = _untied(model, lora.frozen_weights(model))
    if base:
        tensors |= lora.adapter_weights(model)
    weights = {name: spec_of(name, tensor, dtype) for name, tensor in tensors.items()}
    tokens = [tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items())]
    text = f"{layout_hash(weights)} {json.dumps(tokens)} {base}".rstrip()
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def tied_names(model: nn.Module) -> set[str]:
    """Names that are another tensor under a second name (a tied head)."""
    return set(getattr(model, "all_tied_weights_keys", {}))


def export(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    weights: Mapping[str, Tensor],
    path: Path,
) -> None:
    """Write a folder that `from_pretrained` loads, in the dtype of the weights."""
    dtype = next(iter(weights.values())).dtype
    path.mkdir(parents=True, exist_ok=True)
    export_shape(model, tokenizer, path, dtype)
    ModelFiles("model.safetensors", dict(weights), {}, "model.safetensors").write(path)


def export_shape(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, dtype: torch.dtype
) -> list[Path]:
    """Write what a model's folder holds besides weights of `dtype`; of an adapter, what peft reads.

    The generation config has every token that ends a response, of which the tokenizer knows one.
    Returns the files.
    """
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(path)
    # Not by save_pretrained, which refuses what many a published model says of its sampling.
    model.generation_config.to_json_file(path / "generation_config.json")
    tokenizer.save_pretrained(path)
    if lora.has_adapter(model):
        lora.save_config(model, path)
    return sorted(path.iterdir())


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The file of a model's weights that a rank writes, whole tensors on the CPU."""

    name: str
    tensors: dict[str, Tensor]
    """Empty where the rank has no file."""
    index: dict[str, str]
    """Names of the files by tensor, where there are several."""
    first: str
    """Name of the first file, whose rank writes the index."""

    def write(self, folder: Path) -> list[Path]:
        """Write the file into a folder, as Hugging Face names it; return what was written."""
        written = []
        if self.tensors:
            contiguous = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
            written.append(folder / self.name)
            save_file(contiguous, written[-1], metadata={"format": "pt"})
        if self.index and self.name == self.first:
            text = json.dumps({"metadata": {}, "weight_map": self.index}, indent=1)
            written.append(folder / "model.safetensors.index.json")
            written[-1].write_text(text)
        return written


def gather_files(model: PreTrainedModel, dtype: torch.dtype, world: World) -> ModelFiles:
    """Gather the whole weights in `dtype`, each on the CPU of the rank that writes it; collective.

    A large model has a file for each rank. An adapter keeps its dtype, as peft does.
    """
    has_adapter = lora.has_adapter(model)
    weights = lora.adapter_weights(model) if has_adapter else named_weights(model)
    num_bytes = sum(weight.numel() for weight in weights.values()) * dtype.itemsize
    num_files = 1 if has_adapter or num_bytes < _FILE_BYTES else world.size
    pattern = "model-{:05d}-of-{:05d}.safetensors" if num_files > 1 else "model.safetensors"
    names = [pattern.format(number + 1, num_files) for number in range(num_files)]
    if has_adapter:
        names = [lora.WEIGHTS]
    own, index, before = {}, {}, 0
    for name, weight in weights.items():
        owner = before * num_files // num_bytes
        before += weight.numel() * dtype.itemsize
        index[name] = names[owner]
        weight = weight.detach() if has_adapter else weight.detach().to(dtype)
        tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
        if owner == world.rank:
            # A copy: training goes on while it is written.
            own[name] = torch.empty_like(tensor, device="cpu").copy_(tensor)
    name = names[world.rank] if own else ""
    return ModelFiles(name, own, index if num_files > 1 else {}, names[0])
