"""Versions of the weights side by side: by their digests, and word by word where the run still has
the version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from flowtrain.config import Config
from flowtrain.trainer import checkpoint
from flowtrain.weights import StoreError, WeightStore, pull
from flowtrain.weights.format.tensor_shards import u16_view


@dataclass(frozen=True, slots=True)
class Difference:
    """A version that is not the one that the run published."""

    step: int
    tensors: tuple[str, ...]
    """Tensors that differ, in the order of their names."""
    where: str
    """The first word that differs with both values, or why it is not known."""
    largest: float | None
    """Largest difference of two values; None where the run's are not at hand."""

    @property
    def text(self) -> str:
        others = f" and {len(self.tensors) - 1} others" if len(self.tensors) > 1 else ""
        largest = "" if self.largest is None else f"; largest difference {self.largest:.3g}"
        return f"step {self.step}: version {self.step} differs in {self.tensors[0]!r}{others}: " + (
            f"{self.where}{largest}"
        )


def differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """List the tensors whose digests differ, or that only one version has."""
    return tuple(
        name for name in sorted(ours.keys() | theirs.keys()) if ours.get(name) != theirs.get(name)
    )


def recorded_weights(run: Path, config: Config, step: int) -> dict[str, Tensor] | None:
    """Read the version after `step` as the run published it, from its store or a checkpoint; None
    where neither has it.
    """
    store = WeightStore(run / "weights")
    try:
        if step in store.versions():
            return pull(store, step)
    except StoreError:  # what remains of a version that was collected, or that was damaged
        pass
    files = sorted((checkpoint.place(run / "checkpoints", step) / "model").glob("*.safetensors"))
    if config.lora.rank or not files:
        return None
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def compare(
    step: int, names: tuple[str, ...], ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> Difference:
    """Find the first word of the first tensor of `names` that differs, and the largest difference
    of all.
    """
    where, largest = "", 0.0
    for name in names:
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            where = where or "only one version has a tensor of this name and shape"
            continue
        largest = max(largest, float((ours[name].double() - theirs[name].double()).abs().max()))
        where = where or _first_word(ours[name], theirs[name])
    return Difference(step, names, where or "its digest alone differs", largest)


def unknown(step: int, names: tuple[str, ...]) -> Difference:
    """Describe a version that the run has no more."""
    why = "the run no longer has this version (weights.keep sets how many stay)"
    return Difference(step, names, why, None)


def _first_word(ours: Tensor, theirs: Tensor) -> str:
    words = u16_view(ours.contiguous()), u16_view(theirs.contiguous())
    indices = np.flatnonzero(words[0] != words[1])
    if not len(indices):
        return ""
    word = int(indices[0])
    element = word * 2 // ours.element_size()
    value, recorded = (float(tensor.reshape(-1)[element]) for tensor in (ours, theirs))
    index = tuple(int(i) for i in np.unravel_index(element, ours.shape)) if ours.dim() else ()
    return (
        f"word {word} is {int(words[0][word]):#06x}, was {int(words[1][word]):#06x} (element "
        f"{list(index)}: {value!r}, was {recorded!r}; {len(indices):,} of {len(words[0]):,} words)"
    )
