"""Writing and reading checkpoints in tests: `Checkpoints` as one call, and all that it keeps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedTokenizerFast

from flowtrain.training.checkpoint import Checkpoints, place
from flowtrain.training.trainer import Trainer
from flowtrain.training.world import World


def save(
    root: Path,
    step: int,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    *,
    state: Mapping[str, int | str] | None = None,
    keep: int = 10,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a checkpoint and wait until it is on the disk."""
    checkpoints = Checkpoints(root, world, keep=keep)
    model, optimizer = trainer.model, trainer.optimizer
    checkpoints.save(step, model, tokenizer, optimizer, state or {}, dtype=dtype)
    try:
        checkpoints.wait()
    finally:
        checkpoints.close()
    return place(root, step)


def saved_state(path: Path) -> dict[str, Tensor]:
    """Read the master weights and the optimizer's state of a checkpoint, whole, by name."""
    reader = HuggingFaceStorageReader(str(path / "state"))
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found
