"""Checkpoints: one folder per step that transformers loads, with the optimizer and the state of the loop beside the model.

    checkpoints/step_00000050/     config.json, tokenizer.json, model.safetensors   a Hugging Face model
                                   optimizer.safetensors                            "<parameter>/exp_avg" and so on, whole tensors
                                   state.json                                       step, version, cursor; written last

The folder is written under another name and renamed, so one that exists is whole.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain.training import model as models
from flowtrain.training.world import World
from flowtrain.types import UserError


def save(
    root: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: torch.optim.Optimizer,
    state: dict[str, int],
    world: World,
    keep: int,
) -> None:
    """Write the checkpoint of `step` and delete all but the newest `keep`; collective."""
    weights = models.full_weights(model)
    moments = _moments(model, optimizer)
    if world.is_main:
        place = root / f"step_{step:08d}"
        scratch = place.with_suffix(".writing")
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            models.export(model, tokenizer, weights, scratch)
            save_file(moments, scratch / "optimizer.safetensors")
            (scratch / "state.json").write_text(json.dumps({"step": step, **state}))
        except (OSError, SafetensorError):  # safetensors has its own error for a full disk
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        shutil.rmtree(place, ignore_errors=True)
        scratch.rename(place)
        for old in sorted(root.glob("step_????????"))[:-keep]:
            shutil.rmtree(old)
    world.barrier()


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(root.glob("step_????????"), default=None)


def load_state(path: Path) -> dict[str, int]:
    """The state of the loop that was saved in `path`."""
    state: dict[str, int] = json.loads((path / "state.json").read_text())
    return state


def restore(path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer from a checkpoint, for any number of ranks; collective."""
    options = StateDictOptions(full_state_dict=True, strict=False)
    weights: dict[str, Any] = dict(load_file(path / "model.safetensors"))
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        if source in weights:
            weights[tied] = weights[source]
    own, saved = ({name: tensor.shape for name, tensor in each.items()} for each in (model.state_dict(), weights))
    if own != saved:
        differing = sorted(name for name in own | saved if own.get(name) != saved.get(name))
        raise UserError(f"{path} holds another model: {differing[:3]} differ")
    set_model_state_dict(model, weights, options=options)
    moments = load_file(path / "optimizer.safetensors")
    if moments:
        state = _unflatten(moments, get_optimizer_state_dict(model, optimizer, options=options))
        set_optimizer_state_dict(model, optimizer, state, options=options)


def _moments(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Nothing before the first step: asking torch for them would count as one."""
    if not optimizer.state:
        return {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return _flatten(get_optimizer_state_dict(model, optimizer, options=options))


def _flatten(state: dict[str, Any]) -> dict[str, Tensor]:
    """{"state": {parameter: {name: tensor}}} -> {"parameter/name": tensor}; empty on ranks other than 0, as torch gathers to that one.

    The hyper-parameters are left out: they come from the config.
    """
    entries = state.get("state", {}).items()
    return {f"{parameter}/{name}": tensor.contiguous() for parameter, entry in entries for name, tensor in entry.items()}


def _unflatten(moments: dict[str, Tensor], like: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, dict[str, Tensor]] = {}
    for key, tensor in moments.items():
        parameter, name = key.rsplit("/", 1)
        state.setdefault(parameter, {})[name] = tensor
    return {"state": state, "param_groups": like["param_groups"]}
