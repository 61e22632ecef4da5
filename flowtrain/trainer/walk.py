"""A row of any size in the memory of one path: it is walked piece by piece.

A subtree of at most `budget` tokens is computed at once, forward and backward; small siblings share
a pass. What is left are runs of tokens with more below them than the budget: they are entered
without a graph, which leaves their keys and values, or the states of recurrent layers, to the
passes below; and left with a second forward pass and a backward pass that takes the loss and what
the passes below have added to the gradients of keys, values and states. So every gradient is that
of the whole row, no token is computed twice but those of inner pieces, and what is kept is the open
path alone. A row within the budget is a walk of one pass.

N: tokens of a row, T: its targets, M: those of a piece.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain.trainer.packing import PackedRow, segments

Range = tuple[int, int]
"""Tokens of a row, from the first to before the second."""


class Kind(enum.Enum):
    """What a pass does."""

    ENTER = "enter"
    """It computes an inner piece without a graph, and opens it."""
    ONCE = "once"
    """It computes whole subtrees, forward and backward."""
    LEAVE = "leave"
    """It closes the innermost open piece, forward and backward."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of a walk."""

    kind: Kind
    row: PackedRow
    """The tokens of the piece, and the targets that they predict."""
    target_M: Tensor | None = None
    """int64, which targets of the whole row these are; None: all, in their order."""

    @property
    def learns(self) -> bool:
        """Whether it has a backward half."""
        return self.kind is not Kind.ENTER


def passes(row: PackedRow, budget: int | None) -> list[Pass]:
    """Return the walk through a row, in passes of at most `budget` tokens; None: in one."""
    if budget is None or len(row.input_ids_N) <= budget:
        return [Pass(Kind.ONCE, row)]
    cutter, entered = _Cutter(row), dict[tuple[Range, ...], Pass]()
    walk = list[Pass]()
    for kind, ranges in _pieces(row.subtree_end_N.tolist(), budget):
        if kind is Kind.LEAVE:
            walk.append(replace(entered.pop(ranges), kind=kind))
        else:
            walk.append(Pass(kind, *cutter.piece(ranges)))
            if kind is Kind.ENTER:
                entered[ranges] = walk[-1]
    # What concerns the row as a whole is counted with its first tokens that are trained.
    first = next(index for index, step in enumerate(walk) if step.learns)
    counted = replace(
        walk[first].row,
        num_unshared_tokens=row.num_unshared_tokens,
        num_repeated_tokens=row.num_repeated_tokens,
        num_route_conflicts=row.num_route_conflicts,
    )
    walk[first] = replace(walk[first], row=counted)
    return walk


def _pieces(subtree_end: Sequence[int], budget: int) -> Iterator[tuple[Kind, tuple[Range, ...]]]:
    """Yield the passes of a row as ranges of its tokens."""
    runs = segments(subtree_end)
    number_of = {run.end: number for number, run in enumerate(runs)}
    below: dict[int | None, list[int]] = {None: [], **{number: [] for number in range(len(runs))}}
    for number, run in enumerate(runs):
        below[number_of[run.ancestors[-1][1]] if run.ancestors else None].append(number)

    class Go(NamedTuple):
        """What is left to do: leave a piece, go on within a run, or go below one."""

        leave: Range | None = None
        run: int | None = None
        start: int | None = None

    todo = [Go()]
    while todo:
        go = todo.pop()
        if go.leave is not None:
            yield Kind.LEAVE, (go.leave,)
        elif go.start is None:
            subtrees = {n: (runs[n].start, subtree_end[runs[n].start]) for n in below[go.run]}
            small = [part for part in subtrees.values() if part[1] - part[0] <= budget]
            for ranges in _together(small, budget):
                yield Kind.ONCE, ranges
            large = [n for n, part in subtrees.items() if part[1] - part[0] > budget]
            todo += [Go(run=n, start=runs[n].start) for n in reversed(large)]
        else:
            assert go.run is not None
            start, end, stop = go.start, runs[go.run].end, subtree_end[go.start]
            if stop - start <= budget:
                yield Kind.ONCE, ((start, stop),)
                continue
            # As little as lets the rest fit one pass; else even parts of the run.
            even = math.ceil((end - start) / math.ceil((end - start) / budget))
            piece = (start, start + min(even, stop - start - budget))
            yield Kind.ENTER, (piece,)
            todo.append(Go(leave=piece))
            todo.append(Go(run=go.run, start=piece[1] if piece[1] < end else None))


def _together(subtrees: Sequence[Range], budget: int) -> list[tuple[Range, ...]]:
    """Put subtrees that fit a pass together, the largest first."""
    bins: list[tuple[int, list[Range]]] = []
    for start, stop in sorted(subtrees, key=lambda part: part[0] - part[1]):
        size = stop - start
        place = next((n for n, (room, _) in enumerate(bins) if room >= size), len(bins))
        room, ranges = bins.pop(place) if place < len(bins) else (budget, [])
        bins.insert(place, (room - size, [*ranges, (start, stop)]))
    return [tuple(sorted(ranges)) for _, ranges in bins]


class _Cutter:
    """Cuts pieces out of a row."""

    def __init__(self, row: PackedRow) -> None:
        self._row = row
        self._by_token_T = row.target_row_T.argsort(stable=True)
        self._token_T = row.target_row_T[self._by_token_T]

    def piece(self, ranges: Sequence[Range]) -> tuple[PackedRow, Tensor]:
        """Return the tokens of some ranges as a row, and which targets of the whole it has."""
        row, device = self._row, self._row.input_ids_N.device
        bounds = torch.tensor(ranges, device=device)
        starts, stops = torch.searchsorted(self._token_T, bounds).T.tolist()
        tokens, ends, targets, target_rows = [], [], [], []
        num_tokens = 0
        for (start, stop), first, last in zip(ranges, starts, stops, strict=True):
            shift = num_tokens - start
            tokens.append(torch.arange(start, stop, device=device))
            ends.append(row.subtree_end_N[start:stop].clamp(max=stop) + shift)
            targets.append(self._by_token_T[first:last])
            target_rows.append(self._token_T[first:last] + shift)
            num_tokens += stop - start
        token_N = torch.cat(tokens)
        target_M, order_M = torch.cat(targets).sort()  # in the order of the samples

        def of_targets(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[target_M]

        piece = replace(
            row,
            input_ids_N=row.input_ids_N[token_N],
            position_ids_N=row.position_ids_N[token_N],
            subtree_end_N=torch.cat(ends),
            target_row_T=torch.cat(target_rows)[order_M],
            target_ids_T=row.target_ids_T[target_M],
            old_logprob_T=row.old_logprob_T[target_M],
            sampler_logprob_T=row.sampler_logprob_T[target_M],
            advantage_T=row.advantage_T[target_M],
            loss_weight_T=row.loss_weight_T[target_M],
            cu_targets_S1=torch.searchsorted(target_M, row.cu_targets_S1),
            ref_logprob_T=of_targets(row.ref_logprob_T),
            version_T=of_targets(row.version_T),
            routes_NLC=None if row.routes_NLC is None else row.routes_NLC[token_N],
            mask_ids_K=None,
            mask_offsets_T1=None,
            num_unshared_tokens=0,
            num_repeated_tokens=0,
            num_route_conflicts=0,
        )
        if row.mask_ids_K is None or row.mask_offsets_T1 is None:
            return piece, target_M
        offset_T1 = row.mask_offsets_T1
        count_M = offset_T1.diff()[target_M]
        offset_M1 = torch.cat([offset_T1[:1], count_M.cumsum(0)])
        moved_K = (offset_T1[target_M] - offset_M1[:-1]).repeat_interleave(count_M)
        id_K = moved_K + torch.arange(len(moved_K), device=device)
        return replace(piece, mask_ids_K=row.mask_ids_K[id_K], mask_offsets_T1=offset_M1), target_M


class OpenPath:
    """What open pieces leave to the passes below them: by layer their keys and values, or what a
    recurrent layer goes on from.
    """

    def __init__(self) -> None:
        self._pieces: list[_Open] = []
        self._made: dict[Hashable, tuple[Tensor, ...]] | None = None
        self._num_own = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the open pieces."""
        return sum(piece.num_tokens for piece in self._pieces)

    @property
    def matters(self) -> bool:
        """Whether a pass reads the path or leaves something to it."""
        return bool(self._pieces) or self._made is not None

    def begin(self, step: Pass) -> None:
        """Make ready for a pass; one that leaves a piece no longer sees it as open."""
        self._num_own = len(step.row.input_ids_N)
        self._made = None if step.kind is Kind.ONCE else {}

    # ---- what layers ask

    def extended(
        self, layer: int, key_1HND: Tensor, value_1HND: Tensor, num_fill: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of a pass, and return them behind those of the path.

        `num_fill`: zeros between the two.
        """
        num_own = self._num_own  # without the tokens that fill a row up
        self.keep(layer, key_1HND[:, :, :num_own], value_1HND[:, :, :num_own])
        before = [piece.tensors[layer] for piece in self._pieces]
        if not before:
            return key_1HND, value_1HND
        keys, values = (
            torch.cat([*parts, own.new_zeros(*own.shape[:2], num_fill, own.shape[3]), own], 2)
            for parts, own in zip(zip(*before, strict=True), (key_1HND, value_1HND), strict=True)
        )
        return keys, values

    def last(self, place: Hashable) -> Tensor | None:
        """Return what the innermost open piece has kept at a place; None without one."""
        return self._pieces[-1].tensors[place][0] if self._pieces else None

    def keep(self, place: Hashable, *tensors: Tensor) -> None:
        """Keep tensors of an inner piece."""
        if self._made is not None:
            self._made[place] = tensors

    @property
    def num_own(self) -> int:
        """Number of tokens of the pass."""
        return self._num_own

    # ---- what a walk does

    def enter(self) -> None:
        """Open the piece of the pass that has just run."""
        assert self._made is not None
        self._pieces.append(_Open(self._num_own, self._made))

    def leave(self) -> _Open:
        """Close the innermost piece, before the pass that leaves it."""
        return self._pieces.pop()

    def backward(self, loss: Tensor, left: _Open | None) -> None:
        """Take the gradient of a pass: of the loss and, where it leaves a piece, of what the passes
        below have asked of that.
        """
        roots, gradients = [loss], [torch.ones_like(loss)]
        made = self._made or {} if left else {}
        for place, tensors in made.items():
            assert left is not None
            for tensor, gradient in zip(tensors, left.gradients(place), strict=True):
                if gradient is not None and tensor.requires_grad:
                    roots.append(tensor)
                    gradients.append(gradient.to(tensor.dtype))
        self._made = None  # layers that are computed again keep nothing
        torch.autograd.backward(roots, gradients)


class _Open:
    """An open piece: leaves of the graphs of all passes below it."""

    def __init__(self, num_tokens: int, made: dict[Hashable, tuple[Tensor, ...]]) -> None:
        self.num_tokens = num_tokens
        self.tensors = {
            place: tuple(x.detach().requires_grad_() for x in tensors)
            for place, tensors in made.items()
        }
        self._sums: dict[Tensor, Tensor] = {}
        for leaf in (x for tensors in self.tensors.values() for x in tensors):
            if leaf.dtype in (torch.bfloat16, torch.float16):  # sums of many passes are fp32
                leaf.register_post_accumulate_grad_hook(self._add)

    def _add(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        gradient = leaf.grad.float()
        self._sums[leaf] = self._sums[leaf] + gradient if leaf in self._sums else gradient
        leaf.grad = None

    def gradients(self, place: Hashable) -> list[Tensor | None]:
        """Return the gradients of a place's tensors; None where no pass read one."""
        return [self._sums.get(leaf, leaf.grad) for leaf in self.tensors[place]]


def schedule(kinds: Sequence[Sequence[bool]]) -> list[bool]:
    """Say which passes have a backward half, so that ranks with different walks run the same.

    Args:
        kinds: of each rank, its passes in order.

    Returns a sequence that each rank's is a part of, in order; a rank idles in what is left over.
    """
    left, common = [deque(own) for own in kinds], list[bool]()
    while heads := [own[0] for own in left if own]:
        common.append(2 * sum(heads) >= len(heads))
        for own in left:
            if own and own[0] == common[-1]:
                own.popleft()
    return common
