"""Find where a model keeps the tensors of a store by watching its own loader, and prove it by
loading patterns.

There is no table of names. For each tensor of the store, `load_weights` gets a stand-in of the same
shape whose memory is never filled. A dispatch mode sees the loader cut the stand-in and copy the
cuts into parameters, notes the geometry of each copy, and suppresses it. A tensor that the loader
does anything else with (computes, casts, gathers) is dense: only the loader can write it. Then each
tensor is loaded for real, as a pattern that differs from word to word: every view must hold
its part of the pattern, all ranks together every word once, and no tensor may change another's
words. The weights are put back afterwards.

This file names no class of vLLM: any model with a `load_weights` will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flowtrain.inference.vllm.sharded_target import LoadPlan, RegionDigests, sum_regions
from flowtrain.weights.format.manifest import Digest, Layout
from flowtrain.weights.format.tensor_shards import digest_of
from flowtrain.weights.load.target import StridedView
from flowtrain.weights.ranks import Ranks, gather, on_all_ranks

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""`load_weights` of a model."""
_ROW = 1 << 16
_aten = torch.ops.aten
_REFUSALS = (
    ValueError,
    KeyError,
    AssertionError,
    RuntimeError,
    IndexError,
    AttributeError,
    TypeError,
)
"""Errors of a loader that does not take a tensor."""


class LoaderWatch(TorchDispatchMode):
    """Notes what the loader does with a stand-in, and suppresses every write to the memories of the
    parameters.
    """

    def __init__(self, stand_in: Tensor, memories: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.copies: list[tuple[Tensor, Tensor]] = []
        """Views of parameters, and the cuts of the stand-in that the loader copies there."""
        self.touched: set[int] = set()
        """Memories that the loader writes to, with anything."""
        self.obstacle = ""
        """The reason for which the tensor is dense; empty when it is not."""
        self._dtype = stand_in.dtype
        self._source = _memory(stand_in)
        self._memories = memories

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        uses = any(_memory(tensor) == self._source for tensor in _tensors((args, kwargs)))
        is_write = func._schema.is_mutable and isinstance(args[0], Tensor)
        if is_write and _memory(args[0]) in self._memories:
            self._note_write(func, args, uses)
            return args[0]
        is_move = func is _aten._to_copy.default and kwargs.get("dtype") in (None, self._dtype)
        if uses and is_move:  # to the parameter's device, where the copy would go anyway
            return args[0].view_as(args[0])
        result = func(*args, **kwargs)
        views = _tensors(result)
        if uses and not (views and all(_memory(view) == self._source for view in views)):
            self._note_obstacle(f"its loader computes with it ({func})")
        return result

    def _note_write(self, func: Any, args: Any, uses: bool) -> None:
        self.touched.add(_memory(args[0]))
        if not uses:
            return
        if func is not _aten.copy_.default:
            self._note_obstacle(f"its loader writes it by {func}")
            return
        target, cut = args[0], args[1]
        if target.dtype != cut.dtype:
            text = f"its loader casts it from {cut.dtype} to {target.dtype}"
            self._note_obstacle(text.replace("torch.", ""))
        elif target.shape != cut.shape:
            self._note_obstacle(f"its loader spreads {tuple(cut.shape)} over {tuple(target.shape)}")
        self.copies.append((target, cut))

    def _note_obstacle(self, text: str) -> None:
        self.obstacle = self.obstacle or text


def make_plan(layout: Layout, load: Load, tensors: Iterable[Tensor], ranks: Ranks) -> LoadPlan:
    """Plan for a model whose parameters and buffers are `tensors`; collective.

    Raises:
        ValueError: the loader fails at a tensor; the message names it.
    """
    tensors = list(tensors)
    memories = memories_of(tensors)

    def watch_all() -> dict[str, LoaderWatch]:
        originals = [tensor.data for tensor in tensors]
        watches = {name: _watch(name, layout, load, memories=memories) for name in layout}
        for tensor, data in zip(tensors, originals, strict=True):
            if tensor.data_ptr() != data.data_ptr():
                tensor.data = data
                raise ValueError(
                    f"the loader of this model replaces a parameter of shape {tuple(data.shape)}: "
                    "it cannot be updated in place"
                )
        return watches

    watches = on_all_ranks(ranks, watch_all)
    dense: dict[str, str] = {}
    local_obstacles = {name: watch.obstacle for name, watch in watches.items() if watch.obstacle}
    # Dense on one rank is dense on all, as `LoadPlan` has it.
    for obstacles in gather(ranks, local_obstacles):
        dense |= obstacles
    views = {
        name: _join_views(
            [
                _strided_view(target, cut, memories[_memory(target)])
                for target, cut in watch.copies
                if target.numel()
            ]
        )
        for name, watch in watches.items()
        if name not in dense
    }
    return LoadPlan(layout, views, dense, {name: watches[name].touched for name in views})


def memories_of(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return each storage once, as flat 16-bit words, by its address."""
    memories = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() >= 2:
            words = torch.empty(0, dtype=torch.int16, device=tensor.device)
            memories[storage.data_ptr()] = words.set_(storage, 0, (storage.nbytes() // 2,), (1,))
    return memories


@torch.no_grad()
def prove(plan: LoadPlan, load: Load, tensors: Iterable[Tensor], ranks: Ranks) -> None:
    """Check a plan by loading a pattern for each tensor that has views; collective. The memories
    hold afterwards what they held before.

    Tensors that share a memory are tried together, so hundreds of experts in one memory cost a
    copy of it, not hundreds.

    Raises:
        ValueError: the plan is wrong for a tensor; the message names it.
    """
    proof = _Proof(plan, load, memories_of(tensors))
    on_all_ranks(ranks, proof.run)
    incomplete = {
        name: "the ranks together do not hold each of its words once"
        for name, digest in sum_regions(gather(ranks, proof.held)).items()
        if digest != proof.whole[name]
    }
    for problems in gather(ranks, incomplete | proof.wrong):
        for name, problem in problems.items():
            raise ValueError(
                f"the weights of this model cannot be updated in place: {name!r}: {problem}"
            )


class _Proof:
    """Loads patterns on this rank and records misplaced ones."""

    def __init__(self, plan: LoadPlan, load: Load, memories: Mapping[int, Tensor]) -> None:
        self.held: RegionDigests = []
        self.whole: dict[str, Digest] = {}
        """Digests of the patterns."""
        self.wrong: dict[str, str] = {}
        """Problems by tensor."""
        self._plan, self._load, self._memories = plan, load, memories
        self._seeds = {name: number for number, name in enumerate(plan.views)}

    def run(self) -> None:
        for name in self._plan.views:
            self.whole[name] = digest_of(self._pattern(name))
        for names, touched in _groups(self._plan):
            saved = {address: self._memories[address].clone() for address in touched}
            try:
                self._prove_group(names)
            finally:
                for address, words in saved.items():
                    self._memories[address].copy_(words)

    def _prove_group(self, names: Sequence[str]) -> None:
        """Load in both orders, so that each overwritten tensor is loaded first once."""
        for order in (names, names[::-1]):
            for name in order:
                self._load_pattern(name)
            for name in names:
                if not self._holds(name):
                    self._blame(name, names)
                    return
        for name in names:
            self.held.extend((name, view.region, view.digest(1)) for view in self._plan.views[name])

    def _blame(self, victim: str, names: Sequence[str]) -> None:
        """Note whose plan is wrong where the words of `victim` are."""
        self._load_pattern(victim)
        if not self._holds(victim):
            self.wrong[victim] = "its words are not where its loader seemed to put them"
            return
        for name in names:
            self._load_pattern(name)
            if not self._holds(victim):
                self.wrong[name] = f"its loader also changes {victim!r}"
                return
        self.wrong[victim] = "its loader puts the same words elsewhere another time"

    def _pattern(self, name: str) -> Tensor:
        views, num_words = self._plan.views[name], self._plan.layout[name].num_words
        device = views[0].memory.device if views else torch.device("cpu")
        return pattern(num_words, self._seeds[name], device)

    def _load_pattern(self, name: str) -> None:
        spec = self._plan.layout[name]
        self._load([(name, self._pattern(name).view(spec.torch_dtype).view(spec.shape))])

    def _holds(self, name: str) -> bool:
        flat = self._pattern(name)
        return all(torch.equal(x.live(), x.of_tensor(flat)) for x in self._plan.views[name])


def _groups(plan: LoadPlan) -> list[tuple[list[str], set[int]]]:
    """Put the tensors that have views into groups without a memory in common; returns the names and
    memories of each.
    """
    groups: dict[int, tuple[list[str], set[int]]] = {}
    for name, views in plan.views.items():
        if not views:
            continue
        names, memories = [name], set(plan.touched[name])
        joined = {id(groups[address]): groups[address] for address in memories if address in groups}
        for other_names, other_memories in joined.values():
            names += other_names
            memories |= other_memories
        groups.update(dict.fromkeys(memories, (names, memories)))
    return list({id(group): group for group in groups.values()}.values())


def pattern(num_words: int, seed: int, device: torch.device) -> Tensor:
    """Make int16 words that differ between neighbours, between rows 65,536 words apart, and between
    seeds.
    """
    column_words = (torch.arange(_ROW, device=device) * 0x9E37).short()
    num_rows = -(-num_words // _ROW)
    row_words = (torch.arange(num_rows, device=device) * 0x85EB + seed).short()
    return (column_words + row_words[:, None]).view(-1)[:num_words]


def _watch(name: str, layout: Layout, load: Load, memories: Mapping[int, Tensor]) -> LoaderWatch:
    """Watch the loader take one tensor alone or, if it refuses that, among all tensors."""
    refusals = []
    for specs in ({name: layout[name]}, layout):
        # The pages of a stand-in are never touched.
        stand_ins = {
            n: torch.empty(spec.shape, dtype=spec.torch_dtype) for n, spec in specs.items()
        }
        watch = LoaderWatch(stand_ins[name], memories)
        try:
            with torch.no_grad(), watch:
                load(list(stand_ins.items()))
        except _REFUSALS as error:
            refusals.append(error)
        else:
            return watch
    spec = layout[name]
    refusal = refusals[0]
    raise ValueError(
        f"the model's loader does not take {name!r} ({spec.dtype} {spec.shape}): "
        f"{type(refusal).__name__}: {refusal}"
    ) from refusal


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _strided_view(target: Tensor, cut: Tensor, memory: Tensor) -> StridedView:
    """Describe a copy in 16-bit words."""
    num = target.dtype.itemsize // 2
    dims = [
        (n, a * num, b * num)
        for n, a, b in zip(cut.shape, cut.stride(), target.stride(), strict=True)
        if n > 1
    ]
    dims.sort(key=lambda dim: -dim[1])
    if num > 1:
        dims.append((num, 1, 1))
    assert prod(n for n, _, _ in dims) == target.numel() * num
    return _view(memory, int(cut.storage_offset()) * num, int(target.storage_offset()) * num, dims)


def _join_views(views: list[StridedView]) -> list[StridedView]:
    """Join the views of a tensor when they follow each other at equal steps in the tensor and in
    one memory: those of a layer's experts, of which there are hundreds, become one.
    """
    if len(views) < 2:
        return views
    views = sorted(views, key=lambda view: view.first)
    base, second = views[:2]
    step, to_step = second.first - base.first, second.to_first - base.to_first
    geometries = [(v.first, v.to_first, v.sizes, v.strides, v.to_strides) for v in views]
    form = base.sizes, base.strides, base.to_strides
    grid = [(base.first + i * step, base.to_first + i * to_step, *form) for i in range(len(views))]
    dims = list(zip(*form, strict=True))
    is_apart = step > sum((n - 1) * stride for n, stride, _ in dims) and to_step > 0
    if geometries != grid or not is_apart or any(view.memory is not base.memory for view in views):
        return views
    return [_view(base.memory, base.first, base.to_first, [(len(views), step, to_step), *dims])]


def _view(
    memory: Tensor, first: int, to_first: int, dims: Iterable[tuple[int, int, int]]
) -> StridedView:
    """Make a view of dimensions (size, stride, stride in memory), by descending stride; those that
    follow each other on both sides are merged.
    """
    merged: list[tuple[int, int, int]] = []
    for n, stride, to_stride in dims:
        if merged and merged[-1][1:] == (n * stride, n * to_stride):
            merged[-1] = (merged[-1][0] * n, stride, to_stride)
        else:
            merged.append((n, stride, to_stride))
    sizes, strides, to_strides = zip(*(merged or [(1, 1, 1)]), strict=True)
    return StridedView(memory, first, to_first, sizes, strides, to_strides)
