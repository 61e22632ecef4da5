"""Writing, reading and comparing checkpoints in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from transformers import PreTrainedTokenizerFast

from flowtrain.trainer.checkpoint import Checkpoints, load_state, place
from flowtrain.trainer.distributed import World
from flowtrain.trainer.trainer import Trainer


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


def check_same(ours: Path, theirs: Path, but_state: bool = False) -> None:
    """Check that two checkpoints hold the same files, the same bits of all tensors and the same
    state of the loop, if that is asked for. Bytes may differ, because safetensors writes the facts
    in a header in any order.
    """
    names = sorted(path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file())
    assert names == sorted(p.relative_to(ours) for p in ours.rglob("*") if p.is_file())
    for name in names:
        mine, other = ours / name, theirs / name
        if name.suffix == ".safetensors":
            tensors, others = load_file(mine), load_file(other)
            assert tensors.keys() == others.keys(), name
            assert all(torch.equal(tensors[key], others[key]) for key in others), name
        elif name.name == "state.json":
            assert but_state or load_state(ours) == load_state(theirs)
        else:
            assert mine.read_bytes() == other.read_bytes(), name
