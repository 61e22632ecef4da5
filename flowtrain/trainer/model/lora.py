"""Low-rank adapters (LoRA, arXiv:2106.09685) over a frozen model, by the package `peft`.

A linear layer W [out, in] becomes W + alpha / rank * B A with A [rank, in] and B [out, rank]; B is
0 at first. The frozen weights are in the dtype of the forward pass, A and B in fp32. Layers are
replaced in place: the model keeps its class, its forward pass and the order of its parameters.
peft is imported where an adapter is made or read, because that takes seconds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from flowtrain.config import Lora
from flowtrain.records import UserError
from flowtrain.trainer.model.files import reading
from flowtrain.weights.format.manifest import ADAPTER_PREFIX

_NAME = "default"  # peft leaves this one out of the names of saved tensors
_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def add_adapter(
    model: PreTrainedModel, lora: Lora, base: str, dtype: torch.dtype = torch.float32
) -> None:
    """Freeze the model and give its layers an adapter, in place; seed torch before the call.

    Args:
        base: folder or hub name of the model, which a saved adapter names.
        dtype: of A and B.

    Raises UserError for `lora.targets` that are no linear layers of the model.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear = {
        name.rpartition(".")[2]
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.Linear)
    }
    if unknown := [target for target in lora.targets if target not in linear]:
        raise UserError(
            f"lora.targets={list(lora.targets)}: {unknown[0]!r} is not a linear layer of "
            f"{base!r}, which has {', '.join(sorted(linear))}"
        )
    spec = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # any number
        target_modules=sorted(lora.targets or linear),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).resolve()) if Path(base).is_dir() else base,
    )
    inject_adapter_in_model(spec, model, adapter_name=_NAME)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def has_adapter(model: nn.Module) -> bool:
    """Return whether `add_adapter` was called on the model."""
    return bool(_layers(model))


def _layers(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone for a block: the policy that training started from."""
    layers = _layers(model).values()
    assert layers, "the model has no adapter"
    # Not by enable_adapters(): that makes A and B frozen meanwhile, and FSDP looks at this when it
    # gathers them for the first time.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def frozen_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights without the adapter, by the names that they had before it; tied ones too."""
    return {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.state_dict().items()
        if not _is_adapter(name)
    }


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """A and B of every layer as they are held, by the names under which peft saves them."""
    return {
        ADAPTER_PREFIX + name.replace(f".{_NAME}.", "."): weight
        for name, weight in model.state_dict().items()
        if _is_adapter(name)
    }


def _is_adapter(name: str) -> bool:
    return name.endswith((f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"))


@torch.no_grad()
def merged_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights with the adapter added, in the dtype of the frozen ones: shards (DTensors) under
    FSDP2; collective. A layer's sum is taken in fp32 and rounded once.
    """
    merged = {f"{name}.weight": _merged(layer) for name, layer in _layers(model).items()}
    return frozen_weights(model) | merged


def _merged(layer: Any) -> Tensor:
    a, b, frozen = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight, layer.base_layer.weight
    scaling = layer.scaling[_NAME]
    if not isinstance(frozen, DTensor):
        return _sum(frozen, b, a, scaling)
    # B has as many rows as W, so that a rank has the same ones of both.
    rows = _sum(frozen.to_local(), b.to_local(), a.full_tensor(), scaling)
    return DTensor.from_local(
        rows,
        frozen.device_mesh,
        frozen.placements,
        run_check=False,
        shape=frozen.shape,
        stride=frozen.stride(),
    )


def _sum(frozen: Tensor, b: Tensor, a: Tensor, scaling: float) -> Tensor:
    return torch.addmm(frozen.float(), b.float(), a.float(), alpha=scaling).to(frozen.dtype)


def save_config(model: nn.Module, path: Path) -> None:
    """Write what `PeftModel.from_pretrained` reads of an adapter besides its weights."""
    model.peft_config[_NAME].save_pretrained(str(path))  # type: ignore[union-attr, index]


def is_adapter_name(name: str) -> bool:
    """Return whether a saved tensor is A or B of an adapter, by its name."""
    return name.startswith(ADAPTER_PREFIX)


def is_adapter(path: str | Path) -> bool:
    """Return whether a folder holds an adapter instead of a model."""
    return (Path(path) / _CONFIG).exists()


def base_of(path: str, key: str = "model.path") -> str:
    """Return folder or hub name of the model that a saved adapter is for. A relative path is one
    from here, or from the adapter or its folder.
    """
    file = Path(path) / _CONFIG
    with reading(f"{key}={path!r}: {_CONFIG} cannot be read"):
        name = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not isinstance(name, str) or not name:
            raise UserError(f"{key}={path!r}: {_CONFIG} has base_model_name_or_path={name!r}")
        places = [Path(name), file.parent / name, file.parent.parent / name]
        return next((str(place) for place in places if place.is_dir()), name)


def chain(path: str, key: str = "model.path") -> list[str]:
    """Return an adapter, those that it stands on, and the model below; of a model, its own path.
    Raises UserError for an adapter that stands on itself.
    """
    found = [path]
    with reading(f"{key}={path!r}"):
        while is_adapter(found[-1]):
            found.append(base_of(found[-1], key))
            if any(Path(found[-1]).resolve() == Path(each).resolve() for each in found[:-1]):
                raise UserError(f"{key}={path!r} is an adapter of itself, by {found[-2]}/{_CONFIG}")
    return found


def home(path: str, key: str, file: str) -> str:
    """Return which of the `chain` has a file: an adapter may leave it to its model."""
    *adapters, base = chain(path, key)
    return next((each for each in adapters if (Path(each) / file).exists()), base)


def fingerprint(path: str) -> str:
    """Hash the first row of every tensor in the files of a model, and of the one below an adapter:
    engines that add an adapter to a model must have the very one that it was trained over.

    Downloads a model that is only on the hub.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors"]))
    found = hashlib.sha256(fingerprint(base_of(path)).encode() if is_adapter(path) else b"")
    for file in sorted(folder.glob("*model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in sorted(tensors.keys()):
                row = tensors.get_slice(name)[:1] if tensors.get_slice(name).get_shape() else None
                found.update(name.encode())
                found.update(b"" if row is None else row.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:32]


def merge_saved(model: PreTrainedModel, path: str, key: str = "model.path") -> PreTrainedModel:
    """Add a saved adapter to the weights of its model, which should be in fp32; all are trained.
    A head or embedding that it changes is no longer tied.

    Raises UserError for an adapter of another model, or a part of one.
    """
    from peft import PeftModel, get_peft_model_state_dict

    with reading(f"{key}={path!r} is no adapter that peft can merge into its model"):
        if not (Path(path) / WEIGHTS).exists():
            raise UserError(f"{key}={path!r} lacks {WEIGHTS}, the only supported adapter file")
        adapted = PeftModel.from_pretrained(model, path)
        own = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
        with safe_open(Path(path) / WEIGHTS, "pt") as tensors:
            there = set(tensors.keys())
        others = (own - there) | {name for name in there - own if "lora_" in name}
        if others:
            raise UserError(
                f"{key}={path!r}: {WEIGHTS} does not match {_CONFIG}: {len(others)} tensors "
                f"differ, such as {min(others)}"
            )
        if getattr(model.config, "tie_word_embeddings", False) and _changes_embeddings(model):
            _untie(model)
        merged: PreTrainedModel = adapted.merge_and_unload()
    return merged.requires_grad_(True)


def unties(model: PreTrainedModel, path: str, key: str = "model.path") -> bool:
    """Return whether a saved adapter changes the head or the embeddings of a model, which is tried
    on one without memory.
    """
    from peft import PeftConfig, get_peft_model

    with reading(f"{key}={path!r} is no adapter that peft can merge into its model"):
        get_peft_model(model, PeftConfig.from_pretrained(path))
        return _changes_embeddings(model)


def _changes_embeddings(model: PreTrainedModel) -> bool:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return any(type(module).__module__.startswith("peft.") for module in ends)


def _untie(model: PreTrainedModel) -> None:
    """Give a head weights of its own where they are the embeddings'."""
    tied = {id(weight) for weight in model.get_input_embeddings().parameters()}
    for module in model.get_output_embeddings().modules():
        for name, weight in module.named_parameters(recurse=False):
            if id(weight) in tied:
                setattr(module, name, nn.Parameter(weight.detach().clone()))
    model.config.tie_word_embeddings = False
    model.all_tied_weights_keys = {}
