"""Gated DeltaNet (arXiv:2412.06464) on packed rows: recurrent layers whose state follows the tree.

A row of N tokens is a forest (see `packing.py`), and a recurrent layer would run through it as one
text: every segment but the first would begin with a stranger's state. Here a segment begins with
the state that its parent ends with. All segments of one depth run side by side, in groups of
similar length, padded with tokens that leave a state as it is; gradients of a state that several
children begin with add up. The convolution before it reads the last tokens of the path.

No family is known by name and no `forward` is copied: transformers' layers call their convolution
and their rule as functions of their module, with the arguments that a row came with. `equip` puts
functions of ours there, which do as ever unless the row says otherwise.

N: tokens, C: channels, W: width of the convolution, S: segments of a group, L: tokens of its
longest, H: heads, K: size of a key, V: size of a value.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN

from flowtrain.trainer.model.fused_layers import with_names
from flowtrain.trainer.tree_shape import Segment, segments
from flowtrain.trainer.walk import OpenPath

_NAMES = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
"""Names of the functions in a family's module."""
_OPTIONS = ("use_qk_l2norm_in_kernel",)
"""Options that a layer passes to its rule."""
_SIMILAR = 4 / 3
"""Lengths in a group differ by less than this factor."""
_SHORT = 16
"""Tokens up to this number count as alike."""
_CHUNKS = (16, 32, 64)
"""Tokens that a rule on a CPU reads at once; it fills segments up to them."""
WIDEST = 4
"""Tokens that a convolution reads at most."""


@dataclass(frozen=True, slots=True)
class Functions:
    """transformers' functions of a family, or the kernels that it has found in their place."""

    conv: Callable[..., Tensor]
    """Takes x [S, C, L], weight [C, W], bias [C] or None, activation=; returns [S, C, L]."""
    rule: Callable[..., tuple[Tensor, Tensor]]
    """Takes query, key [S, L, H, K], value [S, L, H, V], g=, beta= [S, L, H], initial_state= [S, H,
    K, V] or None, output_final_state=; returns [S, L, H, V] and the states at the ends."""
    step: Callable[..., tuple[Tensor, Tensor]]
    """The same a token at a time."""


class Recurrence(Protocol):
    """Holds the positions of a pass's tokens in their texts; passes have it as `recurrence`."""

    def conv(self, layer: int, functions: Functions, x_1CN: Tensor, *rest: Any) -> Tensor:
        """Return [1, C, N]; `rest`: the weight, its bias, and the name of the activation."""
        ...

    def rule(self, layer: int, functions: Functions, *row: Tensor, **options: Any) -> Tensor:
        """Return [1, N, H, V] for query, key, value, g and beta, [1, N, H, ...]."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """Segments of one depth and of similar length."""

    token_SL: Tensor
    """int64, the tokens of each; N where it has no more."""
    parent_S: Tensor | None
    """int64, the state that each begins with, of those that the depth before kept; None: zeros."""
    kept_P: Tensor
    """int64, the segments whose states at their ends are kept."""


@dataclass(frozen=True, slots=True)
class DeltaTree:
    """How recurrent layers run through a row. Made once per row, used by every layer."""

    depths: tuple[tuple[Group, ...], ...]
    slot_N: Tensor
    """int64, where token i is among the slots of all groups, one after another."""
    parent_N1: Tensor
    """int64, the token before each on its path; N before a root, and of N itself."""
    moved_M: Tensor
    """int64, tokens whose path is another than the row just before them, and which a convolution of
    `WIDEST` would get wrong."""
    kept_P: Tensor
    """int64, the last tokens of the segments whose states are kept, in the order of `run`."""

    @classmethod
    def of(
        cls, subtree_end_N: Tensor, ends: Collection[int] = (), *, goes_on: bool = False
    ) -> DeltaTree:
        """Read the structure on the host, for which a GPU is waited for.

        Args:
            ends: tokens after which states are kept, besides those that others begin with.
            goes_on: its roots begin with a state that `run` is given.
        """
        found = list(_cut(segments(subtree_end_N.tolist()), ends))
        parents, num_tokens = _parents(found), found[-1].end if found else 0
        wanted = {p for p in parents if p is not None}
        wanted |= {n for n, segment in enumerate(found) if segment.end - 1 in ends}
        slots, kept_ends = [0] * num_tokens, list[int]()
        depths, num_slots, kept = [], 0, dict[int, int]()

        def tensor(values: object) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=subtree_end_N.device)

        for of_depth in _by_depth(parents):
            before, kept = kept, {}
            groups = list[Group]()
            for members in _alike(of_depth, found):
                longest = max(found[i].num_queries for i in members)
                tokens = []
                for i in members:
                    start, end = found[i].start, found[i].end
                    slots[start:end] = range(num_slots, num_slots + end - start)
                    num_slots += longest
                    tokens.append([*range(start, end), *[num_tokens] * (longest - end + start)])
                places = [place for place, i in enumerate(members) if i in wanted]
                kept |= {members[place]: len(kept) + n for n, place in enumerate(places)}
                kept_ends += [found[members[place]].end - 1 for place in places]
                begun = [before[p] for i in members if (p := parents[i]) is not None]
                if goes_on and not begun:  # roots have one state in common
                    begun = [0] * len(members)
                group = Group(tensor(tokens), tensor(begun) if begun else None, tensor(places))
                groups.append(group)
            depths.append(tuple(groups))
        parent = [*range(-1, num_tokens - 1), num_tokens]
        for segment, above in zip(found, parents, strict=True):
            parent[segment.start] = num_tokens if above is None else found[above].end - 1
        moved = {
            token
            for segment in found
            if segment.start and parent[segment.start] != segment.start - 1
            for token in range(segment.start, min(segment.start + WIDEST - 1, num_tokens))
        }
        indices = (slots, parent, sorted(moved), kept_ends)
        return cls(tuple(depths), *map(tensor, indices))

    def path(self, token_M: Tensor, width: int) -> Tensor:
        """int64 [M, width]: the last tokens of the paths that end with these; N before a root."""
        path = [token_M]
        for _ in range(width - 1):
            path.append(self.parent_N1[path[-1]])
        return torch.stack(path[::-1], 1)

    def conv(
        self,
        layer: int,
        functions: Functions,
        x_1CN: Tensor,
        weight_CW: Tensor,
        bias_C: Tensor | None,
        activation: str | None,
    ) -> Tensor:
        """Run through the row as one text, then replace what has another path."""
        out_1CN = functions.conv(x_1CN, weight_CW, bias_C, activation=activation)
        if not len(self.moved_M):
            return out_1CN
        past_CMW = F.pad(x_1CN[0], (0, 1))[:, self.path(self.moved_M, weight_CW.shape[1])]
        moved_CM = one_token_conv(past_CMW, weight_CW, bias_C, activation)
        return out_1CN.index_copy(2, self.moved_M, moved_CM[None].to(out_1CN.dtype))

    def rule(self, layer: int, functions: Functions, *row: Tensor, **options: Any) -> Tensor:
        return self.run(functions, *row, **options)[0]

    def run(
        self, functions: Functions, *row: Tensor, state_P: Tensor | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return [1, N, H, V], and the kept states [P, H, K, V].

        `state_P`: [1, H, K, V], of a tree that goes on from one.
        """
        row_N1 = [F.pad(x[0], (0, 0) * (x.dim() - 2) + (0, 1)) for x in row]
        outs, every = [], []
        for groups in self.depths:
            ended = []
            for group in groups:
                query, key, value, g, beta = (x[group.token_SL] for x in row_N1)
                if query.is_cpu:
                    longest = query.shape[1]
                    options["chunk_size"] = next((c for c in _CHUNKS if c >= longest), _CHUNKS[-1])
                begun = None
                if group.parent_S is not None:
                    assert state_P is not None, "a child's depth comes after its parent's"
                    begun = state_P[group.parent_S]
                out_SLHV, last_S = functions.rule(
                    query,
                    key,
                    value,
                    g=g,
                    beta=beta,
                    initial_state=begun,
                    output_final_state=True,
                    **options,
                )
                outs.append(out_SLHV.flatten(0, 1))
                ended.append(last_S[group.kept_P])
            state_P = torch.cat(ended)
            every.append(state_P)
        return torch.cat(outs)[self.slot_N][None], torch.cat(every)


class BelowPath:
    """A piece of a row, and the open pieces above it; see `walk.py` and `Recurrence`."""

    def __init__(self, subtree_end_N: Tensor, path: OpenPath) -> None:
        self._path = path
        num_tokens = len(subtree_end_N)
        # What a convolution reads of the path stands before the row.
        whole = subtree_end_N.new_full((WIDEST - 1,), num_tokens)
        self._reading = DeltaTree.of(torch.cat([whole, subtree_end_N]) + WIDEST - 1)
        ends = () if path.trunk_P is None else (int(path.trunk_P[-1]),)
        self._tree = DeltaTree.of(subtree_end_N, ends, goes_on=path.num_tokens > 0)

    def conv(self, layer: int, functions: Functions, x_1CN: Tensor, *rest: Any) -> Tensor:
        past_1CW, trunk_P = self._path.last((layer, "conv")), self._path.trunk_P
        if past_1CW is None:
            past_1CW = x_1CN.new_zeros(1, x_1CN.shape[1], WIDEST - 1)
        if trunk_P is not None:
            path_1CN = torch.cat([past_1CW, x_1CN[:, :, trunk_P]], 2)
            self._path.keep((layer, "conv"), path_1CN[:, :, 1 - WIDEST :])
        read_1CN = torch.cat([past_1CW, x_1CN], 2)
        return self._reading.conv(layer, functions, read_1CN, *rest)[:, :, WIDEST - 1 :]

    def rule(self, layer: int, functions: Functions, *row: Tensor, **options: Any) -> Tensor:
        state_P = self._path.last((layer, "rule"))
        out_1NHV, kept_P = self._tree.run(functions, *row, state_P=state_P, **options)
        if (trunk_P := self._path.trunk_P) is not None:
            place = (self._tree.kept_P == trunk_P[-1]).nonzero()[0]
            self._path.keep((layer, "rule"), kept_P[place])
        return out_1NHV


def one_token_conv(
    past_CMW: Tensor, weight_CW: Tensor, bias_C: Tensor | None, activation: str | None
) -> Tensor:
    """Return the convolution's output [C, M] for tokens whose last W inputs are given."""
    out_CM = (past_CMW.to(weight_CW.dtype) * weight_CW[:, None]).sum(2)
    out_CM = out_CM if bias_C is None else out_CM + bias_C[:, None]
    return ACT2FN[activation](out_CM) if activation else out_CM


# ---- structure


def _cut(found: Sequence[Segment], ends: Collection[int]) -> Iterator[Segment]:
    """Cut segments after some tokens."""
    for segment in found:
        start, before = segment.start, segment.ancestors
        for end in sorted(t + 1 for t in ends if segment.start <= t < segment.end - 1):
            yield Segment(start, end, before)
            start, before = end, (*before, (start, end))
        yield Segment(start, segment.end, before)


def _parents(found: Sequence[Segment]) -> list[int | None]:
    """The number of each segment's parent; None of a root."""
    number = {segment.end: index for index, segment in enumerate(found)}
    return [number[s.ancestors[-1][1]] if s.ancestors else None for s in found]


def _by_depth(parents: Sequence[int | None]) -> list[list[int]]:
    """The numbers of the segments of each depth; a parent comes before its children."""
    depth_of, depths = list[int](), list[list[int]]()
    for number, parent in enumerate(parents):
        depth_of.append(0 if parent is None else depth_of[parent] + 1)
        if depth_of[-1] == len(depths):
            depths.append([])
        depths[depth_of[-1]].append(number)
    return depths


def _alike(numbers: Sequence[int], found: Sequence[Segment]) -> Iterable[list[int]]:
    """Segments of similar length together."""
    groups: dict[int, list[int]] = {}
    for number in numbers:
        length = max(found[number].num_queries, _SHORT)
        groups.setdefault(math.ceil(math.log(length, _SIMILAR)), []).append(number)
    return groups.values()


# ---- a model


class DeltaLayer(nn.Module):
    """Before a recurrent layer."""

    layer_idx: int

    def forward(self, *args: Any, recurrence: Recurrence | None = None, **kwargs: Any) -> Any:
        if recurrence is not None:
            kwargs["recurrent"] = _At(recurrence, self.layer_idx)
        return super().forward(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class _At:
    """The place of a layer's functions in a pass."""

    recurrence: Recurrence
    layer: int


def equip(model: nn.Module) -> None:
    """Let a model's recurrent layers follow the `recurrence` of a pass, in place; before the model
    is sharded, whether or not it has weights. A model without such layers stays as it is.
    """
    for module in model.modules():
        if _is_known(module):
            kind: Any = type(module)
            module.__class__ = _equipped(kind)


def find_layers(model: nn.Module) -> list[Any]:
    """Return the recurrent layers of a model, equipped or not, in its order."""
    return [m for m in model.modules() if isinstance(m, DeltaLayer) or _is_known(m)]


def recurrence_of(
    model: nn.Module, subtree_end_N: Tensor, path: OpenPath | None = None
) -> dict[str, Any]:
    """Return what the recurrent layers of a model need to read a row, below a path if there is one;
    {} if it has none.
    """
    found = find_layers(model)
    # Another layer would take no notice, and run from one text into the next.
    assert all(isinstance(layer, DeltaLayer) for layer in found), "the model was not equipped"
    if not found:
        return {}
    return {
        "recurrence": DeltaTree.of(subtree_end_N)
        if path is None
        else BelowPath(subtree_end_N, path)
    }


def _is_known(module: nn.Module) -> bool:
    if isinstance(module, DeltaLayer) or not {"A_log", "dt_bias"} <= {*module._parameters}:
        return False
    return {*_NAMES} <= {*inspect.unwrap(type(module).forward).__code__.co_names}


@functools.cache
def _equipped(kind: Any) -> Any:
    """A kind of layer whose functions look for the place of its tokens."""
    forward: Any = inspect.unwrap(kind.forward)

    def functions() -> Functions:
        return Functions(*(forward.__globals__[name] for name in _NAMES))

    @torch.compiler.disable  # its loop is another one for every row
    def conv(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        *,
        recurrent: _At | None = None,
        **options: Any,
    ) -> Tensor:
        if recurrent is None:
            return functions().conv(x, weight, bias, activation=activation, **options)
        at = recurrent.layer, functions()
        return recurrent.recurrence.conv(*at, x, weight, bias, activation)

    @torch.compiler.disable
    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        recurrent: _At | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if recurrent is None:
            return functions().rule(query, key, value, g=g, beta=beta, **options)
        how = {name: options[name] for name in _OPTIONS if name in options}
        row = (query, key, value, g, beta)
        return recurrent.recurrence.rule(recurrent.layer, functions(), *row, **how), None

    names = dict(zip(_NAMES, (conv, rule), strict=False))
    following = type(kind.__name__, (kind,), {"forward": with_names(forward, names)})
    return type(kind.__name__, (DeltaLayer, following), {})
