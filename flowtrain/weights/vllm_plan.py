"""Where a model has the tensors of a store, found by watching its own loader, and proved by loading
patterns through it.

No table of names: `load_weights` gets, for each tensor of the store, a stand-in of the same shape
whose memory nobody fills. A dispatch mode sees the loader cut it and copy the cuts into parameters,
notes the geometry of each copy, and lets none happen. A tensor that the loader does anything else
with (computes, casts, gathers) is dense: only the loader itself can write it. Then each tensor is
loaded once for real, as a pattern that differs from word to word: every box must hold its part of
the pattern, all ranks together every word once, and nothing else that belongs to a tensor may have
changed. The weights are put back as they were.

This file names no class of vLLM: any model with a `load_weights` will do.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowtrain.weights.ranks import Ranks, together
from flowtrain.weights.strided_view import Box, Plan, digest_of, sum_regions
from flowtrain.weights.tensor_shards import Digest, Layout

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""`load_weights` of a model."""
_ROW = 1 << 16
_REFUSALS = (
    ValueError,
    KeyError,
    AssertionError,
    RuntimeError,
    IndexError,
    AttributeError,
    TypeError,
)


class Watch(TorchDispatchMode):
    """Notes what becomes of a stand-in, and keeps everything that happens from the memories of the
    parameters.
    """

    def __init__(self, stand_in: Tensor, memories: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        """A view of a parameter, and the cut of the stand-in that the loader wants there."""
        self.touched: set[int] = set()
        """Memories that the loader writes to, with whatever."""
        self.obstacle = ""
        self._dtype, self._source, self._memories = stand_in.dtype, _memory(stand_in), memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        uses = any(_memory(tensor) == self._source for tensor in tensors)
        if (
            func._schema.is_mutable
            and isinstance(args[0], Tensor)
            and _memory(args[0]) in self._memories
        ):
            self._note_write(func, args, uses)
            return args[0]
        if (
            uses
            and func is torch.ops.aten._to_copy.default
            and kwargs.get("dtype") in (None, self._dtype)
        ):
            return args[0].view_as(
                args[0]
            )  # to the parameter's device, where the copy would go anyway
        result = func(*args, **kwargs)
        views = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if uses and not (views and all(_memory(view) == self._source for view in views)):
            self.obstacle = self.obstacle or f"its loader computes with it ({func})"
        return result

    def _note_write(self, func: Any, args: Any, uses: bool) -> None:
        self.touched.add(_memory(args[0]))
        if func is torch.ops.aten.copy_.default and uses:
            there, cut = args[0], args[1]
            if there.dtype != cut.dtype:
                self.obstacle = (
                    self.obstacle
                    or f"its loader casts it from {cut.dtype} to {there.dtype}".replace(
                        "torch.", ""
                    )
                )
            elif there.shape != cut.shape:
                self.obstacle = (
                    self.obstacle
                    or f"its loader spreads {tuple(cut.shape)} over {tuple(there.shape)}"
                )
            self.copies.append((there, cut))
        elif uses:
            self.obstacle = self.obstacle or f"its loader writes it by {func}"


def make_plan(layout: Layout, load: Load, tensors: Iterable[Tensor], ranks: Ranks) -> Plan:
    """Of a model whose parameters and buffers are `tensors`.

    Raises:
        ValueError: the loader fails at a tensor, with its name.
    """
    found = list(tensors)
    memories = memories_of(found)

    def watch_all() -> dict[str, Watch]:
        kept = [tensor.data for tensor in found]
        watches = {name: _watched(name, layout, load, memories) for name in layout}
        for tensor, data in zip(found, kept, strict=True):
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
                raise ValueError(
                    f"the loader of this model replaces a parameter of shape {tuple(data.shape)}: "
                    "it cannot be updated in place"
                )
        return watches

    watches = together(ranks, watch_all)
    dense = {name: watch.obstacle for name, watch in watches.items() if watch.obstacle}
    for text in ranks.gather_text(json.dumps(dense)):
        dense |= json.loads(text)
    boxes = {
        name: [
            _box(there, cut, memories[_memory(there)])
            for there, cut in watch.copies
            if there.numel()
        ]
        for name, watch in watches.items()
        if name not in dense
    }
    return Plan(layout, boxes, dense)


def memories_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Each storage once, as flat 16-bit words."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= 2:
            words = torch.empty(0, dtype=torch.int16, device=tensor.device)
            found[storage.data_ptr()] = words.set_(storage, 0, (storage.nbytes() // 2,), (1,))
    return found


@torch.no_grad()
def prove(plan: Plan, load: Load, tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Load a pattern for each tensor that has boxes. The memories hold afterwards what they held
    before.

    Raises:
        ValueError: the plan is wrong for a tensor, with its name.
    """
    memories = memories_of(tensors)
    in_memory: dict[int, list[tuple[str, Box]]] = {}
    for name, boxes in plan.boxes.items():
        for box in boxes:
            in_memory.setdefault(box.words.data_ptr(), []).append((name, box))
    own: dict[str, list[tuple[str, Digest]]] = {}
    whole: dict[str, Digest] = {}
    wrong: dict[str, str] = {}

    def try_all() -> None:
        for name, boxes in plan.boxes.items():
            spec = plan.layout[name]
            flat = pattern(
                spec.num_words,
                zlib.crc32(name.encode()),
                boxes[0].words.device if boxes else torch.device("cpu"),
            )
            whole[name] = digest_of(flat)
            if not boxes:
                continue
            watch = _watched(
                name, plan.layout, load, memories
            )  # what it fills with constants has to be put back, too
            saved = {at: memories[at].clone() for at in watch.touched}
            try:
                load([(name, flat.view(spec.torch_dtype).view(spec.shape))])
                own[name] = [(box.region, box.digest(1)) for box in boxes]
                if not all(torch.equal(box.live(), box.within(flat)) for box in boxes):
                    wrong[name] = "its words are not where its loader seemed to put them"
                elif changed := _changed_others(name, saved, memories, in_memory):
                    wrong[name] = f"its loader also changes {changed!r}"
            finally:
                for at, words in saved.items():
                    memories[at].copy_(words)

    together(ranks, try_all)
    held = sum_regions([json.loads(text) for text in ranks.gather_text(json.dumps(own))])
    lost = {
        name: "the ranks together do not hold each of its words once"
        for name, digest in held.items()
        if digest != whole[name]
    }
    for text in ranks.gather_text(json.dumps(lost | wrong)):
        for name, why in json.loads(text).items():
            raise ValueError(
                f"the weights of this model cannot be updated in place: {name!r}: {why}"
            )


def pattern(num_words: int, seed: int, device: torch.device) -> Tensor:
    """int16 words that differ between neighbours, between rows 65,536 words apart, and between
    seeds.
    """
    num_rows = -(-num_words // _ROW)
    in_row, of_row = (
        (torch.arange(_ROW, device=device) * 0x9E37).short(),
        (torch.arange(num_rows, device=device) * 0x85EB + seed).short(),
    )
    return (in_row + of_row[:, None]).view(-1)[:num_words]


def _changed_others(
    name: str,
    saved: Mapping[int, Tensor],
    memories: Mapping[int, Tensor],
    in_memory: Mapping[int, Any],
) -> str:
    """Another tensor of which loading `name` changed a word; empty when there is none. What belongs
    to no tensor is padding.
    """
    for at, words in saved.items():
        changed = words != memories[at]
        for other, box in in_memory.get(at, []):
            if other == name:
                box_of(changed, box).fill_(False)
        if bool(changed.any()):
            for other, box in in_memory.get(at, []):
                if other != name and bool(box_of(changed, box).any()):
                    return str(other)
    return ""


def box_of(flat: Tensor, box: Box) -> Tensor:
    """What `box.live()` is in its memory, in another flat tensor of the same length."""
    return flat.as_strided(box.sizes, box.to_strides, box.to_first)


def _watched(name: str, layout: Layout, load: Load, memories: Mapping[int, Tensor]) -> Watch:
    """What happens to one tensor, alone; or, where the loader does not take it alone, to it among
    all.
    """
    try:
        return _watch_among(name, {name: layout[name]}, load, memories)
    except _REFUSALS as error:
        try:
            return _watch_among(name, layout, load, memories)
        except _REFUSALS:
            spec = layout[name]
            text = (
                f"the model's loader does not take {name!r} ({spec.dtype} {spec.shape}): "
                f"{type(error).__name__}: {error}"
            )
            raise ValueError(text) from error


def _watch_among(name: str, layout: Layout, load: Load, memories: Mapping[int, Tensor]) -> Watch:
    # The pages of a stand-in are never touched.
    stand_ins = [
        (each, torch.empty(spec.shape, dtype=spec.torch_dtype)) for each, spec in layout.items()
    ]
    watch = Watch(dict(stand_ins)[name], memories)
    with torch.no_grad(), watch:
        load(stand_ins)
    return watch


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _box(there: Tensor, cut: Tensor, memory: Tensor) -> Box:
    """Dimensions by descending stride in the store's tensor; those that follow each other on both
    sides made one; in 16-bit words.
    """
    num = there.dtype.itemsize // 2
    dims = [
        (n, a * num, b * num)
        for n, a, b in zip(cut.shape, cut.stride(), there.stride(), strict=True)
        if n > 1
    ]
    merged: list[tuple[int, int, int]] = []
    for n, stride, to_stride in [
        *sorted(dims, key=lambda dim: -dim[1]),
        *([(num, 1, 1)] if num > 1 else []),
    ]:
        if merged and merged[-1][1:] == (n * stride, n * to_stride):
            merged[-1] = (merged[-1][0] * n, stride, to_stride)
        else:
            merged.append((n, stride, to_stride))
    sizes, strides, to_strides = zip(*(merged or [(1, 1, 1)]), strict=True)
    assert prod(sizes) == there.numel() * num
    return Box(
        memory,
        int(cut.storage_offset()) * num,
        int(there.storage_offset()) * num,
        sizes,
        strides,
        to_strides,
    )
