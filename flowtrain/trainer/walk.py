"""Forward and backward passes over a row of any size, piece by piece, in the memory of one path.

A subtree of at most `budget` tokens is computed at once, forward and backward; small siblings share
a pass. The remaining inner pieces consist of a trunk with more tokens below its end than the
budget, and the small subtrees beside it. A walk enters the trunk without a graph, which leaves its
keys and values, or the states of recurrent layers, to the passes below; then it leaves the piece
with a forward pass over all of it and a backward pass that takes the loss and what the passes below
have added to the gradients of keys, values and states. So every gradient equals the whole row's,
only tokens of trunks are computed twice, and only the open path stays in memory. A row within the
budget is a walk of one pass.

N: tokens of a row, M: targets of a piece, P: tokens of its trunk.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain.trainer.distributed import World
from flowtrain.trainer.host_copies import copied
from flowtrain.trainer.packing import PackedRow
from flowtrain.trainer.tree_shape import Segment, segments

Range = tuple[int, int]
"""Tokens of a row, from the first to before the second."""


class Kind(enum.Enum):
    """The kinds of passes."""

    ENTER = "enter"
    """Reads an inner piece without a graph, and opens it."""
    ONCE = "once"
    """Computes whole subtrees, forward and backward."""
    LEAVE = "leave"
    """Closes the innermost open piece, and computes it forward and backward."""


@dataclass(frozen=True, slots=True)
class Pass:
    """A step of a walk."""

    kind: Kind
    row: PackedRow
    """The tokens of the piece, and the targets that they predict."""
    target_M: Tensor | None = None
    """int64, which targets of the whole row these are; None: all, in their order."""
    trunk_P: Tensor | None = None
    """int64, the tokens of an inner piece that all passes below it see; None for other pieces."""

    @property
    def learns(self) -> bool:
        """Whether the pass has a backward half."""
        return self.kind is not Kind.ENTER

    def to(self, device: torch.device) -> Pass:
        """Copy the tensors of the computation to a device; `target_M` stays on the host."""
        trunk_P = None if self.trunk_P is None else copied(self.trunk_P, device)
        return replace(self, row=self.row.to(device), trunk_P=trunk_P)

    def trunk(self) -> Pass:
        """Return the pass over the trunk alone, which predicts nothing."""
        row, trunk_P = self.row, self.trunk_P
        assert trunk_P is not None
        end_P = torch.full_like(trunk_P, len(trunk_P))
        trunk = replace(
            row,
            input_ids_N=row.input_ids_N[trunk_P],
            position_ids_N=row.position_ids_N[trunk_P],
            subtree_end_N=end_P,
            target_row_T=row.target_row_T[:0],
            routes_NLC=None if row.routes_NLC is None else row.routes_NLC[trunk_P],
        )
        return replace(self, row=trunk, trunk_P=torch.arange(len(trunk_P), device=trunk_P.device))


class _Piece(NamedTuple):
    """Ranges of a row's tokens, in their order."""

    ranges: tuple[Range, ...]
    trunk: tuple[Range, ...] = ()


def passes(row: PackedRow, budget: int | None) -> list[Pass]:
    """Return the walk through a row on the host, in passes of at most `budget` tokens; None: in one
    pass.
    """
    if budget is None or len(row.input_ids_N) <= budget:
        return [Pass(Kind.ONCE, row)]
    cutter, entered = _Cutter(row), list[Pass]()
    walk = list[Pass]()
    for kind, piece in _Tree.of(row.subtree_end_N.tolist(), budget).pieces():
        if kind is Kind.LEAVE:
            walk.append(replace(entered.pop(), kind=kind))
        else:
            walk.append(cutter.cut(kind, piece))
            if kind is Kind.ENTER:
                entered.append(walk[-1])
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


class _Place(NamedTuple):
    """A place at which a walk goes on: within a run, or below its end; below no run are roots."""

    run: int | None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class _Tree:
    """The runs of a row's tokens, and the walk through them."""

    subtree_end: Sequence[int]
    budget: int
    runs: Sequence[Segment]
    below: Mapping[int | None, Sequence[int]]
    """The runs that begin below each, by their numbers; those of None are roots."""

    @classmethod
    def of(cls, subtree_end: Sequence[int], budget: int) -> _Tree:
        runs = segments(subtree_end)
        number_of = {run.end: number for number, run in enumerate(runs)}
        below: dict[int | None, list[int]] = defaultdict(list)
        for number, run in enumerate(runs):
            below[number_of[run.ancestors[-1][1]] if run.ancestors else None].append(number)
        return cls(subtree_end, budget, runs, below)

    def pieces(self) -> Iterator[tuple[Kind, _Piece]]:
        """Yield the passes of the walk."""
        todo: list[_Piece | _Place] = [_Place(None)]
        while todo:
            place = todo.pop()
            if isinstance(place, _Piece):
                yield Kind.LEAVE, place
            elif place.run is None or place.start is None:
                small, large = self._parts(place.run)
                for ranges in _together(small, self.budget):
                    yield Kind.ONCE, _Piece(ranges)
                todo += [_Place(number, self.runs[number].start) for number in reversed(large)]
            elif self.subtree_end[place.start] - place.start <= self.budget:
                yield Kind.ONCE, _Piece(((place.start, self.subtree_end[place.start]),))
            else:
                piece, end = self._inner(place.run, place.start)
                yield Kind.ENTER, piece
                todo += [piece, end]

    def _parts(self, number: int | None) -> tuple[list[Range], list[int]]:
        """The subtrees below a run that fit a pass, and the runs that begin the others."""
        small, large = list[Range](), list[int]()
        for child in self.below.get(number, ()):
            start = self.runs[child].start
            stop = self.subtree_end[start]
            if stop - start <= self.budget:
                small.append((start, stop))
            else:
                large.append(child)
        return small, large

    def _inner(self, number: int, start: int) -> tuple[_Piece, _Place]:
        """Return the inner piece that begins at a token, and where the walk goes on below it."""
        trunk, beside, room = list[Range](), list[Range](), self.budget
        while True:
            # As little as lets the rest fit one pass.
            enough = self.subtree_end[start] - start - self.budget
            run_end = self.runs[number].end
            end = min(run_end, start + room, start + enough)
            trunk.append((start, end))
            room -= end - start
            small, large = self._parts(number)
            needed = sum(stop - first for first, stop in small)
            # Passes below begin at one token, so a trunk ends where two large subtrees part.
            if end < run_end or len(large) != 1 or needed >= room:
                piece = _Piece(tuple(sorted([*trunk, *beside])), tuple(trunk))
                return piece, _Place(number, end if end < run_end else None)
            beside += small
            room -= needed
            number, start = large[0], self.runs[large[0]].start


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

    def cut(self, kind: Kind, piece: _Piece) -> Pass:
        """Return the pass over a piece."""
        row = self._row

        def tokens(ranges: Sequence[Range]) -> Tensor:
            return torch.cat([torch.arange(*bounds) for bounds in ranges])

        token_N = tokens(piece.ranges)
        bounds = torch.tensor(piece.ranges)
        found = torch.searchsorted(self._token_T, bounds).tolist()
        # In the order of the samples, as all targets.
        target_M = torch.cat([self._by_token_T[first:last] for first, last in found]).sort().values

        def of_targets(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[target_M]

        part = replace(
            row,
            input_ids_N=row.input_ids_N[token_N],
            position_ids_N=row.position_ids_N[token_N],
            # So many of the piece's tokens come before the end.
            subtree_end_N=torch.searchsorted(token_N, row.subtree_end_N[token_N]),
            target_row_T=torch.searchsorted(token_N, row.target_row_T[target_M]),
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
            teacher=None,
            likeliest_TK=None,
            likeliest_logprob_TK=None,
            num_unshared_tokens=0,
            num_repeated_tokens=0,
            num_route_conflicts=0,
        )
        if row.mask_ids_K is not None and row.mask_offsets_T1 is not None:
            offset_T1 = row.mask_offsets_T1
            count_M = offset_T1.diff()[target_M]
            offset_M1 = torch.cat([offset_T1[:1], count_M.cumsum(0)])
            moved_K = (offset_T1[target_M] - offset_M1[:-1]).repeat_interleave(count_M)
            id_K = moved_K + torch.arange(len(moved_K))
            part = replace(part, mask_ids_K=row.mask_ids_K[id_K], mask_offsets_T1=offset_M1)
        trunk_P = torch.searchsorted(token_N, tokens(piece.trunk)) if piece.trunk else None
        return Pass(kind, part, target_M, trunk_P)


class OpenPath:
    """The state of open pieces for later passes, by layer: keys and values, or recurrent state."""

    def __init__(self) -> None:
        self._pieces: list[_Open] = []
        self._made: dict[Hashable, tuple[Tensor, ...]] | None = None
        self._trunk_P: Tensor | None = None

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
        self._trunk_P = step.trunk_P
        self._made = None if step.trunk_P is None else {}

    # ---- what layers ask

    def before(
        self, layer: int, key_1HND: Tensor, value_1HND: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Keep the keys and values of a trunk, and return those of each open piece."""
        if self._trunk_P is not None:
            self.keep(layer, *(x.index_select(2, self._trunk_P) for x in (key_1HND, value_1HND)))
        return [(key, value) for key, value in (piece.tensors[layer] for piece in self._pieces)]

    def last(self, place: Hashable) -> Tensor | None:
        """Return what the innermost open piece has kept at a place; None without one."""
        return self._pieces[-1].tensors[place][0] if self._pieces else None

    def keep(self, place: Hashable, *tensors: Tensor) -> None:
        """Keep tensors of an inner piece at a place."""
        if self._made is not None:
            self._made[place] = tensors

    @property
    def trunk_P(self) -> Tensor | None:
        """The trunk of the pass's piece, if that is an inner one."""
        return self._trunk_P

    # ---- what a walk does

    def enter(self) -> None:
        """Open the piece of the pass that has just run."""
        assert self._made is not None and self._trunk_P is not None
        self._pieces.append(_Open(len(self._trunk_P), self._made))

    def leave(self) -> _Open:
        """Close the innermost piece, before the pass that leaves it."""
        return self._pieces.pop()

    def backward(self, loss: Tensor, left: _Open | None) -> None:
        """Run the backward pass: of the loss and, when leaving a piece, of the gradients that
        passes below have accumulated.
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


def schedule(steps: Collection[Pass], world: World) -> list[bool]:
    """Return which passes learn, so that ranks with different walks run the same; collective.

    The passes of each rank are a subsequence of the answer; the rank idles in the others.
    """
    own = [step.learns for step in steps]
    if world.size == 1:
        return own
    most, has_inner = world.max([len(own), not all(own)])
    if not has_inner:
        return [True] * int(most)
    texts = world.gather_text("".join("01"[learns] for learns in own))
    return _common([[letter == "1" for letter in text] for text in texts])


def _common(kinds: Sequence[Sequence[bool]]) -> list[bool]:
    """Return a sequence that each of these is a part of: what most need next comes next."""
    left, common = [deque(own) for own in kinds], list[bool]()
    while heads := [own[0] for own in left if own]:
        common.append(2 * sum(heads) >= len(heads))
        for own in left:
            if own and own[0] == common[-1]:
                own.popleft()
    return common
