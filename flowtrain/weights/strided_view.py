"""Weights whose words lie elsewhere than the store has them: cut for several ranks, fused, on a
device.

Each tensor of the store is boxes of words, each an affine copy: (i, j, ...) of the box is word
`first + i * strides[0] + j * strides[1]` and so on of the tensor, and word `to_first + i *
to_strides[0] + ...` of a memory. A delta is decoded, its positions are sent through the boxes, its
differences are added there, and the digest of what that changed is summed over the ranks, each part
of a tensor once. What does not add up is taken back. All of that takes memory for the changes, not
for the weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flowkernels import digest_at, digest_words
from torch import Tensor

from flowtrain import _delta
from flowtrain.weights.files import Blob
from flowtrain.weights.manifest import Manifest, StoreError
from flowtrain.weights.ranks import Ranks
from flowtrain.weights.target import Step, check_layout, part_of
from flowtrain.weights.tensor_shards import Digest, Layout, Piece, Words, add, subtract, words_of

_CHUNK = 1 << 20
_Undo = list[Callable[[], object]]


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Words of a tensor of the store, and where they are."""

    words: Tensor
    """int16, flat: the memory that a parameter lies in."""
    first: int
    to_first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Of the tensor in the store: descending, and no word comes twice."""
    to_strides: tuple[int, ...]

    @property
    def is_run(self) -> bool:
        """Contiguous on both sides."""
        return self.strides == self.to_strides == (1,)

    @property
    def num_words(self) -> int:
        return int(np.prod(self.sizes))

    @property
    def region(self) -> str:
        """Equal for boxes of the same words of a tensor."""
        return f"{self.first}:{self.sizes}:{self.strides}"

    def live(self) -> Tensor:
        """The words where they are."""
        return self.words.as_strided(self.sizes, self.to_strides, self.to_first)

    def within(self, flat: Tensor) -> Tensor:
        """The words in the whole tensor."""
        return flat.as_strided(self.sizes, self.strides, self.first)

    def locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """int64: which of the ascending positions in the tensor are in the box, and where each of
        them is in the memory.
        """
        last = self.first + sum(
            (n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True)
        )
        start, stop = torch.searchsorted(positions, torch.tensor([self.first, last + 1])).tolist()
        which, rest = torch.arange(start, stop), positions[start:stop] - self.first
        place, inside = (
            torch.full_like(rest, self.to_first),
            torch.ones_like(rest, dtype=torch.bool),
        )
        for n, stride, to_stride in zip(self.sizes, self.strides, self.to_strides, strict=True):
            i = rest if stride == 1 else rest // stride
            inside &= i < n
            place += i * to_stride
            rest = rest - i * stride
        inside &= rest == 0
        return which[inside], place[inside]

    def scatter(self, positions: Tensor, diffs: Tensor, undo: _Undo) -> Digest:
        """Add differences at ascending positions of the tensor; those outside the box are left out.
        Returns the digest change.
        """
        which, place = self.locate(positions)
        there, at, index = (
            part.to(self.words.device) for part in (diffs[which], place, positions[which])
        )
        old = self.words[at]
        undo.append(lambda: self.words.index_put_((at,), old))
        new = old + there
        self.words[at] = new
        return to_digest(digest_at(new, index) - digest_at(old, index))

    def write(self, flat: Tensor, first: int) -> None:
        """Copy from a run of whole rows of the tensor that starts at word `first`."""
        span = 1 + sum(
            (n - 1) * stride for n, stride in zip(self.sizes[1:], self.strides[1:], strict=True)
        )
        ahead, stride = first - self.first, self.strides[0]
        start, stop = (
            max(0, -(-ahead // stride)),
            min(self.sizes[0], (ahead + len(flat) - span) // stride + 1),
        )
        if start < stop:
            sizes = (stop - start, *self.sizes[1:])
            self.live()[start:stop].copy_(
                flat.as_strided(sizes, self.strides, start * stride - ahead)
            )

    def digest(self, num_threads: int) -> Digest:
        """Of the words as they are, at their places in the tensor."""
        if self.is_run:
            return digest_of(self.live(), self.first, num_threads)
        inner = torch.zeros(self.sizes[1:], dtype=torch.int64)
        for axis, (n, stride) in enumerate(zip(self.sizes[1:], self.strides[1:], strict=True)):
            inner += (torch.arange(n) * stride).view(-1, *[1] * (inner.dim() - axis - 1))
        inner, rows, live = (
            inner.to(self.words.device),
            max(1, _CHUNK // max(1, inner.numel())),
            self.live(),
        )
        total: Digest = (0, 0)
        for start in range(0, self.sizes[0], rows):
            part = live[start : start + rows]
            outer = (
                torch.arange(start, start + len(part), device=live.device) * self.strides[0]
                + self.first
            )
            total = add(
                total, to_digest(digest_at(part, outer.view(-1, *[1] * inner.dim()) + inner))
            )
        return total


def digest_of(run: Tensor, first: int = 0, num_threads: int = 1) -> Digest:
    """Of contiguous words, wherever they are."""
    if run.device.type == "cpu":
        digest: Digest = _delta.digest(words_of(run), first=first, num_threads=num_threads)
        return digest
    return to_digest(digest_words(run, first))


def to_digest(pair: Tensor) -> Digest:
    a, b = pair.tolist()
    return add((a, b))


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a model has the tensors of a store, on one rank."""

    layout: Layout
    boxes: dict[str, list[Box]]
    """Empty for a tensor of which this rank has no part."""
    dense: dict[str, str]
    """Tensors that only the model's loader can write, and why; not in `boxes`. Alike on all ranks.
    """


@dataclass(slots=True)
class BoxTarget:
    """See `Target`. Level 2 deltas need a tensor whole on every rank."""

    plan: Plan
    ranks: Ranks
    push: Callable[[dict[str, Tensor]], None]
    """Loads whole tensors through the model's loader."""
    num_threads: int = 1
    _dense: dict[str, Tensor] = field(default_factory=dict)
    """Copies on the host of what is dense."""
    _twins: dict[str, list[str]] = field(default_factory=dict)
    """Tensors that no rank has: the loader takes them for another name of one of these."""

    def __post_init__(self) -> None:
        """Raises ValueError for a tensor that no rank has and that cannot be another name of one."""
        layout = self.plan.layout
        self._dense = {
            name: torch.empty(layout[name].shape, dtype=layout[name].torch_dtype)
            for name in self.plan.dense
        }
        own = [name for name in layout if self.plan.boxes.get(name) or name in self._dense]
        held = {
            name for text in self.ranks.gather_text(json.dumps(own)) for name in json.loads(text)
        }
        for name in layout.keys() - held:
            self._twins[name] = [other for other in held if layout[other] == layout[name]]
            if not self._twins[name]:
                raise ValueError(
                    f"the model's loader ignores {name!r}: the store holds another model, or one "
                    "with an untied head"
                )

    def check(self, manifest: Manifest) -> None:
        check_layout(self.plan.layout, manifest.layout, manifest.version)
        for name, twins in self._twins.items():
            if manifest.digests[name] not in [manifest.digests[twin] for twin in twins]:
                raise StoreError(
                    f"version {manifest.version} has {name!r} apart; the model here ties it to "
                    "another tensor"
                )

    def base(self, name: str, first: int, num_words: int) -> Words:
        if name in self._dense:
            return part_of(name, words_of(self._dense[name]), first, num_words)
        whole, boxes = (
            torch.empty(self.plan.layout[name].num_words, dtype=torch.int16),
            self.plan.boxes[name],
        )
        if sum(box.num_words for box in boxes) != len(whole):
            raise _delta.DeltaError(
                f"a delta of {name!r} is at level 2, but no rank has that tensor whole; publish at "
                "level 1"
            )
        for box in boxes:
            box.within(whole).copy_(box.live())
        return part_of(name, words_of(whole), first, num_words)

    def apply(self, step: Step) -> None:
        undo: _Undo = []
        try:
            changes = self._change(step, undo)
        except BaseException as error:
            is_delta = isinstance(error, _delta.DeltaError)
            others = self._say("delta" if is_delta else "other", str(error), {})
            _take_back(undo)
            if is_delta and any(kind == "other" for kind, _, _ in others):
                raise StoreError("another rank could not apply the deltas") from error
            raise
        said = self._say("", "", changes)
        failures = sorted((kind, text) for kind, text, _ in said if kind)
        wrong = (
            []
            if failures
            else _not_led(
                step, [each for _, _, each in said], self._twins.keys() | self._dense.keys()
            )
        )
        if not failures and not wrong:
            return
        _take_back(undo)
        if wrong:
            raise _delta.WrongBase(f"the words of {wrong[0]!r} were not its base, or were damaged")
        kind, text = failures[-1]
        raise (
            StoreError(f"another rank could not apply the deltas: {text}")
            if kind == "other"
            else _delta.DeltaError(text)
        )

    def write(self, found: Sequence[Piece]) -> None:
        for piece in found:
            if piece.name in self._dense:
                words = piece.words()
                words_of(self._dense[piece.name])[piece.first : piece.first + len(words)] = words
            elif piece.name not in self._twins:
                flat = torch.from_numpy(piece.words().view(np.int16))
                for box in self.plan.boxes[piece.name]:
                    box.write(flat, piece.first)
        self._push(self._dense)

    def digests(self) -> dict[str, Digest]:
        own = {
            name: [(box.region, box.digest(self.num_threads)) for box in boxes]
            for name, boxes in self.plan.boxes.items()
        }
        total = sum_regions([json.loads(text) for text in self.ranks.gather_text(json.dumps(own))])
        whole = {
            name: _delta.digest(words_of(host), num_threads=self.num_threads)
            for name, host in self._dense.items()
        }
        return {
            name: total.get(name) or (-1, -1) for name in self.plan.boxes if name not in self._twins
        } | whole

    def finish(self) -> None:
        """Everything was written where it is used."""

    def _say(self, kind: str, text: str, changes: dict[str, list[tuple[str, Digest]]]) -> list[Any]:
        """What every rank says: how it failed, why, and what changed."""
        return [
            json.loads(said) for said in self.ranks.gather_text(json.dumps([kind, text, changes]))
        ]

    def _change(self, step: Step, undo: _Undo) -> dict[str, list[tuple[str, Digest]]]:
        """What that did to the digest of each region of each tensor."""
        changes: dict[str, list[tuple[str, Digest]]] = {}
        decoded = {
            key: self._decode(key, blob)
            for key, blob in step.items()
            if key[0] in self.plan.boxes and key[0] not in self._twins
        }
        for (name, _), (positions, diffs) in decoded.items():
            for box in self.plan.boxes[name]:
                changes.setdefault(name, []).append(
                    (box.region, box.scatter(positions, diffs, undo))
                )
        self._change_dense({key: blob for key, blob in step.items() if key[0] in self._dense}, undo)
        return changes

    def _decode(self, key: tuple[str, int], blob: Blob) -> tuple[Tensor, Tensor]:
        """Positions in the whole tensor, and differences."""
        info = _delta.info(blob)
        base = self.base(*key, info["num_words"]) if info["level"] == 2 else None
        positions, diffs = _delta.decode(blob, base)
        return torch.from_numpy(positions.view(np.int64)) + key[1], torch.from_numpy(
            diffs.view(np.int16)
        )

    def _change_dense(self, step: Step, undo: _Undo) -> None:
        names = {name for name, _ in step}
        old = {name: self._dense[name].clone() for name in names}

        def take_back() -> None:
            for name, tensor in old.items():
                self._dense[name].copy_(tensor)
            self._push(names)

        undo.append(take_back)
        slices = [self.base(*key, _delta.info(blob)["num_words"]) for key, blob in step.items()]
        _delta.apply(list(step.values()), slices, num_threads=self.num_threads)
        self._push(names)

    def _push(self, names: Iterable[str]) -> None:
        if found := {name: self._dense[name] for name in names}:
            self.push(found)


def _take_back(undo: _Undo) -> None:
    """Everything, even when a part of it fails."""
    if undo:
        try:
            undo.pop()()
        finally:
            _take_back(undo)


def sum_regions(said: list[dict[str, list[tuple[str, Digest]]]]) -> dict[str, Digest | None]:
    """Of each tensor, over what each rank says of its parts; None where two that hold the same part
    do not agree.
    """
    parts: dict[str, dict[str, set[Digest]]] = {}
    for of_rank in said:
        for name, regions in of_rank.items():
            for region, (a, b) in regions:
                parts.setdefault(name, {}).setdefault(region, set()).add((a, b))
    return {
        name: add(*(digest for digests in regions.values() for digest in digests))
        if all(len(d) == 1 for d in regions.values())
        else None
        for name, regions in parts.items()
    }


def _not_led(
    step: Step, said: list[dict[str, list[tuple[str, Digest]]]], apart: set[str]
) -> list[str]:
    """Tensors whose digest did not change as their deltas say."""
    wanted: dict[str, Digest] = {}
    for (name, _), blob in step.items():
        info = _delta.info(blob)
        wanted[name] = add(
            wanted.get(name, (0, 0)), subtract(info["target_digest"], info["base_digest"])
        )
    merged = []
    for of_rank in said:  # several deltas of a tensor changed the same region: one number for it
        sums: dict[str, dict[str, Digest]] = {}
        for name, regions in of_rank.items():
            for region, (a, b) in regions:
                of_name = sums.setdefault(name, {})
                of_name[region] = add(of_name.get(region, (0, 0)), (a, b))
        merged.append({name: list(of_name.items()) for name, of_name in sums.items()})
    found = sum_regions(merged)
    return [
        name
        for name, change in wanted.items()
        if name not in apart and found.get(name, (0, 0)) != change
    ]
