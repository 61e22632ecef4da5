"""Checkpoints: one folder per step that transformers loads, with the optimizer and the state of the
loop beside the model.

    checkpoints/step_00000050/
        config.json, tokenizer.json, model.safetensors   a Hugging Face model; of one with LoRA
            adapter_config.json, adapter_model.safetensors   the adapter alone, as peft saves it
        optimizer.safetensors     "<parameter>/exp_avg" and so on, whole tensors; of an 8-bit
                                  optimizer each rank's codes and scales (`optimizers.py`)
        state.json                step, version, cursor, dataflow; checksums of the others

The folder is written under another name and renamed, so one that exists was whole; the checksums
tell whether it still is.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from flowtrain import _delta
from flowtrain.training import lora
from flowtrain.training import model as models
from flowtrain.training.optimizers import ShardOptimizer
from flowtrain.training.world import World
from flowtrain.types import UserError
from flowtrain.utils.errors import on_failure
from flowtrain.utils.files import make_folder, put_folder, remove, share, sync_tree
from flowtrain.weights.checksums import check, record
from flowtrain.weights.manifest import File, StoreError
from flowtrain.weights.ranks import together

_log = logging.getLogger(__name__)
_SCRATCH = ".writing"


def save(
    root: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    optimizer: ShardOptimizer,
    state: dict[str, int | str],
    world: World,
    keep: int,
) -> None:
    """Write the checkpoint of `step` and delete all but the newest `keep`; collective."""
    has_adapter = lora.has_adapter(model)
    weights = (
        models.whole(lora.adapter_weights(model)) if has_adapter else models.full_weights(model)
    )
    moments = optimizer.moments()

    def write() -> None:
        target = place(root, step)
        scratch = target.with_suffix(_SCRATCH)
        remove(scratch)
        make_folder(root)
        # Why it could not be written matters more than why its rest could not be deleted.
        with on_failure(lambda: shutil.rmtree(scratch, ignore_errors=True)):
            if has_adapter:
                models.export_shape(model, tokenizer, scratch)
                lora.save_adapter(model, weights, scratch)
            else:
                models.export(model, tokenizer, weights, scratch)
            save_file(moments, scratch / "optimizer.safetensors")
            _seal(scratch, {"step": step, **state})
        put_folder(scratch, target)
        for old in [*sorted(root.glob("step_????????"))[:-keep], *root.glob(f"*{_SCRATCH}")]:
            remove(old)

    together(world, lambda: write() if world.is_main else None, other_failed=OSError)


def _seal(folder: Path, state: dict[str, int | str]) -> None:
    """Write state.json, with the checksums of all other files, and flush everything."""
    paths = sorted(folder.iterdir())
    for path in paths:
        share(path)
    files = {
        file.name: {"num_bytes": file.num_bytes, "xxh3": file.xxh3} for file in map(record, paths)
    }
    whole = {**state, "files": files}
    text = json.dumps({**whole, "xxh3": _checksum_of(whole)}, indent=1)
    (folder / "state.json").write_text(text)
    sync_tree(folder)


def place(root: Path, step: int) -> Path:
    """The folder of the checkpoint of `step`."""
    return root / f"step_{step:08d}"


def latest(root: Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are passed over with a warning. Reads all
    of it.

    One that was about to replace another of its step may still have the name that it was written
    under.
    """
    for path in _newest_first(root):
        try:
            verify(path)
            return path
        except (StoreError, OSError) as error:
            if path.suffix != _SCRATCH:
                _log.warning("checkpoint %s is passed over: %s", path, error)
    return None


def settle(root: Path) -> Path | None:
    """Choose the checkpoint to resume from, as `latest` does, and rename newer ones, which are
    damaged, so that none of them counts as one of those to keep.

    Raises UserError when there are checkpoints, but none is whole: the run would begin again.
    """
    found = latest(root)
    damaged = [path for path in _newest_first(root) if path.suffix != _SCRATCH]
    if found is None:
        if damaged:
            raise UserError(
                f"no checkpoint in {root} is whole; bring one back, or delete that folder to begin "
                "again"
            )
        return None
    if found.suffix == _SCRATCH:
        scratch, found = found, found.with_suffix("")
        put_folder(scratch, found)
    for path in damaged:
        if path > found:
            aside = path.with_suffix(".damaged")
            remove(aside)
            path.rename(aside)
    return found


def _newest_first(root: Path) -> list[Path]:
    return sorted([*root.glob("step_????????"), *root.glob(f"step_????????{_SCRATCH}")])[::-1]


def load_state(path: Path) -> dict[str, Any]:
    """The state of the loop that was saved in `path`."""
    state = _read_state(path)
    del state["files"]
    return state


def verify(path: Path) -> None:
    """Raise StoreError where a file of a checkpoint is not as it was written. Reads all of it."""
    for name, file in _read_state(path)["files"].items():
        check(path / name, File(name, file["num_bytes"], file["xxh3"]))


def _read_state(path: Path) -> dict[str, Any]:
    """Raises StoreError when the text is not what was written."""
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_bytes())
        xxh3 = state.pop("xxh3")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(
            f"{path / 'state.json'} is damaged: {type(error).__name__}: {error}"
        ) from error
    if xxh3 != _checksum_of(state):
        raise StoreError(f"{path / 'state.json'} does not have the checksum that it names")
    return state


def _checksum_of(state: dict[str, Any]) -> str:
    return f"{_delta.xxh3(np.frombuffer(json.dumps(state).encode(), np.uint8)):016x}"


def restore(path: Path, model: PreTrainedModel, optimizer: ShardOptimizer) -> None:
    """Load model and optimizer from a checkpoint, for any number of ranks; collective."""
    if lora.has_adapter(model) != lora.is_adapter(path):
        held = "an adapter" if lora.is_adapter(path) else "a whole model"
        raise UserError(f"{path} holds {held}: lora.rank is not what it was trained with")
    weights = lora.read_adapter(path, model) if lora.has_adapter(model) else _read(path, model)
    optimizer.load_moments(load_file(path / "optimizer.safetensors"))
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, weights, options=options)


def _read(path: Path, model: PreTrainedModel) -> dict[str, Any]:
    """Read the weights of a checkpoint. Raises UserError for those of another model."""
    weights: dict[str, Any] = dict(load_file(path / "model.safetensors"))
    for tied, source in getattr(model, "all_tied_weights_keys", {}).items():
        if source in weights:
            weights[tied] = weights[source]
    own, saved = (
        {name: tensor.shape for name, tensor in each.items()}
        for each in (model.state_dict(), weights)
    )
    if own != saved:
        differing = sorted(name for name in own | saved if own.get(name) != saved.get(name))
        raise UserError(f"{path} holds another model: {differing[:3]} differ")
    return weights
